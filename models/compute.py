"""The computing process: `python -m models.compute`, one for a run, told what to do over its standard input.

It keeps loaded models between requests, so a failed Prefect task holds no memory and a time limit can end it. Each
request is a line of JSON: {"function": "models.warmup:warm_up", "request": {...}, "out": folder or null}. Answers are
lines of JSON on the original standard output: "log", "progress", then "result" or "error". When the pipe to the parent
closes, the whole process group ends.
"""

import importlib
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from data.errors import UserError, disk_problem

PROGRESS_SECONDS = 0.5
ROOMS = ("models.", "data.")


class PipeReport:
    """Sends log lines and progress to the parent; progress at most every `PROGRESS_SECONDS`."""

    def __init__(self, channel: TextIO):
        self._channel = channel
        self._lock = threading.Lock()
        self._last = 0.0

    def send(self, **message: Any) -> None:
        """One line of JSON to the parent."""
        with self._lock:
            self._channel.write(json.dumps(message) + "\n")
            self._channel.flush()

    def log(self, message: str) -> None:
        """One line for the log."""
        self.send(type="log", message=message)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Progress of the running request."""
        now = time.monotonic()
        if done >= total or now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self.send(type="progress", done=done, total=total, text=text)


def call(function: str, request: dict[str, Any], out: str | None, report: PipeReport) -> Any:
    """Calls a step function of the models or data room with its request validated from JSON.

    Raises UserError for a name outside these rooms.
    """
    if not function.startswith(ROOMS) or ":" not in function:
        raise UserError(f"{function!r} is no step function; name one as models.module:function")
    module, name = function.split(":")
    step = getattr(importlib.import_module(module), name)
    request_class = next(iter(inspect.signature(step).parameters.values())).annotation
    arguments = [request_class.model_validate(request)]
    if out is not None:
        arguments.append(Path(out))
    return step(*arguments, report)


def error_kind(error: BaseException) -> str:
    """`user` (mended by the user, never retried), `transient` (may pass), `bug` (the rest)."""
    if isinstance(error, UserError) or disk_problem(error):
        return "user"
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    passing = isinstance(error, (ConnectionError, TimeoutError, BlockingIOError, InterruptedError))
    return "transient" if passing or out_of_memory else "bug"


def serve(requests: "queue.Queue[str | None]", report: PipeReport) -> None:
    """Answers requests until None arrives."""
    while (line := requests.get()) is not None:
        message = json.loads(line)
        started = time.process_time()
        try:
            value = call(message["function"], message["request"], message["out"], report)
        except Exception as error:  # every failure of a step is an answer, with its traceback
            report.send(
                type="error",
                kind=error_kind(error),
                name=type(error).__name__,
                message=disk_problem(error) or str(error),
                traceback=traceback.format_exc(),
            )
        else:
            report.send(type="result", value=value, cpu_seconds=time.process_time() - started)


def _read(requests: "queue.Queue[str | None]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the parent is gone, and so is whoever wanted the running request


def main() -> None:
    """Serves the parent at the other end of standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process itself
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not reach the parent as an answer
    requests: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    serve(requests, PipeReport(channel))


if __name__ == "__main__":
    main()
