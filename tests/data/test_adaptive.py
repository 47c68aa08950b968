"""The adaptive curriculum: its success model by hand, where it draws, its intervals, and its state."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.adaptive import SuccessModel
from data.curricula import make_curriculum
from data.rewards import difficulty_weight
from data.settings import AdaptiveCurriculum, MixedCurriculum, StagedCurriculum
from data.start_states import cuts


def _rows(items: int, steps: int) -> list[dict]:
    return [
        {
            "start_state_id": f"{item:03d}-{k}",
            "item_id": f"{item:03d}",
            "stage": stage,
            "revealed_steps": k,
            "total_steps": steps,
        }
        for item in range(items)
        for stage, k in cuts(steps, AdaptiveCurriculum())
    ]


def _play(curriculum, rounds, n, chance, seed=0):
    """Rounds with outcomes drawn from `chance(remaining)`; the rows chosen in each."""
    generator = random.Random(seed)
    played = []
    for number in range(rounds):
        chosen = curriculum.choose(number, n)
        success = [
            [float(generator.random() < chance(row["total_steps"] - row["revealed_steps"])) for _ in range(8)]
            for row in chosen
        ]
        curriculum.observe(number, chosen, success)
        played.append(chosen)
    return played


def test_the_model_finds_the_rate_of_a_step():
    model = SuccessModel(AdaptiveCurriculum(prior_rollouts=2.0, decay=0.5), 3)
    assert model.chance(2) == pytest.approx(0.7**2)
    model.add([(1, 1.0)] * 3 + [(1, 0.0)] + [(2, 1.0)] * 2 + [(2, 0.0)] * 2)  # 4 q + 4 q² = 5
    rate = (-1 + 6**0.5) / 2
    assert model.rate == pytest.approx(rate)
    assert model.chance(3) == pytest.approx(rate**3)  # never seen: the pooled model alone
    assert model.chance(1) == pytest.approx((3 + 2 * rate) / 6)
    model.add([])
    assert model.tried == [0.0, 2.0, 2.0, 0.0]


def test_draws_gather_where_success_is_one_half_and_the_question_keeps_its_share():
    played = _play(make_curriculum(AdaptiveCurriculum(), _rows(400, 8), 3), 12, 40, lambda r: 0.7**r)
    late = [row for chosen in played[6:] for row in chosen]
    questions = sum(row["revealed_steps"] == 0 for row in late) / len(late)
    assert 0.2 <= questions < 0.4
    revealed = [8 - row["revealed_steps"] for row in late if row["revealed_steps"]]
    assert 1.5 < sum(revealed) / len(revealed) < 4.0  # 0.7² is 0.49
    assert len(set(revealed)) >= 5  # and they spread


def test_as_the_policy_improves_less_is_revealed():
    curriculum = make_curriculum(AdaptiveCurriculum(), _rows(400, 8), 3)
    rates = iter([0.5] * 400 + [0.98] * 10_000)
    played = _play(curriculum, 40, 20, lambda r: next(rates) ** r)
    shares = [sum(row["revealed_steps"] for row in chosen) / 160 for chosen in played]
    assert sum(shares[-5:]) < 0.6 * sum(shares[1:4]) * 5 / 3


def test_a_demonstration_that_was_all_right_is_revealed_less_and_one_all_wrong_more():
    curriculum = make_curriculum(AdaptiveCurriculum(question_share=0.0), _rows(1, 6), 0)
    [row] = curriculum.choose(0, 1)
    curriculum.observe(0, [row | {"revealed_steps": 3}], [[1.0] * 4])
    assert all(curriculum.choose(1 + i, 1)[0]["revealed_steps"] <= 2 for i in range(20))
    curriculum.observe(20, [row | {"revealed_steps": 1}], [[0.0, None, 0.0]])
    assert {curriculum.choose(21 + i, 1)[0]["revealed_steps"] for i in range(5)} == {2}
    curriculum.observe(26, [row | {"revealed_steps": 2}], [[0.0, 0.0]])  # contradicts the upper bound: forgotten
    assert len({curriculum.choose(26 + i, 1)[0]["revealed_steps"] for i in range(40)}) > 3


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 5), items=st.integers(1, 9), seed=st.integers(0, 5))
def test_a_resumed_curriculum_goes_on_as_the_straight_one(cut, items, seed):
    rows = _rows(items, 5)
    for kind in (AdaptiveCurriculum(), MixedCurriculum(n_stages=5, question_share=0.5), StagedCurriculum(replay=0.5)):
        straight, resumed = make_curriculum(kind, rows, seed), make_curriculum(kind, rows, seed)
        for number in range(6):
            if number == cut:
                state = json.loads(json.dumps(resumed.state_dict()))
                resumed = make_curriculum(kind, rows[::-1], seed)
                resumed.load_state_dict(state)
            chosen = straight.choose(number, 4)
            assert resumed.choose(number, 4) == chosen
            for curriculum in (straight, resumed):
                curriculum.observe(number, chosen, [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, None]])
    with pytest.raises(ValueError, match="start the cell anew"):
        make_curriculum(AdaptiveCurriculum(), rows, seed).load_state_dict({"kind": "mixed", "rows": len(rows)})


def test_mixed_keeps_a_share_from_the_question_with_many_stages():
    rows = [
        {"start_state_id": f"{item}-{stage:02d}", "item_id": str(item), "stage": stage}
        for item in range(7)
        for stage in range(12)
    ]
    chosen = make_curriculum(MixedCurriculum(n_stages=12), rows, 1).choose(0, 100)
    assert sum(row["stage"] == 0 for row in chosen) == 20
    chosen = make_curriculum(MixedCurriculum(n_stages=12, question_share=0.0), rows, 1).choose(0, 84)
    assert sum(row["stage"] == 0 for row in chosen) == 7


def test_staged_replays_stages_that_are_over_and_counts_only_the_present_one():
    curriculum = make_curriculum(StagedCurriculum(n_stages=5, rounds_per_stage=1, replay=0.25), _rows(30, 5), 1)
    assert {row["stage"] for row in curriculum.choose(0, 8)} == {4}  # nothing is over yet
    second = curriculum.choose(1, 8)
    assert [row["stage"] for row in second] == [3] * 6 + [4] * 2
    curriculum.observe(1, second, [[1.0]] * 6 + [[0.0]] * 2)
    assert curriculum.state_dict()["mastered"]
    third = curriculum.choose(2, 8)
    assert [row["stage"] for row in third[:6]] == [2] * 6 and {row["stage"] for row in third[6:]} <= {3, 4}


def test_cut_points_of_the_adaptive_curriculum_and_the_published_weights():
    assert cuts(6, AdaptiveCurriculum()) == [(0, 0), (1, 1), (2, 2), (2, 3), (3, 4), (4, 5)]
    assert cuts(1, AdaptiveCurriculum()) == [(0, 0)]
    assert cuts(2, MixedCurriculum()) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]
    assert cuts(2, MixedCurriculum(unique=True)) == [(0, 0), (2, 1)]
    assert difficulty_weight("none", 3, 4) == 1.0
    assert difficulty_weight("linear", 3, 4) == 0.25
    assert difficulty_weight("square", 3, 4) == 0.0625
    assert difficulty_weight("square", 0, 4) == 1.0
