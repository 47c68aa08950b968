"""The rank pool: the ranks of several LoRA adapters of one base, raw, each with its scale and where it came from.

For every adapted linear layer, A = [A_1; ...; A_T] (R x d_in), B = [B_1, ..., B_T] (d_out x R) and a scale per rank.
The scale is not folded into a factor: folding costs the exact recovery of a single adapter (about 1e-7 relative in
float32, 8e-3 in bfloat16).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import UserError
from models.loracoe.adapters import Adapter

Gates = dict[str, Tensor]
"""Module name → gates (R,) of its ranks, float32. A module that is absent has all gates 0."""

POOL_FILE, PROVENANCE_FILE = "pool.safetensors", "provenance.json"


@dataclass(frozen=True)
class Block:
    """The contiguous ranks start..stop-1 of a pooled layer that came from one adapter."""

    source: str
    start: int
    stop: int
    alpha: float
    rslora: bool
    dtype: str
    """Of the adapter's own file; the pool may hold a wider one."""

    @property
    def rank(self) -> int:
        """How many ranks the adapter has in this layer."""
        return self.stop - self.start

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class PoolModule:
    """The pooled ranks of one linear layer."""

    A_RI: Tensor
    B_OR: Tensor
    scale_R: Tensor
    blocks: tuple[Block, ...]

    @property
    def rank(self) -> int:
        """R, over all adapters."""
        return self.A_RI.shape[0]

    def sources_of_ranks(self) -> list[str]:
        """The adapter's name of every rank."""
        return [block.source for block in self.blocks for _ in range(block.rank)]


@dataclass(frozen=True)
class PoolSource:
    """An adapter in the pool: its name, the SHA-256 of its weights and its adapter_config.json."""

    name: str
    sha256: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Pool:
    """The ranks of several adapters by module (names as in the base's named_modules)."""

    modules: dict[str, PoolModule]
    sources: tuple[PoolSource, ...]

    @property
    def ranks(self) -> int:
        """Ranks over all modules."""
        return sum(module.rank for module in self.modules.values())

    def constant_gates(self, value: float) -> Gates:
        """Every gate `value`. 1 is the sum of all adapters."""
        return {name: torch.full((module.rank,), value) for name, module in self.modules.items()}

    def one_hot_gates(self, source: str) -> Gates:
        """1 on the ranks of one adapter, 0 elsewhere. Raises UserError for a name that is not in the pool."""
        if source not in {known.name for known in self.sources}:
            raise UserError(f"no adapter {source!r} in the pool; it holds {[known.name for known in self.sources]}")
        gates = self.constant_gates(0.0)
        for name, module in self.modules.items():
            for block in module.blocks:
                if block.source == source:
                    gates[name][block.start : block.stop] = 1.0
        return gates


def build_pool(adapters: Sequence[Adapter]) -> Pool:
    """Concatenates the ranks of `adapters` in their order. One adapter makes a pool of its own ranks (`single` mode).

    Different ranks, alphas, rank stabilisation, patterns and target modules are fine. Where the files' dtypes differ
    the wider one holds all values exactly. Raises UserError for no adapter, a name used twice, or layers whose shapes
    differ.
    """
    names = [adapter.name for adapter in adapters]
    if not names or len(set(names)) < len(names):
        raise UserError(f"a pool needs adapters with names of their own, got {names}")
    order = sorted({module for adapter in adapters for module in adapter.modules})
    modules = {module: _concatenate(module, adapters) for module in order}
    sources = tuple(PoolSource(adapter.name, adapter.sha256, adapter.config) for adapter in adapters)
    return Pool(modules, sources)


def _concatenate(module: str, adapters: Sequence[Adapter]) -> PoolModule:
    members = [(adapter.name, adapter.modules[module]) for adapter in adapters if module in adapter.modules]
    shapes = {(factors.A.shape[1], factors.B.shape[0]): name for name, factors in members}
    if len(shapes) > 1:
        raise UserError(
            f"{module} has different shapes in the adapters {list(shapes.values())}: they are not of one base"
        )
    dtype = members[0][1].A.dtype
    for _, factors in members:
        dtype = torch.promote_types(dtype, torch.promote_types(factors.A.dtype, factors.B.dtype))
    blocks, start = [], 0
    for name, factors in members:
        stop = start + factors.rank
        blocks.append(
            Block(name, start, stop, factors.alpha, factors.rslora, str(factors.A.dtype).removeprefix("torch."))
        )
        start = stop
    return PoolModule(
        torch.cat([factors.A.to(dtype) for _, factors in members]).contiguous(),
        torch.cat([factors.B.to(dtype) for _, factors in members], dim=1).contiguous(),
        torch.tensor([block.scale for block in blocks for _ in range(block.rank)], dtype=torch.float32),
        tuple(blocks),
    )


def svd_basis(pool: Pool) -> Pool:
    """The same pool with every adapter's ranks rotated into the singular basis of its own delta W, largest first.

    The function is unchanged (up to rounding), the scores of single ranks are not: a LoRA's rank basis is not
    identifiable, (QA, BQ^T) is the same adapter for any rotation Q. QR of A^T and B, then an SVD of the r x r core.
    """
    modules = {}
    for name, module in pool.modules.items():
        A_RI, B_OR = torch.empty_like(module.A_RI), torch.empty_like(module.B_OR)
        for block in module.blocks:
            ranks = slice(block.start, block.stop)
            A, B = module.A_RI[ranks].double(), module.B_OR[:, ranks].double()
            q_a, r_a = torch.linalg.qr(A.T)
            q_b, r_b = torch.linalg.qr(B)
            u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
            kept = s.shape[0]  # fewer than the rank only where a layer is narrower than its LoRA
            A_RI[ranks], B_OR[:, ranks] = 0, 0
            A_RI[block.start : block.start + kept] = (vh @ q_a.T).to(A_RI.dtype)
            B_OR[:, block.start : block.start + kept] = (q_b @ u * s).to(B_OR.dtype)
        modules[name] = replace(module, A_RI=A_RI, B_OR=B_OR)
    return Pool(modules, pool.sources)


def save_pool(pool: Pool, folder: Path) -> None:
    """Writes pool.safetensors (`<module>.A`, `.B`, `.scale`) and provenance.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, module in pool.modules.items():
        tensors |= {f"{name}.A": module.A_RI, f"{name}.B": module.B_OR, f"{name}.scale": module.scale_R}
    save_file(tensors, folder / POOL_FILE, metadata={"format": "pt"})
    provenance = {
        "sources": [asdict(source) for source in pool.sources],
        "modules": {name: [asdict(block) for block in module.blocks] for name, module in pool.modules.items()},
    }
    text = json.dumps(provenance, indent=1, sort_keys=True) + "\n"
    (folder / PROVENANCE_FILE).write_text(text, encoding="utf-8")


def load_pool(folder: Path) -> Pool:
    """Reads what `save_pool` wrote."""
    provenance = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))
    tensors = load_file(folder / POOL_FILE)
    modules = {
        name: PoolModule(
            tensors[f"{name}.A"],
            tensors[f"{name}.B"],
            tensors[f"{name}.scale"],
            tuple(Block(**block) for block in blocks),
        )
        for name, blocks in provenance["modules"].items()
    }
    return Pool(modules, tuple(PoolSource(**source) for source in provenance["sources"]))
