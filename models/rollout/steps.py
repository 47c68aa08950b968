"""One decoding step: the last token of every live row in, the logits of the next one out; keys and values live here.

Two ways to the same numbers. `ModelStep` calls the model's own forward pass and works for every causal LM that the
engine takes. `DirectStep` (models/rollout/direct.py) does the arithmetic of Llama's family itself, keeps the keys of a
prompt once for all rows that continue it, and costs about half as much on small models.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from data.errors import UserError
from models.rollout.slots import PrefillCache, SlotCache


class Step(Protocol):
    """Decodes the rows in slots 0 .. live-1."""

    cache_name: str
    """The name of the model's cache argument."""

    def admit(self, prefill: PrefillCache, slots: Sequence[int], places: Sequence[int], lengths: Sequence[int]) -> None:
        """Slot `slots[j]` holds a new row; its prompt is the first `lengths[j]` tokens of prefilled row `places[j]`."""

    def logits(self, last_R: Tensor, positions_R: Tensor) -> Tensor:
        """Feeds every live row its last token, which stands at its position; logits [R, V] of what comes after it."""

    def move(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Rows at `sources_R` lie at `targets_R` from now on."""

    def clear(self, slots_R: Tensor) -> None:
        """Rows with values that are not finite leave these slots."""

    def shrink(self, positions_R: Tensor) -> None:
        """Only slots 0 .. R-1 are live from now on; their next tokens stand at these positions."""


class ModelStep:
    """Decodes with the model's own forward pass and a cache of one slot a row."""

    def __init__(self, network: Any, slots: int, prompt_width: int, new_tokens: int) -> None:
        self.network, self.cache_name = network, cache_argument(network)
        columns = prompt_width + new_tokens
        self.cache = SlotCache(slots, columns)
        self.rows = torch.arange(slots, device=network.device)
        self.mask_RW = torch.zeros(slots, columns, dtype=network.dtype, device=network.device)
        self.hidden = torch.finfo(network.dtype).min
        self.window = 0

    def admit(self, prefill: PrefillCache, slots: Sequence[int], places: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies the prompts' keys and values into the rows' slots."""
        device = self.mask_RW.device
        slots_R, lengths_R = torch.tensor(slots, device=device), torch.tensor(lengths, device=device)
        columns = torch.arange(self.mask_RW.shape[1], device=device)
        self.mask_RW[slots_R] = torch.where(columns < lengths_R[:, None], 0.0, self.hidden).to(self.mask_RW.dtype)
        self.cache.admit(prefill, slots_R, torch.tensor(places, device=device))
        self.window = max(self.window, max(lengths) + 1)

    def logits(self, last_R: Tensor, positions_R: Tensor) -> Tensor:
        """One forward pass over one token a row."""
        live = len(last_R)
        rows_R = self.rows[:live]
        self.mask_RW[rows_R, positions_R] = 0
        self.cache.begin(rows_R, positions_R, self.window)
        logits_RV = self.network(
            input_ids=last_R[:, None],
            position_ids=positions_R[:, None],
            attention_mask=self.mask_RW[:live, None, None, : self.window],
            use_cache=True,
            **{self.cache_name: self.cache},
        ).logits[:, -1]
        self.window += 1
        return logits_RV

    def move(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Copies the rows' keys, values and masks."""
        self.mask_RW[targets_R] = self.mask_RW[sources_R]
        self.cache.move(sources_R, targets_R, self.window)

    def clear(self, slots_R: Tensor) -> None:
        """Zeros in these slots."""
        self.cache.clear(slots_R)

    def shrink(self, positions_R: Tensor) -> None:
        """The window ends behind the longest row."""
        self.window = int(positions_R.max()) + 1 if len(positions_R) else 0


def cache_argument(network: Any) -> str:
    """The name of the cache argument: `cache` since transformers 5.2x, `past_key_values` before.

    Raises UserError for a model that takes no cache or no position ids: its rows cannot be decoded together.
    """
    accepted = inspect.signature(network.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in accepted and "position_ids" in accepted:
            return name
    raise UserError(
        f"{type(network).__name__} takes no key/value cache with position ids, which the transformers engine needs; "
        "use a model with rotary or learned positions, or the vllm_server engine"
    )
