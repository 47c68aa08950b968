"""Decoding steps of Llama's family without the model's own forward pass: fewer calls, and shared prompts read once.

A decoding step of a small model is mostly calls, not arithmetic, and one of a larger model waits for memory, so here a
layer is as few tensor operations as it can be, and the keys and values of a prompt are kept once: a group's rows, and
the nested start states of one demonstration, are one matrix product with them instead of one each. The modules of the
model do the arithmetic that has weights, so adapters and gates that are put into it work as ever. Log-probabilities are
those of the model's own pass up to rounding (tests/models/test_rollout_families.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from models.rollout.slots import PrefillCache
from models.rollout.steps import cache_argument

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose layers are: norm, q/k/v (Qwen3: normed), rotary, attention, o, norm, MLP, with two residual sums."""


def decodes_directly(network: Any) -> bool:
    """Whether `DirectStep` knows this model: one of transformers' own classes of the family, not a subclass."""
    kind = type(network)
    return kind.__name__ in FAMILY and kind.__module__.startswith("transformers.models.")


FIRST_COLUMNS = 32
"""Own columns that the first step allocates; they double when they are used up (our choice)."""


def _longer(stored: Tensor, axis: int, more: int) -> Tensor:
    """`stored` with `more` entries along `axis`: zeros, for what was never written is weighted with 0, not skipped."""
    shape = list(stored.shape)
    shape[axis] = more
    return torch.cat((stored, stored.new_zeros(shape)), axis)


class SharedKeys:
    """Keys and values of each prompt once, and of every row's own tokens.

    For each layer prompts [prompts, heads, prompt width, D] and own tokens [slots, heads, columns, D], both made larger
    as they are needed. Live rows and live prompts lie in front. In a step every row writes the same column of its own
    part, whenever it came in; columns are used in turn, and no row lives longer than there are columns. The mask hides
    what is not the row's.
    """

    def __init__(self, network: Any, slots: int, prompt_width: int, columns: int) -> None:
        self.slots, self.prompt_width, self.columns = slots, prompt_width, columns
        self.prompt: list[list[Tensor]] = []
        self.own: list[list[Tensor]] = []
        self.device, dtype = network.device, network.dtype
        self.hidden = torch.finfo(dtype).min
        self.prompt_mask_RW = torch.zeros(slots, prompt_width, dtype=dtype, device=self.device)
        self.own_mask_RC = torch.zeros(slots, columns, dtype=dtype, device=self.device)
        self.prompt_of_R = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.length_R = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.rows = self.prompts = self.width = self.steps = self.column = self.seen = 0
        self.order: tuple[Tensor, Tensor] | None = None

    def admit(self, prefill: PrefillCache, slots: Sequence[int], places: Sequence[int], lengths: Sequence[int]) -> None:
        """Keeps the prefilled prompts behind those that are there, for the rows in `slots`."""
        if self.rows == 0:
            self.prompts = self.steps = self.seen = 0
        count, width = len(prefill.keys[0]), prefill.keys[0].shape[2]
        for layer, computed in enumerate(zip(prefill.keys, prefill.values, strict=True)):
            if layer == len(self.prompt):
                empty = [like.new_zeros(0, like.shape[1], self.prompt_width, like.shape[3]) for like in computed]
                self.prompt.append(empty)
                self.own.append([like.new_zeros(self.slots, like.shape[1], 0, like.shape[3]) for like in computed])
            if self.prompts + count > len(self.prompt[layer][0]):
                more = max(count, len(self.prompt[layer][0]) // 2)
                self.prompt[layer] = [_longer(stored, 0, more) for stored in self.prompt[layer]]
            for stored, like in zip(self.prompt[layer], computed):
                # What is not finite would harm rows from which it is hidden: a weight of 0 times NaN is NaN.
                stored[self.prompts : self.prompts + count, :, :width] = like.nan_to_num(0.0, 0.0, 0.0)
        slots_R = torch.tensor(slots, device=self.device)
        self.length_R[slots_R] = torch.tensor(lengths, device=self.device)
        self.prompt_of_R[slots_R] = torch.tensor(places, device=self.device) + self.prompts
        columns_W = torch.arange(self.prompt_width, device=self.device)
        seen_RW = columns_W < self.length_R[slots_R][:, None]
        self.prompt_mask_RW[slots_R] = torch.where(seen_RW, 0.0, self.hidden).to(self.prompt_mask_RW.dtype)
        self.own_mask_RC[slots_R] = self.hidden
        self.prompts += count
        self.rows = max(self.rows, max(slots) + 1)
        self.width = max(self.width, max(lengths))
        self.order = None

    def begin(self, rows: int) -> None:
        """The next step decodes slots 0 .. rows-1."""
        self.rows = rows
        self.column = self.steps % self.columns
        self.seen = min(self.steps + 1, self.columns)
        self.steps += 1
        have = self.own[0][0].shape[2]
        if self.seen > have:
            more = min(max(FIRST_COLUMNS, have), self.columns - have)
            self.own = [[_longer(stored, 2, more) for stored in layer] for layer in self.own]
        self.own_mask_RC[:rows, self.column] = 0
        masks = (self.prompt_mask_RW[:rows, : self.width], self.own_mask_RC[:rows, : self.seen])
        self.mask_R1W = torch.cat(masks, 1)[:, None]

    def set_order(self, heads: int, members: int) -> None:
        """How (row, query head) pairs lie when gathered by (prompt, key head), padded to the largest group, and back.

        `members` query heads look at each of `heads` key heads.
        """
        of_R = self.prompt_of_R[: self.rows]
        counts_P = torch.bincount(of_R, minlength=self.prompts)
        sorted_R = torch.argsort(of_R, stable=True)
        rank_R = torch.empty_like(of_R)
        rank_R[sorted_R] = torch.arange(self.rows, device=self.device) - (counts_P.cumsum(0) - counts_P)[of_R[sorted_R]]
        largest = int(counts_P.max())
        row_PG = torch.zeros(self.prompts, largest, dtype=torch.long, device=self.device)
        row_PG[of_R, rank_R] = torch.arange(self.rows, device=self.device)
        head, member = torch.arange(heads, device=self.device), torch.arange(members, device=self.device)
        gather = (row_PG[:, None, :, None] * heads + head[:, None, None]) * members + member
        back = (of_R[:, None, None] * heads + head[:, None]) * largest + rank_R[:, None, None]
        self.order = gather.flatten(), (back * members + member).flatten()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention [R, H * D] of one query a row [R, H, D] over its prompt, its own tokens and the new key [R, K, D].

        The softmax is computed in float32.
        """
        rows, query_heads, size = query.shape
        heads = key.shape[1]
        if self.order is None:
            self.set_order(heads, query_heads // heads)
        gather, back = self.order
        prompt_key, prompt_value = (
            stored[: self.prompts, :, : self.width].flatten(0, 1) for stored in self.prompt[layer]
        )
        own = []
        for stored, new in zip(self.own[layer], (key, value)):
            stored[:rows, :, self.column] = new
            own.append(stored[:rows, :, : self.seen].flatten(0, 1))
        flat = query.reshape(rows * query_heads, size)
        shared = torch.bmm(flat.index_select(0, gather).view(len(prompt_key), -1, size), prompt_key.transpose(1, 2))
        shared = shared.view(-1, self.width).index_select(0, back).view(rows, query_heads, -1)
        alone = torch.bmm(flat.view(rows * heads, -1, size), own[0].transpose(1, 2)).view(rows, query_heads, -1)
        scores = torch.add(self.mask_R1W, torch.cat([shared, alone], -1), alpha=scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        shared = weights[..., : self.width].reshape(rows * query_heads, -1).index_select(0, gather)
        shared = torch.bmm(shared.view(len(prompt_value), -1, self.width), prompt_value)
        shared = shared.view(-1, value.shape[2]).index_select(0, back)
        alone = torch.bmm(weights[..., self.width :].reshape(rows * heads, -1, self.seen), own[1])
        return alone.view(rows, -1).add_(shared.view(rows, -1))

    def move(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Copies rows to other slots."""
        for stored in (tensor for layer in self.own for tensor in layer):
            stored[targets_R, :, : self.seen] = stored[sources_R, :, : self.seen]
        for table in (self.prompt_mask_RW, self.own_mask_RC, self.prompt_of_R, self.length_R):
            table[targets_R] = table[sources_R]

    def clear(self, slots_R: Tensor) -> None:
        """Zeros in the own parts of these slots."""
        for stored in (tensor for layer in self.own for tensor in layer):
            stored[slots_R] = 0

    def shrink(self, rows: int) -> None:
        """Slots from `rows` on are free; prompts that no row continues give way to those behind them."""
        self.rows, self.order = rows, None
        if rows == 0:
            self.prompts = self.width = 0
            return
        self.width = int(self.length_R[:rows].max())
        used_P = torch.bincount(self.prompt_of_R[:rows], minlength=self.prompts) > 0
        live = int(used_P.sum())
        if live == self.prompts:
            return
        holes_P, movers_P = (~used_P[:live]).nonzero()[:, 0], live + used_P[live:].nonzero()[:, 0]
        if len(holes_P):
            for stored in (tensor for layer in self.prompt for tensor in layer):
                stored[holes_P, :, : self.width] = stored[movers_P, :, : self.width]
            place_P = torch.arange(self.prompts, device=self.device)
            place_P[movers_P] = holes_P
            self.prompt_of_R[:rows] = place_P[self.prompt_of_R[:rows]]
        self.prompts = live


class DirectStep:
    """Decodes a model of the family; see `models.rollout.steps.Step`."""

    def __init__(self, network: Any, slots: int, prompt_width: int, new_tokens: int) -> None:
        self.network, self.cache_name = network, cache_argument(network)
        self.keys = SharedKeys(network, slots, prompt_width, new_tokens)
        model = network.model
        self.layers = [
            (norm(layer.input_layernorm), layer.self_attn, norm(layer.post_attention_layernorm), layer.mlp)
            for layer in model.layers[: network.config.num_hidden_layers]
        ]
        self.last_norm = norm(model.norm)

    def admit(self, prefill: PrefillCache, slots: Sequence[int], places: Sequence[int], lengths: Sequence[int]) -> None:
        """Keeps the prompts' keys and values once each."""
        self.keys.admit(prefill, slots, places, lengths)

    def logits(self, last_R: Tensor, positions_R: Tensor) -> Tensor:
        """One step of every layer. Rows stay [R, 1, H] where modules see them, as gates of a row expect it."""
        model = self.network.model
        hidden = model.embed_tokens(last_R[:, None])
        cos, sin = model.rotary_emb(hidden, position_ids=positions_R[:, None])
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self.keys.begin(len(last_R))
        for number, (first_norm, attention, second_norm, mlp) in enumerate(self.layers):
            hidden = hidden + self.attend(number, attention, first_norm(hidden), cos, signed)
            hidden = hidden + mlp(second_norm(hidden))
        return self.network.lm_head(self.last_norm(hidden))[:, 0]

    def attend(self, number: int, attention: Any, hidden: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
        """A layer's attention output [R, 1, H]. Rotates by pairs (i, i + D/2) as the family does."""
        rows, size = len(hidden), attention.head_dim
        query = attention.q_proj(hidden).view(rows, -1, size)
        key = attention.k_proj(hidden).view(rows, -1, size)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        both = torch.cat((query, key), 1)
        turned = torch.cat((both[..., size // 2 :], both[..., : size // 2]), -1)
        both = torch.addcmul(both * cos, turned, signed)
        heads = query.shape[1]
        value = attention.v_proj(hidden).view(rows, -1, size)
        mixed = self.keys.attend(number, both[:, :heads], both[:, heads:], value, attention.scaling)
        return attention.o_proj(mixed[:, None])

    def move(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Copies the rows' own keys and values."""
        self.keys.move(sources_R, targets_R)

    def clear(self, slots_R: Tensor) -> None:
        """Zeros in these slots."""
        self.keys.clear(slots_R)

    def shrink(self, positions_R: Tensor) -> None:
        """Forgets prompts that no live row continues."""
        self.keys.shrink(len(positions_R))


def norm(module: Any) -> Callable[[Tensor], Tensor]:
    """The module itself; in float32 the same sum by torch's own RMS norm (16-bit types round in another order)."""
    if module.weight.dtype != torch.float32:
        return module
    shape, weight, epsilon = tuple(module.weight.shape), module.weight, module.variance_epsilon
    return lambda hidden: rms_norm(hidden, shape, weight, epsilon)
