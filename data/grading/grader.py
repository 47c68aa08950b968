"""`grade`: is the answer of a text the gold answer?"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from data.errors import UserError
from data.grading import mathematics, numbers, symbolic, words
from data.grading.equality import Undecided, Unreadable, is_finite, same_answer
from data.grading.latex import tidy
from data.grading.quantities import equal_quantities, parse_quantity, show
from data.grading.selection import Reader, Selected, select
from data.grading.symbolic import SymbolicFailure

_OPTION_GOLD = re.compile(r"\\text\{\s*\(([A-J])\)\s*\}|\(\s*(?:\\text\{)?\s*([A-J])\s*\}?\s*\)")
KINDS = ("number", "math", "choice", "label", "program", "string", "float")
FLOAT_TOLERANCE = Fraction(4, 100)
"""Of the gold's size: what TheoremQA's published checker allows for floats."""


@dataclass(frozen=True, slots=True)
class Grade:
    """`correct`; `parsed` is the answer that was read in a short normal form, None without one; `reason` is "correct",
    "wrong", or why nothing could be read or compared ("no_answer", "several_answers", "timeout", ...)."""

    correct: bool
    parsed: str | None
    reason: str


def grade(prediction: str, gold: str, kind: str = "number") -> Grade:
    """Whether the text `prediction` ends in the answer `gold`, by the policy of docs/grading.md.

    kind: number, math (LaTeX), choice (a letter), label (a closed set of words), program (`def solution():`, run in the
    sandbox), string (exact up to case and white space), float (a number within 4 % of a measured or rounded gold; for
    benchmarks, not for rewards). Never raises for what the texts hold and always returns by its
    deadline; a gold that cannot be read grades everything wrong with the reason "bad_gold". UserError for another kind.
    """
    if not isinstance(prediction, str) or not isinstance(gold, str):
        raise UserError(
            f"grade needs two texts, got {type(prediction).__name__} and {type(gold).__name__}: convert the columns"
        )
    grader = _GRADERS.get(kind)
    if grader is None:
        raise UserError(f"answer kind {kind!r} is not known: use one of {', '.join(KINDS)}")
    return grader(prediction, gold)


def warm(kinds: Iterable[str]) -> None:
    """Starts the workers that grading these kinds may need, ahead of the first answer; harmless when they run."""
    wanted = set(kinds)
    if "math" in wanted:
        symbolic.warm()
    if "program" in wanted:
        from data import sandbox

        sandbox.warm()


def _verdict(correct: bool, parsed: str | None) -> Grade:
    return Grade(correct, parsed, "correct" if correct else "wrong")


def _unread(selected: Selected) -> Grade:
    return Grade(False, None, selected.reason)


def _grade_number(prediction: str, gold: str) -> Grade:
    expected = parse_quantity(gold.strip())
    if expected is None:
        return Grade(False, None, "bad_gold")
    selected = select(prediction, numbers.READER)
    if selected.value is None:
        return _unread(selected)
    return _verdict(equal_quantities(selected.value, expected), show(selected.value.value))


def _grade_float(prediction: str, gold: str) -> Grade:
    expected = parse_quantity(gold.strip())
    if expected is None:
        return Grade(False, None, "bad_gold")
    selected = select(prediction, numbers.READER)
    if selected.value is None:
        return _unread(selected)
    right = equal_quantities(selected.value, expected)
    if not right and (not expected.unit or selected.value.unit in ("", expected.unit)):
        gap = abs(selected.value.value - expected.value)
        right = gap <= abs(expected.value) * FLOAT_TOLERANCE and selected.value.percent == expected.percent
    return _verdict(right, show(selected.value.value))


def _grade_words(prediction: str, expected: str | None, reader: Reader) -> Grade:
    if expected is None:
        return Grade(False, None, "bad_gold")
    selected = select(prediction, reader)
    if selected.value is None:
        return _unread(selected)
    return _verdict(selected.value == expected, selected.value)


def _grade_choice(prediction: str, gold: str) -> Grade:
    return _grade_words(prediction, words.parse_choice(gold), words.CHOICE)


@lru_cache(maxsize=256)
def _label_reader(gold: str) -> Reader:
    return words.label_reader(gold)


def _grade_label(prediction: str, gold: str) -> Grade:
    expected = words.parse_label(gold)
    return _grade_words(prediction, expected, _label_reader(expected) if expected else words.STRING)


def _grade_string(prediction: str, gold: str) -> Grade:
    return _grade_words(prediction, words.normal_string(gold), words.STRING)


def _grade_program(prediction: str, gold: str) -> Grade:
    from data.sandbox import run_program

    expected = parse_quantity(gold.strip())
    if expected is None:
        return Grade(False, None, "bad_gold")
    result = run_program(prediction)
    if not result.ok:
        return Grade(False, None, result.reason)
    value = Fraction(result.text)
    return _verdict(equal_result(value, expected.value, gold), show(value))


def equal_result(value: Fraction, gold: Fraction, written: str) -> bool:
    """Whether a program's result is its gold (our choice, narrower than the 1e-2 of R³'s published checker).

    Programs compute in binary64 and published golds were rounded, so beside equality within 1e-9 these count: a result
    within 5e-4 and 1e-4 of an integer gold without being an integer; one that rounds to the decimals of the gold as
    `written` (two or more); and, for the few golds rounded carelessly, a result with at least two more decimals than a
    gold of three or more, within 2e-3 and 1 % of it.
    """
    gap, size = abs(value - gold), abs(gold)
    if gap <= size / 10**9:
        return True
    if gold.denominator == 1:
        return value.denominator != 1 and gap <= Fraction(1, 2000) and gap <= size / 10**4
    places = len(written.strip().partition(".")[2])
    if not written.strip().replace(".", "", 1).lstrip("-").isdigit() or places < 2:
        return False
    if gap <= Fraction(1, 2 * 10**places):
        return True
    more = (value * 10 ** (places + 1)).denominator != 1
    return places >= 3 and more and gap <= Fraction(1, 500) and gap <= size / 100


def _grade_math(prediction: str, gold: str) -> Grade:
    expected = tidy(gold)
    if not expected:
        return Grade(False, None, "bad_gold")
    option = _OPTION_GOLD.fullmatch(expected)
    if option:
        return _grade_choice(prediction, option[1] or option[2])
    symbolic.begin()
    selected = select(prediction, mathematics.READER)
    if selected.value is None:
        return _unread(selected)
    try:
        if same_answer(selected.value, expected):
            return Grade(True, selected.value[:200], "correct")
        return Grade(False, selected.value[:200] if is_finite(selected.value) else None, "wrong")
    except (Undecided, SymbolicFailure) as error:
        return Grade(False, selected.value[:200], str(error))
    except Unreadable:
        return Grade(False, None, "unreadable_answer")


_GRADERS = {
    "number": _grade_number,
    "math": _grade_math,
    "choice": _grade_choice,
    "label": _grade_label,
    "program": _grade_program,
    "string": _grade_string,
    "float": _grade_float,
}
