"""Random adapters on the tiny Llama, written by PEFT itself."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from models.loracoe.adapters import read_adapter
from models.loracoe.examples import Example
from models.loracoe.pool import Pool, build_pool
from tests.tiny import tiny_llama

TARGETS = ["q_proj", "v_proj", "down_proj"]


def write_adapter(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **config) -> Path:
    """A random adapter (A and B both drawn) on `tiny_llama()`; small enough that logits stay near the base's."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | config
    model = get_peft_model(tiny_llama(), LoraConfig(**settings), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def pool_of(**folders: Path) -> Pool:
    """The pool of adapters by name."""
    return build_pool([read_adapter(folder, name) for name, folder in folders.items()])


def logits(model, ids=None) -> torch.Tensor:
    """Logits of two fixed rows (B, T, V)."""
    ids = token_ids() if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids).logits


def token_ids(rows: int = 2, length: int = 7, seed: int = 5) -> torch.Tensor:
    """Random token ids without the special ones (B, T)."""
    return torch.randint(4, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def examples(count: int, seed: int = 0) -> list[Example]:
    """Random demonstrations of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(4, 100, (6 + index % 4,), generator=generator).tolist()
        made.append(Example([1, *ids[:3]], [*ids[3:], 2]))
    return made


def peft_logits(*folders: Path, model=None) -> torch.Tensor:
    """Logits with PEFT's own adapters, all of them active."""
    loaded = PeftModel.from_pretrained(model or tiny_llama(), folders[0], adapter_name="0")
    for index, folder in enumerate(folders[1:], start=1):
        loaded.load_adapter(folder, adapter_name=str(index))
    loaded.base_model.set_adapter([str(index) for index in range(len(folders))])
    return logits(loaded.eval())


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((one - other).abs().max() / other.abs().max())
