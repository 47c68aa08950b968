"""Optimiser steps on a policy: old log-probabilities, micro-batches, the loss and its statistics.

Every step averages over totals of the whole step, so the cut into micro-batches, the padding and the number of
processes do not change the result: each process computes its share of the rows, and gradients and statistics are
summed. Rollouts whose advantage is 0 add nothing to the gradient unless a KL, entropy or value term is on: they are
counted in the totals and not computed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from models.critic import (
    ValueHead,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_losses,
    whitened,
)
from models.losses import (
    Statistics,
    TokenBatch,
    Totals,
    engine_weights,
    kl_estimate,
    make_loss,
    ratio_of,
    token_weights,
    weighted_sum,
)
from models.meta_actions.actions import ActionTerm
from models.packing import check_packable, packed_batches
from models.policy import Policy
from models.row_scores import Places, Scores, score
from models.scoring import TokenRow, micro_batches
from models.settings import GeneralisedAdvantage, RLSettings
from models.sharding import clip_gradients
from models.shared_prompts import group_batches
from models.training_rows import TrainRow, kl_in_loss
from models.world import World, shares, world

T = TypeVar("T")

STAND_IN = TokenRow([0], [0])
"""What a process computes that has no rows where others have."""


class Updater:
    """Takes the optimiser steps of one round on `policy`."""

    def __init__(self, policy: Policy, rl: RLSettings, rows: Sequence[TrainRow]):
        if rl.row_layout == "packed":
            check_packable(policy.network.config)
        self.policy = policy
        self.world: World = world()
        self.rl = rl
        self.rows = rows
        self.named = policy.trainable_parameters()
        groups: list[dict[str, Any]] = [{"params": [parameter for _, parameter in self.named]}]
        self.critic: ValueHead | None = None
        if isinstance(rl.advantage, GeneralisedAdvantage):
            self.critic = ValueHead(policy.network.config.get_text_config().hidden_size, policy.device)
            self.named = [*self.named, *((f"value_head.{name}", p) for name, p in self.critic.named_parameters())]
            rate = rl.advantage.value_learning_rate
            groups.append({"params": list(self.critic.parameters()), "lr": rl.learning_rate if rate is None else rate})
        self.optimizer = torch.optim.AdamW(groups, lr=rl.learning_rate, weight_decay=rl.weight_decay)
        self.loss = make_loss(rl.loss)
        self.every_row = kl_in_loss(rl) or rl.entropy_coefficient > 0 or self.critic is not None
        self.actions: ActionTerm | None = None
        """The term of the action distribution of meta-actions, where there is one."""
        self.advantages = [torch.full((len(row.tokens.completion_ids),), row.advantage or 0.0) for row in rows]
        """[C] of each row; a critic puts its own in (`ask_critic`)."""
        self.old_values: dict[int, torch.Tensor] = {}
        self.returns: dict[int, torch.Tensor] = {}
        self.old_logprobs: dict[int, torch.Tensor] = {}
        """Row → log-probabilities [C] under the policy before the round's first step."""
        self.moved = False
        """Whether a step was taken, so that the policy is no longer the one that sampled."""
        self.budget = rl.tokens_per_micro_batch
        self.out_of_memory = False

    def trained(self, positions: Sequence[int]) -> list[int]:
        """Those of `positions` that add to the gradient."""
        every = self.every_row or self.actions is not None
        return [i for i in positions if every or self.advantages[i].any()]

    @torch.no_grad()
    def remember_old(self, positions: Sequence[int]) -> None:
        """Computes the log-probabilities of rows before the first step. Call before any step."""
        unknown = [i for i in positions if i not in self.old_logprobs]
        known = dict(self.old_logprobs)

        def compute() -> None:
            self.old_logprobs = dict(known)
            for batch in self.equally_many(self.micro_batches(self.share(unknown))):
                scores = self.score(batch)
                for i, logprobs_T in zip(batch, scores.logprobs_BT.cpu()):
                    self.old_logprobs[i] = logprobs_T[: len(self.rows[i].tokens.completion_ids)]

        self.within_memory(compute)
        self.exchange(self.old_logprobs)

    def share(self, positions: Sequence[int]) -> list[int]:
        """Those of `positions` that this process computes."""
        if self.world.size == 1:
            return list(positions)
        rows = [self.rows[i] for i in positions]
        costs = [len(row.tokens.prompt_ids) + len(row.tokens.completion_ids) for row in rows]
        return [positions[index] for index in shares(costs, [r.group for r in rows], self.world.size)[self.world.rank]]

    def exchange(self, *found: dict[int, torch.Tensor]) -> None:
        """Adds to each dictionary (row → tensor) what the other processes have in theirs."""
        for others in self.world.gather(found) if self.world.size > 1 else []:
            for mine, theirs in zip(found, others, strict=True):
                mine |= theirs

    def equally_many(self, batches: list[list[int]]) -> list[list[int]]:
        """`batches`, with empty ones up to the largest number of any process where parameters are sharded.

        Every pass over a sharded policy is a common act: a process with less to do goes through the motions.
        """
        if not self.world.sharded:
            return batches
        return batches + [[]] * (max(self.world.gather(len(batches))) - len(batches))

    def within_memory(self, compute: Callable[[], T]) -> T:
        """`compute()`; where a process runs out of memory all halve their token budget, once in an update, and redo it.

        Sharded processes cannot agree on it: the others wait in the middle of a pass. There the error ends the step.
        """
        found, failed = [], False
        try:
            found.append(compute())
        except torch.OutOfMemoryError:
            if self.out_of_memory or self.world.sharded:
                raise
            failed = True
        # Outside of the except clause, whose traceback holds the tensors of the failed try.
        if not self.world.any(failed):
            return found[0]
        if self.out_of_memory:
            raise torch.OutOfMemoryError("another process ran out of memory again with half the token budget")
        self.out_of_memory = True
        self.budget = max(1, self.budget // 2)
        self.optimizer.zero_grad(set_to_none=True)
        found.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.within_memory(compute)

    def micro_batches(self, positions: Sequence[int]) -> list[list[int]]:
        """`positions` in parts that are computed together."""
        rows = [self.rows[i].tokens for i in positions]
        if self.layout == "shared":
            batches = group_batches(rows, self.budget)
        else:
            lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
            batches = (packed_batches if self.layout == "packed" else micro_batches)(lengths, self.budget)
        return [[positions[index] for index in batch] for batch in batches]

    @property
    def layout(self) -> str:
        """`rl.row_layout`; layers that recompute their activations keep no keys to share, and sharded ones must be
        asked as often by every process."""
        whole = self.rl.gradient_checkpointing or self.world.sharded
        return "padded" if whole and self.rl.row_layout == "shared" else self.rl.row_layout

    def score(self, positions: Sequence[int], entropy_gradient: bool = False) -> Scores:
        """`score` of the rows at `positions`; of a stand-in where there are none, so that a pass takes place."""
        rows = [self.rows[i].tokens for i in positions] or [STAND_IN]
        rl = self.rl
        places = None
        if self.actions is not None and torch.is_grad_enabled():
            places = Places([self.rows[i].boundaries.columns_K for i in positions], self.actions.tags.ids)
        with self.precision():
            return score(
                self.policy,
                rows,
                rl.temperature,
                entropy_gradient,
                self.critic,
                self.layout,
                rl.vocabulary_chunk,
                places,
            )

    def precision(self) -> Any:
        """The context of a forward pass: bfloat16 products where `compute.mixed_precision` says so.

        Sharded parameters are gathered in bfloat16 already (models.sharding).
        """
        if self.policy.compute.mixed_precision == "no" or self.world.sharded:
            return nullcontext()
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def ask_critic(self) -> dict[str, float]:
        """Old log-probabilities, values, advantages and returns of every row; returns the critic's explained variance.

        Call before any step, where there is a critic.
        """
        settings = self.rl.advantage
        advantages: dict[int, torch.Tensor] = {}
        self.within_memory(lambda: self._ask_critic(advantages))
        self.exchange(self.old_logprobs, self.old_values, advantages, self.returns)
        self.advantages = [advantages[i] for i in range(len(self.rows))]
        if not self.rows:
            return {}
        if settings.whiten:
            self.advantages = whitened(self.advantages)
        order = range(len(self.rows))
        values, returns = (torch.cat([found[i] for i in order]) for found in (self.old_values, self.returns))
        return {
            "explained_variance": explained_variance(values, returns),
            "value_mean": values.double().mean().item(),
            "return_mean": returns.double().mean().item(),
        }

    def _ask_critic(self, advantages: dict[int, torch.Tensor]) -> None:
        settings = self.rl.advantage
        for batch in self.equally_many(self.micro_batches(self.share(range(len(self.rows))))):
            rows = [self.rows[i] for i in batch]
            scores = self.score(batch)
            if not batch:
                continue
            kl = [row.reference_logprobs_C if self.rl.kl.place == "reward" else None for row in rows]
            rewards = [token_rewards(r.reward, r.sampling_logprobs_C, k, self.rl.kl) for r, k in zip(rows, kl)]
            advantages_BT, returns_BT = generalised_advantages(
                self._padded(rewards), scores.values_BT, scores.mask_BT, settings.gamma, settings.lam
            )
            for b, i in enumerate(batch):
                length = len(self.rows[i].tokens.completion_ids)
                self.old_logprobs[i] = scores.logprobs_BT[b, :length].cpu()
                self.old_values[i] = scores.values_BT[b, :length].cpu()
                advantages[i] = advantages_BT[b, :length].cpu()
                self.returns[i] = returns_BT[b, :length].cpu()

    def step(self, positions: Sequence[int]) -> dict[str, float]:
        """One optimiser step on the rows at `positions`; returns its metrics. Raises FloatingPointError for NaN."""
        totals = Totals(
            tokens=sum(len(self.rows[i].tokens.completion_ids) for i in positions),
            rows=len(positions),
            max_new_tokens=self.rl.max_new_tokens,
            choices=sum(len(self.rows[i].boundaries.columns_K) for i in positions) if self.actions else 0,
        )
        known = dict(self.old_logprobs)

        def compute() -> tuple[float, Statistics]:
            self.old_logprobs = dict(known)
            return self.gradient(self.share(self.trained(positions)), totals)

        loss, statistics = self.combined(*self.within_memory(compute))
        metrics = {"loss": loss} | statistics.values()
        norm = clip_gradients([p for _, p in self.named], self.rl.max_gradient_norm)
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}: nothing is updated; lower rl.learning_rate or use model.dtype float32"
            )
        self.optimizer.step()
        self.moved = True
        if self.actions is not None and "action_entropy" in metrics:
            metrics["action_entropy_coefficient"] = self.actions.applied
            self.actions.adapt(metrics["action_entropy"])
        return metrics | {"gradient_norm": norm, "trained_tokens": float(totals.tokens)}

    def gradient(self, positions: Sequence[int], totals: Totals) -> tuple[float, Statistics]:
        """Accumulates the gradient over micro-batches; returns loss and statistics of the rows at `positions`."""
        self.optimizer.zero_grad(set_to_none=True)
        statistics = Statistics()
        loss_sum = 0.0
        for batch in self.equally_many(self.micro_batches(positions)):
            loss = self.micro_batch_loss(batch, totals, statistics) if batch else self.stand_in_loss()
            # FSDP2 averages over the ranks what is to be summed.
            (loss * self.world.size if self.world.sharded else loss).backward()
            loss_sum += loss.item()
        return loss_sum, statistics

    def stand_in_loss(self) -> torch.Tensor:
        """0, with a gradient of 0 for everything."""
        scores = self.score([])
        total = scores.logprobs_BT.sum()
        return 0.0 * (total if scores.values_BT is None else total + scores.values_BT.sum())

    def combined(self, loss: float, statistics: Statistics) -> tuple[float, Statistics]:
        """Sums loss, statistics and gradients over the processes, and exchanges what they learnt."""
        if self.world.size == 1:
            return loss, statistics
        self.exchange(self.old_logprobs)
        parts = self.world.gather((loss, statistics))
        apart = [p for _, p in self.named if not (self.world.sharded and isinstance(p, DTensor))]
        self.world.add_up(apart)
        if self.world.sharded:
            for parameter in apart:
                if parameter.grad is not None:
                    parameter.grad /= self.world.size
        return sum(part for part, _ in parts), Statistics.total([part for _, part in parts])

    def micro_batch_loss(self, positions: Sequence[int], totals: Totals, statistics: Statistics) -> torch.Tensor:
        """The part of the step's loss that the rows at `positions` make up, with gradient."""
        rows = [self.rows[i] for i in positions]
        scores = self.score(positions, self.rl.entropy_coefficient > 0)
        logprobs_BT, entropy_BT, mask_BT = scores.logprobs_BT, scores.entropy_BT, scores.mask_BT
        for i, logprobs_T in zip(positions, logprobs_BT.detach().cpu()):
            if i in self.old_logprobs:
                continue
            # Rows of the first step are scored by the unchanged policy right here; no pass of their own is needed.
            if self.moved:
                raise RuntimeError(f"row {i} has no old log-probabilities; call remember_old before the first step")
            self.old_logprobs[i] = logprobs_T[: len(self.rows[i].tokens.completion_ids)]
        old_BT = self._padded([self.old_logprobs[i] for i in positions])
        batch = TokenBatch(logprobs_BT, old_BT, self._padded([self.advantages[i] for i in positions]), mask_BT)
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
            if self.rl.kl.importance_weighted:
                kl_BT = kl_BT * ratio_of(batch.log_ratio())
            loss = loss + self.rl.kl.coefficient * weighted_sum(kl_BT, weights_BT, mask_BT)
        if self.rl.entropy_coefficient:
            loss = loss - self.rl.entropy_coefficient * weighted_sum(entropy_BT, weights_BT, mask_BT)
        if self.critic is not None:
            loss = loss + self._value_loss(positions, scores, weights_BT, statistics)
        if self.actions is not None and totals.choices:
            loss = loss + self._action_loss(rows, scores, totals, statistics)
        return loss

    def _action_loss(
        self, rows: Sequence[TrainRow], scores: Scores, totals: Totals, statistics: Statistics
    ) -> torch.Tensor:
        """The term of the action distribution; its figures are means over all choices of the step."""
        device = scores.actions_KA.device
        legal_K4 = torch.cat([row.boundaries.legal_K4 for row in rows]).to(device)
        references = [row.boundaries.reference_K4 for row in rows if row.boundaries.reference_K4 is not None]
        reference_K4 = torch.cat(references).to(device) if references else None
        loss, entropy, kl = self.actions.loss(scores.actions_KA, legal_K4, reference_K4, totals.choices)
        statistics.add_share("action_entropy", entropy.item() / totals.choices)
        if references:
            statistics.add_share("action_kl_reference", kl.item() / totals.choices)
        return loss

    def _value_loss(
        self, positions: Sequence[int], scores: Scores, weights_BT: torch.Tensor, statistics: Statistics
    ) -> torch.Tensor:
        old_BT = self._padded([self.old_values[i] for i in positions])
        returns_BT = self._padded([self.returns[i] for i in positions])
        loss_BT, clipped_BT = value_losses(scores.values_BT, old_BT, returns_BT, scores.mask_BT, self.rl.advantage)
        statistics.add_tokens("value_loss", loss_BT.detach(), scores.mask_BT)
        statistics.add_tokens("value_clip_share", clipped_BT, scores.mask_BT)
        return self.rl.advantage.value_coefficient * weighted_sum(loss_BT, weights_BT, scores.mask_BT)

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
