"""Draws that depend on a row's seed and the token's position only, never on what the row is batched with."""

from collections.abc import Sequence

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64-bit integers to well mixed ones, wrapping."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Uniform draws [len(seeds), count] in the open interval (0, 1), float64: entry (i, t) is a hash of (seeds[i], t).

    48 bits each, so that a draw times a sum of probabilities stays below that sum.
    """
    seeds_R = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    steps_T = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits_RT = _mix(_mix(seeds_R)[:, None] + steps_T[None, :]) >> np.uint64(16)
    return torch.from_numpy((bits_RT.astype(np.float64) + 0.5) * 2.0**-48)


def sample(
    logits_RV: torch.Tensor, temperature: float, uniform_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by the inverse cumulative distribution of softmax(logits / temperature), and its log-probability.

    Temperature 0: the largest logit, with its log-probability in the untempered distribution. Float32 log-softmax,
    float64 sums of the distribution. A row without finite distribution gets a log-probability that is not finite.
    """
    logits_RV = logits_RV.float()
    if temperature == 0:
        tokens_R = logits_RV.argmax(-1)
        return tokens_R, logits_RV.gather(1, tokens_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
    if temperature != 1:
        logits_RV = logits_RV / temperature
    normaliser_R = logits_RV.logsumexp(-1)
    cumulative_RV = (logits_RV - normaliser_R[:, None]).exp().cumsum(-1, dtype=torch.float64)
    drawn_R = uniform_R[:, None] * cumulative_RV[:, -1:]
    tokens_R = torch.searchsorted(cumulative_RV, drawn_R, right=True)[:, 0].clamp_(max=logits_RV.shape[1] - 1)
    return tokens_R, logits_RV.gather(1, tokens_R[:, None])[:, 0] - normaliser_R
