"""Which ranks of a pool matter for a task, by several measures, and how concentrated that is.

With gates g on the ranks, c_i = dL/dg_i is one backward pass for all ranks. At g = 1 it equals <dL/dA_i, A_i> and
<dL/dB_i, B_i>, so it does not change when A_i is multiplied and B_i divided by a number, unlike a Fisher of A alone or
norms (whose rank correlation with exact ablation is near 0). All scores depend on the rank basis: see `pool.svd_basis`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.loracoe.examples import Example, batches_of, mean_loss, response_nll
from models.loracoe.gated import GatedModel
from models.loracoe.pool import Gates, Pool

Scores = dict[str, Tensor]
"""Module name → a value for each rank (R,), float64 on the CPU."""


def gate_gradient(gated: GatedModel, examples: Sequence[Example], at: Gates, batch_size: int = 16) -> Scores:
    """c_i = d(mean response loss)/dg_i at the gates `at`, signed.

    The mean is over all response tokens of `examples`. At gates 0, L(rank i alone at 1) - L(0) ~ c_i: negative helps;
    at gates 1, L(rank i off) - L(1) ~ -c_i. The gates are left as dynamic; set them again afterwards.
    """
    leaves = _leaves(gated, at)
    total = {name: torch.zeros(len(leaf), dtype=torch.float64) for name, leaf in leaves.items()}
    tokens = 0
    for batch in batches_of(examples, batch_size, _device(gated)):
        gradients = torch.autograd.grad(response_nll(gated.model, batch).sum(), list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            total[name] += gradient.double().cpu()
        tokens += batch.tokens
    return {name: value / tokens for name, value in total.items()}


def gate_fisher(gated: GatedModel, examples: Sequence[Example], at: Gates) -> Scores:
    """Mean over examples of c_i², c_i of the example's own mean token loss: no cancelling of signs between examples."""
    leaves = _leaves(gated, at)
    total = {name: torch.zeros(len(leaf), dtype=torch.float64) for name, leaf in leaves.items()}
    for batch in batches_of(examples, 1, _device(gated)):
        gradients = torch.autograd.grad(response_nll(gated.model, batch).mean(), list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            total[name] += gradient.double().cpu() ** 2
    return {name: value / len(examples) for name, value in total.items()}


def _leaves(gated: GatedModel, at: Gates) -> Gates:
    """Gates with gradient, in place in the model."""
    device = _device(gated)
    leaves = {
        name: at[name].detach().to(device, torch.float32).clone().requires_grad_(True)
        if name in at
        else torch.zeros(ranks.rank, device=device, requires_grad=True)
        for name, ranks in gated.pool.modules.items()
    }
    gated.set_dynamic(leaves)
    return leaves


def _device(gated: GatedModel) -> torch.device:
    return next(iter(gated.modules.values())).scale_R.device


def ablation(
    gated: GatedModel,
    examples: Sequence[Example],
    ranks: Sequence[tuple[str, int]],
    at: Gates,
    batch_size: int = 16,
) -> list[float]:
    """Exact effect of single ranks, in the order of `ranks` (module, rank): L(g_i = 0) - L(g_i = 1), other gates `at`.

    Positive: the rank helps. One or two forward passes a rank, so meant for a sample of ranks.
    """
    effects = []
    for module, rank in ranks:
        losses = []
        for value in (0.0, 1.0):
            gates = {name: gates_R.clone() for name, gates_R in at.items()}
            gates[module][rank] = value
            gated.set_gates(gates)
            losses.append(mean_loss(gated.model, examples, batch_size, _device(gated)))
        effects.append(losses[0] - losses[1])
    return effects


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
