"""A base model with a rank pool in its linear layers: y = W0 x + ((x A^T) · gates · scale) B^T.

Gates are static (one vector a layer: a task), or dynamic (a tensor with gradient, or a function of the layer's input: a
router). Static gates that switch on exactly one adapter take that adapter's own arithmetic, its scale applied last, so
the result is bit-equal to the adapter alone; all gates 0 is the base, bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from data.errors import UserError
from models.loracoe.pool import Gates, Pool, PoolModule

GateFunction = Callable[[Tensor], Tensor]
"""Input of the layer (B, T, I) → gates, broadcastable to (B, T, R)."""


class GatedLinear(nn.Module):
    """A frozen linear layer and its pooled ranks. Without gates it is the layer alone."""

    def __init__(self, base: nn.Module, ranks: PoolModule, dtype: torch.dtype):
        super().__init__()
        self.base = base
        device = base.weight.device
        self.A_RI = nn.Parameter(ranks.A_RI.to(device, dtype), requires_grad=False)
        self.B_OR = nn.Parameter(ranks.B_OR.to(device, dtype), requires_grad=False)
        self.register_buffer("scale_R", ranks.scale_R.to(device), persistent=False)
        self.blocks = ranks.blocks
        self.static_gates: Tensor | None = None
        self._dynamic: Tensor | GateFunction | None = None
        self._active: tuple[Tensor, Tensor, Tensor | float] | None = None

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a linear layer for it."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias, if any."""
        return self.base.bias

    def set_static(self, gates_R: Tensor | None) -> None:
        """Fixes the gates; None or all 0 switches the pool off. Ranks with gate 0 are not computed."""
        self._dynamic, self._active, self.static_gates = None, None, None
        if gates_R is None:
            return
        gates_R = gates_R.detach().to(self.scale_R.device, torch.float32)
        if gates_R.shape != self.scale_R.shape or not torch.isfinite(gates_R).all():
            raise ValueError(
                f"gates must be {tuple(self.scale_R.shape)} finite numbers, got shape {tuple(gates_R.shape)}"
            )
        self.static_gates = gates_R
        for block in self.blocks:
            if _is_one_hot(gates_R, block.start, block.stop):
                ranks = slice(block.start, block.stop)
                self._active = self.A_RI[ranks].contiguous(), self.B_OR[:, ranks].contiguous(), block.scale
                return
        kept = gates_R.nonzero()[:, 0]
        if len(kept) == len(gates_R):
            self._active = self.A_RI, self.B_OR, (gates_R * self.scale_R).to(self.A_RI.dtype)
        elif len(kept):
            weights = (gates_R * self.scale_R)[kept].to(self.A_RI.dtype)
            self._active = self.A_RI[kept], self.B_OR[:, kept].contiguous(), weights

    def set_dynamic(self, gates: Tensor | GateFunction) -> None:
        """Gates (broadcastable to (B, T, R)) whose gradient is wanted, or a function of the layer's input."""
        self._active, self.static_gates, self._dynamic = None, None, gates

    def forward(self, x_BTI: Tensor) -> Tensor:
        """(B, T, I) → (B, T, O), in the dtype of the frozen layer's output."""
        y_BTO = self.base(x_BTI)
        if self._dynamic is not None:
            gates = self._dynamic(x_BTI) if callable(self._dynamic) else self._dynamic
            h_BTR = linear(x_BTI.to(self.A_RI.dtype), self.A_RI)
            delta_BTO = linear(h_BTR * (gates * self.scale_R).to(h_BTR.dtype), self.B_OR)
        elif self._active is None:
            return y_BTO
        else:
            A, B, weights = self._active
            h_BTR = linear(x_BTI.to(A.dtype), A)
            # one adapter alone: its scale last, as PEFT computes it
            delta_BTO = linear(h_BTR, B) * weights if isinstance(weights, float) else linear(h_BTR * weights, B)
        return (y_BTO + delta_BTO).to(y_BTO.dtype)

    def delta_weight(self) -> Tensor:
        """The (O, I) weight that the static gates add, float32. Raises UserError while gates depend on the input."""
        if self._dynamic is not None:
            raise UserError(
                "gates that depend on the input cannot be merged into the weights; export one adapter a task, or set "
                "static gates first"
            )
        if self.static_gates is None:
            return torch.zeros_like(self.base.weight, dtype=torch.float32)
        return (self.B_OR.float() * (self.static_gates * self.scale_R)) @ self.A_RI.float()


def _is_one_hot(gates_R: Tensor, start: int, stop: int) -> bool:
    """Whether the gates are exactly 1 on start..stop-1 and 0 elsewhere."""
    inside = gates_R[start:stop]
    return bool((inside == 1).all()) and int(gates_R.count_nonzero()) == stop - start


def default_pool_dtype(pool: Pool) -> torch.dtype:
    """float32 for half-precision adapters too, as PEFT loads them (`autocast_adapter_dtype`)."""
    stored = {module.A_RI.dtype for module in pool.modules.values()}
    return torch.float64 if torch.float64 in stored else torch.float32


class GatedModel:
    """`model` with the pool's layers in place of its own, until `detach` (or the end of the `with` block).

    `modules` maps the names to the GatedLinear layers. The model itself is used as before, `generate` and its cache
    included. The base's parameters need no gradient while attached.
    """

    def __init__(self, model: nn.Module, pool: Pool, dtype: torch.dtype | None = None):
        self.model = model
        self.pool = pool
        dtype = dtype or default_pool_dtype(pool)
        layers = {name: model.get_submodule(name) for name in pool.modules}
        for name, layer in layers.items():
            if not isinstance(layer, nn.Linear):
                raise UserError(f"{name} is no linear layer of this model: {type(layer).__name__}")
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._trainable:
            parameter.requires_grad_(False)
        self.modules = {name: GatedLinear(layer, pool.modules[name], dtype) for name, layer in layers.items()}
        for name, module in self.modules.items():
            self._replace(name, module)

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, module)

    def set_gates(self, gates: Gates | None) -> None:
        """Static gates for all layers; None: the base alone. Raises ValueError for a module that is not in the pool."""
        unknown = set(gates or {}) - set(self.modules)
        if unknown:
            raise ValueError(f"gates for modules that are not in the pool: {sorted(unknown)[:3]}")
        for name, module in self.modules.items():
            module.set_static((gates or {}).get(name))

    def set_dynamic(self, gates: Mapping[str, Tensor | GateFunction]) -> None:
        """Gates with gradient, or gate functions, for the layers named; the others are switched off."""
        for name, module in self.modules.items():
            if name in gates:
                module.set_dynamic(gates[name])
            else:
                module.set_static(None)

    def current_pool(self) -> Pool:
        """The pool as it is now, on the CPU: its factors may have been trained since it was attached."""
        modules = {
            name: replace(
                self.pool.modules[name],
                A_RI=module.A_RI.detach().cpu().contiguous(),
                B_OR=module.B_OR.detach().cpu().contiguous(),
            )
            for name, module in self.modules.items()
        }
        return replace(self.pool, modules=modules)

    def detach(self) -> nn.Module:
        """Puts the model's own layers back and returns the model."""
        for name, module in self.modules.items():
            self._replace(name, module.base)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        return self.model

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Adds the static gates' weights to the model's own and detaches.

        Raises UserError while the gates depend on the input.
        """
        deltas = {name: module.delta_weight() for name, module in self.modules.items()}
        for name, delta in deltas.items():
            weight = self.modules[name].base.weight
            weight.copy_((weight.float() + delta).to(weight.dtype))
        return self.detach()

    def __enter__(self) -> "GatedModel":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
