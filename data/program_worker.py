"""The process that holds the sandbox: a fresh interpreter with a pydantic-monty pool of one worker.

It stands between the caller and pydantic-monty because the latter's runtime does not survive a fork of the process that
holds it (seen with 1.4.0: parent and child then both hang), and because finding a program in hostile text is itself
work
that needs a deadline.
"""

import datetime
import faulthandler
import math
import os
import resource
from decimal import Decimal

from data.program_source import find_program
from data.workers import serve

_FROZEN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""What every clock of the sandbox shows: the same program gives the same result on any day (our choice)."""
_MAX_BITS = 1300
"""About 400 decimal digits, as for any number that is graded."""


def describe(value) -> dict:
    """A JSON form of a program's result: the exact text of a number, else its type."""
    if isinstance(value, bool):
        return {"type": "bool", "text": str(value)}
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            return {"type": "error", "text": "error: the result has too many digits"}
        return {"type": "number", "text": str(value)}
    if isinstance(value, float):
        return {"type": "number" if math.isfinite(value) else "a number that is not finite", "text": repr(value)}
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > 400 or len(value.as_tuple().digits) > 400:
            return {"type": "a number that is not finite or too long", "text": ""}
        return {"type": "number", "text": str(value)}
    return {"type": type(value).__name__, "text": ""}


class _Printed:
    """Counts what the program prints and stops it beyond a limit; keeps nothing."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def __call__(self, stream: str, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("the program prints too much")


class Host:
    """Runs one program per message, each in a session of its own."""

    def __init__(self) -> None:
        from pydantic_monty import Monty

        self._nowhere = open(os.devnull, "w")
        self._pool = Monty(
            min_processes=1, max_processes=1, max_checkouts_per_worker=500, feed_duration_limit_grace=0.4
        )
        self._pool.__enter__()

    def answer(self, message: dict) -> dict:
        """The result of the program in message["text"] under message["limits"], or what it ended with."""
        faulthandler.dump_traceback_later(message["seconds"] + 2.0, exit=True, file=self._nowhere)
        try:
            program = find_program(message["text"])
            if program is None:
                return {"type": "no_program", "text": "no_program"}
            return self._run(program + "\nsolution()", message)
        except (RecursionError, MemoryError, UnicodeError) as error:
            return {"type": "error", "text": _described(error)}
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self, code: str, message: dict) -> dict:
        from pydantic_monty import MontyCrashedError, MontyError

        policy = {"sleep": "zero", "random_start": {"seed": 0}, "datetime": _FROZEN}
        try:
            with self._pool.checkout(limits=message["limits"], os_policy=policy) as session:
                value = session.feed_run(code, print_callback=_Printed(message["print_limit"]))
        except MontyCrashedError as error:
            return (
                {"type": "timeout", "text": "timeout"} if error.timed_out else {"type": "error", "text": "worker_died"}
            )
        except MontyError as error:
            text = _described(error)
            if text.startswith("error: TimeoutError: feed time limit"):
                return {"type": "timeout", "text": "timeout"}
            return {"type": "error", "text": text}
        except (ValueError, TypeError, OverflowError) as error:  # a result that cannot be converted
            return {"type": "error", "text": _described(error)}
        return describe(value)


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"error: {lines[0][:300]}"


def main() -> None:
    """Entry point of the worker process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    serve(Host().answer)
