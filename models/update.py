"""One round's policy update: rollouts.parquet in, weights and trainer state out.

The round's groups are shuffled and divided evenly over the optimiser steps of an epoch. Every step averages over totals
of the whole step, so neither the cut into micro-batches nor the padding changes the result. Rollouts whose advantage is
0 add nothing to the gradient unless a KL or entropy term is on: they are counted in the totals and not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Report
from data.seeds import derive_seed
from models.advantages import members
from models.losses import (
    Statistics,
    TokenBatch,
    Totals,
    engine_weights,
    kl_estimate,
    make_loss,
    token_weights,
    weighted_sum,
)
from models.policy import Policy
from models.requests import UpdateRequest
from models.scoring import TokenRow, micro_batches
from models.settings import RLSettings
from models.trainer_state import Counters, load_trainer_state, save_trainer_state, seed_generators


@dataclass(frozen=True)
class TrainRow:
    """One rollout as the trainer sees it; log-probabilities are [C] tensors over the completion."""

    tokens: TokenRow
    group: int
    advantage: float
    sampling_logprobs_C: torch.Tensor
    reference_logprobs_C: torch.Tensor | None

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.tokens.prompt_ids) + len(self.tokens.completion_ids)


def train_rows(rows: Sequence[dict[str, Any]], rl: RLSettings) -> list[TrainRow]:
    """The rollouts that may be trained on: those with a completion, and without truncated ones where so set.

    Raises UserError where a KL term needs reference log-probabilities that the table lacks, or an advantage is missing.
    """
    result = []
    for number, row in enumerate(rows):
        if not row["completion_ids"] or row["stop_reason"] == "error":
            continue
        if row["stop_reason"] == "length" and not rl.train_truncated:
            continue
        if row["advantage"] is None or not np.isfinite(row["advantage"]):
            raise UserError(f"rollouts row {number}: the advantage is {row['advantage']}; make the rollouts again")
        reference = row["reference_logprobs"]
        if kl_in_loss(rl) and reference is None:
            raise UserError(
                f"rollouts row {number} has no reference_logprobs, but rl.kl is on; make the rollouts again with rl.kl"
            )
        result.append(
            TrainRow(
                TokenRow(row["prompt_ids"], row["completion_ids"]),
                row["group"],
                row["advantage"],
                torch.tensor(row["sampling_logprobs"]),
                torch.tensor(reference) if kl_in_loss(rl) else None,
            )
        )
    return result


def kl_in_loss(rl: RLSettings) -> bool:
    """Whether the loss has a KL term."""
    return rl.kl.coefficient > 0 and rl.kl.place == "loss"


def plan_steps(groups_N: Sequence[int], epochs: int, steps: int, seed: int) -> list[list[int]]:
    """Positions of the rows of each optimiser step: in every epoch the groups are shuffled and divided evenly.

    Groups stay whole. Where a round has fewer groups than planned, steps differ by at most one group.
    """
    groups = members(groups_N)
    names = sorted(groups)
    plan = []
    for epoch in range(epochs):
        order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(len(names))
        for part in np.array_split(order, steps):
            plan.append([position for index in part for position in groups[names[index]]])
    return plan


class Updater:
    """Takes the optimiser steps of one round on `policy`."""

    def __init__(self, policy: Policy, rl: RLSettings, rows: Sequence[TrainRow]):
        self.policy = policy
        self.rl = rl
        self.rows = rows
        self.named = policy.trainable_parameters()
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.named], lr=rl.learning_rate, weight_decay=rl.weight_decay
        )
        self.loss = make_loss(rl.loss)
        self.every_row = kl_in_loss(rl) or rl.entropy_coefficient > 0
        self.old_logprobs: dict[int, torch.Tensor] = {}
        """Row → log-probabilities [C] under the policy before the round's first step."""
        self.budget = rl.tokens_per_micro_batch
        self.out_of_memory = False

    def trained(self, positions: Sequence[int]) -> list[int]:
        """Those of `positions` that add to the gradient."""
        return [i for i in positions if self.every_row or self.rows[i].advantage != 0]

    def remember_old(self, positions: Sequence[int]) -> None:
        """Computes the log-probabilities of rows before the first step. Call before any step."""
        wanted = [i for i in positions if i not in self.old_logprobs]
        with torch.no_grad():
            found = self.policy.completion_logprobs(
                [self.rows[i].tokens for i in wanted], self.rl.temperature, self.budget
            )
        self.old_logprobs |= {i: logprobs.cpu() for i, logprobs in zip(wanted, found)}

    def step(self, positions: Sequence[int]) -> dict[str, float]:
        """One optimiser step on the rows at `positions`; returns its metrics. Raises FloatingPointError for NaN."""
        totals = Totals(
            tokens=sum(len(self.rows[i].tokens.completion_ids) for i in positions),
            rows=len(positions),
            max_new_tokens=self.rl.max_new_tokens,
        )
        known = dict(self.old_logprobs)
        try:
            metrics = self.gradient(self.trained(positions), totals)
        except torch.OutOfMemoryError:
            if self.out_of_memory:
                raise
            self.out_of_memory = True
            self.budget = max(1, self.budget // 2)
            self.old_logprobs = known
            metrics = self.gradient(self.trained(positions), totals)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.named], self.rl.max_gradient_norm).item()
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}: nothing is updated; lower rl.learning_rate or use model.dtype float32"
            )
        self.optimizer.step()
        return metrics | {"gradient_norm": norm, "trained_tokens": float(totals.tokens)}

    def gradient(self, positions: Sequence[int], totals: Totals) -> dict[str, float]:
        """Accumulates the gradient over micro-batches; returns loss and statistics of the trained rows."""
        self.optimizer.zero_grad(set_to_none=True)
        statistics = Statistics()
        loss_sum = 0.0
        for batch in micro_batches([self.rows[i].length for i in positions], self.budget):
            loss = self.micro_batch_loss([positions[i] for i in batch], totals, statistics)
            loss.backward()
            loss_sum += loss.item()
        return {"loss": loss_sum} | statistics.values()

    def micro_batch_loss(self, positions: Sequence[int], totals: Totals, statistics: Statistics) -> torch.Tensor:
        """The part of the step's loss that the rows at `positions` make up, with gradient."""
        rows = [self.rows[i] for i in positions]
        logprobs_BT, entropy_BT, mask_BT = score(
            self.policy, [row.tokens for row in rows], self.rl.temperature, self.rl.entropy_coefficient > 0
        )
        for i, logprobs_T in zip(positions, logprobs_BT.detach().cpu()):
            # Rows of the first step are scored by the unchanged policy right here; no pass of their own is needed.
            self.old_logprobs.setdefault(i, logprobs_T[: len(self.rows[i].tokens.completion_ids)])
        old_BT = self._padded([self.old_logprobs[i] for i in positions])
        advantages_B1 = torch.tensor([[row.advantage] for row in rows], dtype=torch.float32, device=mask_BT.device)
        batch = TokenBatch(logprobs_BT, old_BT, advantages_B1.expand(mask_BT.shape), mask_BT)
        losses = self.loss(batch)
        statistics.add(batch, losses, entropy_BT.detach())
        weights_BT = token_weights(mask_BT, self.rl.loss.aggregation, totals)
        loss_BT = losses.loss_BT
        if self.rl.engine_ratio_cap is not None:
            sampling_BT = self._padded([row.sampling_logprobs_C for row in rows])
            importance_BT, truncated_BT = engine_weights(old_BT, sampling_BT, mask_BT, self.rl.engine_ratio_cap)
            statistics.add_tokens("engine_ratio_truncated_share", truncated_BT, mask_BT)
            loss_BT = loss_BT * importance_BT
        loss = weighted_sum(loss_BT, weights_BT, mask_BT)
        if kl_in_loss(self.rl):
            reference_BT = self._padded([row.reference_logprobs_C for row in rows])
            kl_BT = kl_estimate(logprobs_BT, reference_BT, self.rl.kl.estimator)
            statistics.add_tokens("kl_reference", kl_BT.detach(), mask_BT)
            loss = loss + self.rl.kl.coefficient * weighted_sum(kl_BT, weights_BT, mask_BT)
        if self.rl.entropy_coefficient:
            loss = loss - self.rl.entropy_coefficient * weighted_sum(entropy_BT, weights_BT, mask_BT)
        return loss

    def _padded(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(list(values), batch_first=True).to(self.policy.device)

    def engine_difference(self) -> dict[str, float]:
        """|log π_trainer − log π_engine| over the trained tokens, mean and largest (nats)."""
        if not self.old_logprobs:
            return {}
        differences = torch.cat(
            [(old - self.rows[i].sampling_logprobs_C).abs() for i, old in self.old_logprobs.items()]
        )
        return {
            "engine_logprob_difference_mean": differences.double().mean().item(),
            "engine_logprob_difference_max": differences.max().item(),
        }


def score(
    policy: Policy, rows: Sequence[TokenRow], temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies (nats) and mask, each [B, T] over the completions, padded on the right with 0.

    Of the tempered distribution; T is the longest completion. The entropy carries a gradient only where asked for.
    """
    logits_NV, targets_N = policy.completion_logits(rows, temperature)
    log_normaliser_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - log_normaliser_N
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = log_normaliser_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
    lengths_B = torch.tensor([len(row.completion_ids) for row in rows], device=logprobs_N.device)
    mask_BT = torch.arange(int(lengths_B.max()), device=lengths_B.device) < lengths_B[:, None]
    return _spread(logprobs_N, mask_BT), _spread(entropy_N, mask_BT), mask_BT


def _spread(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """`values_N` laid row by row into the true slots of `mask_BT`."""
    values_BT = values_N.new_zeros(mask_BT.shape)
    values_BT[mask_BT] = values_N
    return values_BT


def recompute_activations(policy: Policy) -> None:
    """Turns gradient checkpointing on; dropout stays off, since only the layers' own flags say "training"."""
    policy.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in policy.network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def update(request: UpdateRequest, out: Path, report: Report) -> dict[str, Any]:
    """Trains the policy on a round's rollouts; writes weights/, trainer_state/ and metrics.parquet into `out`.

    Returns the counts of steps taken and skipped. Raises UserError for rollouts that do not fit the settings, for a
    policy without trainable parameters and for a trainer state of other parameters.
    """
    rl = request.rl
    rows = train_rows(read_rows(request.rollouts, "rollouts"), rl)
    policy = Policy.load(request.policy, request.parameters, request.compute, trainable=True, seed=request.seed)
    if rl.gradient_checkpointing:
        recompute_activations(policy)
    updater = Updater(policy, rl, rows)
    if request.trainer_state is None:
        counters = Counters()
        seed_generators(derive_seed(request.seed, "update"))
    else:
        counters = load_trainer_state(request.trainer_state, updater.optimizer, updater.named)
    seed = derive_seed(request.seed, "update", request.round)
    plan = plan_steps([row.group for row in rows], rl.epochs, rl.steps, seed)
    metrics = take_steps(updater, plan, counters, report)
    policy.save(out / "weights")
    save_trainer_state(out / "trainer_state", updater.optimizer, updater.named, counters)
    shared = {"round": request.round, "generated_tokens_so_far": request.generated_tokens_so_far}
    write_table(out / "metrics.parquet", "metrics", [metric | shared for metric in metrics])
    return {"optimizer_steps": counters.optimizer_steps, "skipped_steps": counters.skipped_steps}


def take_steps(
    updater: Updater, plan: Sequence[Sequence[int]], counters: Counters, report: Report
) -> list[dict[str, Any]]:
    """Takes the planned steps and returns rows (step, name, value) of the metrics table."""
    busy = [positions for positions in plan if updater.trained(positions)]
    if busy:
        updater.remember_old(sorted({i for positions in busy[1:] for i in updater.trained(positions)} - {*busy[0]}))
    metrics = []
    for number, positions in enumerate(plan):
        if not updater.trained(positions):
            counters.skipped_steps += 1
            report.log("every advantage of this optimiser step is 0: it is skipped")
            continue
        memory_before = updater.out_of_memory
        values = updater.step(positions)
        if updater.out_of_memory and not memory_before:
            report.log(f"out of memory: micro-batches hold at most {updater.budget} tokens from here on")
        counters.optimizer_steps += 1
        metrics += [{"step": counters.optimizer_steps, "name": name, "value": value} for name, value in values.items()]
        report.progress(number + 1, len(plan), "optimiser steps")
    whole = updater.engine_difference() | {
        "skipped_steps": float(sum(not updater.trained(positions) for positions in plan)),
        "learning_rate": updater.rl.learning_rate,
    }
    return metrics + [{"step": counters.optimizer_steps, "name": name, "value": value} for name, value in whole.items()]
