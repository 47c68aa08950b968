"""The public benchmark files as they are: what is accepted, what is refused and why."""

import json

import pytest

from data.artifacts import read_rows
from data.grading import grade
from data.settings import BenchmarkSource, Splits
from tests.data.ingested import run, tables

pytestmark = pytest.mark.benchmark_files

ONE = Splits(validation=1, promotion=0, test=0)

# file: rows read, rows refused by reason
COUNTS = {
    "svamp/train_rationales.json": (3076, {"answer_mismatch": 10, "duplicate": 3}),
    "aqua/dev.json": (254, {}),
    "aqua/test.json": (254, {}),
    "math500/test.jsonl": (500, {}),
    "boardgameqa/train.json": (500, {}),
    "boardgameqa/test.json": (800, {}),
    "snli/train.json": (300, {}),
    "mnli/train.json": (300, {}),
    "gsm8k/test.jsonl": (1319, {}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(benchmark_files, tmp_path, name):
    counts = run(benchmark_files / name, tmp_path / "out", splits=ONE)
    assert (counts["read"], counts["rejected_by_reason"]) == COUNTS[name]
    demonstrations, rejected, _ = tables(tmp_path / "out")
    assert counts["accepted"] == len(demonstrations) and counts["rejected"] == len(rejected)
    for row in demonstrations[:200]:
        assert grade(row["response"], row["answer"], row["answer_kind"]).correct
        assert "".join(row["steps"]) == row["rationale"] and row["response"].startswith(row["rationale"])


def test_all_of_gsm8k_with_its_comma_golds(benchmark_files, tmp_path):
    """79 golds have thousands commas: R³'s checker fails 10 of 1,000 golds for them."""
    path = benchmark_files / "gsm8k/train.jsonl"
    counts = run(path, tmp_path / "out", splits=ONE)
    assert (counts["read"], counts["rejected"]) == (7473, 0)
    published = [json.loads(line) for line in path.read_text().split("\n") if line]
    demonstrations = read_rows(tmp_path / "out/demonstrations.parquet", "demonstrations")
    assert [row["response"] for row in demonstrations] == [row["answer"] for row in published]
    assert sum("," in row["answer"] for row in demonstrations) == 79
    assert {len(row["steps"]) for row in demonstrations} == set(range(2, 10))


def test_aime_solutions_with_their_boxes_in_bold(benchmark_files, tmp_path):
    """Ten solutions box their answer as `\\textbf{(540)}`; what the grader cannot read of them is refused, not kept."""
    counts = run(benchmark_files / "aime24/test.jsonl", tmp_path / "out", splits=ONE)
    assert counts["read"] == 30 and counts["accepted"] >= 28
    assert set(counts["rejected_by_reason"]) <= {"gold_ungradable"}


@pytest.mark.parametrize("name", ["gsm8k/train_programs.json", "svamp/train_programs.json"])
def test_programs(benchmark_files, tmp_path, name):
    counts = run(benchmark_files / name, tmp_path / "out", splits=ONE, limit=300)
    refused = {reason: n for reason, n in counts["rejected_by_reason"].items() if reason != "over_limit"}
    assert set(refused) <= {"gold_ungradable", "duplicate"} and sum(refused.values()) <= 18
    assert counts["accepted"] == 300


@pytest.mark.parametrize(
    ("source", "benchmark", "contaminated"),
    [
        ("gsm8k/train.jsonl", BenchmarkSource(name="gsm8k", path="gsm8k/test.jsonl"), 3),
        ("svamp/train_rationales.json", BenchmarkSource(name="svamp", path="svamp/test.json"), 54),
        ("boardgameqa/train.json", BenchmarkSource(name="boardgameqa", path="boardgameqa/test.json"), 0),
        ("mnli/train.json", BenchmarkSource(name="mnli", path="mnli/test.json"), 0),
    ],
)
def test_contamination_of_the_published_splits(benchmark_files, tmp_path, source, benchmark, contaminated):
    """SVAMP's test questions vary older ones, which its training set holds; the others share next to nothing."""
    test = benchmark.model_copy(update={"path": str(benchmark_files / benchmark.path), "limit": 50})
    counts = run(benchmark_files / source, tmp_path / "out", splits=ONE, test=test)
    assert counts["rejected_by_reason"].get("contaminated", 0) == contaminated
    assert counts["questions"] == {"validation": 1, "test": 50}
