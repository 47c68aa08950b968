"""Generated Python programs, run in pydantic-monty under time, memory, recursion and output limits."""

import ast
import os
import re
from dataclasses import dataclass

from data.workers import WorkerDied, WorkerPool, WorkerTimeout

MAX_CODE = 20_000
"""Longest program text in characters (our choice)."""
_MAX_NESTING_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)

_pool = WorkerPool("data.program_worker", size=max(1, min(4, os.cpu_count() or 1)), calls_per_worker=2000)


@dataclass(frozen=True)
class ProgramLimits:
    """Bounds of one run. R³ published 2 s in-process; the rest is our choice."""

    seconds: float = 2.0
    memory_bytes: int = 128 << 20
    recursion: int = 300
    printed_characters: int = 100_000


@dataclass(frozen=True)
class ProgramResult:
    """`text` is the exact decimal text of a returned number where `ok`; otherwise `reason` says why there is none."""

    ok: bool
    text: str | None
    reason: str


def find_program(text: str) -> str | None:
    """The source of the program in a text: imports, helpers and the last top-level `def solution()`, without prose.

    A fenced block is preferred (the last one that defines solution); else the text from its first import or def on,
    cut at the longest prefix of lines that parses (R³ cut at the first blank line: its defect 14). None: no program.
    """
    blocks = [block for block in _FENCE.findall(text) if re.search(r"^\s*def\s+solution\s*\(", block, re.MULTILINE)]
    for source in [*reversed(blocks), text] if not blocks else reversed(blocks):
        program = _parse_program(source)
        if program is not None:
            return program
    return None


def _parse_program(source: str) -> str | None:
    lines = source.expandtabs(4).splitlines()
    start = next(
        (i for i, line in enumerate(lines) if re.match(r"(?:async\s+)?def\s+\w|(?:import|from)\s+\w", line)), None
    )
    definition = next((i for i, line in enumerate(lines) if re.match(r"def\s+solution\s*\(", line)), None)
    if definition is None:
        return None
    for first in sorted({start, definition}):
        tree = _longest_prefix(lines[first:])
        if tree is not None:
            kept = [node for node in tree.body if _is_kept(node)]
            if any(isinstance(node, ast.FunctionDef) and node.name == "solution" for node in kept):
                return ast.unparse(ast.Module(body=kept, type_ignores=[]))
    return None


def _is_kept(node: ast.stmt) -> bool:
    """Definitions, imports and assignments stay; calls and prints at the top level would run the program twice."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def _longest_prefix(lines: list[str]) -> ast.Module | None:
    """The syntax tree of the longest prefix of lines that parses; prose after a program is cut off."""
    for end in range(len(lines), 0, -1):
        if end < len(lines) and not lines[end - 1].strip():
            continue
        try:
            return ast.parse("\n".join(lines[:end]) + "\n")
        except _MAX_NESTING_ERRORS:
            continue
    return None


def run_program(text: str, limits: ProgramLimits | None = None) -> ProgramResult:
    """Runs `solution()` of the program in `text` and gives the number it returns.

    Never raises for what the text holds: a text without a program, an error, a limit, a result that is not one finite
    number (a bool is none) all give `ok` False with a reason.
    """
    limits = limits or ProgramLimits()
    if len(text) > MAX_CODE:
        return ProgramResult(False, None, "program_too_long")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return ProgramResult(False, None, "program_not_unicode")
    program = find_program(text)
    if program is None:
        return ProgramResult(False, None, "no_program")
    message = {
        "code": program + "\nsolution()",
        "print_limit": limits.printed_characters,
        "limits": {
            "max_feed_duration_secs": limits.seconds,
            "max_memory": limits.memory_bytes,
            "max_recursion_depth": limits.recursion,
            "max_total_sleep_secs": 0.0,
            "max_suspensions": 1000,
        },
    }
    try:
        answer = _pool.call(message, limits.seconds + 1.0)
    except WorkerTimeout:
        return ProgramResult(False, None, "timeout")
    except WorkerDied:
        return ProgramResult(False, None, "worker_died")
    if answer["type"] == "number":
        return ProgramResult(True, answer["text"], "ok")
    if answer["type"] == "error":
        return ProgramResult(False, None, f"error: {answer['text']}")
    return ProgramResult(False, None, f"returned {answer['type']}")


def warm() -> None:
    """Starts a worker ahead of the first program."""
    _pool.warm()
