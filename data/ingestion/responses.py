"""From a row in the pipeline's terms to a checked demonstration: its response, its steps, and that it grades itself."""

from typing import NamedTuple

from data.grading import grade
from data.grading.extraction import phrase_answers, strong_answers
from data.ingestion.formats import Demonstration, is_number
from data.ingestion.rows import Refused
from data.segmentation import split_steps
from data.settings import AnswerKind, Segmentation

MARKER = "#### "


class Checked(NamedTuple):
    """A demonstration that is whole: `response` begins with `rationale`, which is the concatenation of `steps`."""

    question: str
    rationale: str
    response: str
    answer: str
    answer_kind: AnswerKind
    steps: list[str]


def check(found: Demonstration, segmentation: Segmentation) -> Checked:
    """Checks the text of a demonstration and writes its response. Raises Refused.

    The response is the published text where it carries its own answer marker, the rationale where that ends with an
    answer which grades as the gold, and otherwise the rationale with a last line `#### answer`. A program is its own
    answer. Whatever it is, it must grade itself correct. A rationale that states another answer is refused.
    """
    text = "".join(part for part in (found.question, found.response or found.rationale, found.answer))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.start + 20]
        raise Refused("not_utf8", f"not UTF-8 near {shown!r}") from None
    if "\x00" in text:
        raise Refused("control_characters", "the text holds a NUL character")
    program = found.answer_kind == "program"
    stated = None if program else _stated(found.rationale)
    if program:
        response = found.rationale
        _must_grade(response, found)
    elif found.response is None and stated is not None and _states_gold(found):
        response = found.rationale
    else:
        response = found.response or _with_marker(found.rationale, found.answer)
        _must_grade(response, found)
    steps = split_steps(found.rationale, segmentation)
    if stated is not None:
        steps = _hide(steps, stated)
    return Checked(found.question, found.rationale, response, found.answer, found.answer_kind, steps)


def _states_gold(found: Demonstration) -> bool:
    """Whether the rationale ends with the gold; Refused where it ends with another answer.

    False where the answer that it states cannot be read or may only be written in another way (LaTeX).
    """
    verdict = grade(found.rationale, found.answer, found.answer_kind)
    comparable = found.answer_kind != "math" or (is_number(verdict.parsed or "") and is_number(found.answer))
    if verdict.reason == "wrong" and comparable:
        raise Refused(
            "answer_mismatch", f"the rationale states {verdict.parsed!r}, the answer is {found.answer[:80]!r}"
        )
    return verdict.correct


def _with_marker(rationale: str, answer: str) -> str:
    line_end = "" if rationale.endswith("\n") else "\n"
    return f"{rationale}{line_end}{MARKER}{answer}"


def _must_grade(response: str, found: Demonstration) -> None:
    verdict = grade(response, found.answer, found.answer_kind)
    if not verdict.correct:
        read = "no answer" if verdict.parsed is None else repr(verdict.parsed)
        raise Refused(
            "gold_ungradable",
            f"graded as {found.answer_kind}, the demonstration gives {read} ({verdict.reason}), "
            f"its answer is {found.answer[:80]!r}",
        )


_MENTIONS = ("nswer", "NSWER", "###", "box", "ption", "hoice")
"""What a text holds that states an answer: looking for these first is 20 times faster than reading the text."""


def _stated(rationale: str) -> int | None:
    """Where the rationale begins to state its final answer; None where it does not."""
    if not any(mention in rationale for mention in _MENTIONS):
        return None
    strong = strong_answers(rationale)[0]
    if strong:
        return strong[0].start
    phrases = phrase_answers(rationale, options=True)
    return phrases[-1].start if phrases else None


def _hide(steps: list[str], stated: int) -> list[str]:
    """Joins the steps from the one in which the answer is stated, so that no start state reveals it."""
    position = 0
    for index, step in enumerate(steps):
        position += len(step)
        if position > stated:
            return [*steps[:index], "".join(steps[index:])]
    return steps
