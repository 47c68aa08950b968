"""Killable worker processes for work that must end by a deadline: symbolic grading and generated programs.

A worker is a fresh interpreter (never a fork of this process, which may hold torch's threads), reached by pipes. The
caller waits with `poll`, so a deadline holds from any thread, from asyncio and from a forked process alike, without
signals; a worker that misses it is killed with its process group and replaced. Our choice throughout.
"""

import atexit
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
_HEADER = struct.Struct("!I")
_MAX_MESSAGE = 4 << 20


class WorkerTimeout(TimeoutError):
    """The worker did not answer by the deadline and was killed."""


class WorkerDied(ConnectionError):
    """The worker ended without an answer (crash, out of memory)."""


class _Worker:
    """One child interpreter running `serve` of `module`."""

    def __init__(self, module: str) -> None:
        code = f"import sys; sys.path.insert(0, {_ROOT!r}); from {module} import main; main()"
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )
        self.calls = 0
        self.ready = False
        for stream in (self.process.stdin, self.process.stdout):
            os.set_blocking(stream.fileno(), False)

    def is_ready(self) -> bool:
        """Whether its imports are done."""
        return self.ready or bool(select.select([self.process.stdout], [], [], 0)[0])

    def wait_ready(self, seconds: float) -> None:
        """Waits for the worker's first message, sent after its imports."""
        if not self.ready:
            self._receive(time.monotonic() + seconds)
            self.ready = True

    def call(self, message: dict, seconds: float) -> dict:
        """One request, one answer; raises WorkerTimeout or WorkerDied."""
        deadline = time.monotonic() + seconds
        body = json.dumps(message).encode()
        if len(body) > _MAX_MESSAGE:
            raise ValueError(f"message of {len(body)} bytes is above {_MAX_MESSAGE}: shorten the text")
        self._send(_HEADER.pack(len(body)) + body, deadline)
        self.calls += 1
        return self._receive(deadline)

    def _wait(self, stream, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(stream, event)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise WorkerTimeout("the worker did not answer by the deadline")

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self.process.stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.process.stdin.fileno(), view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerDied("the worker ended before the request") from error

    def _receive(self, deadline: float) -> dict:
        length = _HEADER.unpack(self._read(_HEADER.size, deadline))[0]
        if length > _MAX_MESSAGE:
            raise WorkerDied("the worker's answer is not a message of ours")
        return json.loads(self._read(length, deadline))

    def _read(self, length: int, deadline: float) -> bytes:
        data = b""
        while len(data) < length:
            self._wait(self.process.stdout, select.POLLIN, deadline)
            try:
                part = os.read(self.process.stdout.fileno(), length - len(data))
            except BlockingIOError:
                continue
            if not part:
                raise WorkerDied("the worker ended without an answer")
            data += part
        return data

    def kill(self) -> None:
        """Kills the worker's process group and reaps the worker."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends of the pipes; an idle worker ends at the end of its input."""
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except OSError:
                pass  # a pipe whose other end is gone may refuse the close; the descriptor is released all the same


_pools: weakref.WeakSet = weakref.WeakSet()


class WorkerPool:
    """Up to `size` workers of one module, started at first use, recycled after `calls_per_worker` calls.

    A cold start (imports) lies outside a call's own limit and is bounded by `start_seconds`.
    """

    def __init__(self, module: str, *, size: int, calls_per_worker: int, start_seconds: float = 60.0) -> None:
        self._module = module
        self._size = size
        self._calls_per_worker = calls_per_worker
        self._start_seconds = start_seconds
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._live: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._free = threading.Condition()

    def call(self, message: dict, seconds: float) -> dict:
        """The worker's answer, at most `seconds` after it was given the message.

        Raises WorkerTimeout (killed and replaced) or WorkerDied (replaced). Waiting for a free worker is not counted.
        """
        worker = self._take()
        try:
            worker.wait_ready(self._start_seconds)
            answer = worker.call(message, seconds)
        except BaseException:
            self._replace(worker)
            raise
        self._give(worker)
        return answer

    def warm(self, workers: int = 2) -> None:
        """Starts workers and waits until their imports are done."""
        taken = [self._take() for _ in range(min(workers, self._size))]
        for worker in taken:
            worker.wait_ready(self._start_seconds)
            self._give(worker)

    def _take(self) -> _Worker:
        """A worker of the caller's own: a ready one if there is one, else one that is starting, else a new one."""
        with self._free:
            while not self._idle and len(self._live) >= self._size:
                self._free.wait()
            if self._idle:
                worker = next((worker for worker in reversed(self._idle) if worker.is_ready()), self._idle[-1])
                self._idle.remove(worker)
                return worker
            worker = _Worker(self._module)
            self._live.add(worker)
            return worker

    def _give(self, worker: _Worker) -> None:
        if worker.calls >= self._calls_per_worker:
            self._replace(worker)
            return
        with self._free:
            self._idle.append(worker)
            self._free.notify()

    def _replace(self, worker: _Worker) -> None:
        """Kills a worker and starts its successor, whose imports run while the caller goes on."""
        worker.kill()
        with self._free:
            self._live.discard(worker)
            if not _closing.is_set():
                successor = _Worker(self._module)
                self._live.add(successor)
                self._idle.append(successor)
            self._free.notify()

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        with self._free:
            return [worker.process.pid for worker in self._live]

    def close(self) -> None:
        """Kills the idle workers; a later call starts new ones."""
        with self._free:
            idle, self._idle = self._idle, []
            self._live.difference_update(idle)
        for worker in idle:
            worker.kill()

    def after_fork(self) -> None:
        """In a forked child: leaves the parent's workers to the parent and starts from none."""
        for worker in self._live:
            worker.forget()
            worker.process.returncode = 0  # not our child: nothing to wait for
        self._reset()


_closing = threading.Event()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


def _close_all() -> None:
    _closing.set()
    for pool in list(_pools):
        pool.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)


def serve(answer) -> None:
    """A worker's loop: says it is ready, then answers one JSON message after another until its input ends.

    `answer(message: dict) -> dict`. Standard output is the pipe; anything printed goes to standard error instead.
    """
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    _write(sink, {"ready": True})
    while True:
        header = _read_exactly(source, _HEADER.size)
        if header is None:
            os._exit(0)  # no teardown: daemon threads of libraries must not hold the exit
        body = _read_exactly(source, _HEADER.unpack(header)[0])
        if body is None:
            os._exit(0)
        _write(sink, answer(json.loads(body)))


def _write(sink: int, message: dict) -> None:
    body = json.dumps(message).encode()
    view = memoryview(_HEADER.pack(len(body)) + body)
    while view:
        view = view[os.write(sink, view) :]


def _read_exactly(source: int, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        part = os.read(source, length - len(data))
        if not part:
            return None
        data += part
    return data
