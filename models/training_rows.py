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

    Raises UserError where a KL term needs reference log-probabilities that the table lacks, or an advantage is missing.
    """
    result = []
    for number, row in enumerate(rows):
        if not row["completion_ids"] or row["stop_reason"] == "error":
            continue
        if row["stop_reason"] == "length" and not rl.train_truncated:
            continue
        if rl.advantage.kind == "gae":
            if row["reward"] is None:
                continue
        elif row["advantage"] is None or not np.isfinite(row["advantage"]):
            raise UserError(f"rollouts row {number}: the advantage is {row['advantage']}; make the rollouts again")
        reference = row["reference_logprobs"]
        if rl.kl.coefficient and reference is None:
            raise UserError(
                f"rollouts row {number} has no reference_logprobs, but rl.kl is on; make the rollouts again with rl.kl"
            )
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
