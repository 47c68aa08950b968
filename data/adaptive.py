"""The adaptive curriculum: start states where the policy's outcome is least certain.

Our design. AdaBack (arXiv 2506.18110) searches the revealed share of each sample apart, which needs many visits of
each; here all demonstrations share one success model over the remaining steps, and a demonstration's own outcomes only
bound how much of it is revealed next.
"""

import random
from collections.abc import Sequence
from typing import Any

from data.curricula import Passes, StartState, check_round, check_state, due
from data.seeds import derive_seed
from data.settings import AdaptiveCurriculum

FIRST_GUESS = 0.7
"""Success of a single step before any outcome is known (our choice)."""
BISECTIONS = 40


class SuccessModel:
    """Chance of a right answer by remaining steps: counts of late rounds, pooled by one success rate a step.

    p(r) = (s_r + a q^r) / (n_r + a): s_r of n_r discounted rollouts with r steps to write were right, a is
    `prior_rollouts`, and q is the rate a step under which all counts together are as expected: Σ s_r = Σ n_r q^r.
    """

    def __init__(self, settings: AdaptiveCurriculum, longest: int) -> None:
        self.settings = settings
        self.right = [0.0] * (longest + 1)
        self.tried = [0.0] * (longest + 1)
        self.rate = FIRST_GUESS

    def add(self, outcomes: Sequence[tuple[int, float]]) -> None:
        """Takes a round's outcomes (remaining steps, 1.0 or 0.0); earlier ones count `decay` times as much."""
        for counts in (self.right, self.tried):
            for r in range(len(counts)):
                counts[r] *= self.settings.decay
        for r, success in outcomes:
            self.right[r] += success
            self.tried[r] += 1.0
        self.fit()

    def fit(self) -> None:
        """Finds the rate a step by bisection; the expected number of right rollouts rises with it."""
        if not any(self.tried):
            return
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            expected = sum(n * middle**r for r, n in enumerate(self.tried))
            low, high = (middle, high) if expected < sum(self.right) else (low, middle)
        self.rate = (low + high) / 2

    def chance(self, remaining: int) -> float:
        """Predicted share of right answers with `remaining` steps to write."""
        prior = self.settings.prior_rollouts
        return (self.right[remaining] + prior * self.rate**remaining) / (self.tried[remaining] + prior)


class AdaptiveSampler:
    """One start state a demonstration and pass; how much is revealed is drawn with weight p (1 - p).

    That is the variance of a rollout's reward, so groups gather where about half of the samples succeed and spread
    around it, and move towards the question by themselves as the policy improves. At least `question_share` of the
    groups start from the question.
    """

    kind = "adaptive"

    def __init__(self, rows: Sequence[StartState], seed: int, settings: AdaptiveCurriculum) -> None:
        self.settings = settings
        self._seed = seed
        self._rows = len(rows)
        self._starts: dict[str, dict[int, StartState]] = {}
        for row in rows:
            self._starts.setdefault(row["item_id"], {})[row["revealed_steps"]] = row
        self._passes = Passes([starts[0] for starts in self._starts.values()], seed, "curriculum")
        self._model = SuccessModel(settings, max(row["total_steps"] for row in rows))
        self._intervals: dict[str, list[int]] = {}
        self._rounds = 0
        self._from_question = 0

    def choose(self, round: int, n: int) -> list[StartState]:
        """The next `n` demonstrations, each with as much revealed as its draw says."""
        check_round(round, self._rounds)
        self._rounds += 1
        return self.more(n)

    def more(self, n: int) -> list[StartState]:
        """Further demonstrations for the round of the last `choose`."""
        chosen = []
        for _ in range(n):
            number = self._passes.taken
            [question] = self._passes.take(1)
            if due(self.settings.question_share, self._from_question, number):
                row = question
            else:
                row = self._draw(question["item_id"], random.Random(derive_seed(self._seed, "revealed", number)))
            self._from_question += row["revealed_steps"] == 0
            chosen.append(row)
        return chosen

    def _draw(self, item: str, generator: random.Random) -> StartState:
        starts = self._starts[item]
        low, high = self._intervals.get(item, (0, len(starts) - 1))
        weights = {}
        for revealed in sorted(starts)[low : high + 1]:
            chance = self._model.chance(starts[revealed]["total_steps"] - revealed)
            weights[revealed] = chance * (1 - chance) + 1e-9
        return starts[generator.choices(list(weights), list(weights.values()))[0]]

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """Updates the success model, and the intervals of demonstrations whose samples were all right or all wrong."""
        outcomes = []
        for row, group in zip(rows, success_GS, strict=True):
            known = [float(value) for value in group if value is not None]
            outcomes += [(row["total_steps"] - row["revealed_steps"], value) for value in known]
            if known and self.settings.intervals and sum(known) in (0.0, float(len(known))):
                self._bound(row, all_right=known[0] == 1.0)
        self._model.add(outcomes)

    def _bound(self, row: StartState, *, all_right: bool) -> None:
        last = len(self._starts[row["item_id"]]) - 1
        low, high = self._intervals.get(row["item_id"], (0, last))
        if all_right:
            high = max(0, row["revealed_steps"] - 1)
        else:
            low = min(last, row["revealed_steps"] + 1)
        # An empty interval says that the policy has changed since one of its bounds was found.
        self._intervals[row["item_id"]] = [low, high] if low <= high else [0, last]

    def state_dict(self) -> dict[str, Any]:
        """Rounds, place in the pass, the model's counts and the intervals, and how many rows there are."""
        return {
            "kind": self.kind,
            "rounds": self._rounds,
            "rows": self._rows,
            "from_question": self._from_question,
            "right": self._model.right,
            "tried": self._model.tried,
            "rate": self._model.rate,
            "intervals": self._intervals,
            **self._passes.place(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""
        check_state(state, self.kind, self._rows)
        self._rounds, self._from_question = state["rounds"], state["from_question"]
        self._model.right, self._model.tried = list(state["right"]), list(state["tried"])
        self._model.rate = state["rate"]
        self._intervals = {item: list(bounds) for item, bounds in state["intervals"].items()}
        self._passes.go(state)
