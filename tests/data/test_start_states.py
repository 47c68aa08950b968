"""R³'s start states: the published formula, degenerate demonstrations, and the round trip."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.ingestion import ingest
from data.progress import Silent
from data.settings import FileSource, MixedCurriculum, NoCurriculum, Splits, StagedCurriculum
from data.start_states import build, revealed_steps


@pytest.mark.parametrize(
    ("n", "m", "expected"),
    [
        (1, 5, [0, 0, 0, 0, 0]),
        (2, 5, [0, 0, 1, 1, 1]),
        (3, 5, [0, 1, 1, 2, 2]),
        (4, 5, [0, 1, 2, 2, 3]),
        (5, 5, [0, 1, 2, 3, 4]),
        (7, 5, [0, 1, 3, 4, 6]),
        (10, 5, [0, 2, 4, 6, 8]),
        (3, 1, [0]),
        (3, 2, [0, 2]),  # tie 1.5 goes to the even 2
        (5, 2, [0, 2]),  # tie 2.5 goes to the even 2
        (2, 4, [0, 0, 1, 1]),  # ties 0.5 and 1.5; the last step stays hidden
        (7, 6, [0, 1, 2, 4, 5, 6]),  # tie 3.5
        (2, 12, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_formula(n, m, expected):
    assert revealed_steps(n, m) == expected


@settings(max_examples=200)
@given(st.integers(1, 400), st.integers(1, 40))
def test_formula_is_exact_and_monotone_and_never_reveals_the_last_step(n, m):
    revealed = revealed_steps(n, m)
    assert revealed == [min(n - 1, round(Fraction(stage * n, m))) for stage in range(m)]
    assert revealed == sorted(revealed) and revealed[0] == 0 and revealed[-1] <= n - 1


def test_five_stages_have_no_ties():
    assert all((2 * stage * n) % 10 != 5 for n in range(1, 200) for stage in range(5))


@pytest.mark.parametrize(("n", "m"), [(0, 5), (3, 0)])
def test_formula_refuses_nothing_to_cut(n, m):
    with pytest.raises(ValueError, match="at least 1"):
        revealed_steps(n, m)


def _demonstrations(path, steps_of, split="train"):
    rows = []
    for name, steps in steps_of.items():
        rationale = "".join(steps)
        rows.append(
            {
                "task": "t",
                "item_id": name,
                "question": f"{name}?",
                "rationale": rationale,
                "response": f"{rationale}\n#### 7",
                "answer": "7",
                "answer_kind": "number",
                "steps": steps,
                "source": "s",
                "row_number": 1,
                "split": split,
            }
        )
    write_table(path, "demonstrations", rows)
    return path


def test_mixed_keeps_repeats_unless_unique(tmp_path):
    path = _demonstrations(tmp_path / "d.parquet", {"one": ["a b"], "two": ["a\n", "b"], "five": list("abcde")})
    counts = build(path, MixedCurriculum(), tmp_path, Silent())
    rows = read_rows(tmp_path / "start_states.parquet", "start_states")
    assert counts == {"demonstrations": 3, "rows": 15, "from_question": 5 + 2 + 1}
    assert [row["revealed_steps"] for row in rows if row["item_id"] == "two"] == [0, 0, 1, 1, 1]
    assert all(row["prefix"] + row["remainder"].removesuffix("\n#### 7") in ("a b", "a\nb", "abcde") for row in rows)
    assert all("#### 7" in row["remainder"] and row["n_stages"] == 5 for row in rows)
    assert len({row["start_state_id"] for row in rows}) == 15
    counts = build(path, MixedCurriculum(unique=True), tmp_path, Silent())
    rows = read_rows(tmp_path / "start_states.parquet", "start_states")
    assert [(row["item_id"], row["stage"], row["revealed_steps"]) for row in rows if row["item_id"] != "five"] == [
        ("one", 0, 0),
        ("two", 0, 0),
        ("two", 2, 1),
    ]
    assert counts["rows"] == 8


def test_no_curriculum_has_the_question_only(tmp_path):
    path = _demonstrations(tmp_path / "d.parquet", {"two": ["a\n", "b"]})
    assert build(path, NoCurriculum(), tmp_path, Silent())["rows"] == 1
    row = read_rows(tmp_path / "start_states.parquet", "start_states")[0]
    assert (row["stage"], row["n_stages"], row["prefix"], row["remainder"]) == (0, 1, "", "a\nb\n#### 7")


def test_same_stage_has_the_same_id_under_every_curriculum(tmp_path):
    path = _demonstrations(tmp_path / "d.parquet", {"five": list("abcde")})
    ids = []
    for curriculum in (MixedCurriculum(), StagedCurriculum()):
        build(path, curriculum, tmp_path, Silent())
        ids.append([row["start_state_id"] for row in read_rows(tmp_path / "start_states.parquet", "start_states")])
    assert ids[0] == ids[1]


def test_training_split_only(tmp_path):
    path = _demonstrations(tmp_path / "d.parquet", {"two": ["a\n", "b"]}, split="validation")
    with pytest.raises(UserError, match="no demonstration in the training split"):
        build(path, MixedCurriculum(), tmp_path, Silent())
    assert not (tmp_path / "start_states.parquet").exists()


def test_steps_that_are_not_of_the_response_are_an_error(tmp_path):
    path = _demonstrations(tmp_path / "d.parquet", {"two": ["a\n", "b"]})
    rows = read_rows(path, "demonstrations")
    rows[0]["response"] = "something else"
    write_table(path, "demonstrations", rows)
    with pytest.raises(ValueError, match="not the beginning of its response"):
        build(path, MixedCurriculum(), tmp_path, Silent())


REAL = {
    "gsm8k/train.jsonl": lambda row: row["answer"],
    "svamp/train_rationales.json": lambda row: row["answer_cot"],
    "aqua/dev.json": lambda row: row["rationale"],
    "math500/test.jsonl": lambda row: row["solution"],
    "boardgameqa/train.json": lambda row: row["output"],
    "snli/train.json": lambda row: row["output"],
    "mnli/train.json": lambda row: row["output"],
    "gsm8k/train_programs.json": lambda row: row["answer_cot"],
}


def _raw_rows(path):
    text = path.read_text()
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n") if line.strip()]


@pytest.mark.benchmark_files
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        (name, unit)
        for name in REAL
        for unit in (None, "tokens", "whitespace")
        if unit is None or "programs" not in name
    ],
)
def test_real_demonstrations_round_trip(benchmark_files, tmp_path, name, unit):
    """prefix + remainder is the published text (with an answer line where it had none), whatever the unit."""
    limit = 100 if "programs" in name else 1500 if unit is None else 150
    source = FileSource(path=str(benchmark_files / name), limit=limit)
    ingest(
        source,
        "t",
        tmp_path,
        splits=Splits(validation=1, test=0),
        segmentation=unit,
        answer_kind=None,
        test=None,
        report=Silent(),
    )
    build(tmp_path / "demonstrations.parquet", MixedCurriculum(n_stages=6), tmp_path, Silent())
    published = [REAL[name](row) for row in _raw_rows(benchmark_files / name)]
    numbers = {
        row["item_id"]: row["row_number"] for row in read_rows(tmp_path / "demonstrations.parquet", "demonstrations")
    }
    for row in read_rows(tmp_path / "start_states.parquet", "start_states"):
        text = published[numbers[row["item_id"]] - 1]
        whole = row["prefix"] + row["remainder"]
        assert whole in (text, text.rstrip()) or whole.removesuffix(f"\n#### {row['answer']}") == text.rstrip("\n")
        assert not row["prefix"] or not (row["prefix"][-1].isalnum() and row["remainder"][0].isalnum())
        assert row["revealed_steps"] < row["total_steps"]
        assert "####" not in row["prefix"] and "\\boxed" not in row["prefix"] and "the answer is <" not in row["prefix"]


@pytest.mark.benchmark_files
def test_boardgameqa_has_one_step_proofs_and_half_its_starts_are_questions(benchmark_files, tmp_path):
    """R³'s published mix has 52.2 % of BoardgameQA rows without a prefix; the whole set gives 49.5 %."""
    source = FileSource(path=str(benchmark_files / "boardgameqa/train.json"))
    kind = {"segmentation": None, "answer_kind": None, "test": None, "report": Silent()}
    ingest(source, "t", tmp_path, splits=Splits(validation=1, test=0), **kind)
    rows = read_rows(tmp_path / "demonstrations.parquet", "demonstrations")
    assert sum(len(row["steps"]) == 1 for row in rows) == 159
    assert sum(len(row["steps"]) == 2 for row in rows) == 108
    counts = build(tmp_path / "demonstrations.parquet", MixedCurriculum(), tmp_path, Silent())
    assert 0.48 < counts["from_question"] / counts["rows"] < 0.53
