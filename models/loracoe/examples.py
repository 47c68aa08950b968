"""Demonstrations as padded batches, and the loss of their responses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data.artifacts import read_rows
from data.errors import UserError
from data.settings import Prompt
from models.scoring import logits_at
from models.tokenization import encode_demonstration


class Example(NamedTuple):
    """A demonstration as ids; the loss is that of the response, its EOS included."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclass(frozen=True)
class TaskExamples:
    """A task's demonstrations as ids; `too_long` counts those left out because they exceed the model's context."""

    training: list[Example]
    validation: list[Example]
    too_long: int = 0


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. `targets` are flat positions (row * T + column) whose next token is a response token."""

    ids_BT: Tensor
    attention_mask_BT: Tensor
    prompt_mask_BT: Tensor
    targets_N: Tensor
    labels_N: Tensor

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return len(self.labels_N)


def make_batch(examples: Sequence[Example], device: torch.device, pad_id: int = 0, left: bool = False) -> Batch:
    """Pads `examples` to their longest, on the right (or `left`); masks come from lengths, not from ids."""
    lengths = [len(example.prompt_ids) + len(example.response_ids) for example in examples]
    width = max(lengths)
    ids = torch.full((len(examples), width), pad_id)
    mask, prompt_mask = torch.zeros_like(ids), torch.zeros_like(ids)
    targets, labels = [], []
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        start = width - length if left else 0
        ids[row, start : start + length] = torch.tensor([*example.prompt_ids, *example.response_ids])
        mask[row, start : start + length] = 1
        prompt_mask[row, start : start + len(example.prompt_ids)] = 1
        first = row * width + start + len(example.prompt_ids) - 1
        targets.extend(range(first, first + len(example.response_ids)))
        labels.extend(example.response_ids)
    return Batch(
        ids.to(device),
        mask.to(device),
        prompt_mask.to(device),
        torch.tensor(targets, device=device),
        torch.tensor(labels, device=device),
    )


def batches_of(examples: Sequence[Example], size: int, device: torch.device) -> Iterator[Batch]:
    """`examples` in their order, `size` rows a batch."""
    for start in range(0, len(examples), size):
        yield make_batch(examples[start : start + size], device)


def position_ids(batch: Batch) -> Tensor:
    """Positions that count from a row's first token, whatever side is padded. (B, T)"""
    return (batch.attention_mask_BT.cumsum(1) - 1).clamp(min=0)


def response_nll(model: Any, batch: Batch) -> Tensor:
    """Negative log-likelihood of every response token of the batch, float32. (N,)"""
    logits_NV = logits_at(
        model, batch.ids_BT, batch.targets_N, attention_mask=batch.attention_mask_BT, position_ids=position_ids(batch)
    )
    return cross_entropy(logits_NV.float(), batch.labels_N, reduction="none")


@torch.no_grad()
def mean_loss(model: Any, examples: Sequence[Example], batch_size: int, device: torch.device) -> float:
    """Mean negative log-likelihood over all response tokens of `examples`: one global denominator."""
    total, tokens = 0.0, 0
    for batch in batches_of(examples, batch_size, device):
        total += response_nll(model, batch).double().sum().item()
        tokens += batch.tokens
    return total / tokens


def read_examples(path: Path, split: str, tokenizer: Any, prompt: Prompt, context: int) -> tuple[list[Example], int]:
    """The demonstrations of one split of demonstrations.parquet, and how many were left out as longer than `context`.

    Raises UserError where none of them fits.
    """
    rows = [row for row in read_rows(path, "demonstrations") if row["split"] == split]
    examples = []
    for row in rows:
        encoded = encode_demonstration(tokenizer, row["question"], row["response"], prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) <= context:
            examples.append(Example(encoded.prompt_ids, encoded.response_ids))
    if rows and not examples:
        raise UserError(
            f"{path}: none of the {len(rows)} {split} demonstrations fits into the model's {context} tokens"
        )
    return examples, len(rows) - len(examples)
