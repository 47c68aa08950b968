"""Which start states a round uses, and in which order."""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from data.errors import UserError
from data.seeds import derive_seed
from data.settings import Curriculum, StagedCurriculum

StartState = dict[str, Any]
"""One row of the table start_states."""


class CurriculumSampler(Protocol):
    """Chooses the start states of each round, and may learn from their outcomes."""

    def choose(self, round: int, n: int) -> list[StartState]:
        """The start states of the next round's `n` groups; `round` counts from 0 and is one more at each call."""

    def more(self, n: int) -> list[StartState]:
        """Further start states for the round of the last `choose`."""

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """Takes the outcomes of the chosen rows: for each group the samples' success (1.0 or 0.0; None: unscorable)."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which another sampler over the same rows continues."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""


def make_curriculum(settings: Curriculum, rows: Sequence[StartState], seed: int) -> CurriculumSampler:
    """The sampler for `settings` over `rows` (start_states.parquet). The order of `rows` does not matter.

    `none` and `mixed` draw from all rows (R³: the union of all stages), `staged` from one stage after another.
    Raises UserError where `rows` is empty or, for `staged`, lacks a stage.
    """
    if not rows:
        raise UserError("there is no start state to choose from; the demonstrations have no training split")
    if isinstance(settings, StagedCurriculum):
        return StagedSampler(rows, seed, settings)
    return MixedSampler(rows, seed)


class _Passes:
    """Rows in shuffled passes without replacement; each pass has its own order, made from the seed and its number."""

    def __init__(self, rows: Sequence[StartState], *seed: int | str) -> None:
        self.rows = sorted(rows, key=lambda row: row["start_state_id"])
        self.seed = seed
        self.number = 0
        self.cursor = 0
        self._order: tuple[int, list[int]] | None = None

    def take(self, n: int) -> list[StartState]:
        """The next `n` rows; a pass that ends is followed by the next one."""
        taken = []
        for _ in range(n):
            if self.cursor == len(self.rows):
                self.number, self.cursor = self.number + 1, 0
            taken.append(self.rows[self._permutation()[self.cursor]])
            self.cursor += 1
        return taken

    def _permutation(self) -> list[int]:
        if self._order is None or self._order[0] != self.number:
            order = list(range(len(self.rows)))
            random.Random(derive_seed(*self.seed, self.number)).shuffle(order)
            self._order = (self.number, order)
        return self._order[1]


class MixedSampler:
    """All start states in shuffled passes: uniform over stages, every one once before any comes again."""

    kind = "mixed"

    def __init__(self, rows: Sequence[StartState], seed: int) -> None:
        self._passes = _Passes(rows, seed, "curriculum")
        self._rounds = 0

    def choose(self, round: int, n: int) -> list[StartState]:
        """The next `n` start states of the passes."""
        _check_round(round, self._rounds)
        self._rounds += 1
        return self._passes.take(n)

    def more(self, n: int) -> list[StartState]:
        """The next `n` start states of the passes."""
        return self._passes.take(n)

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """The order does not depend on outcomes."""

    def state_dict(self) -> dict[str, Any]:
        """Rounds done, pass and place in it, and how many rows there are."""
        passes = self._passes
        return {
            "kind": self.kind,
            "rounds": self._rounds,
            "rows": len(passes.rows),
            "pass": passes.number,
            "cursor": passes.cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""
        _check_state(state, self.kind, len(self._passes.rows))
        self._rounds, self._passes.number, self._passes.cursor = state["rounds"], state["pass"], state["cursor"]


class StagedSampler:
    """One stage after another, from the last start state back to the question, where it stays.

    The next stage begins when a round's share of correct rollouts reaches `success_threshold`, or after
    `rounds_per_stage` rounds (both our choice: the paper does not say how long its stages are).
    """

    kind = "staged"

    def __init__(self, rows: Sequence[StartState], seed: int, settings: StagedCurriculum) -> None:
        self.settings = settings
        self._seed = seed
        self._rows_of: dict[int, list[StartState]] = {stage: [] for stage in range(settings.n_stages)}
        for row in rows:
            if row["stage"] not in self._rows_of:
                raise UserError(
                    f"a start state has stage {row['stage']}, but curriculum.n_stages is {settings.n_stages}; "
                    "build the start states with the same curriculum"
                )
            self._rows_of[row["stage"]].append(row)
        empty = [stage for stage, found in self._rows_of.items() if not found]
        if empty:
            raise UserError(f"no start state has stage {empty[0]}; build the start states with the same curriculum")
        self._rows = len(rows)
        self._rounds = 0
        self._enter(settings.n_stages - 1)

    def _enter(self, stage: int) -> None:
        self.stage = stage
        self._rounds_in_stage = 0
        self._mastered = False
        self._passes = _Passes(self._rows_of[stage], self._seed, "curriculum", "stage", stage)

    def choose(self, round: int, n: int) -> list[StartState]:
        """The next `n` start states of the present stage; changes the stage first where that is due."""
        _check_round(round, self._rounds)
        limit = self.settings.rounds_per_stage
        if self.stage > 0 and (self._mastered or (limit is not None and self._rounds_in_stage >= limit)):
            self._enter(self.stage - 1)
        self._rounds += 1
        self._rounds_in_stage += 1
        return self._passes.take(n)

    def more(self, n: int) -> list[StartState]:
        """The next `n` start states of the present stage."""
        return self._passes.take(n)

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """Notes whether the round's success reached the threshold; unscorable samples do not count."""
        known = [float(value) for group in success_GS for value in group if value is not None]
        self._mastered = bool(known) and sum(known) / len(known) >= self.settings.success_threshold

    def state_dict(self) -> dict[str, Any]:
        """Stage, rounds in it, whether it is mastered, pass and place in it, and how many rows there are."""
        return {
            "kind": self.kind,
            "rounds": self._rounds,
            "rows": self._rows,
            "stage": self.stage,
            "rounds_in_stage": self._rounds_in_stage,
            "mastered": self._mastered,
            "pass": self._passes.number,
            "cursor": self._passes.cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""
        _check_state(state, self.kind, self._rows)
        self._rounds = state["rounds"]
        self._enter(state["stage"])
        self._rounds_in_stage, self._mastered = state["rounds_in_stage"], state["mastered"]
        self._passes.number, self._passes.cursor = state["pass"], state["cursor"]


def _check_round(round: int, expected: int) -> None:
    if round != expected:
        raise ValueError(
            f"round {round} was asked of a curriculum whose next round is {expected}; load its state first"
        )


def _check_state(state: dict[str, Any], kind: str, rows: int) -> None:
    found = state.get("kind"), state.get("rows")
    if found != (kind, rows):
        raise ValueError(
            f"the curriculum's state is of kind {found[0]!r} over {found[1]} start states, not {kind!r} over {rows}; "
            "start the cell anew"
        )
