"""LoRA modules around a base: made by PEFT once for each adapter configuration, then copied for every policy.

PEFT goes through a whole model several times to put an adapter in and to read its tensors, and a round loads two (the
policy that samples and the one that is trained). Only the first time does it here: the modules that it makes are kept
without their LoRA tensors, and further adapters of the same configuration are a copy of them with the file's tensors.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from models.shared_modules import copy_with, shared_copy

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEPT = 4
"""Configurations kept for a base (our choice: a round has two, with a reference or a second adapter up to four)."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that peft asks transformers for an attribute by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


class AdaptedModules:
    """Empty adapters around one base, by configuration. They hold the base's tensors and none of their own."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.kept: dict[tuple[str, bool], Any] = {}

    def load(self, folder: Path, trainable: bool) -> Any:
        """A PeftModel around the base's tensors with the adapter in `folder`, as PEFT itself loads it."""
        from peft import PeftModel

        from models.lora_linear import use_lora_products

        key = ((folder / ADAPTER_CONFIG).read_text(), trainable)
        state = load_file(folder / ADAPTER_WEIGHTS)
        model = self._filled(self.kept[key], state) if key in self.kept else None
        if model is None:
            with quiet():
                model = PeftModel.from_pretrained(shared_copy(self.base), str(folder), is_trainable=trainable)
            use_lora_products(model)
            self._keep(key, model)
        return model

    def _filled(self, empty: Any, state: dict[str, torch.Tensor]) -> Any | None:
        """A copy of `empty` with the tensors of `state`; None where it wants others (PEFT then says so)."""
        wanted = {_file_name(name): parameter for name, parameter in empty.named_parameters() if parameter.is_meta}
        if {name: tensor.shape for name, tensor in state.items()} != {name: p.shape for name, p in wanted.items()}:
            return None
        device = self.base.device
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*empty.parameters(), *empty.buffers())}
        for name, place in wanted.items():
            tensor = state[name].to(device, place.dtype, copy=True)
            memo[id(place)] = torch.nn.Parameter(tensor, requires_grad=place.requires_grad)
        return copy_with(empty, memo)

    def _keep(self, key: tuple[str, bool], model: Any) -> None:
        """Keeps the modules of `model` with LoRA tensors that have no memory; the oldest configuration goes."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        base = {id(tensor) for tensor in (*self.base.parameters(), *self.base.buffers())}
        for parameter in model.parameters():
            if id(parameter) not in base:
                memo[id(parameter)] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        self.kept[key] = copy_with(model, memo)
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]


def _file_name(name: str) -> str:
    """The name of a parameter in PEFT's file: without the adapter's own."""
    before, _, after = name.rpartition(".default")
    return before + after
