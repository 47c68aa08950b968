"""Finds the Python program in a model's text. Runs inside the sandbox's worker, where a deadline holds."""

import ast
import re

_DEFINITION = re.compile(r"def\s+solution\s*\(")
_START = re.compile(r"(?:async\s+)?def\s+\w|import\s+\w|from\s+[\w.]+\s+import\b|class\s+\w|@\w|[A-Za-z_]\w*\s*=(?!=)")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.MULTILINE)
_RUN_ON = re.compile(
    r"^(?:#+[ \t]*)?(?:question|problem|instruction|q|human|user)\s*[0-9]*\s*:", re.IGNORECASE | re.MULTILINE
)
_MAX_CUTS = 50
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def find_program(text: str) -> str | None:
    """The source of the program: imports, helpers, assignments and the last top-level `def solution`, without prose.

    A fenced block that defines solution is preferred (the last one), else the text from its first definition or import
    on; prose after it is cut off (R³ cut at the first blank line: its defect 14), and so is a new question after a
    complete program. Of two definitions in one program the last counts, as in Python. None: no complete program.
    """
    for part in _before_new_question(text):
        blocks = [block for block in _fenced(part) if _DEFINITION.search(block)]
        for source in reversed(blocks) if blocks else [part]:
            program = _program_in(source)
            if program is not None:
                return program
    return None


def _before_new_question(text: str) -> list[str]:
    """The text before a new question first, then the whole text (a docstring may quote a line like one)."""
    for match in _RUN_ON.finditer(text):
        if _DEFINITION.search(text, 0, match.start()):
            return [text[: match.start()], text]
    return [text]


def _fenced(text: str) -> list[str]:
    """The insides of fenced blocks; a last one without its closing fence counts."""
    fences = list(_FENCE.finditer(text))
    blocks = []
    for index in range(0, len(fences), 2):
        end = fences[index + 1].start() if index + 1 < len(fences) else len(text)
        blocks.append(text[fences[index].end() : end])
    return blocks


def _program_in(source: str) -> str | None:
    lines = source.expandtabs(4).split("\n")
    starts = [index for index, line in enumerate(lines) if _START.match(line)][:_MAX_CUTS]
    definitions = [index for index in starts if _DEFINITION.match(lines[index])]
    if not definitions:
        return None
    for first in dict.fromkeys((starts[0], definitions[0])):
        tree = _parsed(lines[first:])
        if tree is None:
            continue
        kept = [node for node in tree.body if _is_kept(node)]
        if any(isinstance(node, ast.FunctionDef) and node.name == "solution" for node in kept):
            return ast.unparse(ast.Module(body=kept, type_ignores=[]))
    return None


def _is_kept(node: ast.stmt) -> bool:
    """Definitions, imports and assignments; a call or print at the top level would run the program twice."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def _parsed(lines: list[str]) -> ast.Module | None:
    """The tree of the lines, cut before the line of each syntax error in turn."""
    for _ in range(_MAX_CUTS):
        while lines and not lines[-1].strip():
            lines = lines[:-1]
        if not lines:
            return None
        try:
            return ast.parse("\n".join(lines) + "\n")
        except SyntaxError as error:
            place = min(error.lineno or 1, len(lines))
            if place < 2:
                return None
            lines = lines[: place - 1]
        except _UNPARSABLE:
            return None
    return None
