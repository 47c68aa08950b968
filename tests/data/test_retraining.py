"""Which demonstrations are new, and when a candidate is promoted."""

import json

import pytest

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.requests import DecideRequest, HoldOutRequest, SelectRequest
from data.retraining import decide, hold_out, select_new


def demonstrations(path, names, split="train"):
    rows = [{"task": "t", "item_id": name, "question": f"Q {name}?", "split": split} for name in names]
    write_table(path, "demonstrations", rows)
    return path


def test_new_is_neither_seen_nor_held_out_and_always_trains(tmp_path):
    table = demonstrations(tmp_path / "d.parquet", "abcdef", split="test")
    held = [{"item_id": "x", "question": " q  B? ", "split": "promotion"}, {"item_id": "c", "question": "Q c?"}]
    write_table(tmp_path / "q.parquet", "questions", held)
    for number, names in enumerate(["ad", "e"]):
        write_table(tmp_path / f"s{number}.parquet", "seen", [{"task": "t", "item_id": name} for name in names])
    seen = (tmp_path / "s0.parquet", tmp_path / "s1.parquet")
    (tmp_path / "out").mkdir()
    request = SelectRequest(demonstrations=table, held_out=tmp_path / "q.parquet", seen=seen)
    counts = select_new(request, tmp_path / "out", Silent())
    assert counts == {"read": 6, "new": 1, "seen": 3, "held_out": 2}
    [row] = read_rows(tmp_path / "out" / "demonstrations.parquet", "demonstrations")
    assert (row["item_id"], row["split"]) == ("f", "train")
    assert len(read_rows(tmp_path / "out" / "questions.parquet", "questions")) == 2


def test_held_out_questions_are_kept_as_they_are(tmp_path):
    rows = [{"item_id": str(i), "question": "?", "split": split} for i, split in enumerate(["test", "promotion"] * 2)]
    write_table(tmp_path / "q.parquet", "questions", rows)
    (tmp_path / "out").mkdir()
    counts = hold_out(HoldOutRequest(questions=tmp_path / "q.parquet"), tmp_path / "out", Silent())
    assert counts == {"promotion": 2, "test": 2}


def evaluated(path, shares):
    """Ten answers a question, of which `shares` tenths are correct."""
    rows = [
        {"item_id": str(item), "sample": sample, "correct": sample < share}
        for item, share in enumerate(shares)
        for sample in range(10)
    ]
    write_table(path, "evaluations", rows)
    return path


@pytest.mark.parametrize(
    ("candidate", "serving", "promote", "where"),
    [
        ([10] * 40, [0] * 40, True, "lies above 0"),  # every question: the interval is [1, 1]
        ([10] * 20 + [0] * 20, [0] * 20 + [10] * 20, False, "holds 0"),
        ([5] * 40, [5] * 40, False, "holds 0"),  # [0, 0]: as good is not better
        ([0] * 40, [10] * 40, False, "lies below 0"),
        ([10] * 3 + [0] * 37, [0] * 40, False, "holds 0"),  # 7.5 points, but (37/40)^40 = 4 % of the draws have none
        ([10] * 8 + [0] * 32, [0] * 40, True, "lies above 0"),
    ],
)
def test_promotion_needs_an_interval_above_zero(tmp_path, candidate, serving, promote, where):
    (tmp_path / "out").mkdir()
    request = DecideRequest(
        candidate=evaluated(tmp_path / "c.parquet", candidate),
        serving=evaluated(tmp_path / "s.parquet", serving),
        demonstrations=demonstrations(tmp_path / "d.parquet", "ab"),
        compared_with=3,
        confidence=0.95,
        seed=0,
    )
    decision = decide(request, tmp_path / "out", Silent())
    assert (decision["promote"], decision["compared_with"], decision["questions"]) == (promote, 3, len(candidate))
    assert decision["difference"] == pytest.approx((sum(candidate) - sum(serving)) / 10 / len(candidate))
    assert decision["reason"].endswith(where)
    assert json.loads((tmp_path / "out" / "decision.json").read_text()) == decision
    assert {row["item_id"] for row in read_rows(tmp_path / "out" / "seen.parquet", "seen")} == {"a", "b"}


def test_models_that_answered_other_questions_are_not_compared(tmp_path):
    request = DecideRequest(
        candidate=evaluated(tmp_path / "c.parquet", [1, 2]),
        serving=evaluated(tmp_path / "s.parquet", [1]),
        demonstrations=tmp_path / "d.parquet",
        compared_with=None,
        confidence=0.95,
        seed=0,
    )
    with pytest.raises(UserError, match="different questions"):
        decide(request, tmp_path, Silent())
