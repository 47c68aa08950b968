"""Advantages: hand-worked values, and the rules that hold for every estimator."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.advantages import make_estimator, zero_variance_share
from models.settings import GlobalNormalisation, GroupMean, GroupMeanStd, LeaveOneOut

BY_GROUP = [GroupMean(), GroupMeanStd(), LeaveOneOut(), GlobalNormalisation()]
EVERY = [*BY_GROUP, GlobalNormalisation(baseline="round")]


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        (GroupMean(), [0.75, -0.25, -0.25, -0.25]),
        (GroupMeanStd(), [1.4997, -0.4999, -0.4999, -0.4999]),
        (LeaveOneOut(), [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_in_four(estimator, wanted):
    assert make_estimator(estimator)([1, 0, 0, 0], [0] * 4) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("estimator", EVERY)
def test_constant_rewards_give_exact_zeros(estimator):
    for reward in (1.0, 0.0, 0.1, 0.7):
        assert make_estimator(estimator)([reward] * 7, [0] * 7) == [0.0] * 7
    assert make_estimator(estimator)([], []) == []


@pytest.mark.parametrize("estimator", BY_GROUP)
def test_a_group_of_one_gives_zero(estimator):
    assert make_estimator(estimator)([1.0], [3]) == [0.0]
    assert make_estimator(estimator)([1.0, 0.0, 1.0], [0, 1, 2]) == [0.0, 0.0, 0.0]


def test_groups_of_one_learn_from_the_round():
    advantages = make_estimator(GlobalNormalisation(baseline="round"))([1, 0, None], [0, 1, 2])
    assert advantages == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4), 0])


def test_global_normalisation_divides_by_the_rounds_deviation():
    # Centred by group: ±0.5, and 0 in the constant group; standard deviation with ddof 1 over the four.
    deviation = math.sqrt(0.5 / 3)
    advantages = make_estimator(GlobalNormalisation())([1, 0, 1, 1], [0, 0, 1, 1])
    assert advantages == pytest.approx([0.5 / (deviation + 1e-4), -0.5 / (deviation + 1e-4), 0, 0])


@pytest.mark.parametrize("estimator", EVERY)
def test_unscorable_rewards_are_left_out_of_the_baseline(estimator):
    advantages = make_estimator(estimator)([1, None, 0, None], [0] * 4)
    assert advantages[1] == advantages[3] == 0.0
    assert advantages[0] == -advantages[2] > 0
    if estimator == GroupMean():
        assert advantages == [0.5, 0.0, -0.5, 0.0]
    assert make_estimator(estimator)([None, None], [0, 0]) == [0.0, 0.0]
    assert make_estimator(estimator)([None, 1.0], [0, 0]) == [0.0, 0.0]


def test_groups_need_not_lie_together():
    apart = make_estimator(GroupMean())([1, 5, 0, 7], [0, 1, 0, 1])
    assert apart == [0.5, -1.0, -0.5, 1.0]


def test_zero_variance_share():
    assert zero_variance_share([1, 1, 1, 0, 1, None, None, None], [0, 0, 1, 1, 2, 2, 3, 3]) == 0.75
    assert zero_variance_share([], []) == 0.0


rewards_and_groups = st.lists(
    st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.2, 1.0])), st.integers(0, 3)), max_size=24
)


@settings(max_examples=60, deadline=None)
@given(rows=rewards_and_groups, estimator=st.sampled_from(EVERY))
def test_finite_zero_where_unscorable_and_summing_to_zero(rows, estimator):
    rewards, groups = [reward for reward, _ in rows], [group for _, group in rows]
    advantages = make_estimator(estimator)(rewards, groups)
    assert len(advantages) == len(rows)
    assert all(math.isfinite(advantage) for advantage in advantages)
    assert all(advantage == 0 for advantage, reward in zip(advantages, rewards) if reward is None)
    assert sum(advantages) == pytest.approx(0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(rows=rewards_and_groups, shift=st.sampled_from([-1.0, 0.5]))
def test_a_constant_added_to_every_reward_changes_nothing(rows, shift):
    rewards, groups = [reward for reward, _ in rows], [group for _, group in rows]
    moved = [None if reward is None else reward + shift for reward in rewards]
    for estimator in BY_GROUP[:3]:
        before, after = (make_estimator(estimator)(values, groups) for values in (rewards, moved))
        assert before == pytest.approx(after, abs=1e-6)
