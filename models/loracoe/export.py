"""A task's gates as an ordinary PEFT adapter, which PEFT loads and vLLM serves: no gates left, nothing of the pool."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from data.errors import UserError
from models.loracoe.adapters import CONFIG_FILE, KEY_PREFIX, WEIGHTS_FILE
from models.loracoe.pool import Gates, Pool
from models.rollout.vllm_python import VLLM_RANKS

Format = Literal["uniform", "pattern", "exact"]


@dataclass(frozen=True)
class Exported:
    """What was written: format, largest rank, active ranks over all modules, the --max-lora-rank that vLLM needs.

    `max_lora_rank` is None where no value that vLLM takes is large enough.
    """

    format: Format
    rank: int
    active_ranks: int
    modules: int
    max_lora_rank: int | None


def one_source(pool: Pool, gates: Gates) -> str | None:
    """The adapter that the gates switch on whole and alone; None where they do anything else."""
    for source in pool.sources:
        wanted = pool.one_hot_gates(source.name)
        if all(torch.equal(gates.get(name, torch.zeros_like(gate)), gate) for name, gate in wanted.items()):
            return source.name
    return None


def export_adapter(pool: Pool, gates: Gates, folder: Path, how: Format, base_name: str, card: str) -> Exported:
    """Writes adapter_model.safetensors, adapter_config.json and README.md (`card`) into `folder`.

    - `uniform`: one rank for all layers, zero-padded (padding changes no bit), scale 1.
    - `pattern`: each layer its own rank (rank_pattern, alpha_pattern with whole module names), scale 1.
    - `exact`: the gates are 1 on one adapter and 0 elsewhere: its own factors, r and alpha, bit for bit.
    In the first two a rank is kept where its gate is not 0, and gate and scale are folded into B in float32. A layer
    without active ranks is left out; where all gates are 0, one rank of zeros is written, for PEFT loads no empty
    adapter. Raises UserError for `exact` where the gates are not of one adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if how == "exact":
        tensors, config, ranks = _exact(pool, gates)
    else:
        factors = _folded(pool, gates)
        if not factors:
            factors = _one_rank_of_zeros(pool)
        ranks = {name: A.shape[0] for name, (A, _) in factors.items()}
        tensors, config = _uniform(factors) if how == "uniform" else _pattern(factors)
    config |= {"base_model_name_or_path": base_name, "inference_mode": True}
    named = {f"{KEY_PREFIX}{name}.lora_{factor}.weight": tensor for (name, factor), tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
    active = sum(int(gate.count_nonzero()) for gate in gates.values())
    stored = max(tensor.shape[0] for (_, factor), tensor in tensors.items() if factor == "A")
    needed = next((allowed for allowed in VLLM_RANKS if allowed >= stored), None)
    return Exported(how, stored, active, len(ranks), needed)


Tensors = dict[tuple[str, str], Tensor]


def _folded(pool: Pool, gates: Gates) -> dict[str, tuple[Tensor, Tensor]]:
    """Module → (A of its active ranks, B with gate and scale folded in), float32; without active rank: left out."""
    factors = {}
    for name, module in pool.modules.items():
        gates_R = gates.get(name, torch.zeros(module.rank)).float()
        kept = gates_R.nonzero()[:, 0]
        if len(kept):
            weights = (gates_R * module.scale_R)[kept]
            factors[name] = (
                module.A_RI[kept].float().contiguous(),
                (module.B_OR[:, kept].float() * weights).contiguous(),
            )
    return factors


def _one_rank_of_zeros(pool: Pool) -> dict[str, tuple[Tensor, Tensor]]:
    name, module = next(iter(pool.modules.items()))
    return {name: (torch.zeros(1, module.A_RI.shape[1]), torch.zeros(module.B_OR.shape[0], 1))}


def _uniform(factors: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensors, dict[str, Any]]:
    rank = max(A.shape[0] for A, _ in factors.values())
    tensors: Tensors = {}
    for name, (A, B) in factors.items():
        missing = rank - A.shape[0]
        tensors[name, "A"] = torch.cat([A, A.new_zeros(missing, A.shape[1])])
        tensors[name, "B"] = torch.cat([B, B.new_zeros(B.shape[0], missing)], dim=1)
    return tensors, _config(rank, list(factors))


def _pattern(factors: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensors, dict[str, Any]]:
    ranks = {name: A.shape[0] for name, (A, _) in factors.items()}
    tensors: Tensors = {(name, kind): pair[index] for name, pair in factors.items() for index, kind in enumerate("AB")}
    common = Counter(ranks.values()).most_common()
    rank = max(value for value, count in common if count == common[0][1])
    config = _config(rank, list(factors))
    config["rank_pattern"] = {name: value for name, value in ranks.items() if value != rank}
    config["alpha_pattern"] = dict(config["rank_pattern"])
    return tensors, config


def _exact(pool: Pool, gates: Gates) -> tuple[Tensors, dict[str, Any], dict[str, int]]:
    name = one_source(pool, gates)
    if name is None:
        raise UserError("an exact export needs gates that are 1 on one adapter and 0 elsewhere; use uniform or pattern")
    source = next(source for source in pool.sources if source.name == name)
    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    for module_name, module in pool.modules.items():
        for block in module.blocks:
            if block.source == name:
                own = slice(block.start, block.stop)
                dtype = getattr(torch, block.dtype)
                tensors[module_name, "A"] = module.A_RI[own].to(dtype).contiguous()
                tensors[module_name, "B"] = module.B_OR[:, own].to(dtype).contiguous()
                ranks[module_name] = block.rank
    return tensors, dict(source.config), ranks


def _config(rank: int, modules: list[str]) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA of scale 1 on `modules` (whole names), keys and lists in a stable order."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=modules, task_type="CAUSAL_LM").to_dict()
    return config | {"peft_type": "LORA", "target_modules": sorted(modules)}
