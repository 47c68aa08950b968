"""The shape of a mathematical answer: expression with unit, list, set, tuple or interval, union, relation, matrix,
words.

An answer is a tuple: ("expr", tree, unit, percent), ("list", items), ("set", items), ("seq", opening, closing, items),
("union", parts), ("rel", operators, sides), ("matrix", rows), ("ratio", values), ("time", text), ("based", digits,
base)
or ("words", text). Items are answers.
"""

import re
from fractions import Fraction

from data.grading.expressions import Unreadable, parse_expression
from data.grading.latex import compact
from data.grading.quantities import is_unit_name, read_tail

MAX_LENGTH = 2000
_MAX_DEPTH = 8

_BASED = re.compile(
    r"([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*_\s*\{?\s*(?:\\text\{)?\s*([0-9]{1,2}|two|three|eight|ten|sixteen)\s*\}*"
)
_BASES = {"two": "2", "three": "3", "eight": "8", "ten": "10", "sixteen": "16"}
_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?:\s*(?:\\text\{\s*)?([apAP])\.?\s?[mM]\.?\s*\}?)?")
_RATIO = re.compile(r"[0-9.]+(?:\s*:\s*[0-9.]+)+")
_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3}(?:,[0-9]{3})+)(?!,?[0-9])")
_AND = re.compile(r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*,?\s*")
_MATRIX = re.compile(r"\\begin\{([pbB]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|sim|equiv|Rightarrow)(?![A-Za-z])|<=|>=|!=|==|[=<>]")
_OPERATORS = {
    "\\le": "<=",
    "\\ge": ">=",
    "\\ne": "!=",
    "==": "?",
    "\\approx": "?",
    "\\sim": "?",
    "\\equiv": "?",
    "\\Rightarrow": "?",
}
_UNIT_TEXT = re.compile(r"(.*?)\s*\\text\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?\s*[23]\s*\}?)?", re.DOTALL)
_UNIT_PLAIN = re.compile(r"(.*?[0-9}).])\s*((?<![A-Za-z])[A-Za-z][A-Za-z./ ]*)(\^\s*\{?\s*[23]\s*\}?)?", re.DOTALL)
_SHORT_UNIT = re.compile(r"(-?[0-9.]+)\s*([A-Za-z]{2,3})(?:\s*(\^[23]))?")
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*([CF]?)\s*$")
_OPENERS, _CLOSERS = ("(", "[", "\\{", "\\langle"), (")", "]", "\\}", "\\rangle")


def parse_answer(text: str, depth: int = 0) -> tuple:
    """The answer that a tidy text is; raises Unreadable. Words are the last resort."""
    if len(text) > MAX_LENGTH or depth > _MAX_DEPTH:
        raise Unreadable("too long or nested too deeply")
    text = (
        _THOUSANDS.sub(lambda m: m[1].replace(",", ""), text) if depth == 0 and not text.startswith(_OPENERS) else text
    )
    for read in (_based, _time_or_ratio, _matrix, _relation, _union, _list, _bracketed, _expression):
        answer = read(text.strip(), depth)
        if answer is not None:
            return answer
    return ("words", words_of(text))


def words_of(text: str) -> str:
    """Words without mark-up, case and white space; empty is unreadable."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = " ".join(text.casefold().split()).strip("'\" .")
    if not text:
        raise Unreadable("empty")
    return text


def split_top(text: str, separator: re.Pattern) -> tuple[list[str], list[str]]:
    """The parts of a text between separators outside all brackets, and the separators."""
    parts, found, depth, start, position = [], [], 0, 0, 0
    while position < len(text):
        if text[position] == "\\" and text[position : position + 2] in ("\\{", "\\}"):
            depth += 1 if text[position + 1] == "{" else -1
            position += 2
            continue
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth -= 1
        elif depth == 0:
            match = separator.match(text, position)
            if match:
                parts.append(text[start:position])
                found.append(match[0])
                start = position = match.end()
                continue
        position += 1
    parts.append(text[start:])
    return parts, found


def _based(text: str, depth: int) -> tuple | None:
    match = _BASED.fullmatch(text)
    if not match or not (match[1][0].isdigit() or (match[1].isupper() and match[2] in ("16", "sixteen", "12"))):
        return None
    return ("based", match[1].upper(), _BASES.get(match[2], match[2]))


def _time_or_ratio(text: str, depth: int) -> tuple | None:
    match = _TIME.fullmatch(text)
    if match:
        return ("time", f"{int(match[1])}:{match[2]}{(match[3] or '').lower()}")
    if _RATIO.fullmatch(text):
        return ("ratio", tuple(_number(part) for part in text.split(":")))
    return None


def _number(text: str) -> Fraction:
    tree = parse_expression(text.strip())
    if tree[0] != "num":
        raise Unreadable("not a number")
    return tree[1]


def _matrix(text: str, depth: int) -> tuple | None:
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    rows = [row for row in re.split(r"\\cr(?![A-Za-z])", match[2])]
    if rows and not rows[-1].strip():
        rows.pop()
    cells = tuple(tuple(parse_answer(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows)
    if not cells or len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of different lengths")
    return ("matrix", cells)


def _relation(text: str, depth: int) -> tuple | None:
    sides, operators = split_top(text, _RELATION)
    if not operators:
        return None
    names = tuple(_OPERATORS.get(name, name) for name in operators)
    if "?" in names or any(not side.strip() for side in sides):
        raise Unreadable("a relation that is not read")
    items = _items(text)
    if len(items) == 1:
        return ("rel", names, tuple(parse_answer(side.strip(), depth + 1) for side in sides))
    if all(_RELATION.search(item) for item in items):  # x = 2, y = 3, or x < 1 or x > 2
        if set(names) - {"="} and re.search(r"\band\b", text):
            raise Unreadable("an intersection of inequalities")
        return ("list", tuple(parse_answer(item.strip(), depth + 1) for item in items))
    if names not in (("=",), ("\\in",)) or not _RELATION.search(items[0]):
        raise Unreadable("a list that mixes relations and values")
    return ("rel", names, tuple(parse_answer(side.strip(), depth + 1) for side in sides))  # n = 2, 3, 4


def _items(text: str) -> list[str]:
    """The items of a list at the top level: commas, semicolons, and, or."""
    text = _AND.sub(", ", text)
    parts, _ = split_top(text, re.compile(r"[,;]"))
    return parts


def _union(text: str, depth: int) -> tuple | None:
    parts, found = split_top(text, re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])"))
    if not found:
        return None
    return ("union", tuple(parse_answer(part.strip(), depth + 1) for part in parts))


def _list(text: str, depth: int) -> tuple | None:
    parts = _items(text)
    if len(parts) < 2:
        return None
    if any(not part.strip() for part in parts):
        raise Unreadable("an empty item")
    return ("list", _flat(tuple(parse_answer(part.strip(), depth + 1) for part in parts)))


def _flat(items: tuple) -> tuple:
    """`\\pm` inside a list or set stands for two items."""
    flat: list[tuple] = []
    for item in items:
        flat.extend(item[1] if item[0] == "list" else (item,))
    return tuple(flat)


def _bracketed(text: str, depth: int) -> tuple | None:
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return ("set", ())
    if text == "\\mathbb{R}" or words_of(text) in ("all real numbers", "all reals", "the real numbers"):
        infinity = ("const", "inf")
        return ("seq", "(", ")", (("expr", ("neg", infinity), "", False), ("expr", infinity, "", False)))
    opening = next((mark for mark in _OPENERS if text.startswith(mark)), None)
    closing = next((mark for mark in _CLOSERS if text.endswith(mark)), None)
    if opening is None or closing is None or not _is_one_group(text):
        return None
    items, _ = split_top(text[len(opening) : -len(closing)], re.compile(r"[,;]"))
    if opening == "(" and closing == ")" and len(items) == 1:
        return parse_answer(items[0].strip(), depth + 1)
    if opening == "\\{" and closing == "\\}":
        return ("set", _flat(tuple(parse_answer(item.strip(), depth + 1) for item in items)))
    if opening not in ("(", "[", "\\langle") or closing not in (")", "]", "\\rangle"):
        raise Unreadable("brackets that do not go together")
    return ("seq", opening, closing, tuple(parse_answer(item.strip(), depth + 1) for item in items))


def _is_one_group(text: str) -> bool:
    """Whether the bracket that opens the text closes at its end and not before."""
    depth = 0
    marks = list(re.finditer(r"\\[{}]|\\[lr]angle|[()\[\]{}]", text))
    for index, mark in enumerate(marks):
        depth += 1 if mark[0] in ("(", "[", "{", "\\{", "\\langle") else -1
        if depth == 0:
            return index == len(marks) - 1
    return False


def _expression(text: str, depth: int) -> tuple | None:
    for core, scale, percent, unit in _readings(text):
        try:
            tree = parse_expression(core)
        except Unreadable:
            continue
        if scale != 1:
            tree = ("num", tree[1] * scale) if tree[0] == "num" else ("mul", tree, ("num", Fraction(scale)))
        return _expanded(tree, unit, percent)
    return None


def _expanded(tree: tuple, unit: str, percent: bool) -> tuple:
    """One expression, or the list of two that a plus-minus stands for."""
    if not _has_sign_pair(tree):
        return ("expr", tree, unit, percent)
    return ("list", tuple(("expr", _with_sign(tree, sign), unit, percent) for sign in (1, -1)))


def _has_sign_pair(tree: tuple) -> bool:
    return tree[0] in ("pm", "mp") or any(_has_sign_pair(part) for part in tree[1:] if isinstance(part, tuple))


def _with_sign(tree: tuple, sign: int) -> tuple:
    parts = tuple(_with_sign(part, sign) if isinstance(part, tuple) else part for part in tree[1:])
    if tree[0] not in ("pm", "mp"):
        return (tree[0], *parts)
    positive = (tree[0] == "pm") == (sign == 1)
    term = parts[1] if positive else ("neg", parts[1])
    return term if parts[0] == ("num", Fraction(0)) else ("add", parts[0], term)


def _readings(text: str):
    """The text as an expression alone, then with a unit taken off: (expression, scale, percent, unit)."""
    unit = ""
    for mark, name in (("\\$", "dollar"), ("€", "euro"), ("£", "pound sterling"), ("¥", "yen")):
        if text.startswith((mark, "-" + mark)):
            text, unit = text.replace(mark, "", 1), name
    for mark in ("\\%", "%"):
        if text.endswith(mark):
            yield text.removesuffix(mark).strip(), 1, True, unit
            return
    degree = _DEGREE.search(text)
    if degree:
        yield text[: degree.start()].strip(), 1, False, ("degree " + degree[1].lower()).strip()
        return
    plain_unit = _SHORT_UNIT.fullmatch(text)
    if plain_unit and is_unit_name(plain_unit[2]):
        yield (
            plain_unit[1],
            1,
            False,
            " ".join(filter(None, (unit, read_tail(plain_unit[2] + (plain_unit[3] or ""))[2]))),
        )
        return
    if "\\text" not in text:
        yield text, 1, False, unit
    for pattern in (_UNIT_TEXT, _UNIT_PLAIN):
        match = pattern.fullmatch(text)
        if match and match[1].strip():
            power = "^" + compact(match[3]).strip("^{}") if match[3] else ""
            tail = read_tail(match[2] + power)
            if tail is not None:
                scale, percent, name = tail
                yield (
                    match[1].strip(),
                    scale,
                    percent,
                    " ".join(word for word in (unit, name) if word and word != unit) or unit,
                )
