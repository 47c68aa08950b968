"""What an update trains on: the rows of rollouts.parquet as tensors, and which rows each optimiser step takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.errors import UserError
from data.seeds import derive_seed
from data.settings import MetaActions, PlainReasoning, Reasoning
from models.advantages import members
from models.meta_actions.actions import RowBoundaries
from models.meta_actions.rollouts import row_boundaries
from models.scoring import TokenRow
from models.settings import RLSettings

LARGEST_WEIGHT = 1e15
"""Largest reward or advantage that is trained with: squares of a gradient of this size still add up in float32."""


@dataclass(frozen=True)
class TrainRow:
    """One rollout as the trainer sees it; log-probabilities are [C] tensors over the completion."""

    tokens: TokenRow
    group: int
    reward: float | None
    advantage: float | None
    """None where a value head makes it."""
    sampling_logprobs_C: torch.Tensor
    reference_logprobs_C: torch.Tensor | None
    boundaries: RowBoundaries | None = None
    """Choices of meta-actions that the loss looks at; None: it looks at none."""


def train_rows(
    rows: Sequence[dict[str, Any]],
    rl: RLSettings,
    reasoning: Reasoning = PlainReasoning(),  # noqa: B008 - frozen settings
) -> list[TrainRow]:
    """The rollouts that may be trained on: those with a completion, and without truncated ones where so set.

    Raises UserError where one of them is not whole: see `check_row`.
    """
    result = []
    for number, row in enumerate(rows):
        if not row["completion_ids"] or row["stop_reason"] == "error":
            continue
        if row["stop_reason"] == "length" and not rl.train_truncated:
            continue
        if rl.advantage.kind == "gae" and row["reward"] is None:
            continue
        check_row(row, number, rl)
        reference = row["reference_logprobs"]
        result.append(
            TrainRow(
                TokenRow(row["prompt_ids"], row["completion_ids"]),
                row["group"],
                row["reward"],
                row["advantage"],
                torch.tensor(row["sampling_logprobs"]),
                torch.tensor(reference) if rl.kl.coefficient else None,
                row_boundaries(row, reasoning, number) if isinstance(reasoning, MetaActions) else None,
            )
        )
    return result


def check_row(row: dict[str, Any], number: int, rl: RLSettings) -> None:
    """Raises UserError where a rollout is not whole: the loss would be NaN, or be made from other tokens' numbers.

    Engines write no such rows; a table made elsewhere may hold them. There are as many log-probabilities as tokens, all
    finite, and the gradient's weight (the advantage, or the reward with a critic) is not beyond `LARGEST_WEIGHT`.
    """
    again = "make the rollouts again"
    if not row["prompt_ids"]:
        raise UserError(f"rollouts row {number} has no prompt_ids: nothing predicts its first token; {again}")
    weight = "reward" if rl.advantage.kind == "gae" else "advantage"
    if row[weight] is None or not abs(row[weight]) <= LARGEST_WEIGHT:
        raise UserError(f"rollouts row {number}: the {weight} is {row[weight]}; {again}")
    if rl.kl.coefficient and row["reference_logprobs"] is None:
        raise UserError(f"rollouts row {number} has no reference_logprobs, but rl.kl is on; {again} with rl.kl")
    for name in ("sampling_logprobs", *(("reference_logprobs",) if rl.kl.coefficient else ())):
        values, tokens = row[name] or [], len(row["completion_ids"])
        if len(values) != tokens:
            raise UserError(f"rollouts row {number} has {len(values)} {name} for {tokens} completion_ids; {again}")
        if not np.isfinite(values).all():
            raise UserError(f"rollouts row {number}: {name} are not all finite; {again}")


def check_fits(rows: Sequence[TrainRow], vocabulary: int, context: int) -> None:
    """Raises UserError for rows of another model: ids beyond its vocabulary, or more tokens than a row may have."""
    for row in rows:
        ids = [*row.tokens.prompt_ids, *row.tokens.completion_ids]
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise UserError(
                f"rollouts group {row.group}: token ids from {min(ids)} to {max(ids)}, but the model has {vocabulary}; "
                "make the rollouts again with this model"
            )
        if len(ids) > context:
            raise UserError(
                f"rollouts group {row.group}: a row of {len(ids)} tokens is longer than the model's {context}; "
                "make the rollouts again with this model"
            )


def kl_in_loss(rl: RLSettings) -> bool:
    """Whether the loss has a KL term."""
    return rl.kl.coefficient > 0 and rl.kl.place == "loss"


def plan_steps(groups_N: Sequence[int], epochs: int, steps: int, seed: int) -> list[list[int]]:
    """Positions of the rows of each optimiser step: in every epoch the groups are shuffled and divided evenly.

    Groups stay whole. Where a round has fewer groups than planned, steps differ by one group at most, none is empty.
    """
    groups = members(groups_N)
    names = sorted(groups)
    plan = []
    for epoch in range(epochs):
        order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(len(names))
        for part in np.array_split(order, steps):
            if len(part):
                plan.append([position for index in part for position in groups[names[index]]])
    return plan
