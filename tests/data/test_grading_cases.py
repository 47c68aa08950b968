"""The grader's verdicts: the table of cases, the published cases where they are at hand, and every gold on itself."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from data.errors import UserError
from data.grading import grade
from tests.data.grading_cases import MATH, TEXTS


@pytest.mark.parametrize(("gold", "prediction", "right"), MATH)
def test_math_verdicts(gold: str, prediction: str, right: bool) -> None:
    result = grade(f"The answer is \\boxed{{{prediction}}}.", gold, "math")
    assert result.correct is right, result


@pytest.mark.parametrize(("gold", "text", "kind", "right"), TEXTS)
def test_text_verdicts(gold: str, text: str, kind: str, right: bool) -> None:
    result = grade(text, gold, kind)
    assert result.correct is right, result


def _published(name: str) -> list[dict]:
    file = Path(__file__).resolve().parents[3] / "shared" / "methods" / name
    if not file.is_file():
        pytest.skip("the published grading cases are not here")
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_published_math_cases() -> None:
    wrong = []
    for row in _published("grading_cases.csv"):
        whole = 103 <= int(row["id"]) <= 117
        text = row["prediction"] if whole else f"The answer is \\boxed{{{row['prediction']}}}."
        if grade(text, row["gold"], "math").correct != (row["want"] == "true"):
            wrong.append(row["id"])
    assert not wrong


def test_published_number_cases() -> None:
    for row in _published("grading_number_cases.csv"):
        gold = row["want"] if row["want"] not in ("none", "policy") else "5"
        result = grade(row["text"], gold, "number")
        assert result.correct is (row["want"] not in ("none", "policy")), row
        if row["want"] == "none":
            assert result.parsed is None


def test_unknown_kind_and_no_text_are_user_errors() -> None:
    with pytest.raises(UserError, match="kind"):
        grade("1", "1", "essay")
    with pytest.raises(UserError, match="text"):
        grade("1", 1, "number")  # type: ignore[arg-type]


def test_unreadable_gold_grades_nothing_correct() -> None:
    for kind, gold in (("number", "about five"), ("math", ""), ("choice", "?"), ("label", ""), ("program", "x")):
        assert grade(gold, gold, kind).reason == "bad_gold"


def _golds(folder: Path):
    """(file, gold, kind) of every published row."""

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    def array(name: str) -> list[dict]:
        return json.loads((folder / name).read_text(encoding="utf-8"))

    for name in ("gsm8k/train.jsonl", "gsm8k/test.jsonl"):
        yield from ((name, row["answer"].rsplit("####", 1)[1].strip(), "number") for row in lines(name))
    for name in (
        "gsm8k/train_programs.json",
        "svamp/train_rationales.json",
        "svamp/train_programs.json",
        "svamp/test.json",
    ):
        yield from ((name, row["answer_value"], "number") for row in array(name))
    yield from (("math500", row["answer"], "math") for row in lines("math500/test.jsonl"))
    yield from (("aime24", row["answer"], "number") for row in lines("aime24/test.jsonl"))
    for name in ("aqua/dev.json", "aqua/test.json"):
        yield from ((name, row["correct"], "choice") for row in lines(name))
    yield from (("mathqa", row["answer_value"], "choice") for row in array("mathqa/test.json"))
    kinds = {"float": "float", "integer": "number", "bool": "label", "option": "choice"}
    for row in array("theoremqa/test.json"):
        yield "theoremqa", str(row["Answer"]), kinds.get(row["Answer_type"], "math")
    for task in ("boardgameqa", "snli", "mnli"):
        for part in ("train", "test"):
            for row in array(f"{task}/{part}.json"):
                yield task, row["output"].rsplit("###", 1)[1].strip("# "), "label"


PUBLISHED = {
    ("gsm8k/train.jsonl", "number"): 7473,
    ("gsm8k/test.jsonl", "number"): 1319,
    ("gsm8k/train_programs.json", "number"): 1000,
    ("svamp/train_rationales.json", "number"): 3076,
    ("svamp/train_programs.json", "number"): 3043,
    ("svamp/test.json", "number"): 1000,
    ("math500", "math"): 500,
    ("aime24", "number"): 30,
    ("aqua/dev.json", "choice"): 254,
    ("aqua/test.json", "choice"): 254,
    ("mathqa", "choice"): 1605,
    ("theoremqa", "number"): 216,
    ("theoremqa", "float"): 378,
    ("theoremqa", "math"): 73,
    ("theoremqa", "label"): 115,
    ("theoremqa", "choice"): 18,
    ("boardgameqa", "label"): 1300,
    ("snli", "label"): 425,
    ("mnli", "label"): 430,
}
"""(file, kind) → how many golds it holds: the table of docs/grading.md."""


@pytest.mark.benchmark_files
def test_every_published_gold_grades_itself_correct(benchmark_files: Path) -> None:
    wrong, seen = [], Counter()
    for file, gold, kind in _golds(benchmark_files):
        seen[file, kind] += 1
        for text in (f"#### {gold}", f"The answer is \\boxed{{{gold}}}."):
            if not grade(text, gold, kind).correct:
                wrong.append((file, gold, kind))
    assert seen == PUBLISHED
    assert not wrong


@pytest.mark.benchmark_files
def test_published_solutions_are_correct(benchmark_files: Path) -> None:
    math = [json.loads(line) for line in (benchmark_files / "math500/test.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in math if not grade(row["solution"], row["answer"], "math").correct] == []
    aime = [json.loads(line) for line in (benchmark_files / "aime24/test.jsonl").read_text().splitlines()]
    for kind in ("number", "math"):
        assert [row["answer"] for row in aime if not grade(row["solution"], row["answer"], kind).correct] == []
    rows = json.loads((benchmark_files / "svamp/train_rationales.json").read_text())
    refused = [row for row in rows if not grade(row["answer_cot"], row["answer_value"]).correct]
    assert len(refused) == 10  # their golds or rationales are rounded: 3.22 for 3.2222222222, 9 for 8.9333333333
