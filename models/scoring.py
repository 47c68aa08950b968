"""Log-probabilities of sampled tokens under a causal language model, for training and for comparing with an engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from models.settings import VOCABULARY_CHUNK
from models.vocabulary import Entropies, check_transform, chunked_logprobs, logit_transform, whole_logprobs


class TokenRow(NamedTuple):
    """One row to score: what is conditioned on, and what was sampled after it (a sampled EOS included)."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    learned: Sequence[bool] | None = None
    """Supervised training alone: which completion tokens carry loss; None: all."""

    @property
    def learned_tokens(self) -> int:
        """How many completion tokens carry loss."""
        return len(self.completion_ids) if self.learned is None else sum(self.learned)


class How(NamedTuple):
    """How tokens are scored."""

    temperature: float = 1.0
    """Of the distribution softmax(logits / temperature); 0 stands for greedy rows: the untempered one."""
    entropies: Entropies = "none"
    vocabulary_chunk: int = VOCABULARY_CHUNK
    """Vocabulary entries at a time where the vocabulary is larger; 0: whole logits."""


class TokenScores(NamedTuple):
    """What one pass says of N tokens, float32."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    """Nats; None where not asked for."""
    hidden_NH: torch.Tensor
    """The hidden states that the logits come from."""


class Piece(NamedTuple):
    """Scores of N completion tokens, and where they stand: row and column of the batch."""

    scores: TokenScores
    rows_N: torch.Tensor
    columns_N: torch.Tensor


def completion_logprobs(
    network: Any,
    rows: Sequence[TokenRow],
    temperature: float = 1.0,
    tokens_per_micro_batch: int = 8192,
    vocabulary_chunk: int = VOCABULARY_CHUNK,
) -> list[torch.Tensor]:
    """log π(completion | prompt) of each row's completion tokens: float32 tensors [C_i], in the order of `rows`.

    Of the distribution softmax(logits / temperature), which is what the engine samples (temperature 0 stands for
    greedy rows: the untempered distribution). With a gradient where torch records one; give one micro-batch
    (`micro_batches`) at a time then, since the graphs of all are kept. Logits exist for completion positions only, and
    for `vocabulary_chunk` entries of the vocabulary at a time where it is larger (0: for all of it).
    """
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    result: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    how = How(temperature, "none", vocabulary_chunk)
    for indices in micro_batches(lengths, tokens_per_micro_batch):
        batch = [rows[index] for index in indices]
        ids_BT, flat_N, targets_N = padded(batch)
        device = network.device
        scores = token_scores(network, ids_BT.to(device), flat_N.to(device), targets_N.to(device), how)
        parts = scores.logprobs_N.split([len(row.completion_ids) for row in batch])
        for index, logprobs in zip(indices, parts, strict=True):
            result[index] = logprobs
    return result


def padded(rows: Sequence[TokenRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B, T] padded on the right, flat places [N] in front of every completion token, and those tokens [N].

    N runs over the completion tokens of row 0, then of row 1, and so on. Raises ValueError for a row without a prompt.
    """
    sequences = [torch.tensor([*row.prompt_ids, *row.completion_ids]) for row in rows]
    # Padding on the right needs no mask: in a causal model no real position sees what comes after it.
    ids_BT = pad_sequence(sequences, batch_first=True)
    positions, targets = [], []
    for index, row in enumerate(rows):
        first, count = len(row.prompt_ids), len(row.completion_ids)
        if first == 0:
            raise ValueError(f"row {index} has no prompt: nothing predicts its first completion token")
        positions.append(index * ids_BT.shape[1] + first - 1 + torch.arange(count))
        targets.append(sequences[index][first:])
    return ids_BT, torch.cat(positions), torch.cat(targets)


def completion_logits(
    network: Any, rows: Sequence[TokenRow], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 logits [N, V] / temperature in front of every completion token of `rows`, and those tokens [N].

    One forward pass; order and errors as in `padded`.
    """
    ids_BT, flat_N, targets_N = padded(rows)
    device = network.device
    logits_NV = logits_at(network, ids_BT.to(device), flat_N.to(device)).float()
    if temperature not in (0.0, 1.0):
        logits_NV = logits_NV / temperature
    return logits_NV, targets_N.to(device)


def token_scores(
    network: Any, ids_BT: torch.Tensor, flat_N: torch.Tensor, targets_N: torch.Tensor, how: How, **inputs: Any
) -> TokenScores:
    """Log-probabilities (and entropies) of tokens `targets_N` predicted at flat positions of `ids_BT`; one pass.

    Raises UserError for a model whose logits cannot be computed in chunks.
    """
    temperature = how.temperature or 1.0
    if 0 < how.vocabulary_chunk < network.config.get_text_config().vocab_size:
        return _chunked_scores(network, ids_BT, flat_N, targets_N, how, inputs)
    with seen_by_output_layer(network) as hidden:
        logits_NV = logits_at(network, ids_BT, flat_N, **inputs).float()
    if temperature != 1:
        logits_NV = logits_NV / temperature
    logprobs_N, entropy_N = whole_logprobs(logits_NV, targets_N, how.entropies)
    return TokenScores(logprobs_N, entropy_N, hidden[0])


def _chunked_scores(
    network: Any,
    ids_BT: torch.Tensor,
    flat_N: torch.Tensor,
    targets_N: torch.Tensor,
    how: How,
    inputs: dict[str, Any],
) -> TokenScores:
    """`token_scores` in chunks. They are computed while the output layer runs, where its weights are at hand even when
    they are sharded otherwise; the layer itself makes the logits of one token, which are compared with ours."""
    transform = logit_transform(network.config)
    found: list[Any] = []

    def choose(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]
        found.append(hidden.reshape(-1, hidden.shape[-1]).index_select(0, flat_N))
        return (found[0][None, :1].detach(), *arguments[1:])

    def score(module: torch.nn.Module, _arguments: Any, _output: Any) -> None:
        found.extend(
            chunked_logprobs(
                found[0],
                module,
                targets_N,
                chunk=how.vocabulary_chunk,
                transform=transform,
                temperature=how.temperature or 1.0,
                entropies=how.entropies,
            )
        )

    layer = network.get_output_embeddings()
    handles = [layer.register_forward_pre_hook(choose), layer.register_forward_hook(score)]
    try:
        inputs.setdefault("use_cache", False)
        logits_1V = network(input_ids=ids_BT, **inputs).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    hidden_NH, logprobs_N, entropy_N = found
    check_transform(layer, transform, hidden_NH[:1].detach(), logits_1V.detach())
    return TokenScores(logprobs_N, None if how.entropies == "none" else entropy_N, hidden_NH)


@contextmanager
def seen_by_output_layer(network: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the hidden states [N, H] from which forward passes compute their logits."""
    seen: list[torch.Tensor] = []
    handle = network.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][0]))
    try:
        yield seen
    finally:
        handle.remove()


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
