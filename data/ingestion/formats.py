"""The layouts of published files: which columns they have, and how a row becomes a demonstration."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from data.benchmarks.entries import with_options
from data.errors import UserError
from data.grading.extraction import phrase_answers, strong_answers
from data.ingestion.rows import NotFinite, NumberText, Refused
from data.settings import AnswerKind, ColumnMapping, DatasetsSource, FileSource, Segmentation

LONGEST_ANSWER = 200
"""Characters of an answer after a marker; more is text that goes on (our choice)."""

_NUMBER = re.compile(r"[-+]?[$€£]?\s*\d[\d,]*(\.\d+)?\s*%?")
_PROGRAM = re.compile(r"\s*(?:(?:import|from) [^\n]*\n\s*)*def solution\(")


class Demonstration(NamedTuple):
    """A row in the pipeline's terms, before it is checked."""

    question: str
    rationale: str
    answer: str
    answer_kind: AnswerKind
    response: str | None = None
    """The published text with its own answer marker; None: see `data.ingestion.responses`."""


@dataclass(frozen=True)
class Layout:
    """A published layout. `read` raises Refused for a row that lacks something."""

    name: str
    columns: frozenset[str]
    """All of them are needed."""
    read: Callable[[dict[str, Any]], Demonstration]
    segmentation: Segmentation
    """R³'s unit for it where the expert's settings name none."""


def text_of(values: dict[str, Any], column: str, missing: str) -> str:
    """The text of a column. Refused with the reason `missing` where it is absent, null or empty, or no text."""
    value = values.get(column)
    if value is None or (type(value) is str and not value.strip()):
        what = "empty" if value is not None else "null" if column in values else "missing"
        raise Refused(missing, f"{column} is {what}")
    if type(value) is not str:
        raise Refused("not_text", f"{column} is {_type(value)}, not text")
    return value


def answer_of(values: dict[str, Any], column: str) -> str:
    """The text of an answer column, which may also be a number or a truth value."""
    value = values.get(column)
    if isinstance(value, NotFinite) or (isinstance(value, float) and value - value != 0):
        raise Refused("no_answer", f"{column} is {value}, which is no answer")
    if isinstance(value, NumberText | bool | int | float | Decimal):
        return str(value)
    return text_of(values, column, "no_answer").strip()


def _type(value: Any) -> str:
    names = {NumberText: "a number", NotFinite: "NaN", list: "a list", dict: "an object", bool: "true or false"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def is_number(text: str) -> bool:
    """Whether `text` is one decimal number, perhaps with thousands commas, a currency or a percent sign."""
    return _NUMBER.fullmatch(text) is not None


def infer_kind(rationale: str, answer: str) -> AnswerKind:
    """Program where the rationale defines `solution`, number where the answer is one, math for LaTeX, else string."""
    if _PROGRAM.match(rationale):
        return "program"
    if is_number(answer):
        return "number"
    return "math" if re.search(r"[\\^$]", answer) else "string"


def _marked(text: str) -> tuple[str, str]:
    """(rationale, answer) of a text whose answer follows its last `###` or `####`."""
    mark = text.rfind("###")
    if mark < 0:
        raise Refused("no_answer", "the text has no answer after ### or ####")
    rationale, answer = text[:mark].removesuffix("#").rstrip(), text[mark + 3 :].strip()
    if not answer:
        raise Refused("no_answer", "nothing follows the answer marker")
    if "\n" in answer or len(answer) > LONGEST_ANSWER:
        raise Refused("answer_not_at_end", f"text follows the answer: {answer[:80]!r}")
    if not rationale:
        raise Refused("empty_rationale", "nothing precedes the answer marker")
    return rationale, answer


def _gsm8k(values: dict[str, Any]) -> Demonstration:
    """Calculator marks (`<<48/2=24>>`) are kept, as in the data that R³ published."""
    question, text = text_of(values, "question", "no_question"), text_of(values, "answer", "no_answer")
    rationale, answer = _marked(text)
    return Demonstration(question, rationale, answer, "number", text.rstrip())


def _svamp(values: dict[str, Any]) -> Demonstration:
    question = text_of(values, "question", "no_question")
    rationale = text_of(values, "answer_cot", "empty_rationale")
    answer = answer_of(values, "answer_value")
    return Demonstration(question, rationale, answer, "program" if _PROGRAM.match(rationale) else "number")


def _aqua(values: dict[str, Any]) -> Demonstration:
    question = text_of(values, "question", "no_question")
    options = values.get("options")
    if not isinstance(options, list) or not options or not all(type(option) is str for option in options):
        raise Refused("not_text", "options is no list of texts")
    rationale = text_of(values, "rationale", "empty_rationale")
    return Demonstration(with_options(question, options), rationale, answer_of(values, "correct"), "choice")


def _math(values: dict[str, Any]) -> Demonstration:
    question = text_of(values, "problem", "no_question")
    rationale = text_of(values, "solution", "empty_rationale")
    if values.get("answer") is not None:
        return Demonstration(question, rationale, answer_of(values, "answer"), "math")
    return Demonstration(question, rationale, answer_at_end(rationale), "math", rationale)


def _instruction(values: dict[str, Any]) -> Demonstration:
    question = text_of(values, "instruction", "no_question")
    if values.get("input"):
        question = f"{question}\n\n{text_of(values, 'input', 'no_question')}"
    text = text_of(values, "output", "empty_rationale")
    rationale, answer = _marked(text)
    kind = "number" if is_number(answer) else "label"
    return Demonstration(question, rationale, answer, kind, text.rstrip())


def answer_at_end(rationale: str) -> str:
    """The answer that a rationale states at its end: boxed, after `####` or `###`, or after "the answer is".

    Refused where there is none, or where more than LONGEST_ANSWER characters or another paragraph follow it.
    """
    found = strong_answers(rationale)[0] or phrase_answers(rationale)
    if not found or not found[-1].text:
        raise Refused("no_answer", "the rationale states no answer (boxed, after ####, or after 'the answer is')")
    tail = rationale[found[-1].end :].strip()
    if len(tail) > LONGEST_ANSWER or "\n\n" in tail:
        raise Refused("answer_not_at_end", f"text follows the answer: {tail[:80]!r}")
    return found[-1].text.rstrip(".").strip("<> ")


LAYOUTS = (
    Layout("aqua", frozenset({"question", "options", "rationale", "correct"}), _aqua, "lines"),
    Layout("svamp", frozenset({"question", "answer_cot", "answer_value"}), _svamp, "tokens"),
    Layout("math", frozenset({"problem", "solution"}), _math, "sentences"),
    Layout("instruction", frozenset({"instruction", "output"}), _instruction, "sentences"),
)
_GSM8K = Layout("gsm8k", frozenset({"question", "answer"}), _gsm8k, "lines")
_BY_NAME = {layout.name: layout for layout in (*LAYOUTS, _GSM8K)}


def columns_layout(mapping: ColumnMapping) -> Layout:
    """The layout of a user's own file with the columns that `mapping` names."""

    def read(values: dict[str, Any]) -> Demonstration:
        question = text_of(values, mapping.question, "no_question")
        rationale = text_of(values, mapping.rationale, "empty_rationale")
        if mapping.answer is not None:
            answer = answer_of(values, mapping.answer)
            return Demonstration(question, rationale, answer, infer_kind(rationale, answer))
        if "###" in rationale:
            before, answer = _marked(rationale)
            return Demonstration(question, before, answer, infer_kind(before, answer), rationale.rstrip())
        answer = answer_at_end(rationale)
        return Demonstration(question, rationale, answer, infer_kind(rationale, answer), rationale)

    names = {mapping.question, mapping.rationale} | ({mapping.answer} if mapping.answer is not None else set())
    return Layout("columns", frozenset(names), read, "lines")


def choose_layout(source: FileSource | DatasetsSource, columns: Collection[str], where: str) -> Layout:
    """The layout that the settings name, or the one that `columns` (of the first rows) belong to.

    Raises UserError where the columns do not fit, naming those that are there.
    """
    there = f"its columns are {', '.join(repr(name[:40]) for name in sorted(columns)[:12]) or 'none'}"
    if source.format == "columns" or source.columns is not None:
        if source.format not in ("auto", "columns"):
            raise UserError(
                f"source.columns is given with source.format {source.format!r}; leave one of them out for {where}"
            )
        layout = columns_layout(source.columns or ColumnMapping())
        remedy = "set source.columns to the names in the file"
    elif source.format != "auto":
        layout = _BY_NAME[source.format]
        remedy = "set source.format to 'auto', or to 'columns' with source.columns"
    else:
        return _recognised(set(columns), where, there)
    lacking = sorted(layout.columns - set(columns))
    if lacking:
        raise UserError(f"{where} has no column {lacking[0]!r} (format {layout.name}); {there}; {remedy}")
    return layout


def _recognised(columns: set[str], where: str, there: str) -> Layout:
    for layout in LAYOUTS:
        if layout.columns <= columns:
            return layout
    default = columns_layout(ColumnMapping())
    if default.columns <= columns:
        return default
    if {"question", "answer"} <= columns and not {"rationale", "answer_cot"} & columns:
        return _GSM8K
    if "answer_value" in columns and "answer_cot" not in columns:
        raise UserError(
            f"{where} has answers but no rationales; {there}; use it as an expert's `test`, not as its source"
        )
    raise UserError(
        f"{where} is in no format known here; {there}; set source.format to 'columns' and source.columns "
        "to the names of the question, the rationale and the answer"
    )
