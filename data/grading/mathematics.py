"""Answers in LaTeX or plain mathematical notation: which part of a text is one."""

import re

from data.grading.answers import parse_answer
from data.grading.equality import Undecided, same_answer
from data.grading.expressions import Unreadable
from data.grading.extraction import last_sentence
from data.grading.latex import balanced, tidy
from data.grading.numbers import is_doubtful, is_qualified, parse_number_unmarked, sole_number
from data.grading.quantities import show
from data.grading.selection import Reader
from data.grading.symbolic import SymbolicFailure

_INLINE = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)", re.DOTALL)
_COMPLETE = re.compile(r"[.!][\"'”)*_$]*$")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*\.?")
_WORD_FIRST = re.compile(r"[A-Za-z]{2,}\s")
_MAX_ANSWER = 5000


def parse_math(text: str) -> str | None:
    """A marked answer as a tidy text; None where it is empty, unbalanced or too long."""
    if len(text) > _MAX_ANSWER or not balanced(text):
        return None
    return tidy(text) or None


def parse_math_phrase(text: str) -> str | None:
    """What follows "the answer is": an answer that can be read, or a sentence with one formula or number."""
    text = text.strip().rstrip(".!").strip()
    if text.startswith("<") and text.endswith(">"):
        text = text[1:-1]
    formulas = _formulas(text)
    if len(formulas) == 1 and not text.startswith(("$", "\\(")):
        return _sole_formula(text, formulas)
    value = parse_math(text)
    if value is not None and _shape(value) not in (None, "words"):
        return value
    if formulas:
        return _sole_formula(text, formulas)
    number = sole_number(text)
    return None if number is None else show(number.value) + ("%" if number.percent else "")


def parse_few_words(text: str) -> str | None:
    """An answer in words, such as a name; a longer phrase is prose."""
    value = parse_math(text.strip().rstrip(".!"))
    return value if value is not None and _shape(value) == "words" and len(value.split()) <= 3 else None


def parse_math_unmarked(text: str) -> str | None:
    """A text without a marker: the whole text is an answer, or its last complete sentence holds one formula or
    number."""
    bold = _BOLD.fullmatch(text)
    text = bold[1] if bold else text
    sentence_with_formula = _WORD_FIRST.match(text) and len(_formulas(text)) == 1
    if "\n" not in text and len(text) <= 300 and not sentence_with_formula:
        value = parse_math(text)
        shape = _shape(value) if value else None
        if shape not in (None, "words") or (shape == "words" and len(value.split()) <= 3):
            return value
    sentence = last_sentence(text)
    if not _COMPLETE.search(sentence):
        return None
    formulas = _formulas(sentence)
    if formulas:
        return _sole_formula(sentence, formulas)
    number = parse_number_unmarked(text)
    return None if number is None else show(number.value) + ("%" if number.percent else "")


def _formulas(text: str) -> list[str]:
    return [first or second for first, second in _INLINE.findall(text)]


def _sole_formula(text: str, formulas: list[str]) -> str | None:
    """The only formula of a sentence without another number outside it."""
    rest = _INLINE.sub(" ", text)
    if len(formulas) != 1 or any(character.isdigit() for character in rest):
        return None
    if is_doubtful(rest) or is_qualified(text[: _INLINE.search(text).start()]):
        return None
    value = parse_math(formulas[0])
    return value if value is not None and _shape(value) not in (None, "words") else None


def _shape(text: str) -> str | None:
    try:
        return parse_answer(text)[0]
    except Unreadable:
        return None


def _settled(rest: str) -> bool:
    return not any(character.isdigit() or character in "$\\=" for character in rest)


def _equal(first: str, second: str) -> bool:
    try:
        return same_answer(first, second)
    except (Unreadable, Undecided, SymbolicFailure):
        return False


READER = Reader(parse_math, parse_math_phrase, parse_math_unmarked, _settled, parse_few_words, equal=_equal)
