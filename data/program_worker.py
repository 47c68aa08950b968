"""The process that holds the sandbox: a fresh interpreter with a pydantic-monty pool of one worker.

It stands between the caller and pydantic-monty because the latter's runtime does not survive a fork of the process
that holds it (seen with 1.4.0: parent and child then both hang).
"""

import math
import resource

from data.workers import serve

_MAX_DIGITS = 4000


def describe(value) -> dict:
    """A JSON form of a program's result: exact text of a number, else its type."""
    from decimal import Decimal

    if isinstance(value, bool):
        return {"type": "bool", "text": str(value)}
    if isinstance(value, int):
        if value.bit_length() > _MAX_DIGITS * 3:
            return {"type": "error", "text": "the result has too many digits"}
        return {"type": "number", "text": str(value)}
    if isinstance(value, float):
        return {"type": "number" if math.isfinite(value) else "not finite", "text": repr(value)}
    if isinstance(value, Decimal):
        return {"type": "number" if value.is_finite() else "not finite", "text": str(value)}
    if isinstance(value, str):
        return {"type": "str", "text": value[:1000]}
    return {"type": type(value).__name__, "text": ""}


class Host:
    """Runs one program per message in a session of its own."""

    def __init__(self) -> None:
        from pydantic_monty import Monty

        self._pool = Monty(
            min_processes=1, max_processes=1, max_checkouts_per_worker=500, feed_duration_limit_grace=0.5
        )
        self._pool.__enter__()

    def answer(self, message: dict) -> dict:
        """The result of message["code"] under message["limits"], or the error it ended with."""
        from pydantic_monty import MontyError

        printed = _Printed(message["print_limit"])
        policy = {"sleep": "zero", "random_start": {"seed": 0}}
        try:
            with self._pool.checkout(limits=message["limits"], os_policy=policy) as session:
                value = session.feed_run(message["code"], print_callback=printed)
        except MontyError as error:
            return {"type": "error", "text": _first_line(error)}
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a result that cannot be converted
            return {"type": "error", "text": f"{type(error).__name__}: {_first_line(error)}"}
        return describe(value)


class _Printed:
    """Counts what the program prints and stops it beyond a limit; keeps nothing."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def __call__(self, stream: str, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("the program prints too much")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """Entry point of the worker process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    serve(Host().answer)
