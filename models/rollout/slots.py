"""Preallocated keys and values of the rows that are being decoded, one slot a row, live rows in front."""

from typing import Any

import torch
from transformers.cache_utils import Cache


class PrefillCache(Cache):
    """Remembers the keys and values [P, heads, T, width] of one forward pass over P prompts."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps and returns what the layer computed. Layers come in order."""
        if layer != len(self.keys):
            raise ValueError(
                f"layer {layer} stores keys after {len(self.keys)} layers: this model's cache is not supported"
            )
        self.keys.append(keys)
        self.values.append(values)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing came before a prefill."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """A prompt sees itself alone."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """A prompt begins at position 0."""
        return 0


class SlotCache(Cache):
    """Keys and values [slots, heads, columns, width] for each layer; row i writes at its own column.

    Before a decoding step, `begin` says how many rows are live, at which column each writes and how many columns are
    looked at.
    """

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__(layers=[])
        self.slots, self.columns = slots, columns
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._live, self._window = 0, 0
        self._rows = self._positions = torch.empty(0)

    def admit(self, prefill: PrefillCache, slots_R: torch.Tensor, hosts_R: torch.Tensor) -> None:
        """Copies the prompt's columns of prefilled row `hosts_R[j]` into slot `slots_R[j]`."""
        for layer, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
            if layer == len(self.keys):
                # Zeros, for a column that no row wrote yet is multiplied by an attention weight of 0.
                for store, like in ((self.keys, keys), (self.values, values)):
                    store.append(like.new_zeros(self.slots, like.shape[1], self.columns, like.shape[3]))
            width = keys.shape[2]
            self.keys[layer][slots_R, :, :width] = keys[hosts_R]
            self.values[layer][slots_R, :, :width] = values[hosts_R]

    def begin(self, rows_R: torch.Tensor, positions_R: torch.Tensor, window: int) -> None:
        """The next step decodes slots 0 .. R-1, row i writing column `positions_R[i]`, all below `window`."""
        self._live, self._rows, self._positions, self._window = len(rows_R), rows_R, positions_R, window

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one column a row and returns the live rows' window."""
        stored_keys, stored_values = self.keys[layer], self.values[layer]
        stored_keys[self._rows, :, self._positions] = keys[:, :, 0]
        stored_values[self._rows, :, self._positions] = values[:, :, 0]
        return stored_keys[: self._live, :, : self._window], stored_values[: self._live, :, : self._window]

    def move(self, sources_R: torch.Tensor, targets_R: torch.Tensor, window: int) -> None:
        """Copies rows to other slots, the first `window` columns of each."""
        for stored in (*self.keys, *self.values):
            stored[targets_R, :, :window] = stored[sources_R, :, :window]

    def clear(self, slots_R: torch.Tensor) -> None:
        """Zeros in these slots: what is not finite would harm the row that comes after, though it is hidden from it."""
        for stored in (*self.keys, *self.values):
            stored[slots_R] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns looked at before this step; rows have positions of their own, which the engine passes."""
        return self._window - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Size of the window; the engine passes a finished mask of that size."""
        return self._window, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_seq_length`."""
        return self._window - 1
