"""Key-state restarts: block boundaries of earlier rollouts from which groups of rollouts start again.

A state is a problem with the blocks written so far. Candidates are chosen without further rollouts (a pre-score),
valued by the continuations that are the training group anyway, and kept while both outcomes are likely by their value.
All of it is our design (that MetaAct-RL has "a key-state restart mechanism" is all that is known).
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.artifacts import stable_hash
from data.seeds import derive_seed
from data.settings import Restarts

FLIP, AFTER_WRONG, UNCERTAIN, BEFORE_END = 1.0, 1.0, 1.0, 0.5
"""What a boundary's pre-score is the sum of."""
BEST_PRESCORE = 2.0
"""A candidate with this pre-score is tried before any state of known value (our choice)."""


@dataclass
class KeyState:
    """A block boundary of an earlier rollout."""

    row: dict[str, Any]
    """item_id, task, question, answer, answer_kind of its problem, and the text of the prefix."""
    ids: list[int]
    """Prompt and prefix, as they were sampled."""
    prefix_length: int
    trace: str
    """The rollout it comes from."""
    block: int
    """How many blocks the prefix has."""
    actions: list[str]
    right: bool
    """Whether the last candidate answer of the prefix is right."""
    success: float
    """The problem's success rate in the group from its root."""
    version: int
    """The policy that wrote the prefix."""
    prescore: float
    value: float | None = None
    """(m + 1) / (M + 2) after m of M right continuations, of the last visit; None before the first."""
    visits: int = 0
    same: int = 0
    """Visits whose continuations all ended alike."""

    @property
    def id(self) -> str:
        """Stands for the state as a start state."""
        return stable_hash("restart", self.row["item_id"], self.ids)[:32]


@dataclass(frozen=True)
class Rollout:
    """What candidates are made from: one rollout from a root, block by block."""

    row: dict[str, Any]
    ids: Sequence[int]
    """Prompt, prefix and completion."""
    prompt: int
    """How many of `ids` are the prompt."""
    name: str
    actions: Sequence[str]
    ends: Sequence[int]
    """For each block how many of `ids` lie before its end."""
    texts: Sequence[int]
    """For each block the characters of the trace up to its end."""
    text: str
    candidates: Sequence[bool | None]
    """For each block whether its candidate is right; None without one."""
    entropies: Sequence[float | None]
    """For each block the entropy of the choice after it; None where it was not measured."""
    correct: bool


@dataclass
class RestartBuffer:
    """The states that are kept from round to round; everything in it is JSON."""

    settings: Restarts
    seed: int
    states: list[KeyState] = field(default_factory=list)

    def share(self, progress: float) -> float:
        """Share of a round's groups that restart, `progress` in [0, 1] of the budget spent."""
        chosen = self.settings
        if progress < chosen.start or not chosen.share:
            return 0.0
        left = max(0.0, 1.0 - progress)
        return chosen.share * (min(1.0, left / chosen.anneal) if chosen.anneal else 1.0)

    def choose(self, round: int, groups: int, progress: float) -> list[KeyState]:
        """The states that this round's restart groups start from; fewer than the share where there are not enough.

        At most one a problem. Balanced: as many from states whose candidate is wrong as right ones. Drops what is too
        old first.
        """
        self._drop(round)
        wanted = round_half_up(self.share(progress) * groups)
        if not wanted:
            return []
        ranked = self._ranked(round)
        if not self.settings.balanced:
            return _one_a_problem(ranked, set())[:wanted]
        taken: set[str] = set()
        found: dict[bool, list[KeyState]] = {True: [], False: []}
        for state in ranked:
            if len(found[state.right]) < wanted // 2 and state.row["item_id"] not in taken:
                taken.add(state.row["item_id"])
                found[state.right].append(state)
        each = min(len(found[True]), len(found[False]))
        return [state for pair in zip(found[False][:each], found[True][:each]) for state in pair]

    def _ranked(self, round: int) -> list[KeyState]:
        if self.settings.choose == "random":
            order = random.Random(derive_seed(self.seed, "restarts", round))
            shuffled = sorted(self.states, key=lambda state: state.id)
            order.shuffle(shuffled)
            return shuffled
        return sorted(self.states, key=lambda state: (-self.score(state), state.id))

    def score(self, state: KeyState) -> float:
        """V(1 − V) + ½ |V(next) − V| for a valued state; for a candidate ¼ · min(1, pre-score / BEST_PRESCORE)."""
        if state.value is None:
            return 0.25 * min(1.0, state.prescore / BEST_PRESCORE)
        after = [s.value for s in self.states if s.trace == state.trace and s.block == state.block + 1]
        jump = abs(after[0] - state.value) if after and after[0] is not None else 0.0
        return state.value * (1 - state.value) + 0.5 * jump

    def observe(self, outcomes: Sequence[tuple[KeyState, Sequence[bool]]]) -> None:
        """Takes the results of this round's restart groups: the value of each state, and which are dropped."""
        for state, results in outcomes:
            if not results:
                continue
            right = sum(results)
            state.value = (right + 1) / (len(results) + 2)
            state.visits += 1
            state.same += right in (0, len(results))
        if self.settings.choose == "key":
            self.states = [s for s in self.states if s.value is None or self.is_key(s)]
        self.states = [s for s in self.states if s.same < 2 and s.visits < self.settings.max_visits]

    def is_key(self, state: KeyState) -> bool:
        """Whether a valued state is worth another group."""
        return self.settings.value_low <= state.value <= self.settings.value_high

    def add(self, groups: Sequence[Sequence[Rollout]], round: int) -> int:
        """Takes candidates from the groups of a round's roots, of mixed and of all-wrong ones; returns how many."""
        entropies = sorted(e for group in groups for r in group for e in r.entropies if e is not None)
        upper = entropies[int(0.75 * len(entropies))] if entropies else float("inf")
        before = {state.id for state in self.states}
        added = 0
        for group in groups:
            success = sum(r.correct for r in group) / len(group)
            if success == 1.0:
                continue
            found = [state for rollout in group for state in candidates(rollout, success, round, upper)]
            unique = {state.id: state for state in found if state.id not in before}
            chosen = self._best(list(unique.values()), round)
            self.states += chosen
            added += len(chosen)
        self._shrink()
        return added

    def _best(self, found: list[KeyState], round: int) -> list[KeyState]:
        """The candidates of one problem that are kept, both sides alike where the buffer is balanced."""
        limit = self.settings.states_per_problem
        if self.settings.choose == "random":
            found = sorted(found, key=lambda state: state.id)
            random.Random(derive_seed(self.seed, "candidates", round, *(s.id for s in found[:1]))).shuffle(found)
        else:
            found = sorted(found, key=lambda state: (-state.prescore, state.id))
        if not self.settings.balanced:
            return found[:limit]
        sides = [[s for s in found if s.right == right][: limit // 2] for right in (False, True)]
        return [*sides[0], *sides[1]]

    def _drop(self, round: int) -> None:
        self.states = [s for s in self.states if round - s.version <= self.settings.max_age]

    def _shrink(self) -> None:
        """Keeps the newest states within the capacity, each side its half where balanced."""
        capacity = self.settings.capacity
        newest = sorted(self.states, key=lambda s: (-s.version, -self.score(s), s.id))
        if self.settings.balanced:
            newest = [s for right in (False, True) for s in [x for x in newest if x.right == right][: capacity // 2]]
        self.states = sorted(newest[:capacity], key=lambda s: s.id)

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which another buffer continues."""
        return {"states": [asdict(state) for state in self.states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self.states = [KeyState(**values) for values in state["states"]]


def round_half_up(value: float) -> int:
    """The nearest whole number, halves up."""
    return int(value + 0.5)


def _one_a_problem(states: Sequence[KeyState], taken: set[str]) -> list[KeyState]:
    found = []
    for state in states:
        if state.row["item_id"] not in taken:
            taken.add(state.row["item_id"])
            found.append(state)
    return found


def candidates(rollout: Rollout, success: float, version: int, upper: float) -> list[KeyState]:
    """The block boundaries of a rollout that follow at least one candidate answer, with their pre-scores.

    +1 at the first boundary after a wrong candidate, +1 where a right candidate turned wrong, +1 for an entropy of the
    next choice in the upper quartile (`upper`), +½ in front of the last block of a wrong trace.
    """
    found = []
    last: bool | None = None
    for number, action in enumerate(rollout.actions):
        if action == "answer":
            break
        before, here = last, rollout.candidates[number]
        last = last if here is None else here
        if last is None:
            continue
        score = AFTER_WRONG * (here is False) + FLIP * (here is False and before is True)
        entropy = rollout.entropies[number]
        score += UNCERTAIN * (entropy is not None and entropy >= upper)
        score += BEFORE_END * (not rollout.correct and number == len(rollout.actions) - 2)
        end = rollout.ends[number]
        found.append(
            KeyState(
                row=dict(rollout.row) | {"prefix": rollout.text[: rollout.texts[number]]},
                ids=[int(i) for i in rollout.ids[:end]],
                prefix_length=end - rollout.prompt,
                trace=rollout.name,
                block=number + 1,
                actions=list(rollout.actions[: number + 1]),
                right=last,
                success=success,
                version=version,
                prescore=score,
            )
        )
    return found
