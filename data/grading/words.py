"""Answers from a closed set: letters of options, labels, and plain strings."""

import re
import unicodedata

from data.grading.quantities import plain_text
from data.grading.selection import Reader

LABEL_SETS = (
    frozenset({"yes", "no", "it is not possible to tell"}),
    frozenset({"proved", "disproved", "unknown"}),
    frozenset({"true", "false"}),
    frozenset({"entailment", "neutral", "contradiction"}),
)
"""Sets of labels that exclude each other (our choice beyond the published files')."""
_CHOICE = re.compile(
    r"(?i:(?:the\s+)?(?:option|choice|answer)\s+)?"
    r"(?:[(\[]\s*([A-Ja-j])\s*[)\]]|([A-Ja-j])\s*[).:](?=\s|$)|([A-J])|([a-j])(?=\s*[.!]?\s*$))(?![A-Za-z0-9])\s*(.*)",
    re.DOTALL,
)
_OTHER_OPTION = re.compile(
    r"[(\[]\s*[A-Ja-j]\s*[)\]]|(?<![A-Za-z0-9])[A-Ja-j]\s*\)|(?<![A-Za-z0-9'’])[B-HJ](?![A-Za-z0-9'’])|\bnot\b"
    # A and I are words too: letters of options where they stand in a list and no word follows
    r"|(?:^|[,;/&|+]|\b(?:or|and))\s*[AI](?![A-Za-z0-9'’]|\s+[a-z])"
)
_AFTER_BARE_LETTER = re.compile(r"[.,:;!]|(?:because|since|as|is correct)\b|$")


def parse_choice(text: str) -> str | None:
    """The upper-case letter of one option; the option's own text may follow, another option may not."""
    text = plain_text(text).strip(" \t\r\n*_$`\"'“”")
    match = _CHOICE.match(text)
    if not match:
        return None
    letter = next(group for group in match.groups()[:4] if group)
    rest = match[5].strip()
    if _OTHER_OPTION.search(rest):
        return None
    if match[3] and rest and not _AFTER_BARE_LETTER.match(rest):
        return None  # "A man walks": an article
    return letter.upper()


def _choice_unmarked(text: str) -> str | None:
    if "\n" in text:
        return None
    return parse_choice(text)


def _choice_settled(rest: str) -> bool:
    return not _OTHER_OPTION.search(rest)


CHOICE = Reader(parse_choice, parse_choice, _choice_unmarked, _choice_settled, options=True)


def normal_string(text: str) -> str | None:
    """Case and white space do not count, nor one pair of quotes or a mark-up around the whole; empty is none."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()) or None


def parse_label(text: str) -> str | None:
    """A label without its quotes, emphasis and final stop."""
    text = normal_string(plain_text(text)) or ""
    text = text.strip(" \t*_$`\"'“”‘’.,!:;<>()[]").replace("it's", "it is").replace("it’s", "it is")
    return text or None


def label_reader(gold: str) -> Reader:
    """Reads labels of the set that the gold belongs to; another gold is a set of its own."""
    labels = next((labels for labels in LABEL_SETS if gold in labels), frozenset({gold}))
    inside = re.compile("|".join(rf"\b{re.escape(label)}\b" for label in sorted(labels)))

    def parse(text: str) -> str | None:
        label = parse_label(text)
        return label if label in labels else None

    def settled(rest: str) -> bool:
        return not inside.search(rest.casefold())

    def unmarked(text: str) -> str | None:
        return parse(text) if "\n" not in text else None

    return Reader(parse, parse, unmarked, settled)


def parse_string(text: str) -> str | None:
    """A string answer: only white space and case are normalised, and a \\text around the whole is taken off."""
    wrapped = re.fullmatch(r"\s*\\text\{([^{}]*)\}\s*", text)
    return normal_string(wrapped[1] if wrapped else text)


def _string_phrase(text: str) -> str | None:
    return normal_string(text.strip().removesuffix("."))


def _string_unmarked(text: str) -> str | None:
    return normal_string(text) if "\n" not in text else None


STRING = Reader(parse_string, _string_phrase, _string_unmarked, lambda rest: not rest.strip(" \t\n.!*_"))
