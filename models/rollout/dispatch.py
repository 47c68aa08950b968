"""Spreads rows over servers that may fail: each row is answered exactly once, or the whole call fails.

Every server has a queue of its own, so that rows with a common prompt share its prefix cache; one that runs dry takes
rows from the end of the longest other queue. A row whose request was lost goes back to the front of a queue. A server
that lost a request takes no new rows until it was prepared again, with a back-off.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

BACK_OFF_SECONDS = 0.25
LONGEST_BACK_OFF_SECONDS = 5.0

Output = TypeVar("Output")


class Lost(ConnectionError):
    """A request without a usable answer: the connection, the server or its answer failed. Another try may succeed."""


class Server(Protocol):
    """What rows are sent to."""

    name: str

    async def prepare(self) -> None:
        """Makes the server ready for rows. Raises Lost where it does not answer."""

    async def ask(self, index: int) -> Any:
        """The output of row `index`. Raises Lost."""


class _State:
    """A server's queue and how it fares."""

    def __init__(self, server: Server, rows: Sequence[int]):
        self.server = server
        self.waiting = deque(rows)
        self.ready = False
        self.failures = 0
        self.reason = "not asked yet"


class Dispatcher(Generic[Output]):
    """One batch of `count` rows, given in an order in which neighbours share prompts."""

    def __init__(
        self,
        servers: Sequence[Server],
        order: Sequence[int],
        *,
        concurrency: int,
        attempts: int,
        patience: float,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.count = len(order)
        share, rest = divmod(len(order), len(servers))
        starts = [number * share + min(number, rest) for number in range(len(servers) + 1)]
        self.states = [_State(server, order[start:end]) for server, start, end in zip(servers, starts[:-1], starts[1:])]
        self.concurrency, self.attempts, self.patience = concurrency, attempts, patience
        self.progress = progress
        self.outputs: dict[int, Output] = {}
        self.tries: dict[int, int] = {}
        self.changed = asyncio.Condition()
        self.answered_at = 0.0

    @property
    def finished(self) -> bool:
        """Whether every row has its output."""
        return len(self.outputs) == self.count

    async def run(self) -> list[Output]:
        """The outputs of all rows, by index. Raises Lost where no server answers, or a row is lost too often."""
        self.answered_at = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(self._serve(state)) for state in self.states]
        try:
            await _all(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [self.outputs[index] for index in range(self.count)]

    async def _serve(self, state: _State) -> None:
        """Prepares a server and keeps it busy until every row is answered, again after each failure."""
        while not self.finished:
            try:
                await state.server.prepare()
            except Lost as error:
                state.failures += 1
                state.reason = str(error)
                self._check_patience()
                await self._wait(min(BACK_OFF_SECONDS * 2 ** (state.failures - 1), LONGEST_BACK_OFF_SECONDS))
                continue
            self.answered_at = asyncio.get_running_loop().time()
            state.ready = True
            workers = [asyncio.create_task(self._work(state)) for _ in range(min(self.concurrency, self.count))]
            try:
                await _all(workers)
            finally:
                state.ready = False
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            if not self.finished:
                await self._wait(min(BACK_OFF_SECONDS * 2**state.failures, LONGEST_BACK_OFF_SECONDS))

    async def _work(self, state: _State) -> None:
        """Sends rows one after another while the server is ready."""
        while state.ready and (index := await self._next(state)) is not None:
            self.tries[index] = self.tries.get(index, 0) + 1
            try:
                output = await state.server.ask(index)
            except Lost as error:
                await self._lost(state, index, error)
                continue
            async with self.changed:
                if index in self.outputs:
                    raise RuntimeError(f"row {index} was answered twice")
                self.outputs[index] = output
                self.answered_at = asyncio.get_running_loop().time()
                state.failures = 0
                self.changed.notify_all()
            if self.progress is not None:
                self.progress(len(self.outputs), self.count)

    async def _lost(self, state: _State, index: int, error: Lost) -> None:
        """Puts a row back and keeps new ones from the server until it was prepared again."""
        async with self.changed:
            state.waiting.appendleft(index)
            if state.ready:
                state.failures += 1
            state.ready, state.reason = False, str(error)
            self.changed.notify_all()
        if self.tries[index] >= self.attempts:
            raise Lost(f"row {index} was lost {self.attempts} times, last: {error}")

    async def _next(self, state: _State) -> int | None:
        """A row for this server; None when all are answered or it is not ready any more."""
        async with self.changed:
            while state.ready and not self.finished:
                if state.waiting:
                    return state.waiting.popleft()
                longest = max(self.states, key=lambda other: len(other.waiting))
                if longest.waiting:
                    return longest.waiting.pop()
                await self.changed.wait()
        return None

    async def _wait(self, seconds: float) -> None:
        """Sleeps, but not past the last answer."""
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(lambda: self.finished), seconds)
            except TimeoutError:
                pass  # the usual end of a back-off

    def _check_patience(self) -> None:
        """Raises Lost where no server has answered for too long."""
        silent = asyncio.get_running_loop().time() - self.answered_at
        if silent >= self.patience and not any(state.ready for state in self.states):
            reasons = "; ".join(f"{state.server.name}: {state.reason}" for state in self.states)
            raise Lost(f"no vLLM server has answered for {silent:.0f} s ({reasons}); start one with `ratchet serve`")


async def _all(tasks: Sequence[asyncio.Task]) -> None:
    """Waits for all tasks, or raises the first error of one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
