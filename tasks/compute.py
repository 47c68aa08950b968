"""The parent's side of the computing process: starts it at first use, sends requests, ends it for good.

One process for a run, shared by its tasks. A request has a deadline; a process that misses it, dies or is cancelled is
killed with its whole group, and the next request starts a new one.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from data.errors import UserError
from data.progress import Report

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie, for a Python in which they are not installed."""

POLL_SECONDS = 0.5
STDERR_LINES = 40


class StepFailed(RuntimeError):
    """A step raised an error that another try would raise again; the message ends with its traceback."""


class MayPass(OSError):
    """What another try may not meet: the process was lost, ran out of time or memory, or a connection failed."""


class Compute:
    """One computing process. Not shared between threads: tasks of a run are called one after another."""

    def __init__(self, threads: int | None = None, python: str | None = None):
        self.threads = threads
        self.python = python or sys.executable
        """Runs the process. Another Python (one with vLLM) needs what models/ and data/ import, and no Prefect."""
        self.cpu_seconds = 0.0
        """CPU seconds of the last request that was answered."""
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the running process, None before the first request."""
        return self._process.pid if self._process else None

    def call(self, function: str, request: BaseModel, out: Path | None, report: Report, timeout: float) -> Any:
        """Runs `function` (models.module:name) in the process and returns its JSON value.

        `timeout` in seconds. Raises UserError as the step raised it, StepFailed for its other errors, MayPass where the
        process was lost, missed its deadline, or met what may pass. Whatever ends the wait early ends the process.
        """
        with self._lock:
            try:
                return self._call(function, request, out, report, timeout)
            except (UserError, StepFailed):
                raise
            except BaseException:
                self.close()
                raise

    def _call(self, function: str, request: BaseModel, out: Path | None, report: Report, timeout: float) -> Any:
        process = self._start()
        line = json.dumps({"function": function, "request": request.model_dump(mode="json"), "out": out and str(out)})
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise MayPass(f"{function}: the computing process was gone; {self._last_words()}") from None
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise MayPass(
                    f"{function}: still running after {timeout:g} s and killed; raise compute.step_timeout_seconds "
                    "if it needs longer"
                )
            try:
                message = self._messages.get(timeout=min(POLL_SECONDS, left))
            except queue.Empty:
                continue
            if message is None:
                code = process.wait()
                raise MayPass(f"{function}: the computing process ended with code {code}; {self._last_words()}")
            if message["type"] == "log":
                report.log(message["message"])
            elif message["type"] == "progress":
                report.progress(message["done"], message["total"], message["text"])
            elif message["type"] == "result":
                self.cpu_seconds = message["cpu_seconds"]
                return message["value"]
            else:
                raise _as_exception(function, message)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._messages, self._stderr = queue.Queue(), deque(maxlen=STDERR_LINES)
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        if self.python != sys.executable:
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [self.python, "-m", "models.compute"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=_relay, args=(self._process.stdout, self._messages), daemon=True).start()
        threading.Thread(target=self._stderr.extend, args=(self._process.stderr,), daemon=True).start()
        return self._process

    def _last_words(self) -> str:
        time.sleep(0.1)  # the thread that reads standard error may be a moment behind
        text = "".join(self._stderr).strip()
        return f"its last words: {text[-2000:]}" if text else "it said nothing (out of memory is the usual reason)"

    def close(self) -> None:
        """Ends the process and everything it started; harmless when there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended by itself, with its group
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # an unsent request to a process that is gone


def _relay(stream: Any, messages: "queue.Queue[dict[str, Any] | None]") -> None:
    try:
        for line in stream:
            messages.put(json.loads(line))
    except (ValueError, OSError):
        pass  # a line cut short by a kill, or a stream closed by `close`: both mean that the process is gone
    messages.put(None)


def _as_exception(function: str, message: dict[str, Any]) -> Exception:
    if message["kind"] == "user":
        return UserError(message["message"])
    text = f"{function}: {message['name']}: {message['message']}"
    if message["kind"] == "transient":
        return MayPass(text)
    return StepFailed(f"{text}\n{message['traceback']}")


_shared: Compute | None = None


def shared(threads: int | None, python: str | None = None) -> Compute:
    """The computing process of this run, shared by its tasks; `python` runs it (None: this one)."""
    global _shared
    if _shared is None:
        _shared = Compute(threads, python)
    return _shared


def close_shared() -> None:
    """Ends the run's computing process."""
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None
