"""Which start states a round uses, and in which order."""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from data.errors import UserError
from data.seeds import derive_seed
from data.settings import AdaptiveCurriculum, Curriculum, MixedCurriculum, StagedCurriculum

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

    `none` and `mixed` draw from all rows (R³: the union of all stages), `staged` from one stage after another,
    `adaptive` where the policy's own success says that there is most to learn.
    Raises UserError where `rows` is empty or, for `staged`, lacks a stage.
    """
    if not rows:
        raise UserError("there is no start state to choose from; the demonstrations have no training split")
    if isinstance(settings, StagedCurriculum):
        return StagedSampler(rows, seed, settings)
    if isinstance(settings, AdaptiveCurriculum):
        from data.adaptive import AdaptiveSampler

        return AdaptiveSampler(rows, seed, settings)
    return MixedSampler(rows, seed, settings.question_share if isinstance(settings, MixedCurriculum) else 0.0)


class Passes:
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

    @property
    def taken(self) -> int:
        """How many rows were taken so far."""
        return self.number * len(self.rows) + self.cursor

    def place(self) -> dict[str, int]:
        """Pass and place in it, as JSON."""
        return {"pass": self.number, "cursor": self.cursor}

    def go(self, place: dict[str, int]) -> None:
        """Continues from what `place` returned."""
        self.number, self.cursor = place["pass"], place["cursor"]

    def _permutation(self) -> list[int]:
        if self._order is None or self._order[0] != self.number:
            order = list(range(len(self.rows)))
            random.Random(derive_seed(*self.seed, self.number)).shuffle(order)
            self._order = (self.number, order)
        return self._order[1]


def due(share: float, taken: int, of: int) -> bool:
    """Whether the next of a stream must be of a kind that is to make up `share` of it: `taken` of `of` were so far."""
    return taken < share * (of + 1) - 1e-9


class MixedSampler:
    """All start states in shuffled passes: uniform over stages, every one once before any comes again.

    Where stage 0 is less than `question_share` of the rows, it has passes of its own and is drawn as often as that.
    """

    kind = "mixed"

    def __init__(self, rows: Sequence[StartState], seed: int, question_share: float = 0.0) -> None:
        questions = [row for row in rows if row["stage"] == 0]
        self._rows = len(rows)
        self._share = question_share
        self._questions: Passes | None = None
        if len(questions) < question_share * len(rows):
            rows = [row for row in rows if row["stage"] != 0]
            self._questions = Passes(questions, seed, "curriculum", "questions")
        self._passes = Passes(rows, seed, "curriculum")
        self._rounds = 0

    def choose(self, round: int, n: int) -> list[StartState]:
        """The next `n` start states of the passes."""
        check_round(round, self._rounds)
        self._rounds += 1
        return self.more(n)

    def more(self, n: int) -> list[StartState]:
        """The next `n` start states of the passes."""
        if self._questions is None:
            return self._passes.take(n)
        taken = []
        for _ in range(n):
            questions = self._questions.taken
            from_question = due(self._share, questions, questions + self._passes.taken)
            taken += (self._questions if from_question else self._passes).take(1)
        return taken

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """The order does not depend on outcomes."""

    def state_dict(self) -> dict[str, Any]:
        """Rounds done, pass and place in it, and how many rows there are."""
        state = {"kind": self.kind, "rounds": self._rounds, "rows": self._rows, **self._passes.place()}
        return state if self._questions is None else state | {"questions": self._questions.place()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""
        check_state(state, self.kind, self._rows)
        self._rounds = state["rounds"]
        self._passes.go(state)
        if self._questions is not None:
            self._questions.go(state["questions"])


class StagedSampler:
    """One stage after another, from the last start state back to the question, where it stays.

    The next stage begins when a round's share of correct rollouts reaches `success_threshold`, or after
    `rounds_per_stage` rounds (both our choice: the paper does not say how long its stages are). With `replay` a share
    of the start states comes from the stages that are over; they do not count for the threshold.
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
        self._passes = Passes(self._rows_of[stage], self._seed, "curriculum", "stage", stage)
        over = [row for later in range(stage + 1, self.settings.n_stages) for row in self._rows_of[later]]
        self._replayed = Passes(over, self._seed, "curriculum", "replay", stage)

    def choose(self, round: int, n: int) -> list[StartState]:
        """The next `n` start states of the present stage; changes the stage first where that is due."""
        check_round(round, self._rounds)
        limit = self.settings.rounds_per_stage
        if self.stage > 0 and (self._mastered or (limit is not None and self._rounds_in_stage >= limit)):
            self._enter(self.stage - 1)
        self._rounds += 1
        self._rounds_in_stage += 1
        replayed = round_half(self.settings.replay * n) if self._replayed.rows else 0
        return [*self._passes.take(n - replayed), *self._replayed.take(replayed)]

    def more(self, n: int) -> list[StartState]:
        """The next `n` start states of the present stage."""
        return self._passes.take(n)

    def observe(self, round: int, rows: Sequence[StartState], success_GS: Sequence[Sequence[float | None]]) -> None:
        """Notes whether the round's success reached the threshold; unscorable samples do not count."""
        groups = [group for row, group in zip(rows, success_GS, strict=True) if row["stage"] == self.stage]
        known = [float(value) for group in groups for value in group if value is not None]
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
            **self._passes.place(),
            "replayed": self._replayed.place(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it belongs to another curriculum or other rows."""
        check_state(state, self.kind, self._rows)
        self._rounds = state["rounds"]
        self._enter(state["stage"])
        self._rounds_in_stage, self._mastered = state["rounds_in_stage"], state["mastered"]
        self._passes.go(state)
        self._replayed.go(state["replayed"])


def round_half(value: float) -> int:
    """`value` rounded to a whole number, halves up."""
    return int(value + 0.5)


def check_round(round: int, expected: int) -> None:
    """Raises ValueError where a round is asked for out of turn."""
    if round != expected:
        raise ValueError(
            f"round {round} was asked of a curriculum whose next round is {expected}; load its state first"
        )


def check_state(state: dict[str, Any], kind: str, rows: int) -> None:
    """Raises ValueError where a state belongs to another curriculum or other rows."""
    found = state.get("kind"), state.get("rows")
    if found != (kind, rows):
        raise ValueError(
            f"the curriculum's state is of kind {found[0]!r} over {found[1]} start states, not {kind!r} over {rows}; "
            "start the cell anew"
        )
