"""What a reader gives: one row of the user's file, or why it is none."""

from typing import Any, NamedTuple

MAX_ROW_CHARACTERS = 1_000_000
"""Longer rows are refused: no model's context holds them, and a file without line ends must not fill memory."""

REASONS = {
    "bad_json": "the row is not JSON",
    "bad_csv": "the row has more or fewer fields than the header",
    "not_an_object": "the row is JSON, but no object with columns",
    "row_too_large": f"the row has more than {MAX_ROW_CHARACTERS:,} characters",
    "not_utf8": "the row holds bytes that are not UTF-8, or half of a surrogate pair",
    "control_characters": "the row holds a NUL character",
    "no_question": "the question is missing, null or empty",
    "empty_rationale": "the rationale is missing, null or empty",
    "no_answer": "the answer is missing, null or empty, or the rationale has no answer marker",
    "not_text": "a field is a list, an object or another value that is no text",
    "answer_mismatch": "the rationale states another answer than the answer column",
    "answer_not_at_end": "text follows the answer that the rationale is marked with",
    "gold_ungradable": "the demonstration does not grade itself correct, so no rollout from it could be rewarded",
    "duplicate": "the same question with the same rationale came before",
    "contaminated": "the question overlaps with a benchmark question",
    "over_limit": "accepted, but beyond the source's limit",
}
"""Every reason code of rejected.parquet and what it means."""


class Refused(Exception):
    """A row that cannot become a demonstration: a reason code and what is wrong with this row."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Row(NamedTuple):
    """One row of an input: its number from 1, its columns or why it has none, and its text as it was read."""

    number: int
    values: dict[str, Any] | None
    raw: str | None = None
    """None: the columns written as JSON."""
    refused: Refused | None = None


class NumberText(str):
    """A number of a JSON file in the digits that its author wrote."""

    __slots__ = ()


class NotFinite(str):
    """NaN or an infinity in a JSON file, which JSON does not have."""

    __slots__ = ()
