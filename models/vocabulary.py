"""Log-probabilities of tokens from hidden states, in chunks over the vocabulary, with exact gradients.

The logits of N tokens over a vocabulary of V take 4·N·V bytes, and their softmax and gradient as much again: at 8,192
tokens and 128,256 entries 4.2 GB each. Here they exist for one chunk of the vocabulary at a time and are computed again
in the backward pass (one product more with the output layer), so memory grows with the chunk and not with V.
"""

from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.errors import UserError

Entropies = Literal["none", "values", "gradient"]
PROBE_TOLERANCE = {torch.float32: 1e-4}
"""Largest relative difference of the checked logits; 0.05 in 16-bit types."""
_checked: "WeakSet[torch.nn.Module]" = WeakSet()
"""Output layers whose logits were compared with their network's."""


class LogitTransform(NamedTuple):
    """What a model does to the products of its output layer: cap · tanh(scale · x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        """The logits that the model makes of the products of its output layer."""
        scaled = products * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap


def logit_transform(config: Any) -> LogitTransform:
    """Scale and soft cap of a model's logits, by the names that transformers' configurations give them."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text, name, None) is not None:
            scale = float(getattr(text, name))
    divisor = getattr(text, "logits_scaling", None)
    if divisor is not None:
        scale = float(divisor) if text.model_type == "hyperclovax" else 1 / float(divisor)
    return LogitTransform(scale, getattr(text, "final_logit_softcapping", None))


def head_weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] of an output layer; a LoRA adapter on it is added in, with its gradient."""
    base = getattr(layer, "base_layer", layer)
    weight = base.weight
    for name in getattr(layer, "active_adapters", ()):
        weight = weight + layer.get_delta_weight(name).to(weight.dtype)
    return weight, getattr(base, "bias", None)


class _WholeLogprobs(torch.autograd.Function):
    """log π of targets [N] and entropies [N] (no gradient; 0 where not asked for) from float32 logits [N, V].

    The probabilities are computed once, for the entropies and for the gradient (1[target] − p), which is written once.
    """

    @staticmethod
    def forward(ctx, logits_NV, targets_N, entropies):
        normaliser_N = logits_NV.logsumexp(-1)
        logprobs_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - normaliser_N
        entropy_N = torch.zeros_like(normaliser_N)
        if entropies or ctx.needs_input_grad[0]:
            shares_NV = (logits_NV - normaliser_N[:, None]).exp_()
            ctx.save_for_backward(shares_NV, targets_N)
            if entropies:
                entropy_N = normaliser_N - (shares_NV * logits_NV).sum(-1)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs_N, _grad_entropy_N):
        shares_NV, targets_N = ctx.saved_tensors
        grad_NV = shares_NV * -grad_logprobs_N[:, None]
        return grad_NV.scatter_add_(1, targets_N[:, None], grad_logprobs_N[:, None]), None, None


def whole_logprobs(logits_NV: Tensor, targets_N: Tensor, entropies: Entropies) -> tuple[Tensor, Tensor | None]:
    """log π [N] of `targets_N` and entropies [N] (nats) under softmax of float32 logits.

    The entropies have a gradient with "gradient" only; they are None with "none".
    """
    if entropies != "gradient" or not torch.is_grad_enabled():
        logprobs_N, entropy_N = _WholeLogprobs.apply(logits_NV, targets_N, entropies != "none")
        return logprobs_N, None if entropies == "none" else entropy_N
    normaliser_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - normaliser_N
    return logprobs_N, normaliser_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """log π of targets [N] and entropies [N], float32, from hidden states [N, H] and the output layer's weight."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, transform, temperature, chunk, entropies):
        ctx.transform, ctx.temperature, ctx.chunk, ctx.entropies = transform, temperature, chunk, entropies
        # What autocast would do to the product is done by hand: in the backward pass it is not there.
        device = hidden_NH.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
        count, device = len(targets_N), hidden_NH.device
        largest_N = torch.full((count,), -torch.inf, device=device)
        mass_N, moment_N, chosen_N = (torch.zeros(count, device=device) for _ in range(3))
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(weight_VH), chunk):
                logits_NC, _ = _logits(ctx, hidden_NH, weight_VH, bias_V, start)
                new_N = torch.maximum(largest_N, logits_NC.amax(1))
                shrink_N = (largest_N - new_N).exp()
                weights_NC = (logits_NC - new_N[:, None]).exp_()
                mass_N = mass_N * shrink_N + weights_NC.sum(1)
                if entropies != "none":
                    moment_N = moment_N * shrink_N + (weights_NC.mul_(logits_NC)).sum(1)
                largest_N = new_N
                inside_N = (targets_N >= start) & (targets_N < start + logits_NC.shape[1])
                place_N1 = (targets_N - start).clamp(0, logits_NC.shape[1] - 1)[:, None]
                chosen_N = torch.where(inside_N, logits_NC.gather(1, place_N1)[:, 0], chosen_N)
        normaliser_N = largest_N + mass_N.log()
        mean_N = moment_N / mass_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, mean_N)
        logprobs_N, entropy_N = chosen_N - normaliser_N, normaliser_N - mean_N
        if entropies != "gradient":
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, mean_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.zeros(hidden_NH.shape, device=hidden_NH.device) if needs_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
        compute_NH = hidden_NH.to(ctx.dtype)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, len(weight_VH), ctx.chunk):
                logits_NC, slope_NC = _logits(ctx, hidden_NH, weight_VH, bias_V, start)
                stop = start + logits_NC.shape[1]
                # d log π = 1[target] − p, dH = −p · (logit − mean logit)
                grad_NC = (logits_NC - normaliser_N[:, None]).exp_()
                factor_NC = grad_logprobs_N[:, None]
                if grad_entropy_N is not None and ctx.entropies == "gradient":
                    factor_NC = factor_NC + grad_entropy_N[:, None] * (logits_NC - mean_N[:, None])
                grad_NC.mul_(-factor_NC)
                inside_N = (targets_N >= start) & (targets_N < stop)
                place_N1 = (targets_N - start).clamp(0, stop - start - 1)[:, None]
                grad_NC.scatter_add_(1, place_N1, torch.where(inside_N, grad_logprobs_N, 0.0)[:, None])
                grad_NC.mul_(ctx.transform.scale / ctx.temperature)
                if slope_NC is not None:
                    grad_NC.mul_(slope_NC)
                small_NC = grad_NC.to(ctx.dtype)
                if needs_hidden:
                    grad_hidden_NH += (small_NC @ weight_VH[start:stop].to(ctx.dtype)).float()
                if needs_weight:
                    grad_weight_VH[start:stop] = small_NC.T @ compute_NH
                if needs_bias:
                    grad_bias_V[start:stop] = grad_NC.sum(0)
        if needs_hidden:
            grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _logits(
    ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, start: int
) -> tuple[Tensor, Tensor | None]:
    """Tempered logits [N, C] of one chunk in float32, and the soft cap's derivative where there is one."""
    stop = start + ctx.chunk
    raw_NC = hidden_NH.to(ctx.dtype) @ weight_VH[start:stop].to(ctx.dtype).T
    if bias_V is not None:
        raw_NC = raw_NC + bias_V[start:stop].to(ctx.dtype)
    raw_NC = raw_NC.float()
    scale, cap = ctx.transform
    slope_NC = None
    if scale != 1:
        raw_NC = raw_NC * scale
    if cap is not None:
        bounded_NC = (raw_NC / cap).tanh()
        slope_NC = 1 - bounded_NC.square()
        raw_NC = bounded_NC * cap
    return (raw_NC if ctx.temperature == 1 else raw_NC / ctx.temperature), slope_NC


def chunked_logprobs(
    hidden_NH: Tensor,
    layer: Any,
    targets_N: Tensor,
    *,
    chunk: int,
    transform: LogitTransform = LogitTransform(),  # noqa: B008 - immutable
    temperature: float = 1.0,
    entropies: Entropies = "values",
) -> tuple[Tensor, Tensor]:
    """log π [N] of `targets_N` and entropies [N] (nats), float32, of softmax(logits / temperature).

    `layer` is the output layer (Linear, or one with a LoRA adapter), `chunk` the vocabulary entries at a time. The
    entropies have a gradient with "gradient" only, and mean nothing with "none".
    """
    weight_VH, bias_V = head_weight(layer)
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, transform, temperature, chunk, entropies)


@torch.no_grad()
def check_transform(layer: Any, transform: LogitTransform, hidden_1H: Tensor, logits_1V: Tensor) -> None:
    """Compares the network's own logits of one token with those that `transform` gives, once for each output layer.

    Raises UserError where a model does something to its logits that is not known here.
    """
    if layer in _checked:
        return
    weight_VH, bias_V = head_weight(layer)
    own_1V = transform.apply(torch.nn.functional.linear(hidden_1H.to(weight_VH.dtype), weight_VH, bias_V).float())
    difference = (own_1V - logits_1V.float()).abs().max()
    tolerance = PROBE_TOLERANCE.get(logits_1V.dtype, 0.05)
    if difference > tolerance * own_1V.abs().max() + 1e-6:
        raise UserError(
            "this model changes its logits in a way that chunks over the vocabulary do not know "
            f"(difference {difference.item():.3g}); set vocabulary_chunk to 0 in [rl] and [warmup]"
        )
    _checked.add(layer)
