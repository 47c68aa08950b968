"""From a text to the one answer it commits to, for any kind of answer."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from data.grading.extraction import (
    Marked,
    denied,
    in_one_breath,
    in_short_succession,
    phrase_answers,
    readable_part,
    strong_answers,
)

_LONGEST_RUN, _MOST_TAKEN_BACK = 12, 3
_QUESTION = re.compile(r"\?")
_HEADING_WORDS = re.compile(
    r"\W*(?:the\s+)?(?:(?:final|short|step-by-step|detailed)\s+)?(?:answer|solution|explanation|response|conclusion|result"
    r"|summary|verification|check|notes?|reasoning|analysis|calculations?|justification)\W*",
    re.IGNORECASE,
)
_OPEN_END = re.compile(r"\bor\W*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selected:
    """The committed answer: its parsed `value` (None without one), the text it was read from, and the reason."""

    value: object | None
    text: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Reader:
    """How one kind of answer is read.

    `parse_only_phrase` reads a phrase of words, which counts only where the text has no marked answer; `equal` says
    whether two read answers are the same; `parse` reads a marked answer strictly; `parse_phrase` what follows "the
    answer is"; `parse_unmarked` a text without
    any marker; `settled` says whether the text after a phrase leaves its answer alone.
    """

    parse: Callable[[str], object | None]
    parse_phrase: Callable[[str], object | None]
    parse_unmarked: Callable[[str], object | None]
    settled: Callable[[str], bool]
    parse_only_phrase: Callable[[str], object | None] | None = None
    options: bool = False
    equal: Callable[[object, object], bool] = operator.eq


def select(text: str, reader: Reader) -> Selected:
    """The last complete answer of a text, under the rules of docs/grading.md."""
    text = readable_part(text)
    if not text.strip():
        return Selected(None, None, "no_answer")
    strong, unfinished = strong_answers(text)
    strong = [mark for mark in strong if not _is_heading(mark, reader)]
    strong = _before_new_question(text, strong, reader)
    last = strong[-1] if strong else None
    phrase = _last_phrase(text, last, reader)
    if phrase is not None:
        return phrase
    if last is not None:
        if denied(text, last, marked=True):
            return Selected(None, last.text[:200], "taken_back")
        if _contradicted(text, last, reader):
            return Selected(None, last.text[:200], "several_answers")
        return _read_strong(text, strong, reader)
    if unfinished:
        return Selected(None, None, "unfinished_answer")
    value = reader.parse_unmarked(text.strip())
    if value is None:
        return Selected(None, None, "no_answer")
    return Selected(value, text.strip()[-200:], "ok")


def _is_heading(mark: Marked, reader: Reader) -> bool:
    """`### Step 1` is a heading, not an answer: hashes count where what follows reads as an answer or begins like
    one."""
    if mark.marker != "hash":
        return False
    if not mark.text or _HEADING_WORDS.fullmatch(mark.text):
        return True
    return mark.text[0].isalpha() and reader.parse(mark.text) is None


def _before_new_question(text: str, strong: list[Marked], reader: Reader) -> list[Marked]:
    """Drops what follows a `####` answer and a question: `####` ends a response, so a new question has begun."""
    for index in range(len(strong) - 1):
        here, after = strong[index], strong[index + 1]
        if (
            here.marker == "hash"
            and _QUESTION.search(text, here.end, after.start)
            and reader.parse(here.text) is not None
        ):
            return strong[: index + 1]
    return strong


def _last_phrase(text: str, last: Marked | None, reader: Reader) -> Selected | None:
    """The answer of a phrase after the last strong answer, if there is one that decides."""
    if "nswer" not in text and not reader.options and "NSWER" not in text:
        return None
    start = last.end if last is not None else 0
    marks = [mark for mark in phrase_answers(text, reader.options) if mark.start >= start]
    if not marks:
        return None
    mark = marks[-1]
    if last is not None and last.marker == "hash" and _QUESTION.search(text, last.end, mark.start):
        return None  # `####` ended the response: the phrase answers another question
    value = reader.parse_phrase(mark.text)
    if value is None and last is None and reader.parse_only_phrase is not None:
        value = reader.parse_only_phrase(mark.text)
    if value is None and last is not None:
        return None  # "so the answer is the sum of both": prose about an answer already given
    if value is None or "\\boxed" in mark.text:
        return Selected(None, mark.text[:200], "unreadable_answer")
    if last is not None and in_one_breath(text[last.end : mark.start]):
        marked = reader.parse(last.text)
        if marked is not None and not _same(reader, marked, value):
            return Selected(None, mark.text[:200], "several_answers")
    for other in marks[:-1]:
        gap = text[other.end : mark.start]
        if in_one_breath(gap) and not _same(reader, reader.parse_phrase(other.text), value):
            return Selected(None, mark.text[:200], "several_answers")
    if not reader.settled(text[mark.end :]):
        return Selected(None, mark.text[:200], "text_after_answer")
    if denied(text, mark, marked=False):
        return Selected(None, mark.text[:200], "taken_back")
    return Selected(value, mark.text, "ok")


def _contradicted(text: str, last: Marked, reader: Reader) -> bool:
    """Whether "the answer is" states another answer directly before the last marked one."""
    if "nswer" not in text and not reader.options and "NSWER" not in text:
        return False
    before = [mark for mark in phrase_answers(text[: last.start], reader.options) if mark.text]
    gap = text[before[-1].end : last.start] if before else ""
    if not before or not in_one_breath(gap) or not reader.settled(gap):
        return False
    if _OPEN_END.search(before[-1].text):
        return True  # "the answer is either 4 or", then a mark
    stated, marked = reader.parse_phrase(before[-1].text), reader.parse(last.text)
    return stated is not None and marked is not None and not _same(reader, stated, marked)


def _read_strong(text: str, strong: list[Marked], reader: Reader) -> Selected:
    """The last marked answer; answers in a row with nothing but connectors between are read as one list."""
    last = strong[-1]
    if len(strong) == 1:
        value = reader.parse(last.text)
        if value is None:
            return Selected(None, last.text[:200], "unreadable_answer" if last.text else "empty_answer")
        return Selected(value, last.text, "ok")
    if _sprays(text, strong):
        return Selected(None, last.text[:200], "several_answers")
    run = [last]
    for mark in reversed(strong[:-1]):
        if not in_one_breath(text[mark.end : run[0].start]):
            break
        run.insert(0, mark)
    distinct: list[str] = []
    for mark in run:
        value = reader.parse(mark.text)
        if not any(_same(reader, reader.parse(text), value) or text == mark.text for text in distinct):
            distinct.append(mark.text)
    joined = ", ".join(distinct)
    value = reader.parse(joined)
    if value is None:
        reason = "several_answers" if len(distinct) > 1 else ("unreadable_answer" if joined else "empty_answer")
        return Selected(None, joined[:200], reason)
    return Selected(value, joined, "ok")


def _same(reader: Reader, first: object | None, second: object | None) -> bool:
    return first is not None and second is not None and reader.equal(first, second)


def _sprays(text: str, strong: list[Marked]) -> bool:
    """Whether the last answer ends a row of more than three different ones in short succession, or of very many."""
    row = [strong[-1]]
    for mark in reversed(strong[:-1]):
        if not in_short_succession(text[mark.end : row[-1].start]):
            break
        row.append(mark)
    different = len({mark.text for mark in row})
    taken_back = any(not in_one_breath(text[row[i + 1].end : row[i].start]) for i in range(len(row) - 1))
    return different > (_MOST_TAKEN_BACK if taken_back else _LONGEST_RUN)
