"""A linear layer with a LoRA adapter in one autograd step, in place of PEFT's chain of products and sums.

PEFT computes W·x, B·(A·x), the scaled B·(A·x) and their sum as four tensors as large as the layer's output, and as many
for the gradient. Here the low-rank product is added to W·x where it lies (gemm with beta 1), so one such tensor is
written each way. The numbers are the same up to the rounding of sums.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

ADAPTER = "default"
"""PEFT's name of the only adapter that a policy has."""


class _LoraProduct(torch.autograd.Function):
    """x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ for x [N, I], W [O, I], b [O] or None, A [R, I], B [O, R]; W and b are frozen."""

    @staticmethod
    def forward(ctx, x_NI, weight_OI, bias_O, a_RI, b_OR, scaling):
        down_NR = x_NI @ a_RI.T
        ctx.save_for_backward(x_NI, weight_OI, a_RI, b_OR, down_NR)
        ctx.scaling = scaling
        return torch.nn.functional.linear(x_NI, weight_OI, bias_O).addmm_(down_NR, b_OR.T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NO):
        x_NI, weight_OI, a_RI, b_OR, down_NR = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        grad_NR = (grad_NO @ b_OR).mul_(ctx.scaling) if needs_x or needs_a else None
        grad_x_NI = (grad_NO @ weight_OI).addmm_(grad_NR, a_RI) if needs_x else None
        grad_a_RI = grad_NR.T @ x_NI if needs_a else None
        grad_b_OR = (grad_NO.T @ down_NR).mul_(ctx.scaling) if needs_b else None
        return grad_x_NI, None, None, grad_a_RI, grad_b_OR, None


class LoraLinear(PeftLinear):
    """PEFT's LoRA layer, computed by `_LoraProduct` in float32; otherwise (16-bit, autocast, adapter off) by PEFT."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output [..., O] for x [..., I]."""
        if args or kwargs or self.disable_adapters or self.merged or list(self.active_adapters) != [ADAPTER]:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        a_RI, b_OR = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        single = all(tensor.dtype == torch.float32 for tensor in (x, base.weight, a_RI, b_OR))
        if not single or base.weight.requires_grad or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = _LoraProduct.apply(x_NI, base.weight, base.bias, a_RI, b_OR, self.scaling[ADAPTER])
        return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


def use_lora_products(model: torch.nn.Module) -> None:
    """Makes the plain LoRA layers of `model` `LoraLinear`s; what has dropout, biases or a variant stays PEFT's.

    The layers keep their parameters, names and attributes: only their forward pass is another.
    """
    for layer in model.modules():
        if type(layer) is PeftLinear and _is_plain(layer):
            layer.__class__ = LoraLinear


def _is_plain(layer: PeftLinear) -> bool:
    return (
        type(layer.base_layer) is torch.nn.Linear
        and list(layer.lora_A) == [ADAPTER]
        and not layer.lora_variant
        and not layer.fan_in_fan_out
        and isinstance(layer.lora_dropout[ADAPTER], torch.nn.Identity)
        and layer.lora_B[ADAPTER].bias is None
    )
