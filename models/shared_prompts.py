"""Forward passes over rows that share prompts: each distinct prompt is computed once, with its gradient.

A group's rollouts continue the same prompt and revealed prefix, so its keys and values are computed once and looked at
by all of them; completions run in passes of like length, so that little of them is padding. Logits exist for completion
positions only. The numbers are those of one pass over whole rows, up to rounding.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from models.rollout.slots import PrefillCache
from models.scoring import How, Piece, TokenRow, TokenScores, padded, token_scores

FULL_ENOUGH = 0.75
"""A pass takes no completion shorter than this share of its longest one ..."""
SMALL_PASS = 1024
"""... unless it holds fewer tokens than this (both our choice: a pass of its own must be worth its overhead)."""


class _SharedPrefix(Cache):
    """Keys and values of prompts, row i looking at prompt `hosts_B[i]`; new ones are appended for the pass only."""

    def __init__(self, prompts: PrefillCache, hosts_B: Tensor) -> None:
        super().__init__(layers=[])
        self.prompts, self.hosts_B = prompts, hosts_B

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The prompt's keys and values in front of the new ones."""
        return (
            torch.cat([self.prompts.keys[layer].index_select(0, self.hosts_B), keys], dim=-2),
            torch.cat([self.prompts.values[layer].index_select(0, self.hosts_B), values], dim=-2),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Width of the prompts."""
        return self.prompts.keys[0].shape[-2]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Prompt and completion."""
        return self.get_seq_length() + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Completions come after the prompts."""
        return self.get_seq_length()


def whole_rows(network: Any, rows: Sequence[TokenRow], how: How) -> list[Piece]:
    """One pass over whole rows, padded on the right."""
    device = network.device
    ids_BT, flat_N, targets_N = (tensor.to(device) for tensor in padded(rows))
    scores = token_scores(network, ids_BT, flat_N, targets_N, how)
    lengths = [len(row.completion_ids) for row in rows]
    rows_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    columns_N = torch.cat([torch.arange(length) for length in lengths])
    return [Piece(scores, rows_N.to(device), columns_N.to(device))]


def shared_prompts(network: Any, rows: Sequence[TokenRow], how: How) -> list[Piece]:
    """One pass over the distinct prompts, then passes over the completions of like length."""
    device = network.device
    prompts = list(dict.fromkeys(tuple(row.prompt_ids) for row in rows))
    number = {prompt: index for index, prompt in enumerate(prompts)}
    hosts = [number[tuple(row.prompt_ids)] for row in rows]
    lengths_P = torch.tensor([len(prompt) for prompt in prompts])
    ids_PT = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    prefix = PrefillCache()
    flat_P = torch.arange(len(prompts)) * ids_PT.shape[1] + lengths_P - 1
    hosts_B = torch.tensor(hosts, device=device)
    first = torch.tensor([row.completion_ids[0] for row in rows], device=device)
    everyone = torch.arange(len(rows), device=device)
    # The end of a prompt predicts the first token of each of its rows: it is scored once a row.
    scores = _scores(network, how, ids_PT.to(device), flat_P.to(device)[hosts_B], first, prefix)
    pieces = [Piece(scores, everyone, torch.zeros_like(everyone))]
    for batch in completion_passes([len(row.completion_ids) - 1 for row in rows]):
        pieces.append(_continue(network, rows, batch, how, prefix, hosts_B, lengths_P.to(device)))
    return pieces


def _continue(
    network: Any,
    rows: Sequence[TokenRow],
    batch: Sequence[int],
    how: How,
    prefix: PrefillCache,
    hosts_B: Tensor,
    lengths_P: Tensor,
) -> Piece:
    """The pass over the completions of the rows in `batch`: every token but the last predicts the one after it."""
    device = hosts_B.device
    counts = [len(rows[i].completion_ids) - 1 for i in batch]
    ids_BC = pad_sequence([torch.tensor(rows[i].completion_ids[:-1]) for i in batch], batch_first=True).to(device)
    width, prompt_width = ids_BC.shape[1], int(prefix.keys[0].shape[-2])
    chosen_B = torch.tensor(batch, device=device)
    before_B1 = lengths_P[hosts_B[chosen_B]][:, None]
    seen_BT = torch.ones(len(batch), prompt_width + width, dtype=torch.long, device=device)
    seen_BT[:, :prompt_width] = torch.arange(prompt_width, device=device) < before_B1
    places_N = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(counts)).to(device)
    columns_N = torch.cat([torch.arange(count) for count in counts]).to(device)
    targets_N = torch.cat([torch.tensor(rows[i].completion_ids[1:]) for i in batch]).to(device)
    scores = _scores(
        network,
        how,
        ids_BC,
        places_N * width + columns_N,
        targets_N,
        _SharedPrefix(prefix, hosts_B[chosen_B]),
        attention_mask=seen_BT,
        position_ids=before_B1 + torch.arange(width, device=device),
    )
    return Piece(scores, chosen_B[places_N], columns_N + 1)


def _scores(
    network: Any, how: How, ids: Tensor, flat_N: Tensor, targets_N: Tensor, cache: Cache, **inputs: Any
) -> TokenScores:
    name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
    return token_scores(network, ids, flat_N, targets_N, how, use_cache=True, **{name: cache}, **inputs)


def completion_passes(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in passes of like length, longest first; rows of length 0 need none."""
    passes: list[list[int]] = []
    for row in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i)):
        width = lengths[passes[-1][0]] if passes else 0
        if not passes or (lengths[row] < FULL_ENOUGH * width and len(passes[-1]) * width >= SMALL_PASS):
            passes.append([])
        passes[-1].append(row)
    return passes


def group_batches(rows: Sequence[TokenRow], tokens: int) -> list[list[int]]:
    """Rows in micro-batches, those of a prompt together: distinct prompts and completions, padded, within `tokens`.

    A prompt whose rows alone are too many is given several micro-batches; one row too long for `tokens` goes alone.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(tuple(row.prompt_ids), []).append(index)
    batches: list[list[int]] = []
    prompts, prompt_width, width = 0, 0, 0
    for prompt in sorted(groups, key=lambda prompt: (-len(prompt), prompt)):
        new = True
        for index in sorted(groups[prompt], key=lambda index: (-len(rows[index].completion_ids), index)):
            length = len(rows[index].completion_ids)
            size = (prompts + new) * max(prompt_width, len(prompt)) + (len(batches[-1]) + 1 if batches else 0) * max(
                width, length
            )
            if not batches or size > tokens:
                batches.append([])
                prompts, prompt_width, width, new = 0, 0, 0, True
            batches[-1].append(index)
            prompts, prompt_width, width, new = prompts + new, max(prompt_width, len(prompt)), max(width, length), False
    return batches
