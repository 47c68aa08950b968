"""Answers that are one number (GSM8K, SVAMP, AIME and their like)."""

import re
from fractions import Fraction

from data.grading.expressions import Unreadable, parse_expression
from data.grading.extraction import last_sentence
from data.grading.latex import tidy
from data.grading.quantities import MAX_DIGITS, MAX_LENGTH, Quantity, equal_quantities, parse_quantity, plain_text, show
from data.grading.selection import Reader
from data.grading.values import TooLarge, exact, is_unevaluated

_DOUBT = (
    r"or|could|might|may|either|neither|nor|not|never|hardly|cannot|between|about|approximately|around|almost|nearly"
    r"|roughly|maybe|perhaps|possibly|probably|guess|if|unless|than|until|half|twice|double|triple|least|most|impossible"
    r"|false|untrue|wrong|incorrect|doubts?|unlikely|nobody|no\s+way"
)
_HAZARDS = re.compile(
    rf"\b(?:{_DOUBT}|third|quarter|two|three|four|five|six|seven|eight|nine"
    r"|ten|eleven|twelve|twenty|thirty|forty|fifty|step|ago|squared|cubed|root|factorial|negative|minus|plus|times"
    r"|divided|over|under|point)\b|n['’]t\b|\?|≈|~|\\approx|√|\\sqrt|\^",
    re.IGNORECASE,
)
_DOUBTFUL = re.compile(rf"\b(?:{_DOUBT})\b|n['’]t\b|\?", re.IGNORECASE)
_QUALIFIED = re.compile(
    r"\b(?:above|below|beyond|beneath|near|nearer|within|past|mod|modulo|exceed(?:s|ed|ing)?|surpass(?:es|ed|ing)?"
    r"|lack(?:s|ed|ing)?|without|no|log|ln|except|excluding|(?:up|down|close|closer|nearer)\s+to|upwards?\s+of"
    r"|(?:anything|all)\s+but|divisible\s+by|divides?|(?:differ(?:s|ed|ent)?|far|away)\s+from"
    r"|(?:multiples?|factors?|divisors?|reciprocal|inverse|opposite|squares?|cubes?|digits?|powers?|logarithm|fraction)"
    r"\s+of)[\s$*\\(]*\Z",
    re.IGNORECASE,
)
_CLUSTER = re.compile(r"[0-9][0-9,./:]*|\.[0-9]+")
_SCALE_AFTER = re.compile(
    r"\s*(?:%|percent\b|hundred\b|thousand\b|million\b|billion\b|trillion\b|dozen\b)", re.IGNORECASE
)
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])(?![mghslxX]\b(?<=\d\s.))[A-Za-z](?![A-Za-z])")
_CALL = re.compile(r"^\s*[A-Za-z]_?[0-9]*\([^()]*\)\s*$")
_SUBSCRIPT = re.compile(r"_(?:[0-9A-Za-z]|\{[^{}]*\})")
_ARITHMETIC = re.compile(r"[0-9^√]|^\s*-|\\sqrt")
_COMPLETE = re.compile(r"[.!][\"'”)*_]*$")


def parse_number(text: str) -> Quantity | None:
    """A marked answer: one number, or an equation that ends in one (`3 + 4 = 7`, `x = 7`)."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    quantity = parse_quantity(text)
    if quantity is not None:
        return quantity
    if "=" not in text:
        return _computed(text)
    parts = text.strip("$ ").split("=")
    if any(mark in text for mark in ("≠", "<", ">", "\\ne", "\\le", "\\ge", ";", "==", "!=")):
        return None
    if any(re.search(r",(?![0-9]{3}(?![0-9]))|\b(?:and|or|not)\b|n't\b", part) for part in parts):
        return None  # x = 5, y = 6: several answers
    quantity = parse_quantity(parts[-1].strip())
    if quantity is None or not all(_may_equal(part.strip(), quantity) for part in parts[:-1]):
        return None
    return quantity


def _may_equal(side: str, quantity: Quantity) -> bool:
    """Whether a side in front of the last one of an equation leaves that one an answer.

    `x`, `m + n`, `f(5)` name it; `2x`, `x + 1` do not, they are something to solve. A side that can be computed must
    give it, to the written decimals (`10/3 = 3.33`).
    """
    named = _SUBSCRIPT.sub("", _CALL.sub(" ", side))
    if _UNKNOWN.search(named) and _ARITHMETIC.search(named):
        return False
    stated = parse_quantity(side)
    if stated is not None and equal_quantities(stated, quantity):
        return True
    try:
        value = exact(parse_expression(tidy(side)))
    except (Unreadable, TooLarge):
        return stated is None  # words, units, money: a name of the answer or a sum that is not read
    if value is None:
        return stated is None
    places = len(show(quantity.value).partition(".")[2])
    rounding = Fraction(1, 2 * 10**places) if places else 0
    return abs(value - quantity.value) <= rounding or (quantity.percent and value == quantity.value / 100)


def _computed(text: str) -> Quantity | None:
    """`10^3`, `\\sqrt{25}`, `\\frac{12}{4}`: a form with one rational value, but no sum or product left standing."""
    if "~" in text or "[" in text:
        return None  # about five; a list
    try:
        tree = parse_expression(tidy(text))
        value = exact(tree)
    except (Unreadable, TooLarge):
        return None
    return (
        None
        if value is None or is_unevaluated(tree) or max(abs(value.numerator), value.denominator) > 10**MAX_DIGITS
        else Quantity(value)
    )


def parse_number_phrase(text: str) -> Quantity | None:
    """What follows "the answer is": strictly one number (`<72>` as SVAMP writes it), or a sentence with a single
    one."""
    text = text.strip().rstrip(".!").strip()
    if text.startswith("<") and text.endswith(">"):
        text = text[1:-1]
    quantity = parse_number(text)
    return quantity if quantity is not None or "=" in text else sole_number(text)


def parse_number_unmarked(text: str) -> Quantity | None:
    """A text without a marker: the whole text is a number, or its last complete sentence holds exactly one."""
    if "\n" not in text:
        quantity = parse_number(text)
        if quantity is not None:
            return quantity
    sentence = last_sentence(text)
    if not _COMPLETE.search(sentence) or re.fullmatch(r"[0-9]+[.)]+", sentence):
        return None  # cut off, or nothing but the mark of a list's next item
    return sole_number(sentence)


def is_doubtful(text: str) -> bool:
    """Whether a sentence's words outside its formula leave open whether that is the answer."""
    return bool(_DOUBTFUL.search(text))


def is_qualified(before: str) -> bool:
    """Whether the words directly before a number make something else of it: "exceeds", "divisible by", "square of"."""
    return bool(_QUALIFIED.search(before))


def sole_number(sentence: str) -> Quantity | None:
    """The only number of a sentence, after its last `=` if it has one; None where a word makes it doubtful."""
    if len(sentence) > MAX_LENGTH or _HAZARDS.search(sentence):
        return None
    sentence = plain_text(sentence.rsplit("=", 1)[-1])
    clusters = list(_CLUSTER.finditer(sentence))
    if len(clusters) != 1:
        return None
    start, end = clusters[0].span()
    end -= len(clusters[0][0]) - len(clusters[0][0].rstrip(",./:"))
    before, after = sentence[:start], sentence[end:]
    if is_qualified(before):
        return None
    prefix = re.search(r"(?:^|(?<=[\s(*:]))(-?[$€£¥₹]?-?)$", before)
    if not prefix or (after and not re.match(r"[\s.,!;:)*%$\"'”’]", after)):
        return None
    scale = _SCALE_AFTER.match(after)
    return parse_quantity(prefix[1] + sentence[start:end] + (scale[0] if scale else ""))


def _settled(rest: str) -> bool:
    return not any(character.isdigit() for character in rest)


READER = Reader(parse_number, parse_number_phrase, parse_number_unmarked, _settled, equal=equal_quantities)
