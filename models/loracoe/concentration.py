"""How concentrated importance is over the ranks of a pool, and how much the tasks' important ranks overlap."""

import torch
from torch import Tensor

from models.loracoe.importance import Scores
from models.loracoe.pool import Pool


def mass_in_top(scores: Scores, k: int) -> float:
    """Share of a module's absolute scores that its k largest hold, averaged over modules; uniform scores give k / R."""
    shares = []
    for value in scores.values():
        magnitude = value.abs()
        whole = magnitude.sum()
        shares.append(float(magnitude.topk(min(k, len(value))).values.sum() / whole) if whole > 0 else k / len(value))
    return sum(shares) / len(shares)


def gini(values: Tensor) -> float:
    """Gini coefficient of non-negative `values` (N,): 0 where all are equal, (N-1)/N where one holds everything."""
    ordered, n = values.double().sort().values, len(values)
    if ordered.sum() == 0:
        return 0.0
    weights = 2 * torch.arange(1, n + 1, dtype=torch.float64) - n - 1
    return float((weights * ordered).sum() / (n * ordered.sum()))


def top_ranks(value: Tensor, k: int) -> list[int]:
    """The k ranks with the largest absolute scores, largest first; of equal ones the lower rank."""
    return torch.sort(value.abs(), descending=True, stable=True).indices[:k].tolist()


def jaccard_of_top(one: Scores, other: Scores, k: int) -> float:
    """Overlap of the k largest absolute scores of two tasks: |intersection| / |union|, averaged over modules."""
    overlaps = []
    for name, value in one.items():
        size = min(k, len(value))
        first, second = set(top_ranks(value, size)), set(top_ranks(other[name], size))
        overlaps.append(len(first & second) / len(first | second))
    return sum(overlaps) / len(overlaps)


def share_by_source(pool: Pool, scores: Scores) -> dict[str, float]:
    """Each adapter's share of the absolute scores over all modules."""
    shares = {source.name: 0.0 for source in pool.sources}
    for name, ranks in pool.modules.items():
        for block in ranks.blocks:
            shares[block.source] += float(scores[name][block.start : block.stop].abs().sum())
    whole = sum(shares.values())
    return {source: share / whole if whole else 0.0 for source, share in shares.items()}
