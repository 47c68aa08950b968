"""The parent's side of the computing process: starts it at first use, sends requests, ends it for good.

One process for a run, shared by its tasks; `accelerate launch` may start several that compute together. A request has a
deadline; a process that misses it, dies or is cancelled is killed with its whole group, and the next request starts a
new one.
"""

import json
import os
import queue
import signal
import socket
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
from models.requests import Launch

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie, for a Python in which they are not installed."""

POLL_SECONDS = 0.5
CAUSE_SECONDS = 30.0
STDERR_LINES = 40
NO_TIMEOUT = 365 * 24 * 3600.0
"""Seconds: for a command that may take as long as it takes and ends with its terminal."""


class StepFailed(RuntimeError):
    """A step raised an error that another try would raise again; the message ends with its traceback."""


class MayPass(OSError):
    """What another try may not meet: the process was lost, ran out of time or memory, or a connection failed."""


class Compute:
    """One computing process. Not shared between threads: tasks of a run are called one after another."""

    def __init__(self, threads: int | None = None, python: str | None = None, launch: Launch | None = None):
        self.threads = threads
        self.python = python or sys.executable
        """Runs the process. Another Python (one with vLLM) needs what models/ and data/ import, and no Prefect."""
        self.launch = launch
        """How `accelerate launch` starts several processes; None: one process, started directly."""
        self._ranks: list[int] = []
        """Process ids of launched ranks, each the leader of a group of its own."""
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
                if self.launch is not None:
                    self.close()  # the other ranks wait in the middle of the step
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
        lost: Exception | None = None
        while True:
            left = deadline - time.monotonic()
            if left <= 0 and lost is not None:
                raise lost
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
            if message["type"] == "rank":
                self._ranks.append(message["pid"])
            elif message["type"] == "log":
                report.log(message["message"])
            elif message["type"] == "progress":
                report.progress(message["done"], message["total"], message["text"])
            elif message["type"] == "result":
                self.cpu_seconds = message["cpu_seconds"]
                return message["value"]
            elif message["type"] == "error" and message["kind"] == "lost":
                # A rank misses another one; what ended that one is on its way, or the launcher's word on it.
                lost = lost or _as_exception(function, message)
                deadline = min(deadline, time.monotonic() + CAUSE_SECONDS)
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
        if self.launch is not None:
            environment |= {"RATCHET_PIPED": "1"} | (loopback() if self.launch.machines == 1 else {})
        self._process = subprocess.Popen(
            command(self.launch, self.python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        arguments = (self._process.stdout, self._messages, self._stderr)
        threading.Thread(target=_relay, args=arguments, daemon=True).start()
        threading.Thread(target=self._stderr.extend, args=(self._process.stderr,), daemon=True).start()
        return self._process

    def _last_words(self) -> str:
        time.sleep(0.1)  # the thread that reads standard error may be a moment behind
        text = "".join(self._stderr).strip()
        return f"its last words: {text[-4000:]}" if text else "it said nothing (out of memory is the usual reason)"

    def close(self) -> None:
        """Ends the process and everything it started; harmless when there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if message is not None and message["type"] == "rank":
                self._ranks.append(message["pid"])
        for group in (process.pid, *self._ranks):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it had ended by itself, with its group
        self._ranks = []
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # an unsent request to a process that is gone


def command(launch: Launch | None, python: str = sys.executable) -> list[str]:
    """The command that starts the computing process, or through `accelerate launch` several of it.

    On one machine they meet at a free port of the loopback address; with several, as the configuration says.
    """
    if launch is None:
        return [python, "-m", "models.compute"]
    options = ["--config_file", str(launch.config)]
    if launch.machines == 1:
        options += ["--num_processes", str(launch.processes), "--main_process_ip", "127.0.0.1"]
        options += ["--main_process_port", "0"]
    return [python, "-m", "accelerate.commands.launch", *options, "--module", "models.compute"]


def loopback() -> dict[str, str]:
    """The environment in which gloo and NCCL talk over the loopback interface alone."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {variable: names[0] for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names}


def _relay(stream: Any, messages: "queue.Queue[dict[str, Any] | None]", other: "deque[str]") -> None:
    try:
        for line in stream:
            if line.startswith("{"):
                messages.put(json.loads(line))
            else:
                other.append(line)  # a launcher's own words
    except (ValueError, OSError):
        pass  # a line cut short by a kill, or a stream closed by `close`: both mean that the process is gone
    messages.put(None)


def _as_exception(function: str, message: dict[str, Any]) -> Exception:
    if message["kind"] == "user":
        return UserError(message["message"])
    text = f"{function}: {message['name']}: {message['message']}"
    if message["kind"] in ("transient", "lost"):
        return MayPass(text)
    return StepFailed(f"{text}\n{message['traceback']}")


_shared: Compute | None = None


def shared(threads: int | None, python: str | None = None, launch: Launch | None = None) -> Compute:
    """The computing process of this run (several where `launch` says so), shared by its tasks; `python` runs it."""
    global _shared
    if _shared is None:
        _shared = Compute(threads, python, launch)
    return _shared


def close_shared() -> None:
    """Ends the run's computing process."""
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None
