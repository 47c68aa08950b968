"""The rollouts of one round: start states are chosen, continued, graded and compared within their groups.

Tokens come out as the engine sampled them; the revealed prefix is part of the prompt. A reward function sees the text
of prefix and completion together. All draws are seeded by what they are for: the same request gives the same tables.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.artifacts import read_rows, write_table
from data.curricula import make_curriculum
from data.errors import UserError
from data.progress import Report
from data.rewards import score
from data.seeds import derive_seed
from models.advantages import make_estimator, zero_variance_share
from models.losses import kl_estimate
from models.policy import Policy
from models.requests import RolloutsRequest
from models.rollout.engine import RolloutInput, RolloutOutput
from models.rollout.engines import make_engine
from models.scoring import TokenRow
from models.settings import GeneralisedAdvantage, KLSettings
from models.tokenization import boundary, decode, encode_demonstration
from models.trainer_state import seed_generators

STATE_COLUMNS = ("answer", "answer_kind", "question", "task", "prefix")
ROW_COLUMNS = ("item_id", "stage", "stop_reason", "completion_ids")
"""What reward functions get beside prompts (the questions) and completions."""


@dataclass(frozen=True)
class Start:
    """A start state as ids: the prompt and the revealed prefix, which are conditioned on."""

    row: dict[str, Any]
    """Its row of the table start_states."""
    ids: list[int]
    """Prompt and prefix."""
    prefix_length: int
    """How many of `ids` are the prefix."""
    first_sample: int
    """Samples of the same start state earlier in the round: their seeds are taken."""


def encode_starts(chosen: Sequence[dict[str, Any]], policy: Policy, request: RolloutsRequest) -> list[Start]:
    """The chosen start states as ids, cut at the last token boundary at or before the end of their prefix.

    One whose whole demonstration does not fit the model's context is left out: nothing is ever cut.
    """
    starts: list[Start] = []
    taken: dict[str, int] = defaultdict(int)
    for row in chosen:
        response = row["prefix"] + row["remainder"]
        encoded = encode_demonstration(policy.tokenizer, row["question"], response, request.prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) > policy.context:
            continue
        cut = boundary(encoded.offsets[:-1], len(row["prefix"]))
        ids = encoded.prompt_ids + encoded.response_ids[:cut]
        starts.append(Start(row, ids, cut, taken[row["start_state_id"]]))
        taken[row["start_state_id"]] += request.rl.samples
    if not starts:
        raise UserError(
            f"round {request.round}: none of the {len(chosen)} chosen demonstrations fits the model's context of "
            f"{policy.context} tokens; leave long demonstrations out or use a model with a longer context"
        )
    return starts


def sampling_inputs(starts: Sequence[Start], request: RolloutsRequest, context: int) -> list[RolloutInput]:
    """What the engine is asked for: `samples` rows a start state, their limit of new tokens lowered by the context.

    The seed of a row is a function of run seed, policy version, start state and sample, whatever it is batched with.
    """
    return [
        RolloutInput(
            start.ids,
            derive_seed(request.seed, request.round, start.row["start_state_id"], start.first_sample + sample),
            min(request.rl.max_new_tokens, context - len(start.ids)),
        )
        for start in starts
        for sample in range(request.rl.samples)
    ]


def rollout_rows(
    starts: Sequence[Start],
    inputs: Sequence[RolloutInput],
    outputs: Sequence[RolloutOutput],
    request: RolloutsRequest,
    tokenizer: Any,
) -> list[dict[str, Any]]:
    """Graded rows of the table rollouts, without advantages."""
    rows = []
    samples = request.rl.samples
    for number, (asked, output) in enumerate(zip(inputs, outputs, strict=True)):
        start = starts[number // samples]
        prefix_ids = start.ids[len(start.ids) - start.prefix_length :]
        rows.append(
            {
                **{name: start.row[name] for name in ("item_id", "start_state_id", "stage")},
                "group": number // samples,
                "sample": number % samples,
                "prompt_ids": start.ids,
                "prefix_length": start.prefix_length,
                "completion_ids": output.completion_ids,
                "sampling_logprobs": output.logprobs,
                "stop_reason": output.stop_reason,
                "completion": decode(tokenizer, [*prefix_ids, *output.completion_ids]),
                "policy_version": request.round,
                "seed": asked.seed,
            }
        )
    states = [starts[number // samples].row for number in range(len(rows))]
    columns = {name: [state[name] for state in states] for name in STATE_COLUMNS}
    columns |= {name: [row[name] for row in rows] for name in ROW_COLUMNS}
    scored = score(columns["question"], [row["completion"] for row in rows], columns, request.reward)
    for row, grade in zip(rows, scored, strict=True):
        failed = row["stop_reason"] == "error"
        row |= {
            "correct": grade.correct and not failed,
            "parsed": grade.parsed,
            "reason": "the engine gave no finite distribution" if failed else grade.reason,
            "reward_parts": json.dumps(grade.parts, sort_keys=True),
            "reward": None if failed else grade.reward,
        }
    return rows


def add_reference(rows: list[dict[str, Any]], policy: Policy, request: RolloutsRequest) -> None:
    """Puts the warm-up policy's log-probabilities of the completions into `rows`, where a KL term is on."""
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows]
    with policy.reference(request.reference) as reference:
        found = reference.completion_logprobs(tokens, request.rl.temperature, request.rl.tokens_per_micro_batch)
    for row, logprobs_C in zip(rows, found):
        row["reference_logprobs"] = logprobs_C.tolist()


def row_kl(row: dict[str, Any], estimator: str) -> float:
    """Σ over the completion of the KL estimate between the sampling and the warm-up policy (nats)."""
    sampling_C, reference_C = torch.tensor(row["sampling_logprobs"]), torch.tensor(row["reference_logprobs"])
    return kl_estimate(sampling_C, reference_C, estimator).double().sum().item()


def penalised(rows: Sequence[dict[str, Any]], kl: KLSettings) -> list[float | None]:
    """The rewards that advantages are made from: minus coefficient × KL of the row where KL belongs to the reward."""
    if not (kl.coefficient and kl.place == "reward"):
        return [row["reward"] for row in rows]
    return [
        None if row["reward"] is None else row["reward"] - kl.coefficient * row_kl(row, kl.estimator) for row in rows
    ]


def round_metrics(rows: Sequence[dict[str, Any]], kl: KLSettings) -> dict[str, float]:
    """Figures of a round's rollouts by name; a name is absent where nothing is to be averaged."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    lengths = [len(row["completion_ids"]) for row in rows]
    groups = [row["group"] for row in rows]
    values = {
        "reward": _mean(rewards),
        "accuracy": _mean(row["correct"] for row in rows),
        "unscorable_share": _mean(row["reward"] is None for row in rows),
        "zero_variance_share": zero_variance_share([row["reward"] for row in rows], groups),
        "completion_tokens_mean": _mean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "prompt_tokens_mean": _mean(len(row["prompt_ids"]) for row in rows),
        "prefix_tokens_mean": _mean(row["prefix_length"] for row in rows),
        "truncated_share": _mean(row["stop_reason"] == "length" for row in rows),
        "engine_error_share": _mean(row["stop_reason"] == "error" for row in rows),
        "generated_tokens": float(sum(lengths)),
        "groups": float(len(set(groups))),
    }
    parts = defaultdict(list)
    for row in rows:
        for name, value in json.loads(row["reward_parts"]).items():
            if value is not None:
                parts[name].append(value)
    values |= {f"reward/{name}": _mean(found) for name, found in sorted(parts.items())}
    for stage in sorted({row["stage"] for row in rows}):
        correct = [row["correct"] for row in rows if row["stage"] == stage]
        values[f"accuracy/stage_{stage}"] = _mean(correct)
        values[f"rollouts/stage_{stage}"] = float(len(correct))
    if kl.coefficient:
        total = sum(row_kl(row, kl.estimator) for row in rows)
        values["kl_reference_rollouts"] = total / max(sum(lengths), 1)
    return {name: value for name, value in values.items() if value is not None}


def _success(row: dict[str, Any]) -> float | None:
    """What a curriculum learns from a rollout: 1 or 0, None where it cannot be scored."""
    return None if row["reward"] is None else float(row["correct"])


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def generate(request: RolloutsRequest, out: Path, report: Report) -> dict[str, Any]:
    """Writes rollouts.parquet, curriculum.json and metrics.parquet of one round; returns counts and means.

    `generated_tokens` in the result are the sampled tokens of this round. Raises UserError where no chosen start state
    fits the context.
    """
    rl = request.rl
    seed_generators(derive_seed(request.seed, "rollouts", request.round))
    curriculum = make_curriculum(request.curriculum, read_rows(request.start_states, "start_states"), request.seed)
    if request.curriculum_state is not None:
        curriculum.load_state_dict(json.loads(request.curriculum_state.read_text()))
    policy = Policy.load(request.policy, compute=request.compute)
    chosen = curriculum.choose(request.round, rl.prompts)
    starts = encode_starts(chosen, policy, request)
    if len(starts) < len(chosen):
        report.log(f"round {request.round}: {len(chosen) - len(starts)} start states do not fit the context: left out")
    inputs = sampling_inputs(starts, request, policy.context)
    engine = make_engine(request.engine, policy)
    began = time.perf_counter()
    outputs = engine.generate(
        inputs, rl.temperature, progress=lambda done, total: report.progress(done, total, "rollouts")
    )
    seconds = time.perf_counter() - began
    rows = rollout_rows(starts, inputs, outputs, request, policy.tokenizer)
    if rl.kl.coefficient:
        add_reference(rows, policy, request)
    groups = [row["group"] for row in rows]
    if not isinstance(rl.advantage, GeneralisedAdvantage):
        for row, advantage in zip(rows, make_estimator(rl.advantage)(penalised(rows, rl.kl), groups), strict=True):
            row["advantage"] = advantage
    curriculum.observe(
        request.round,
        [start.row for start in starts],
        [[_success(row) for row in rows if row["group"] == group] for group in range(len(starts))],
    )
    metrics = round_metrics(rows, rl.kl)
    tokens = int(metrics["generated_tokens"])
    write_table(out / "rollouts.parquet", "rollouts", rows)
    (out / "curriculum.json").write_text(json.dumps(curriculum.state_dict(), sort_keys=True) + "\n")
    shared = {"step": request.round, "round": request.round}
    shared["generated_tokens_so_far"] = request.generated_tokens_so_far + tokens
    write_table(out / "metrics.parquet", "metrics", [{"name": n, "value": v, **shared} for n, v in metrics.items()])
    report.log(
        f"round {request.round}: reward {metrics.get('reward', float('nan')):.3f}, accuracy {metrics['accuracy']:.3f}, "
        f"{tokens} tokens at {tokens / max(seconds, 1e-9):.0f}/s"
    )
    return {"rollouts": len(rows), "generated_tokens": tokens, "accuracy": metrics["accuracy"]}
