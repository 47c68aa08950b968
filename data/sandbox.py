"""Generated Python programs, run in pydantic-monty under time, memory, recursion and output limits.

The sandbox interprets a subset of Python with no files, network, processes or environment; what it lacks (sympy, numpy,
statistics, fractions, most of the standard library) ends a program with an error, which is a graded failure.
"""

import os
from dataclasses import dataclass

from data.grading.extraction import visible_part
from data.workers import WorkerDied, WorkerPool, WorkerTimeout

MAX_TEXT = 20_000
"""Longest text with a program, in characters (our choice)."""
_OVERHEAD_SECONDS = 1.0

_pool = WorkerPool("data.program_worker", size=max(2, min(4, os.cpu_count() or 1)), calls_per_worker=2000)


@dataclass(frozen=True)
class ProgramLimits:
    """Bounds of one run. R³ published 2 s, in-process; the rest is our choice."""

    seconds: float = 2.0
    memory_bytes: int = 128 << 20
    recursion: int = 300
    printed_characters: int = 100_000


@dataclass(frozen=True)
class ProgramResult:
    """`text` is the exact decimal text of the returned number where `ok`; otherwise `reason` says why there is none:
    "no_program", "program_too_long", "timeout", "worker_died", "error: ...", "returned bool" and the like."""

    ok: bool
    text: str | None
    reason: str


def run_program(text: str, limits: ProgramLimits | None = None) -> ProgramResult:
    """Runs `solution()` of the program in `text` and gives the number it returns.

    `text` may hold prose and code fences around the program. Never raises for what the text holds: no program, an
    error, a limit, a result that is not one finite number (a bool or a string is none) all give `ok` False.
    """
    limits = limits or ProgramLimits()
    text = visible_part(text)
    if "solution" not in text:
        return ProgramResult(False, None, "no_program")
    if len(text) > MAX_TEXT:
        return ProgramResult(False, None, "program_too_long")
    message = {
        "text": text,
        "print_limit": limits.printed_characters,
        "seconds": limits.seconds,
        "limits": {
            "max_feed_duration_secs": limits.seconds,
            "max_memory": limits.memory_bytes,
            "max_recursion_depth": limits.recursion,
            "max_total_sleep_secs": 0.0,
        },
    }
    try:
        answer = _pool.call(message, limits.seconds + _OVERHEAD_SECONDS)
    except WorkerTimeout:
        return ProgramResult(False, None, "timeout")
    except WorkerDied:
        return ProgramResult(False, None, "worker_died")
    if answer["type"] == "number":
        return ProgramResult(True, answer["text"], "ok")
    if answer["type"] in ("error", "no_program", "timeout"):
        return ProgramResult(False, None, answer["text"])
    return ProgramResult(False, None, f"returned {answer['type']}")


def warm() -> None:
    """Starts a worker ahead of the first program."""
    _pool.warm()


def worker_pids() -> list[int]:
    """Process ids of the live workers."""
    return _pool.pids()


def close() -> None:
    """Ends the idle workers; a later program starts new ones."""
    _pool.close()
