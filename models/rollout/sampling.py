"""Draws that depend on a row's seed and the token's position only, never on what the row is batched with."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

BLOCK = 256
"""Vocabularies of many times this size are summed in blocks of it first, which is several times as fast."""


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64-bit integers to well mixed ones, wrapping."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Uniform draws [len(seeds), count] in the open interval (0, 1), float64: entry (i, t) is a hash of (seeds[i], t).

    48 bits each, so that a draw times a sum of probabilities stays below that sum.
    """
    seeds_R = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    steps_T = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits_RT = _mix(_mix(seeds_R)[:, None] + steps_T[None, :]) >> np.uint64(16)
    return torch.from_numpy((bits_RT.astype(np.float64) + 0.5) * 2.0**-48)


def sample(logits_RV: Tensor, temperature: float, uniform_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse cumulative distribution of softmax(logits / temperature), and its log-probability.

    Temperature 0: the largest logit, with its log-probability in the untempered distribution. Float32 exponentials,
    float64 sums of them. A row without finite distribution gets a log-probability that is not finite.
    """
    logits_RV = logits_RV.float()
    if temperature == 0:
        tokens_R = logits_RV.argmax(-1)
        return tokens_R, logits_RV.gather(1, tokens_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
    if temperature != 1:
        logits_RV = logits_RV / temperature
    shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    tokens_R, total_R = _inverse(shifted_RV.exp(), uniform_R)
    return tokens_R, (shifted_RV.gather(1, tokens_R[:, None])[:, 0] - total_R.log()).float()


def _inverse(weights_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which a row's cumulative weight passes its draw, and the row's total weight (float64)."""
    rows, size = weights_RV.shape
    if size < 8 * BLOCK:
        cumulative_RV = weights_RV.cumsum(-1, dtype=torch.float64)
        total_R = cumulative_RV[:, -1]
        found_R = _first_beyond(cumulative_RV, uniform_R * total_R)
    else:
        weights_RNB = torch.nn.functional.pad(weights_RV, (0, -size % BLOCK)).view(rows, -1, BLOCK)
        ends_RN = weights_RNB.sum(-1, dtype=torch.float64).cumsum(-1)
        total_R = ends_RN[:, -1]
        drawn_R = uniform_R * total_R
        block_R = _first_beyond(ends_RN, drawn_R)
        chosen_RB = weights_RNB[torch.arange(rows, device=block_R.device), block_R].double()
        before_R = torch.where(block_R > 0, ends_RN.gather(1, (block_R - 1).clamp_(min=0)[:, None])[:, 0], 0.0)
        inside_RB = before_R[:, None] + chosen_RB.cumsum(-1)
        # Summed in another order, the block may end an ulp below the draw: then its last weight above 0 is meant.
        last_R = inside_RB.argmax(-1)  # the first of equal sums, so that no weight of 0 is drawn
        found_R = block_R * BLOCK + torch.minimum(_first_beyond(inside_RB, drawn_R), last_R)
    return found_R.clamp_(max=size - 1), total_R


def _first_beyond(cumulative_RN: Tensor, drawn_R: Tensor) -> Tensor:
    return torch.searchsorted(cumulative_RN, drawn_R[:, None], right=True)[:, 0].clamp_(max=cumulative_RN.shape[1] - 1)
