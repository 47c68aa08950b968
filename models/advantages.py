"""Advantages of a round's rollouts from their rewards: one small class per estimator.

Common rules. A reward of None is unscorable: it is left out of every baseline and its advantage is 0, never filled
with a reward of 0. A group with fewer than two scorable rewards, or whose scorable rewards are all equal, gives exact
zeros (the test is max == min within the group: a standard deviation that is only nearly zero would be divided by).
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from models.settings import Advantage, GlobalNormalisation, GroupMean, GroupMeanStd, LeaveOneOut

GRPO_EPS = 1e-4


class Estimator(Protocol):
    """Turns the rewards of a round into one advantage a rollout."""

    def __call__(self, rewards_N: Sequence[float | None], groups_N: Sequence[int]) -> list[float]:
        """`rewards_N[i]` belongs to group `groups_N[i]`; returns N finite advantages in the same order."""


def members(groups_N: Sequence[int]) -> dict[int, list[int]]:
    """Group → the positions of its rollouts, in order of first appearance."""
    found: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(groups_N):
        found[group].append(position)
    return dict(found)


def informative(rewards_G: Sequence[float | None]) -> bool:
    """Whether a group's rewards can move the policy: at least two are scorable and they differ."""
    scorable = [reward for reward in rewards_G if reward is not None]
    return len(scorable) > 1 and max(scorable) != min(scorable)


def zero_variance_share(rewards_N: Sequence[float | None], groups_N: Sequence[int]) -> float:
    """Share of groups that are not `informative`, between 0 and 1; 0 where there is no group."""
    groups = members(groups_N).values()
    silent = sum(not informative([rewards_N[i] for i in group]) for group in groups)
    return silent / len(groups) if groups else 0.0


class _ByGroup(ABC):
    """Base of the estimators that look at one group at a time."""

    @abstractmethod
    def of_group(self, rewards_S: np.ndarray) -> np.ndarray:
        """Advantages of the S ≥ 2 scorable rewards of a group, which are not all equal."""

    def __call__(self, rewards_N: Sequence[float | None], groups_N: Sequence[int]) -> list[float]:
        """See `Estimator`."""
        advantages_N = np.zeros(len(rewards_N))
        for positions in members(groups_N).values():
            if informative([rewards_N[i] for i in positions]):
                scorable = [i for i in positions if rewards_N[i] is not None]
                advantages_N[scorable] = self.of_group(np.array([rewards_N[i] for i in scorable], dtype=np.float64))
        return advantages_N.tolist()


class GroupMeanEstimator(_ByGroup):
    """Dr.GRPO (Liu et al. 2025, section 3): r − mean(r)."""

    def of_group(self, rewards_S: np.ndarray) -> np.ndarray:
        """See `_ByGroup`."""
        return rewards_S - rewards_S.mean()


class GroupMeanStdEstimator(_ByGroup):
    """GRPO (Shao et al. 2024, section 4.1): (r − mean(r)) / (std(r) + 1e-4); std with ddof 1, as the peers take it."""

    def of_group(self, rewards_S: np.ndarray) -> np.ndarray:
        """See `_ByGroup`."""
        return (rewards_S - rewards_S.mean()) / (rewards_S.std(ddof=1) + GRPO_EPS)


class LeaveOneOutEstimator(_ByGroup):
    """RLOO (Ahmadian et al. 2024, equation 8): r minus the mean of the other rewards of the group."""

    def of_group(self, rewards_S: np.ndarray) -> np.ndarray:
        """See `_ByGroup`."""
        size = len(rewards_S)
        return rewards_S - (rewards_S.sum() - rewards_S) / (size - 1)


class GlobalNormalisationEstimator:
    """REINFORCE++ (Hu 2025): normalised by mean and standard deviation over the whole round (ddof 1, eps 1e-4).

    `baseline="group"` subtracts each group's mean first, so that a constant group gives zeros (REINFORCE++-baseline);
    `baseline="round"` subtracts the round's mean, which lets groups of one learn.
    """

    def __init__(self, settings: GlobalNormalisation):
        self.baseline = settings.baseline

    def __call__(self, rewards_N: Sequence[float | None], groups_N: Sequence[int]) -> list[float]:
        """See `Estimator`. All zeros where nothing differs."""
        if self.baseline == "group":
            centred_N = np.array(GroupMeanEstimator()(rewards_N, groups_N))
        else:
            if not informative(rewards_N):
                return [0.0] * len(rewards_N)
            mean = np.mean([reward for reward in rewards_N if reward is not None])
            centred_N = np.array([0.0 if reward is None else reward - mean for reward in rewards_N])
        scorable = [i for i, reward in enumerate(rewards_N) if reward is not None]
        if not np.any(centred_N):
            return [0.0] * len(rewards_N)
        return (centred_N / (centred_N[scorable].std(ddof=1) + GRPO_EPS)).tolist()


def make_estimator(settings: Advantage) -> Estimator:
    """The estimator that `settings` names."""
    match settings:
        case GroupMean():
            return GroupMeanEstimator()
        case GroupMeanStd():
            return GroupMeanStdEstimator()
        case LeaveOneOut():
            return LeaveOneOutEstimator()
        case GlobalNormalisation():
            return GlobalNormalisationEstimator(settings)
    raise TypeError(f"no estimator for {type(settings).__name__}")
