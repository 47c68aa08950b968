"""Which ranks of a pool matter for a task, by several measures.

With gates g on the ranks, c_i = dL/dg_i is one backward pass for all ranks. At g = 1 it equals <dL/dA_i, A_i> and
<dL/dB_i, B_i>, so it does not change when A_i is multiplied and B_i divided by a number, unlike a Fisher of A alone or
norms (whose rank correlation with exact ablation is near 0). All scores depend on the rank basis: see `pool.svd_basis`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.loracoe.examples import Example, batches_of, mean_loss, response_nll
from models.loracoe.gated import GatedModel
from models.loracoe.pool import Gates

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


def mask_count(
    gated: GatedModel, examples: Sequence[Example], at: Gates, batch_size: int = 16, share: float = 0.01
) -> Scores:
    """How many elements of A's row i and B's column i are in the top `share` of |element · gradient| of their matrix.

    The gradient is that of the mean response loss over all `examples`, its magnitude taken after accumulating.
    Template: the region analysis of arXiv 2402.14700. A rank whose gate is 0 has no gradient: `at` should be gates 1.
    """
    products = None
    for elements, _ in _elementwise(gated, examples, at, batch_size):
        products = (
            elements if products is None else [one + other for one, other in zip(products, elements, strict=True)]
        )
    assert products is not None
    scores = {}
    for index, name in enumerate(gated.modules):
        rows, columns = (_largest_mask(products[2 * index + offset], share) for offset in (0, 1))
        scores[name] = (rows.sum(1) + columns.sum(0)).double().cpu()
    return scores


def _largest_mask(product: Tensor, share: float) -> Tensor:
    count = max(1, round(share * product.numel()))
    mask = torch.zeros(product.numel(), dtype=torch.bool, device=product.device)
    mask[product.abs().flatten().topk(count).indices] = True
    return mask.view_as(product)


def adalora_score(
    gated: GatedModel,
    examples: Sequence[Example],
    at: Gates,
    batch_size: int = 16,
    beta1: float = 0.85,
    beta2: float = 0.85,
) -> Scores:
    """AdaLoRA's sensitivity times uncertainty (arXiv 2303.10512), with the gate in the place of its singular value.

    For every element I = |element · gradient| of a batch's mean loss; Ibar and Ubar (of |I - Ibar|) are moving averages
    over batches from 0, the element's score is Ibar · Ubar, and a rank's is that of its gate plus the means over A's
    row and B's column. It depends on the order of the examples. A rank whose gate is 0 scores 0: use gates 1.
    """
    means: list[Tensor] = []
    deviations: list[Tensor] = []
    for elements, tokens in _elementwise(gated, examples, at, batch_size, gates_too=True):
        sensitivities = [(element / tokens).abs() for element in elements]
        if not means:
            means = [torch.zeros_like(value) for value in sensitivities]
            deviations = [torch.zeros_like(value) for value in sensitivities]
        means = [beta1 * mean + (1 - beta1) * value for mean, value in zip(means, sensitivities, strict=True)]
        deviations = [
            beta2 * deviation + (1 - beta2) * (value - mean).abs()
            for deviation, value, mean in zip(deviations, sensitivities, means, strict=True)
        ]
    scored = [mean * deviation for mean, deviation in zip(means, deviations, strict=True)]
    layers = len(gated.modules)
    return {
        name: (scored[2 * layers + index] + scored[2 * index].mean(1) + scored[2 * index + 1].mean(0)).double().cpu()
        for index, name in enumerate(gated.modules)
    }


def _elementwise(
    gated: GatedModel, examples: Sequence[Example], at: Gates, batch_size: int, gates_too: bool = False
) -> Iterator[tuple[list[Tensor], int]]:
    """For every batch, element · gradient of the summed response loss: A, B of each layer (then all gates)."""
    leaves = _leaves(gated, at)
    factors = [factor for module in gated.modules.values() for factor in (module.A_RI, module.B_OR)]
    wanted = [*factors, *leaves.values()] if gates_too else factors
    for factor in factors:
        factor.requires_grad_(True)
    try:
        for batch in batches_of(examples, batch_size, _device(gated)):
            gradients = torch.autograd.grad(response_nll(gated.model, batch).sum(), wanted)
            elements = [(value * slope).detach() for value, slope in zip(wanted, gradients, strict=True)]
            yield elements, batch.tokens
    finally:
        for factor in factors:
            factor.requires_grad_(False)


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
