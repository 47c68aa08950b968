"""Log-probabilities of sampled tokens under a causal language model, for training and for comparing with an engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence


class TokenRow(NamedTuple):
    """One row to score: what is conditioned on, and what was sampled after it (a sampled EOS included)."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


def completion_logprobs(
    network: Any, rows: Sequence[TokenRow], temperature: float = 1.0, tokens_per_micro_batch: int = 8192
) -> list[torch.Tensor]:
    """log π(completion | prompt) of each row's completion tokens: float32 tensors [C_i], in the order of `rows`.

    Of the distribution softmax(logits / temperature), which is what the engine samples (temperature 0 stands for
    greedy rows: the untempered distribution). With a gradient where torch records one; give one micro-batch
    (`micro_batches`) at a time then, since the graphs of all are kept. Logits exist for completion positions only.
    """
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    result: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for indices in micro_batches(lengths, tokens_per_micro_batch):
        batch = [rows[index] for index in indices]
        logits_NV, targets_N = completion_logits(network, batch, temperature)
        logprobs_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
        for index, logprobs in zip(indices, logprobs_N.split([len(row.completion_ids) for row in batch]), strict=True):
            result[index] = logprobs
    return result


def completion_logits(
    network: Any, rows: Sequence[TokenRow], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 logits [N, V] / temperature in front of every completion token of `rows`, and those tokens [N].

    N runs over the completion tokens of row 0, then of row 1, and so on. One forward pass. Raises ValueError for a
    row without a prompt.
    """
    sequences = [torch.tensor([*row.prompt_ids, *row.completion_ids]) for row in rows]
    # Padding on the right needs no mask: in a causal model no real position sees what comes after it.
    ids_BT = pad_sequence(sequences, batch_first=True)
    width = ids_BT.shape[1]
    positions, targets = [], []
    for index, row in enumerate(rows):
        first, count = len(row.prompt_ids), len(row.completion_ids)
        if first == 0:
            raise ValueError(f"row {index} has no prompt: nothing predicts its first completion token")
        positions.append(index * width + first - 1 + torch.arange(count))
        targets.append(sequences[index][first:])
    device = network.device
    logits_NV = logits_at(network, ids_BT.to(device), torch.cat(positions).to(device)).float()
    if temperature not in (0.0, 1.0):
        logits_NV = logits_NV / temperature
    return logits_NV, torch.cat(targets).to(device)


def logits_at(network: Any, ids_BT: torch.Tensor, flat_N: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Logits [N, V] at flat positions (row * T + column) of `ids_BT`; no others are computed.

    The hidden states are chosen in front of the output layer, so that whatever a model does to its logits afterwards
    (soft caps, scales) happens as ever.
    """

    def choose(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, flat_N)[None], *arguments[1:])

    handle = network.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        inputs.setdefault("use_cache", False)
        logits = network(input_ids=ids_BT, **inputs).logits
    finally:
        handle.remove()
    return logits[0]


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of rows in batches whose padded size (rows × longest) is at most `tokens`; a longer row goes alone.

    Rows of like length go together, longest first, so that memory runs out in the first batch or never.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not batches or (len(batches[-1]) + 1) * width > tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
