"""The computing process: `python -m models.compute`, one for a run, told what to do over its standard input.

It keeps loaded models between requests, so a failed Prefect task holds no memory and a time limit can end it. Each
request is a line of JSON: {"function": "models.warmup:warm_up", "request": {...}, "out": folder or null}. Answers are
lines of JSON on the original standard output: "log", "progress", then "result" or "error". When the pipe to the parent
closes, the whole process group ends.

`accelerate launch` may start several of it: rank 0 answers, the others take part in what it leads (models.world) and
report their errors with their rank. Without a parent, every rank runs one step from files and ends:

    accelerate launch --config_file FILE -m models.compute models.update:update request.json OUT
"""

import importlib
import inspect
import json
import os
import queue
import select
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
PIPED = "RATCHET_PIPED"
"""Set by the parent at the other end of standard input and output."""


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
    """`user` (mended by the user, never retried), `transient` (may pass), `bug` (the rest).

    Of several processes also `lost`: another one is gone, and what ended that one is the cause.
    """
    if isinstance(error, UserError) or disk_problem(error):
        return "user"
    if "RANK" in os.environ and lost_peer(error):
        return "lost"
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    passing = isinstance(error, (ConnectionError, TimeoutError, BlockingIOError, InterruptedError))
    return "transient" if passing or out_of_memory else "bug"


def lost_peer(error: BaseException) -> bool:
    """Whether an exchange between processes broke off (gloo raises RuntimeError, NCCL and the store have their own)."""
    named = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return named or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def serve(requests: "queue.Queue[str | None]", report: PipeReport) -> None:
    """Answers requests until None arrives."""
    while (line := requests.get()) is not None:
        message = json.loads(line)
        started = time.process_time()
        try:
            value = call(message["function"], message["request"], message["out"], report)
        except Exception as error:  # every failure of a step is an answer, with its traceback
            _send_error(report, error)
        else:
            report.send(type="result", value=value, cpu_seconds=time.process_time() - started)


def take_part(report: PipeReport) -> None:
    """What a rank other than 0 does until the end; its error is reported under its rank and ends it."""
    from models.world import follow

    try:
        follow()
    except Exception as error:  # every failure is reported, whatever it is
        _send_error(report, error)
        sys.exit(1)


def _send_error(report: PipeReport, error: Exception) -> None:
    kind, message, trace = error_kind(error), disk_problem(error) or str(error), traceback.format_exc()
    if "RANK" in os.environ:
        # Short enough for one write, which stays whole beside those of other ranks.
        message, trace = message[:1000], trace[-2500:]
        if kind != "user":
            message = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {message}"
    report.send(type="error", kind=kind, name=type(error).__name__, message=message, traceback=trace)


def _watch_pipe() -> None:
    """Ends this process's group when the parent is gone, without reading what rank 0 reads."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read(requests: "queue.Queue[str | None]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the parent is gone, and so is whoever wanted the running request


def main() -> None:
    """Serves the parent at the other end of standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process itself
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not reach the parent as an answer
    report = PipeReport(channel)
    piped = PIPED in os.environ
    rank = int(os.environ.get("RANK", "0"))
    if piped and "RANK" in os.environ:
        report.send(type="rank", pid=os.getpid())
    requests: queue.Queue[str | None] = queue.Queue()
    if rank == 0:
        threading.Thread(target=_read, args=(requests,), daemon=True).start()
    elif piped:
        threading.Thread(target=_watch_pipe, daemon=True).start()
    if "RANK" in os.environ:
        from models.world import join

        join(led=True)
    if rank == 0:
        serve(requests, report)
    else:
        take_part(report)


class TerminalReport:
    """Prints rank 0's log lines."""

    def log(self, message: str) -> None:
        """To standard error: standard output is for the result."""
        if os.environ.get("RANK", "0") == "0":
            print(message, file=sys.stderr, flush=True)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Not shown."""


def run_one(function: str, request: Path, out: Path) -> None:
    """Runs one step on every rank, from a file with its request into the folder `out`; rank 0 prints its value."""
    from models.world import join, leave

    here = join(led=False)
    out.mkdir(parents=True, exist_ok=True)
    value = call(function, json.loads(request.read_text(encoding="utf-8")), str(out), TerminalReport())
    if here.main:
        print(json.dumps(value))
    leave()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run_one(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    elif len(sys.argv) == 1:
        main()
    else:
        sys.exit("usage: python -m models.compute [FUNCTION REQUEST.json OUT]")
