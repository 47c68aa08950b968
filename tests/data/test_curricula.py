"""The order in which start states are used: whole passes, independent of row order and of interruptions."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.curricula import make_curriculum
from data.errors import UserError
from data.settings import MixedCurriculum, NoCurriculum, StagedCurriculum


def _rows(items: int, stages: int) -> list[dict]:
    return [
        {
            "start_state_id": f"{item:03d}-{stage}",
            "item_id": str(item),
            "stage": stage,
            "prefix": "same" if item == 0 else "",
        }
        for item in range(items)
        for stage in range(stages)
    ]


def _ids(rows) -> list[str]:
    return [row["start_state_id"] for row in rows]


@settings(max_examples=40, deadline=None)
@given(
    items=st.integers(1, 7),
    n=st.integers(1, 11),
    rounds=st.integers(1, 8),
    seed=st.integers(0, 9),
    cut=st.integers(0, 8),
)
def test_mixed_passes_cover_everything_whatever_the_order_and_the_interruptions(items, n, rounds, seed, cut):
    rows = _rows(items, 5)
    straight = make_curriculum(MixedCurriculum(), rows, seed)
    wanted = [_ids(straight.choose(number, n)) for number in range(rounds)]
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    resumed = make_curriculum(MixedCurriculum(), shuffled, seed)
    for number in range(rounds):
        if number == cut:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = make_curriculum(MixedCurriculum(), rows, seed)
            resumed.load_state_dict(state)
        assert _ids(resumed.choose(number, n)) == wanted[number]
    drawn = [identity for ids in wanted for identity in ids]
    for start in range(0, len(drawn) - len(rows) + 1, len(rows)):
        assert sorted(drawn[start : start + len(rows)]) == _ids(rows)


def test_passes_and_seeds_differ():
    rows = _rows(10, 5)
    first = make_curriculum(MixedCurriculum(), rows, 0)
    one, two = _ids(first.choose(0, 50)), _ids(first.choose(1, 50))
    assert one != two and sorted(one) == sorted(two)
    assert _ids(make_curriculum(MixedCurriculum(), rows, 1).choose(0, 50)) != one


def test_mixed_is_uniform_over_stages_in_every_pass():
    chosen = make_curriculum(MixedCurriculum(), _rows(16, 5), 3).choose(0, 80)
    assert Counter(row["stage"] for row in chosen) == dict.fromkeys(range(5), 16)


def test_plain_rl_draws_from_the_question_only():
    sampler = make_curriculum(NoCurriculum(), _rows(4, 1), 0)
    assert {row["stage"] for row in sampler.choose(0, 9)} == {0}


def test_staged_goes_back_stage_by_stage_after_its_rounds():
    sampler = make_curriculum(StagedCurriculum(n_stages=3, rounds_per_stage=2), _rows(4, 3), 0)
    stages = []
    for number in range(8):
        chosen = sampler.choose(number, 3)
        stages.append({row["stage"] for row in chosen})
        sampler.observe(number, chosen, [[0.0, 1.0]] * 3)
    assert stages == [{2}, {2}, {1}, {1}, {0}, {0}, {0}, {0}]


def test_staged_moves_on_at_its_success_threshold_and_not_on_unscorable_samples():
    sampler = make_curriculum(
        StagedCurriculum(n_stages=3, rounds_per_stage=None, success_threshold=0.75), _rows(4, 3), 0
    )
    outcomes = [[[0.0, 1.0]], [[1.0, None], [1.0, 1.0]], [[None, None]], [[1.0, 1.0, 1.0, 0.0]], [[1.0]], [[0.0]]]
    stages = []
    for number, success in enumerate(outcomes):
        chosen = sampler.choose(number, len(success))
        stages.append(chosen[0]["stage"])
        sampler.observe(number, chosen, success)
    assert stages == [2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("cut", range(7))
def test_staged_resumes(cut):
    settings_, rows = StagedCurriculum(n_stages=3, rounds_per_stage=2, success_threshold=0.9), _rows(5, 3)

    def play(interrupted: bool) -> list[list[str]]:
        sampler, drawn = make_curriculum(settings_, rows, 4), []
        for number in range(7):
            if interrupted and number == cut:
                state = sampler.state_dict()
                sampler = make_curriculum(settings_, rows[::-1], 4)
                sampler.load_state_dict(state)
            chosen = sampler.choose(number, 2)
            drawn.append(_ids(chosen))
            sampler.observe(number, chosen, [[1.0 if number == 0 else 0.0]] * 2)
        return drawn

    assert play(True) == play(False)


def test_what_cannot_be_continued_says_so():
    sampler = make_curriculum(MixedCurriculum(), _rows(2, 5), 0)
    with pytest.raises(ValueError, match="round 3 was asked of"):
        sampler.choose(3, 1)
    with pytest.raises(ValueError, match="over 10"):
        sampler.load_state_dict(make_curriculum(MixedCurriculum(), _rows(3, 5), 0).state_dict())
    with pytest.raises(ValueError, match="'staged'"):
        sampler.load_state_dict(make_curriculum(StagedCurriculum(), _rows(2, 5), 0).state_dict())
    with pytest.raises(UserError, match="no start state"):
        make_curriculum(MixedCurriculum(), [], 0)
    with pytest.raises(UserError, match="has stage 3, but"):
        make_curriculum(StagedCurriculum(n_stages=3), _rows(2, 5), 0)
    with pytest.raises(UserError, match="no start state has stage 3"):
        make_curriculum(StagedCurriculum(n_stages=5), _rows(2, 3), 0)
