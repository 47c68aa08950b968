"""The public benchmarks. A new one is one entry; nothing of a data set is stored here.

The hub names are those of the publishers or of the copy most used; files in the layouts that the papers of R³ and
ReFT use (instruction/output pairs, `answer_value`) read the same way.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from data.benchmarks.base import Benchmark, Hub, Row
from data.settings import AnswerKind

NLI_LABELS = ("yes", "it is not possible to tell", "no")
"""Answers of the entailment benchmarks, in the order of the hub's labels: entailment, neutral, contradiction."""


def column(name: str) -> Callable[[Row], str]:
    """The text of one column."""
    return lambda row: str(row[name])


def with_options(question: str, options: Iterable[str]) -> str:
    """A question and its options, `A)72` and so on, one a line."""
    return "\n".join([question.strip(), *(option.strip() for option in options)])


def after_marker(text: str) -> str:
    """What follows the last `###` or `####` of a published answer. Raises ValueError where there is none."""
    _, marker, tail = text.rpartition("###")
    if not marker or not tail.strip():
        raise ValueError("no answer after ### or ####")
    return tail.strip()


def _svamp_question(row: Row) -> str:
    if "question" in row:
        return row["question"]
    return f"{row['Body'].strip().removesuffix('.')}. {row['Question'].strip()}"


def _mathqa_question(row: Row) -> str:
    if "Problem" not in row:
        return _one_option_a_line(row["question"])
    return f"{row['Problem']}\n{row['options']}"


def _one_option_a_line(question: str) -> str:
    """Some rows of the published file hold their options as a Python list of strings: written like the others."""
    head, _, last = question.rstrip().rpartition("\n")
    if not last.startswith("["):
        return question
    return f"{head}\n{' , '.join(re.findall(r'[a-e] [)] [^' + chr(39) + r']*', last))}"


def _nli_question(row: Row) -> str:
    if "instruction" in row:
        return row["instruction"]
    options = "\n".join(f"- {label}" for label in NLI_LABELS)
    return (
        f"Premise: {row['premise']}\n\nHypothesis: {row['hypothesis']}\n\n"
        f"Does the premise entail the hypothesis?\n\nOPTIONS:\n{options}"
    )


def _nli_gold(row: Row) -> str:
    return after_marker(row["output"]) if "output" in row else NLI_LABELS[row["label"]]


def _no_label(row: Row) -> bool:
    """The hub marks pairs on which the annotators did not agree with -1."""
    return row.get("label") == -1


def _theoremqa_gold(row: Row) -> str:
    answer: Any = row["Answer"]
    return answer if isinstance(answer, str) else repr(answer)


def _theoremqa_kind(row: Row) -> AnswerKind:
    kinds: dict[str, AnswerKind] = {"bool": "label", "option": "choice", "integer": "number", "float": "float"}
    return kinds.get(row["Answer_type"], "math")


def _nli(name: str, hub: Hub) -> Benchmark:
    return Benchmark(
        name, hub, question=_nli_question, gold=_nli_gold, answer_kind="label", exclusions={"no_label": _no_label}
    )


_ENTRIES = (
    Benchmark(
        "gsm8k",
        Hub("openai/gsm8k", "main"),
        question=column("question"),
        gold=lambda row: after_marker(row["answer"]),
        answer_kind="number",
    ),
    Benchmark(
        "svamp",
        Hub("ChilleD/SVAMP", split="train+test"),  # the hub splits the 1,000 published test questions in two
        question=_svamp_question,
        gold=lambda row: str(row["answer_value"] if "answer_value" in row else row["Answer"]),
        answer_kind="number",
        subject=lambda row: str(row.get("Type", "")),
    ),
    Benchmark(
        "math500",
        Hub("HuggingFaceH4/MATH-500"),
        question=column("problem"),
        gold=column("answer"),
        answer_kind="math",
        subject=column("subject"),
    ),
    Benchmark(
        "aqua",
        Hub("deepmind/aqua_rat", "raw"),
        question=lambda row: with_options(row["question"], row["options"]),
        gold=column("correct"),
        answer_kind="choice",
    ),
    Benchmark(
        "mathqa",
        # The hub's own copy is a loading script; its converted Parquet needs none. It has all 2,985 test questions,
        # the file of ReFT the 1,605 whose answer is a number.
        Hub("allenai/math_qa", revision="refs/convert/parquet"),
        question=_mathqa_question,
        gold=lambda row: row["answer_value"] if "answer_value" in row else row["correct"],
        answer_kind="choice",
        subject=lambda row: row.get("category", ""),
    ),
    Benchmark(
        "theoremqa",
        Hub("TIGER-Lab/TheoremQA"),
        question=column("Question"),
        gold=_theoremqa_gold,
        answer_kind=_theoremqa_kind,
        subject=lambda row: row.get("field", ""),
        exclusions={"picture": lambda row: row["Picture"] is not None},
    ),
    Benchmark(
        "aime24",
        Hub("HuggingFaceH4/aime_2024", split="train"),
        question=column("problem"),
        gold=column("answer"),
        answer_kind="number",
        metric="avg@k",
    ),
    Benchmark(
        "boardgameqa",
        Hub("tasksource/Boardgame-QA"),
        question=lambda row: row["instruction"] if "instruction" in row else row["example"],
        gold=lambda row: after_marker(row["output"]) if "output" in row else row["label"],
        answer_kind="label",
        subject=lambda row: row.get("config", ""),
    ),
    _nli("snli", Hub("stanfordnlp/snli")),
    _nli("mnli", Hub("nyu-mll/multi_nli", split="validation_matched")),
)

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ENTRIES}
