"""Supervised warm-up: the policy learns to write the demonstrations before it is rewarded for answers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Report
from data.seeds import derive_seed
from data.settings import Prompt
from models.policy import Policy
from models.requests import WarmupRequest
from models.scoring import TokenRow
from models.settings import WarmupSettings
from models.supervised import fit
from models.tokenization import encode_demonstration


def training_rows(policy: Policy, demonstrations: Path, prompt: Prompt) -> tuple[list[TokenRow], int]:
    """The training split as rows, and how many demonstrations are left out because they do not fit the context.

    The prompt is conditioned on, the whole response and its EOS are learned; nothing is ever cut. Raises UserError
    where no demonstration remains.
    """
    rows: list[TokenRow] = []
    left_out = 0
    for row in read_rows(demonstrations, "demonstrations"):
        if row["split"] != "train":
            continue
        encoded = encode_demonstration(policy.tokenizer, row["question"], row["response"], prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) > policy.context:
            left_out += 1
        else:
            rows.append(TokenRow(encoded.prompt_ids, encoded.response_ids))
    if not rows:
        raise UserError(
            f"{demonstrations} has no demonstration to train on: {left_out} of its training split are longer than the "
            f"model's context of {policy.context} tokens; give more, hold fewer out or use a longer context"
        )
    return rows, left_out


def trace_rows(policy: Policy, traces: Path, prompt: Prompt) -> tuple[list[TokenRow], int]:
    """Meta-action traces as rows, and how many are left out because they do not fit the context.

    Tokens that hold any character of an unlearned span carry no loss. Raises UserError where no trace remains.
    """
    rows: list[TokenRow] = []
    left_out = 0
    for row in read_rows(traces, "traces"):
        encoded = encode_demonstration(policy.tokenizer, row["question"], row["text"], prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) > policy.context:
            left_out += 1
            continue
        spans = json.loads(row["unlearned"])
        learned = [not any(s < end and start < e for s, e in spans) for start, end in encoded.offsets]
        rows.append(TokenRow(encoded.prompt_ids, encoded.response_ids, learned if spans else None))
    if not rows:
        raise UserError(
            f"{traces} has no trace to train on: {left_out} are longer than the model's context of {policy.context} "
            "tokens; use a longer context or shorter demonstrations"
        )
    return rows, left_out


def within(batches: list[list[TokenRow]], tokens: int | None) -> list[list[TokenRow]]:
    """The first batches, up to the one in which their learned tokens reach `tokens`; None: all."""
    if tokens is None:
        return batches
    learned = 0
    for number, batch in enumerate(batches):
        learned += sum(row.learned_tokens for row in batch)
        if learned >= tokens:
            return batches[: number + 1]
    return batches


def plan_batches(count: int, settings: WarmupSettings, seed: int) -> list[list[int]]:
    """Rows of each optimiser step: pass after pass in a new order, `epochs` passes, at most `max_steps` steps."""
    total = round(settings.epochs * count)
    order: list[int] = []
    while len(order) < total:
        generator = np.random.default_rng(derive_seed(seed, "warmup", len(order) // count))
        order += generator.permutation(count).tolist()
    order = order[:total]
    size = settings.batch_size
    steps = math.ceil(total / size)
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    return [order[step * size : (step + 1) * size] for step in range(steps)]


def warm_up(request: WarmupRequest, out: Path, report: Report) -> dict[str, Any]:
    """Fine-tunes the policy on demonstrations, or on traces in their place; writes `weights/` and `metrics.parquet`.

    Returns demonstrations, steps, trained tokens and the losses (nats a token) of the first and last step. Raises
    UserError for demonstrations that do not fit, FloatingPointError where the loss stops being finite.
    """
    settings = request.warmup
    policy = Policy.load(request.policy, request.parameters, request.compute, trainable=True, seed=request.seed)
    if request.traces is None:
        rows, left_out = training_rows(policy, request.demonstrations, request.prompt)
    else:
        rows, left_out = trace_rows(policy, request.traces, request.prompt)
    batches = [[rows[index] for index in batch] for batch in plan_batches(len(rows), settings, request.seed)]
    batches = within(batches, settings.max_tokens)
    if left_out:
        report.log(
            f"{left_out} demonstrations are left out: longer than the model's context of {policy.context} tokens"
        )
    report.log(f"warm-up on {len(rows)} demonstrations, {len(batches)} steps of {settings.batch_size}")
    metrics = fit(
        policy.network,
        batches,
        learning_rate=settings.learning_rate,
        schedule=settings.schedule,
        warmup_ratio=settings.warmup_ratio,
        weight_decay=settings.weight_decay,
        max_gradient_norm=settings.max_gradient_norm,
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        vocabulary_chunk=settings.vocabulary_chunk,
        report=report,
        what="warm-up",
    )
    policy.save(out / "weights")
    write_table(out / "metrics.parquet", "metrics", metrics)
    return {"demonstrations": len(rows), "left_out": left_out, **summary(batches, metrics)}


def summary(batches: Sequence[Sequence[TokenRow]], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Steps, trained tokens, and the first and last loss of a run of `fit` (None where it took no step)."""
    losses = [metric["value"] for metric in metrics if metric["name"] == "loss"]
    return {
        "steps": len(batches),
        "trained_tokens": sum(row.learned_tokens for batch in batches for row in batch),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
    }
