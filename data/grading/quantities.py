"""Numbers as people and models write them, read exactly: no floating point, no symbolic library."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from data.grading.latex import straighten

MAX_DIGITS = 400
"""More digits than this, or a power of ten beyond it, is no number (our choice)."""
MAX_LENGTH = 2000

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_SIMPLE = re.compile(rf"-?{_DECIMAL}")
_CURRENCY = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\s*
    (?P<currency>[$€£¥₹]?)\s*
    (?P<inner>[-+]?)
    (?:
        (?P<whole>{_DIGITS})\s+(?P<mixed_top>[0-9]+)\s*/\s*(?P<mixed_bottom>[0-9]+)
      | (?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})
      |
      (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]+)|\s*(?:\*|×|x)\s*10\s*(?:\^|\*\*)\s*(?P<power>[-+]?[0-9]+))?
    )
    """,
    re.VERBOSE,
)
_UNITS = {
    word: value
    for value, word in enumerate(
        """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
        seventeen
    eighteen nineteen""".split()
    )
} | {word: 10 * value for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
_CURRENCY_CODE = re.compile(r"(USD|EUR|GBP|INR|Rs)\.?\s*(?=[0-9])")
_SCALE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TAIL_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*\.?|[%°/$€£¥₹¢]|\^[23]\b|\^\{[23]\}")
_NOT_UNITS = frozenset(
    """and or nor to than plus minus times divided over squared cubed factorial half halves third thirds quarter
    quarters
    fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth
    hundredths
    thousandth thousandths hundreds thousands millions billions trillions dozens not but maybe perhaps possibly either
    is was are were equals approximately about if because since so then wait no k x y z n i e pi π a b c d p q r t u v w
    infinity inf nan point more less fewer most least choose mod base root ish odd never nearly almost
    around roughly""".split()
)
_ATTACHED = re.compile(r"[A-Za-z]{1,2}(?![A-Za-z])")
_SHORT_WORDS = frozenset("of in on at an by he we it up so my us am pm".split())
_UNIT_NAMES = {
    "cm": "centimeter", "mm": "millimeter", "m": "meter", "km": "kilometer", "in": "inch", "inches": "inch",
    "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram", "mg": "milligram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "s": "second", "sec": "second", "secs": "second", "min": "minute",
    "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "l": "liter", "ml": "milliliter", "°": "degree",
    "deg": "degree", "usd": "dollar", "buck": "dollar", "cent": "cent", "¢": "cent", "percent": "%", "percentage": "%",
    "per": "/", "$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee",
    "eur": "euro", "gbp": "pound sterling", "rs": "rupee", "inr": "rupee",
    "sq": "square", "cu": "cubic", "metre": "meter", "litre": "liter", "cms": "centimeter",
    "kilometre": "kilometer", "centimetre": "centimeter", "kph": "kilometer / hour", "mph": "mile / hour",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact value, whether it was written as a percentage, and the unit's words ("" without one)."""

    value: Fraction
    percent: bool = False
    unit: str = ""


def plain_text(text: str) -> str:
    """LaTeX and typography that mean nothing for a number are taken off: dollar signs of mathematics, thin spaces,
    \\text."""
    if text.isascii():
        if "\\" not in text and "*" not in text and "{" not in text:
            return text.strip()
    else:
        text = straighten(text)
    text = re.sub(r"(?<=[0-9])\\[,;:!> ](?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"\{,\}|\\!\s*,|,\\!\s*", ",", text)
    text = re.sub(r"\\[,;:!> ]|~|\\q?quad\b|\\(?:displaystyle|left|right)(?![A-Za-z])", " ", text)
    text = text.replace("**", "").replace("\\$", "$").replace("\\%", "%").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "").replace("\\]", "")  # displayed mathematics
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname|rm)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree\b|\\circ\b", "°", text)
    text = re.sub(r"\\[dtc]?frac\s*([0-9])\s*([0-9])(?![0-9])", r" \1/\2", text)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*(-?)([^{}]*)\}\s*([0-9])(?![0-9])", r" \1\2/\3", text)
    text = re.sub(r"\\[dtc]?frac\s*([0-9])\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*(-?)([^{}]*)\}\s*\{([^{}]*)\}", r" \1\2/\3", text)
    text = re.sub(r"\^\s*\{\s*([-+]?[0-9]+)\s*\}", r"^\1", text.replace("\\times", "×").replace("\\cdot", "×"))
    return text.strip()


def _strip_dollars(text: str) -> str:
    """`$18$` is mathematics; `$18` is money."""
    if text.count("$") >= 2 and text.startswith("$") and text.endswith("$"):
        return text.strip("$").strip()
    return text


@lru_cache(maxsize=4096)
def parse_quantity(text: str) -> Quantity | None:
    """The one finite number that the whole text is, with percent sign and unit, or None.

    Reads thousands separators, currency, percent, units, fractions, mixed numbers and scientific notation. Anything
    else beside the number (a second number, an operator, "or") makes it none.
    """
    if len(text) > MAX_LENGTH:
        return None
    simple = _SIMPLE.fullmatch(text)
    if simple:
        value = _decimal(text)
        return None if value is None else Quantity(value)
    text = _strip_dollars(plain_text(text)).strip(" \t\r\n*_`\"'“”")
    text = re.sub(r"^(?:negative|minus)\s+(?=[0-9$.])", "-", text, flags=re.IGNORECASE)
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1].strip()
    spelled = _spelled(text)
    if spelled is not None:
        return Quantity(Fraction(spelled))
    code = _CURRENCY_CODE.match(text)
    text = text[code.end() :] + " " + code[1] if code else text
    match = _NUMBER.match(text)
    if not match or text.endswith("..") or (match["sign"] and match["inner"]):
        return None
    value = _value(match)
    if value is None:
        return None
    return _with_tail(value, match["currency"], text[match.end() :])


def _spelled(text: str) -> int | None:
    """A whole number in English words below a million: "seven", "twenty-five", "three hundred and two"."""
    if not text[:1].isalpha():
        return None
    total = current = 0
    rank = 10**9  # the last word's size: "two three" and "five twenty" are no numbers
    for word in re.split(r"[\s-]+", text.lower().rstrip(".")):
        if word in _UNITS and rank > (9 if _UNITS[word] < 10 else 99):
            if _UNITS[word] == 0 and total + current:
                return None
            current, rank = current + _UNITS[word], (0 if _UNITS[word] < 20 else 10)
        elif word == "hundred" and 0 < current < 10:
            current, rank = current * 100, 100
        elif word == "thousand" and 0 < current < 1000 and not total:
            total, current, rank = current * 1000, 0, 1000
        elif word != "and" or rank != 100:
            return None
    return total + current


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "").rstrip(".")
    if len(digits) > MAX_DIGITS:
        return None
    return Fraction(int(digits)) if digits.lstrip("-").isdigit() else Fraction(digits)


def _value(match: re.Match) -> Fraction | None:
    if match["whole"]:
        parts = [_decimal(match[name]) for name in ("whole", "mixed_top", "mixed_bottom")]
        if None in parts or parts[2] == 0 or parts[1] >= parts[2]:
            return None
        value = parts[0] + parts[1] / parts[2]
    elif match["top"]:
        top, bottom = _decimal(match["top"]), _decimal(match["bottom"])
        if top is None or not bottom:
            return None
        value = top / bottom
    else:
        value = _decimal(match["decimal"])
        exponent = match["exponent"] or match["power"]
        if exponent is not None and value is not None:
            if len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS:
                return None
            value *= Fraction(10) ** int(exponent)
    if value is None:
        return None
    return -value if "-" in (match["sign"], match["inner"]) else value


def _with_tail(value: Fraction, currency: str, tail: str) -> Quantity | None:
    """The quantity with what follows its number: scale words, percent sign, unit; None where it is anything else."""
    unit = _CURRENCY[currency] if currency else ""
    if not tail.strip(" \t.,;:"):
        return Quantity(value, False, unit)
    attached = tail[0].isalpha()
    read = read_tail(tail)
    if (
        read is None
        or tail.lstrip().startswith("^")
        or (attached and _ATTACHED.match(tail) and _ATTACHED.match(tail)[0] not in _UNIT_NAMES)
    ):
        return None  # "5xy" is a product
    scale, percent, name = read
    if unit and name and name != unit:
        name = f"{unit} {name}"
    return Quantity(value * scale, percent, name or unit)


@lru_cache(maxsize=1024)
def read_tail(tail: str) -> tuple[int, bool, str] | None:
    """What follows a number, as (scale, whether percent, unit); None where it is not only scale words and a unit."""
    tail = tail.strip()
    if len(tail) > 1 and tail[0] == "-" and tail[1].isalpha():
        tail = tail[1:]  # a hyphen between number and unit: "5-mile"
    words, position, scale, percent = [], 0, 1, False
    tail = tail.rstrip(".,;: ")
    while position < len(tail):
        match = _TAIL_WORD.match(tail, position)
        if not match:
            return None
        words.append(match[0].rstrip(".").strip("{}"))
        position = match.end()
        while position < len(tail) and tail[position] in " \t":
            position += 1
    if len(words) > 12 or any(len(word) < 3 and not _is_short_word(word) for word in words):
        return None
    words = [word if word == "C" or word == "F" else word.lower() for word in words]
    while words and words[0] in _SCALE:
        scale *= _SCALE[words.pop(0)]
    if words and words[0] in ("%", "percent"):
        percent = True
        words.pop(0)
    if any(word in _NOT_UNITS or word in _SCALE for word in words):
        return None
    names = [_unit_name(word) for word in words]
    return scale, percent, _in_order([name for name in names if name != "unit"])


def is_unit_name(word: str) -> bool:
    """Whether a word is a unit's abbreviation or name that is known without being marked as text."""
    return word in _UNIT_NAMES and word not in ("per", "sq", "cu")


def _is_short_word(word: str) -> bool:
    return (
        not word.isalpha()
        or word in _UNIT_NAMES
        or (len(word) > 1 and word.lower() in _UNIT_NAMES)
        or word.lower() in _SHORT_WORDS
        or word.startswith("^")
    )


def _unit_name(word: str) -> str:
    singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _UNIT_NAMES.get(word) or _UNIT_NAMES.get(singular, singular)


def _in_order(names: list[str]) -> str:
    """`square inch` and `inch ^2` are the same unit."""
    for word, power in (("square", "^2"), ("cubic", "^3")):
        if names and names[0] == word:
            names = [*names[1:2], power, *names[2:]] if len(names) > 1 else []
    return " ".join(names)


def equal_quantities(prediction: Quantity, gold: Quantity) -> bool:
    """Exact equality under the policy for percentages and units of docs/grading.md."""
    if prediction.unit and gold.unit and prediction.unit != gold.unit:
        return False
    if prediction.value == gold.value:
        return True
    if prediction.percent and not gold.percent:
        return prediction.value / 100 == gold.value
    if gold.percent and not prediction.percent:
        return prediction.value == gold.value / 100
    return _same_double(prediction.value, gold.value)


def _same_double(prediction: Fraction, gold: Fraction) -> bool:
    """A gold that was printed from a double (15 significant digits or more) stands for what rounds to it, within
    1e-14."""
    if gold.denominator == 1 or abs(gold.numerator) < 10**13 or 10**20 % gold.denominator:
        return False
    return abs(prediction - gold) <= abs(gold) / 10**14


def show(value: Fraction) -> str:
    """A short exact text of a value: an integer, a terminating decimal, or a/b."""
    if value.denominator == 1:
        return str(value.numerator)
    denominator, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while denominator % prime == 0:
            denominator //= prime
            count += 1
        places = max(places, count)
    if denominator != 1 or places > 30:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
