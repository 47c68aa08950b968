"""Intervals and estimates over graded answers. numpy only; every draw takes a seed.

Axes: N items (questions), S samples of an item, R seeds. Accuracies and differences are shares between 0 and 1.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
_CHUNK = 4_000_000
"""Drawn values held at once: bounds the memory of a bootstrap to some tens of megabytes."""


class Estimate(NamedTuple):
    """A mean with its interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Share of successes with Wilson's score interval (Wilson 1927); (nan, 0, 1) where n is 0.

    Raises ValueError unless 0 <= successes <= n and 0 < confidence < 1.
    """
    _check_confidence(confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n, got {successes} of {n}")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, factor = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / factor
    half = z / factor * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and n the exact bound is 0 or 1; rounding may miss it by an ulp.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(share, low, high)


def bootstrap_mean(
    values_N: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Mean over items with its percentile bootstrap interval (Efron 1979), items drawn with replacement.

    Average the samples of an item first: items are the independent draws. Raises ValueError for no values.
    """
    values_N = _finite(values_N, "values", 1)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for part in _parts(resamples, len(values_N)):
        rows = generator.integers(len(values_N), size=(part.stop - part.start, len(values_N)))
        means[part] = values_N[rows].mean(axis=1)
    return _percentiles(values_N.mean(), means, confidence)


def paired_bootstrap(
    first_N: ArrayLike, second_N: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Difference first - second of two models on the same items, in the same order, with its bootstrap interval.

    Raises ValueError where the lengths differ.
    """
    first_N, second_N = _finite(first_N, "first", 1), _finite(second_N, "second", 1)
    if first_N.shape != second_N.shape:
        raise ValueError(f"paired models need the same items, got {len(first_N)} and {len(second_N)}")
    return bootstrap_mean(first_N - second_N, confidence, resamples, seed)


def paired_bootstrap_seeds(
    first_RN: ArrayLike, second_RN: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Difference first - second over R training seeds and N questions; both are drawn with replacement.

    Seed r of one model is paired with seed r of the other, and column n is the same question for all seeds. One
    resample draws R seeds, then N questions that all its seeds share (our choice: questions drawn anew for each seed
    would average the luck of the test set away). With one seed it is `paired_bootstrap`. Raises ValueError where the
    shapes differ.
    """
    first_RN, second_RN = _finite(first_RN, "first", 2), _finite(second_RN, "second", 2)
    if first_RN.shape != second_RN.shape:
        raise ValueError(f"paired models need the same seeds and items, got {first_RN.shape} and {second_RN.shape}")
    differences_RN = first_RN - second_RN
    return _percentiles(differences_RN.mean(), _seed_draws(differences_RN, resamples, seed), confidence)


def paired_bootstrap_tasks(
    differences_TRN: Sequence[ArrayLike], confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Mean over T tasks of a paired difference, each task with R seeds and its own N questions: one interval.

    The tasks are fixed (the claim is about them), their seeds and questions are drawn anew and apart for each task, as
    `paired_bootstrap_seeds` does for one. Raises ValueError where there is no task.
    """
    if not differences_TRN:
        raise ValueError("a mean over tasks needs at least one task")
    means, total = 0.0, 0.0
    for number, differences in enumerate(differences_TRN):
        differences_RN = _finite(differences, f"task {number}", 2)
        means = means + _seed_draws(differences_RN, resamples, seed + number)
        total += float(differences_RN.mean())
    return _percentiles(total / len(differences_TRN), means / len(differences_TRN), confidence)


def _seed_draws(differences_RN: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means of resamples: R seeds, then N questions that all its seeds share."""
    n_seeds, n_items = differences_RN.shape
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for part in _parts(resamples, n_seeds * n_items):
        draws = part.stop - part.start
        seeds = generator.integers(n_seeds, size=(draws, n_seeds))
        items = generator.integers(n_items, size=(draws, n_items))
        means[part] = np.take_along_axis(differences_RN[seeds].mean(axis=1), items, axis=1).mean(axis=1)
    return means


def avg_at_k(correct_NS: ArrayLike) -> float:
    """Mean accuracy over items and all k = S samples of each."""
    return float(_finite(correct_NS, "correct", 2).mean())


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> NDArray[np.float64]:
    """Unbiased probability that one of k samples is right, for items with c right ones among n (Chen et al. 2021).

    1 - C(n-c, k) / C(n, k) as a product, so that no factorial overflows. `n` and `c` are broadcast; one value an item.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n for all items.
    """
    n_N, c_N = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64))
    if k < 1 or (n_N < k).any():
        raise ValueError(f"pass@{k} needs 1 <= k <= samples of every item, the fewest are {n_N.min(initial=0)}")
    if ((c_N < 0) | (c_N > n_N)).any():
        raise ValueError("right samples must be between 0 and the samples of the item")
    i = np.arange(k)
    # Factor i is the chance that draw i is wrong, given that all before it were.
    factors = np.clip(n_N[..., None] - c_N[..., None] - i, 0, None) / (n_N[..., None] - i)
    return 1.0 - factors.prod(axis=-1)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int | None = None) -> float:
    """Chance that the most frequent answer of an item's first k samples is right (self-consistency, Wang et al. 2023).

    None is no answer and has no vote; of several answers with equally many votes each wins equally often (our
    choice). Answers that are equal but spelled differently vote apart unless the caller gives them one spelling.
    No vote at all is wrong: 0.0. Raises ValueError where k exceeds the samples.
    """
    k = len(answers) if k is None else k
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} needs at least {max(k, 1)} samples with a verdict each, got {len(answers)}")
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers[:k], correct[:k]):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(right))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [sum(rights) / len(rights) for rights in votes.values() if len(rights) == most]
    return sum(winners) / len(winners)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")


def _finite(values: ArrayLike, name: str, axes: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != axes or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be a non-empty array of finite numbers with {axes} axes, got shape {array.shape}"
        )
    return array


def _parts(resamples: int, width: int) -> list[slice]:
    """Slices of the resamples, each small enough to be drawn at once."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    rows = max(1, _CHUNK // width)
    return [slice(start, min(start + rows, resamples)) for start in range(0, resamples, rows)]


def _percentiles(mean: float, means: NDArray[np.float64], confidence: float) -> Estimate:
    _check_confidence(confidence)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(mean), float(low), float(high))
