"""PEFT LoRA adapters on disk, made by anyone: read, or refused where they would be silently wrong."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from data.artifacts import file_hash
from data.errors import UserError

CONFIG_FILE, WEIGHTS_FILE, PICKLED_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KEY_PREFIX = "base_model.model."
_KEY = re.compile(re.escape(KEY_PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Keys of adapter_config.json that say something about plain LoRA, or nothing about the forward pass.
_HARMLESS = {
    *(
        "peft_type",
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("megatron_core", "qalora_group_size", "eva_config", "loftq_config", "corda_config", "lora_ga_config"),
}
# Initialisations that leave the base weights as they are; the others subtract the start from the base.
_SAFE_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
_REASONS = {
    "use_dora": "DoRA rescales the whole weight by a magnitude vector, which a sum of ranks cannot express",
    "lora_bias": "the bias of lora_B belongs to no rank and would be dropped",
    "bias": "biases of the base were trained with it and belong to no rank",
    "modules_to_save": "whole modules were trained with it and would be dropped",
    "trainable_token_indices": "token embeddings were trained with it and would be dropped",
    "target_parameters": "it targets bare parameters, not linear layers",
    "layer_replication": "it runs on a base with repeated layers",
    "fan_in_fan_out": "its base has transposed weights (Conv1D); only torch.nn.Linear layers are supported",
}


@dataclass(frozen=True)
class LoraFactors:
    """One adapted linear layer: delta W = scale · B A, with the factors as they are on disk."""

    A: Tensor
    """(r, d_in)"""
    B: Tensor
    """(d_out, r)"""
    alpha: float
    rslora: bool

    @property
    def rank(self) -> int:
        """r"""
        return self.A.shape[0]

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rank stabilisation (rsLoRA)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter: its name in the pool, its configuration, the hash of its weights, its factors by module."""

    name: str
    folder: Path
    config: dict[str, Any]
    sha256: str
    modules: dict[str, LoraFactors]


def read_adapter(folder: Path, name: str) -> Adapter:
    """Reads the PEFT adapter in `folder` (adapter_config.json, adapter_model.safetensors) under the name `name`.

    Raises UserError where the folder holds no such adapter, or one that is more than a sum of LoRA ranks.
    """
    config = _read_config(folder)
    reason = _why_not(config)
    if reason:
        raise UserError(f"{folder / CONFIG_FILE}: {reason}")
    if not (folder / WEIGHTS_FILE).is_file():
        if (folder / PICKLED_FILE).is_file():
            raise UserError(
                f"{folder} has its weights in {PICKLED_FILE}, a pickle, which is not opened here; load it where "
                "you trust it and write it again with save_pretrained(..., safe_serialization=True)"
            )
        raise UserError(f"{folder} has no {WEIGHTS_FILE}: name the folder that PEFT's save_pretrained wrote")
    factors: dict[str, dict[str, Tensor]] = {}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for key in sorted(file.keys()):
            match = _KEY.fullmatch(key)
            if match is None:
                raise UserError(
                    f"{folder / WEIGHTS_FILE}: {key!r} is not the lora_A or lora_B weight of a linear layer; an "
                    "adapter that also holds embeddings, heads or magnitudes would lose them here. Where PEFT added "
                    "unchanged embeddings by itself, write it with save_pretrained(..., save_embedding_layers=False)"
                )
            factors.setdefault(match["module"], {})[match["factor"]] = file.get_tensor(key)
    if not factors:
        raise UserError(f"{folder / WEIGHTS_FILE} holds no LoRA weights")
    modules = {module: _factors(folder, module, pair, config) for module, pair in factors.items()}
    return Adapter(name, folder, config, file_hash(folder / WEIGHTS_FILE), modules)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {CONFIG_FILE}: name the folder of a PEFT adapter") from None
    except ValueError as error:
        raise UserError(f"{folder / CONFIG_FILE} is not JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("r"), int):
        raise UserError(f"{folder / CONFIG_FILE} has no integer 'r': it is not the configuration of a LoRA adapter")
    return config


def _why_not(config: dict[str, Any]) -> str | None:
    """Why an adapter of this configuration is no plain sum of LoRA ranks; None where it is one."""
    if config.get("peft_type") != "LORA":
        return f"peft_type is {config.get('peft_type')!r}; only LORA adapters can be composed rank by rank"
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in _SAFE_INITIALISATIONS:
        return (
            f"init_lora_weights is {initialisation!r}: such adapters belong to changed base weights or are a variant "
            "of their own; convert them with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for key, reason in _REASONS.items():
        if config.get(key) not in (None, False, "none", [], {}):
            return f"{key} is {config[key]!r}: {reason}; train the adapter without it"
    for key, value in config.items():
        if key not in _HARMLESS and key not in _REASONS and value not in (None, False, [], {}):
            return f"{key} is {value!r}: a LoRA variant that is not known here to be a plain sum of ranks"
    return None


def _factors(folder: Path, module: str, pair: dict[str, Tensor], config: dict[str, Any]) -> LoraFactors:
    """The factors of one module, checked against the rank that the configuration gives it."""
    if set(pair) != {"A", "B"}:
        raise UserError(f"{folder / WEIGHTS_FILE}: {module} has lora_{next(iter(pair))} only; the file is incomplete")
    A, B = pair["A"], pair["B"]
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = ranks.get(get_pattern_key(ranks, module), config["r"])
    if A.dim() != 2 or B.dim() != 2:
        raise UserError(f"{folder / WEIGHTS_FILE}: {module} is not a linear layer (shape {tuple(A.shape)})")
    if A.shape[0] != rank or B.shape[1] != rank:
        raise UserError(
            f"{folder}: {module} has rank {A.shape[0]} (A) and {B.shape[1]} (B) in the weights but {rank} in "
            f"{CONFIG_FILE}; its scale would be wrong: restore the file that belongs to these weights"
        )
    if not (A.is_floating_point() and torch.isfinite(A).all() and torch.isfinite(B).all()):
        raise UserError(f"{folder / WEIGHTS_FILE}: {module} holds values that are not finite numbers")
    alpha = float(alphas.get(get_pattern_key(alphas, module), config.get("lora_alpha", 8)))
    return LoraFactors(A, B, alpha, bool(config.get("use_rslora", False)))


def check_same_base(adapters: list[Adapter], base_name: str, base_revision: str | None) -> None:
    """Raises UserError where an adapter names another base model (name or revision) than `base_name`.

    Folders are compared by where they are. An adapter that names no base is not compared.
    """
    wanted = _identity(base_name, base_revision)
    for adapter in adapters:
        name = adapter.config.get("base_model_name_or_path")
        found = _identity(name, adapter.config.get("revision")) if name else wanted
        if found != wanted:
            raise UserError(
                f"adapter {adapter.name!r} names the base {found[0]} (revision {found[1]}), but this base is "
                f"{wanted[0]} (revision {wanted[1]}); pass same_base=True once you know that these are the same weights"
            )


def _identity(name: str, revision: str | None) -> tuple[str, str]:
    if "#sha256=" in name:  # a base on an object store goes by its content, wherever it lies
        return name.partition("#")[2], revision or "main"
    return (str(Path(name).resolve()) if Path(name).is_dir() else name), revision or "main"


def check_against_base(model: nn.Module, adapter: Adapter) -> None:
    """Raises UserError where `adapter` does not fit `model`, in either direction.

    PEFT itself ignores adapter weights that have no place (a base with fewer layers loads in silence) and leaves
    targeted layers without weights at their random start; both are refused here.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in adapter.modules if name not in linears]
    if missing:
        raise UserError(
            f"adapter {adapter.name!r} has weights for {len(missing)} module(s) that are no linear layers of this "
            f"base, such as {missing[0]}; it was trained on another model"
        )
    for name, factors in adapter.modules.items():
        wanted = linears[name].out_features, linears[name].in_features
        found = factors.B.shape[0], factors.A.shape[1]
        if wanted != found:
            raise UserError(
                f"adapter {adapter.name!r}: {name} is made for a weight of shape {found}, this base has {wanted}; it "
                "was trained on another model"
            )
    known = {
        key: value
        for key, value in adapter.config.items()
        if key in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    }
    config = LoraConfig(**known)
    bare = [name for name in linears if name not in adapter.modules and check_target_module_exists(config, name)]
    if bare:
        raise UserError(
            f"adapter {adapter.name!r} targets {len(bare)} module(s) of this base without having weights for them, "
            f"such as {bare[0]}; it was trained on a smaller model"
        )
    _refuse_tied_head(model, adapter)


def _refuse_tied_head(model: nn.Module, adapter: Adapter) -> None:
    """The head of a model with tied embeddings: merged, the delta would change the input embeddings as well."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return
    for name, module in model.named_modules():
        if module is head and name in adapter.modules:
            raise UserError(
                f"adapter {adapter.name!r} adapts {name}, whose weight is tied to the input embeddings; merging it "
                "anywhere would corrupt them: train it without this module"
            )
