"""Policy losses as pure functions of tensors: one small class per loss, one weight a token for the aggregation.

Shapes: B rows (rollouts), T completion tokens, padded on the right; `mask_BT` is true on trained tokens and comes from
lengths. What lies in masked slots is never read: inputs go through `torch.where`, so NaN there harms neither the loss
nor its gradient (multiplying by 0 would). A loss is Σ weight · token loss, and the weights of one optimiser step come
from totals over the whole step, so the result does not depend on how its rows are cut into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from models.settings import ClippedImportance, ClippedRatio, Loss, SequenceRatio

LARGEST_LOG_RATIO = 20.0
"""Ratios are counted as e²⁰ from there on (our choice): far beyond any bound, and squares of it fit float32."""
RATIO_ROUNDING = 1e-5
"""How far a ratio of 1 may lie from 1 where both policies are the same (the bound of the invariants)."""


@dataclass(frozen=True)
class TokenBatch:
    """What a policy loss needs of a micro-batch. All [B, T]; log-probabilities are of the tempered distribution."""

    logprobs_BT: Tensor
    """Of the policy in training, with gradient."""
    old_logprobs_BT: Tensor
    """Of the policy before this round's first step, as the trainer computes it."""
    advantages_BT: Tensor
    mask_BT: Tensor

    def log_ratio(self) -> Tensor:
        """log π/π_old [B, T]; 0 in masked slots."""
        return where(self.mask_BT, self.logprobs_BT) - where(self.mask_BT, self.old_logprobs_BT)

    def advantages(self) -> Tensor:
        """Advantages [B, T]; 0 in masked slots."""
        return where(self.mask_BT, self.advantages_BT)


@dataclass(frozen=True)
class TokenLosses:
    """A policy loss before aggregation. All [B, T]; 0 or false in masked slots."""

    loss_BT: Tensor
    clipped_low_BT: Tensor
    """Tokens whose gradient is cut because the ratio fell below its lower bound (negative advantage)."""
    clipped_high_BT: Tensor
    """Tokens whose gradient is cut because the ratio rose above its upper bound (positive advantage)."""


class PolicyLoss(Protocol):
    """Token losses of a micro-batch, to be minimised."""

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """Losses and clip flags, token by token."""


def where(mask_BT: Tensor, values_BT: Tensor) -> Tensor:
    """`values_BT` on the mask and 0 elsewhere, whatever stands there."""
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio, without gradient above `LARGEST_LOG_RATIO`: never infinite, so that ∞ · 0 makes no NaN."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def beyond(ratio_BT: Tensor, cap: float) -> Tensor:
    """Which ratios a cap cuts by more than rounding, for the statistics: at a cap of 1, none where policies agree."""
    return ratio_BT > cap * (1 + RATIO_ROUNDING)


def _clipped_surrogate(ratio_BT: Tensor, batch: TokenBatch, low: float, high: float) -> TokenLosses:
    """−min(r·A, clip(r, 1−low, 1+high)·A) (Schulman et al. 2017, equation 7)."""
    advantages_BT = batch.advantages()
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1 - low, 1 + high) * advantages_BT)
    return TokenLosses(
        where(batch.mask_BT, loss_BT),
        (ratio_BT < 1 - low) & (advantages_BT < 0) & batch.mask_BT,
        (ratio_BT > 1 + high) & (advantages_BT > 0) & batch.mask_BT,
    )


class ClippedRatioLoss:
    """PPO's clipped token ratio; `dual_clip` c bounds the loss at −c·A where A < 0 (Ye et al. 2020, equation 5)."""

    def __init__(self, settings: ClippedRatio):
        self.settings = settings

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """See `PolicyLoss`."""
        losses = _clipped_surrogate(ratio_of(batch.log_ratio()), batch, self.settings.clip_low, self.settings.clip_high)
        if self.settings.dual_clip is None:
            return losses
        advantages_BT = batch.advantages()
        bound_BT = -self.settings.dual_clip * advantages_BT
        loss_BT = torch.where(advantages_BT < 0, torch.minimum(losses.loss_BT, bound_BT), losses.loss_BT)
        return TokenLosses(loss_BT, losses.clipped_low_BT, losses.clipped_high_BT)


class SequenceRatioLoss:
    """GSPO (Zheng et al. 2025, equations 5 and 7): the row's ratio exp(mean of log ratios) stands at every token.

    Without `length_normalised` it is exp(sum of log ratios), the ratio of the row as one action (Ahmadian et al. 2024).
    """

    def __init__(self, settings: SequenceRatio):
        self.settings = settings

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """See `PolicyLoss`."""
        ratio_BT = self.ratio(batch)
        return _clipped_surrogate(ratio_BT, batch, self.settings.clip_low, self.settings.clip_high)

    def ratio(self, batch: TokenBatch) -> Tensor:
        """The row's ratio, expanded to [B, T]."""
        log_ratio_BT = batch.log_ratio()
        total_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
        if self.settings.length_normalised:
            total_B1 = total_B1 / batch.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return ratio_of(total_B1).expand_as(log_ratio_BT)


class ClippedImportanceLoss:
    """CISPO (MiniMax 2025, equation 4): −sg(min(r, cap))·A·log π; every token keeps its gradient."""

    def __init__(self, settings: ClippedImportance):
        self.settings = settings

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """See `PolicyLoss`. `clipped_high_BT` marks the capped tokens, whose gradient is bounded, not cut."""
        ratio_BT = ratio_of(batch.log_ratio().detach())
        weight_BT = ratio_BT.clamp(max=self.settings.cap)
        loss_BT = -weight_BT * batch.advantages() * where(batch.mask_BT, batch.logprobs_BT)
        capped_BT = beyond(ratio_BT, self.settings.cap) & batch.mask_BT
        return TokenLosses(loss_BT, torch.zeros_like(capped_BT), capped_BT)


def make_loss(settings: Loss) -> PolicyLoss:
    """The loss that `settings` names."""
    match settings:
        case ClippedRatio():
            return ClippedRatioLoss(settings)
        case SequenceRatio():
            return SequenceRatioLoss(settings)
        case ClippedImportance():
            return ClippedImportanceLoss(settings)
    raise TypeError(f"no loss for {type(settings).__name__}")


@dataclass(frozen=True)
class Totals:
    """What one optimiser step is averaged over, all its micro-batches (and processes) together."""

    tokens: int
    """Trained tokens."""
    rows: int
    """Rollouts with at least one trained token."""
    max_new_tokens: int
    """Length that the constant denominator assumes."""
    choices: int = 0
    """Choices between several meta-actions at block boundaries; 0 where the loss does not look at them."""


Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(mask_BT: Tensor, aggregation: Aggregation, totals: Totals) -> Tensor:
    """Weight of each token's loss [B, T], float32; 0 in masked slots. All masked: all 0, never NaN.

    `token_mean`: 1/tokens (DAPO); `sequence_mean`: 1/(rows · the row's tokens) (GRPO); `constant`:
    1/(rows · max_new_tokens) (Dr.GRPO).
    """
    match aggregation:
        case "token_mean":
            weights_BT = torch.full(mask_BT.shape, 1 / max(totals.tokens, 1), device=mask_BT.device)
        case "sequence_mean":
            lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
            weights_BT = (1 / (lengths_B1 * max(totals.rows, 1))).expand(mask_BT.shape)
        case "constant":
            weights_BT = torch.full(
                mask_BT.shape, 1 / max(totals.rows * totals.max_new_tokens, 1), device=mask_BT.device
            )
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")
    return where(mask_BT, weights_BT)


def weighted_sum(values_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ weight · value over the mask, a scalar with gradient."""
    return (where(mask_BT, values_BT) * weights_BT).sum()


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(π ‖ reference) from tokens sampled from π (Schulman 2020).

    k1 = log π/ref; k2 = k1²/2; k3 = ref/π − 1 + k1. In the loss, k2's gradient is the true one in expectation, k1's is
    0 in expectation.
    """
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return ratio_of(-difference) - 1 + difference
    raise ValueError(f"unknown KL estimator {estimator!r}")


def engine_weights(
    old_logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, mask_BT: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance correction min(π_trainer/π_engine, cap) [B, T] and which tokens were truncated.

    Yao et al. 2025 (truncated importance sampling), at token level. No gradient.
    """
    difference_BT = where(mask_BT, old_logprobs_BT.detach()) - where(mask_BT, sampling_logprobs_BT)
    ratio_BT = ratio_of(difference_BT)
    return ratio_BT.clamp(max=cap), beyond(ratio_BT, cap) & mask_BT


class Statistics:
    """Sums and maxima over the trained tokens of an update, micro-batch by micro-batch."""

    def __init__(self):
        self.tokens = 0
        self._sums: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._shares: dict[str, float] = {}

    @torch.no_grad()
    def add(self, batch: TokenBatch, losses: TokenLosses, entropy_BT: Tensor) -> None:
        """Counts a micro-batch."""
        mask_BT = batch.mask_BT
        log_ratio_BT = batch.log_ratio()
        ratio_BT = ratio_of(log_ratio_BT)
        deviation_BT = (ratio_BT - 1).abs()
        self.tokens += int(mask_BT.sum())
        self.add_tokens("clip_share_low", losses.clipped_low_BT, mask_BT)
        self.add_tokens("clip_share_high", losses.clipped_high_BT, mask_BT)
        self.add_tokens("kl_old", ratio_BT - 1 - log_ratio_BT, mask_BT)
        self.add_tokens("entropy", entropy_BT, mask_BT)
        self.add_tokens("ratio_deviation_mean", deviation_BT, mask_BT)
        self.add_largest("ratio_deviation_max", deviation_BT, mask_BT)

    @torch.no_grad()
    def add_tokens(self, name: str, values_BT: Tensor, mask_BT: Tensor) -> None:
        """Adds a value a token; `values` divides the sum by the tokens."""
        self._sums[name] = self._sums.get(name, 0.0) + where(mask_BT, values_BT.double()).sum().item()

    @torch.no_grad()
    def add_largest(self, name: str, values_BT: Tensor, mask_BT: Tensor) -> None:
        """Keeps the largest of non-negative values."""
        largest = where(mask_BT, values_BT).max().item() if mask_BT.any() else 0.0
        self._largest[name] = max(self._largest.get(name, 0.0), largest)

    def add_share(self, name: str, value: float) -> None:
        """Adds a micro-batch's part of a mean whose denominator it knows."""
        self._shares[name] = self._shares.get(name, 0.0) + value

    @classmethod
    def total(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """The statistics of several processes as one."""
        found = cls()
        for part in parts:
            found.tokens += part.tokens
            for name, value in part._sums.items():
                found._sums[name] = found._sums.get(name, 0.0) + value
            for name, value in part._shares.items():
                found.add_share(name, value)
            for name, value in part._largest.items():
                found._largest[name] = max(found._largest.get(name, 0.0), value)
        return found

    def values(self) -> dict[str, float]:
        """Name → mean over trained tokens, maximum, or sum of parts. Empty where nothing was trained."""
        means = {name: total / self.tokens for name, total in self._sums.items() if self.tokens}
        return means | self._largest | self._shares
