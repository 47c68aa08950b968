"""Maximum likelihood on demonstrations: the optimiser loop that pre-training and warm-up share."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from data.progress import Report
from models.scoring import TokenRow, completion_logprobs, micro_batches
from models.settings import VOCABULARY_CHUNK

LOG_LINES = 10
"""Log lines over a whole run, besides the progress."""


def learning_rate_at(
    step: int, steps: int, peak: float, schedule: Literal["constant", "cosine"], warmup_ratio: float
) -> float:
    """Learning rate of step `step` (0 is the first) of `steps`: a linear rise, then constant or cosine to 0."""
    rise = math.ceil(warmup_ratio * steps)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def gradient(
    network: Any, rows: Sequence[TokenRow], tokens_per_micro_batch: int, vocabulary_chunk: int = VOCABULARY_CHUNK
) -> tuple[float, int]:
    """Adds the gradient of the mean negative log-likelihood per learned token of `rows`; returns it and the tokens.

    One denominator, the learned tokens of all `rows`: the cut into micro-batches changes nothing. What is not learned
    is conditioned on and has no gradient.
    """
    tokens = max(sum(row.learned_tokens for row in rows), 1)
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    total = 0.0
    for indices in micro_batches(lengths, tokens_per_micro_batch):
        batch = [rows[index] for index in indices]
        logprobs_N = torch.cat(completion_logprobs(network, batch, 1.0, tokens_per_micro_batch, vocabulary_chunk))
        if any(row.learned is not None for row in batch):
            learned = [flag for row in batch for flag in (row.learned or [True] * len(row.completion_ids))]
            logprobs_N = logprobs_N[torch.tensor(learned, device=logprobs_N.device)]
        loss = -logprobs_N.sum() / tokens
        loss.backward()
        total += loss.item()
    return total, tokens


def fit(
    network: Any,
    batches: Sequence[Sequence[TokenRow]],
    *,
    learning_rate: float,
    schedule: Literal["constant", "cosine"],
    warmup_ratio: float,
    weight_decay: float,
    max_gradient_norm: float,
    tokens_per_micro_batch: int,
    vocabulary_chunk: int = VOCABULARY_CHUNK,
    report: Report,
    what: str,
    after_step: Callable[[int], bool] | None = None,
) -> list[dict[str, Any]]:
    """One AdamW step for each batch, on the parameters of `network` that require a gradient; rows of table `metrics`.

    `after_step` is called with the number of steps done, and ends the run by returning True.
    Raises FloatingPointError where loss or gradient are not finite: nothing is updated then.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    metrics: list[dict[str, Any]] = []
    recent: list[float] = []
    every = max(1, len(batches) // LOG_LINES)
    for step, rows in enumerate(batches):
        rate = learning_rate_at(step, len(batches), learning_rate, schedule, warmup_ratio)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss, tokens = gradient(network, rows, tokens_per_micro_batch, vocabulary_chunk)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_gradient_norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FloatingPointError(
                f"{what}, step {step + 1}: loss {loss}, gradient norm {norm}; lower the learning rate or use float32"
            )
        optimizer.step()
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "trained_tokens": float(tokens)}
        metrics += [{"step": step + 1, "name": name, "value": value} for name, value in values.items()]
        recent.append(loss)
        if (step + 1) % every == 0 or step + 1 == len(batches):
            report.log(f"{what}: step {step + 1} of {len(batches)}, loss {sum(recent) / len(recent):.4f} a token")
            recent.clear()
        report.progress(step + 1, len(batches), f"{what}: optimiser steps")
        if after_step is not None and after_step(step + 1):
            break
    return metrics
