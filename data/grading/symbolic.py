"""Equality of expressions that are not rational: asked of math-verify and mpmath in a killable worker process."""

import os
import threading
import time
from fractions import Fraction
from functools import lru_cache

from data.workers import WorkerDied, WorkerPool, WorkerTimeout

SECONDS = 2.0
"""Wall-clock bound of one comparison (our choice); a cold start of the worker comes on top, once."""
GRADE_SECONDS = 4.0
"""Bound of all comparisons of one grade, such as the items of a list."""
_MAX_NODES = 300

_pool = WorkerPool("data.grading.symbolic_worker", size=max(2, min(4, os.cpu_count() or 1)), calls_per_worker=2000)


class SymbolicFailure(ValueError):
    """The worker could not decide: "timeout", "worker_died" or "too_large"."""


class _Budget(threading.local):
    """Until when the calling thread's grade may ask the worker."""

    until = 0.0


_budget = _Budget()


def begin() -> None:
    """Starts the budget of one grade, which may need several comparisons."""
    _budget.until = time.monotonic() + GRADE_SECONDS


@lru_cache(maxsize=8192)
def equal(first: tuple, second: tuple) -> bool:
    """Whether two trees are equal for all values of their variables. Raises SymbolicFailure; that is not remembered."""
    if _size(first) + _size(second) > _MAX_NODES:
        raise SymbolicFailure("too_large")
    seconds = min(SECONDS, _budget.until - time.monotonic())
    if seconds <= 0.1:
        raise SymbolicFailure("timeout")
    message = {"trees": [_plain(first), _plain(second)], "seconds": seconds * 0.8}
    try:
        answer = _pool.call(message, seconds)
    except WorkerTimeout as error:
        raise SymbolicFailure("timeout") from error
    except WorkerDied as error:
        raise SymbolicFailure("worker_died") from error
    if answer["equal"] is None:
        raise SymbolicFailure(answer["reason"])
    return answer["equal"]


def warm() -> None:
    """Starts the workers ahead of the first comparison."""
    _pool.warm()


def worker_pids() -> list[int]:
    """Process ids of the live workers, for measurements."""
    return _pool.pids()


def _size(tree: tuple) -> int:
    return 1 + sum(_size(part) for part in tree[1:] if isinstance(part, tuple))


def _plain(tree: tuple) -> list:
    """A tree as JSON takes it."""
    parts = []
    for part in tree:
        if isinstance(part, tuple):
            parts.append(_plain(part))
        else:
            parts.append(f"{part.numerator}/{part.denominator}" if isinstance(part, Fraction) else part)
    return parts
