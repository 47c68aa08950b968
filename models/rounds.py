"""The rollouts of one round: start states are chosen, continued, graded and compared within their groups.

Tokens come out as the engine sampled them; the revealed prefix is part of the prompt. A reward function sees the text
of prefix and completion together. All draws are seeded by what they are for: the same request gives the same tables.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.artifacts import read_rows, write_table
from data.curricula import make_curriculum
from data.errors import UserError
from data.grading import warm
from data.progress import Report
from data.rewards import difficulty_weight, score
from data.seeds import derive_seed
from data.settings import MetaActions
from models.advantages import informative, make_estimator, zero_variance_share
from models.losses import kl_estimate
from models.meta_actions.rollouts import MetaRound, as_trace
from models.policy import Policy
from models.requests import RolloutsRequest
from models.rollout.engine import RolloutInput, RolloutOutput
from models.rollout.engines import make_engine
from models.scoring import TokenRow
from models.settings import GeneralisedAdvantage, KLSettings, RLSettings
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


class Sampler:
    """Draws rollouts from one policy for the start states of one round."""

    def __init__(
        self, request: RolloutsRequest, policy: Policy, report: Report, carried: dict[str, Any] | None = None
    ) -> None:
        self.request = request
        self.policy = policy
        self.report = report
        self.meta = MetaRound(request, policy, carried) if isinstance(request.reasoning, MetaActions) else None
        """Where the response is a trace of meta-actions; it continues from `carried`, the state after the round before.
        """
        self.engine = make_engine(request.engine, policy)
        self.seconds = 0.0
        self.starts: list[Start] = []
        """What was drawn from so far; a group's number is its place here."""
        self._taken: dict[str, int] = defaultdict(int)

    def encode(self, chosen: Sequence[dict[str, Any]]) -> list[Start]:
        """The chosen start states as ids, cut at the last token boundary at or before the end of their prefix.

        One whose whole demonstration does not fit the model's context is left out: nothing is ever cut.
        """
        starts: list[Start] = []
        for row in chosen:
            key = self.meta.restarted.get(row["start_state_id"]) if self.meta else None
            if key is not None:
                ids, cut = key.ids, key.prefix_length
            else:
                prefix, remainder = row["prefix"], row["remainder"]
                if self.meta:
                    prefix, remainder = as_trace(prefix, remainder, row["answer"])
                encoded = encode_demonstration(
                    self.policy.tokenizer, row["question"], prefix + remainder, self.request.prompt
                )
                if len(encoded.prompt_ids) + len(encoded.response_ids) > self.policy.context:
                    continue
                cut = boundary(encoded.offsets[:-1], len(prefix))
                ids = encoded.prompt_ids + encoded.response_ids[:cut]
            starts.append(Start(row, ids, cut, self._taken[row["start_state_id"]]))
            self._taken[row["start_state_id"]] += self.request.rl.samples
        if len(starts) < len(chosen):
            self.report.log(f"{len(chosen) - len(starts)} start states do not fit the model's context: left out")
        return starts

    def draw(self, chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Graded rollouts of the chosen start states, as rows without advantages."""
        starts = self.encode(chosen)
        inputs = sampling_inputs(starts, self.request, self.policy.context)
        began = time.perf_counter()
        outputs = self.engine.generate(
            inputs,
            self.request.rl.temperature,
            progress=lambda done, total: self.report.progress(done, total, "rollouts"),
        )
        self.seconds += time.perf_counter() - began
        rows = rollout_rows(starts, inputs, outputs, self.request, self.policy.tokenizer)
        states = [starts[row["group"]].row for row in rows]
        for row in rows:
            row["group"] += len(self.starts)
        self.starts += starts
        grade_rows(rows, states, self.request, self.meta)
        return rows


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
    """Rows of the table rollouts, without grades, rewards and advantages."""
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
    return rows


def grade_rows(
    rows: list[dict[str, Any]], states: Sequence[dict[str, Any]], request: RolloutsRequest, meta: MetaRound | None
) -> None:
    """Puts correctness and reward into `rows`, whose start states are `states`; of a trace its answer block counts."""
    columns = {name: [state[name] for state in states] for name in STATE_COLUMNS}
    columns |= {name: [row[name] for row in rows] for name in ROW_COLUMNS}
    graded = meta.grade(rows, states) if meta else None
    scored = score(columns["question"], [row["completion"] for row in rows], columns, request.reward, graded)
    if meta:
        meta.reward(rows, scored)
        return
    for row, state, grade in zip(rows, states, scored, strict=True):
        failed = row["stop_reason"] == "error"
        reward = None if failed else grade.reward
        if reward is not None and request.reward.difficulty_weight != "none":
            reward *= difficulty_weight(request.reward.difficulty_weight, state["revealed_steps"], state["total_steps"])
        row |= {
            "correct": grade.correct and not failed,
            "parsed": grade.parsed,
            "reason": "the engine gave no finite distribution" if failed else grade.reason,
            "reward_parts": json.dumps(grade.parts, sort_keys=True),
            "reward": reward,
        }


def resample(rows: list[dict[str, Any]], more: Callable[[int], list[dict[str, Any]]], rl: RLSettings) -> list[int]:
    """Replaces groups whose rewards are all equal: extends `rows` by up to `rl.resample_draws` draws of `more(groups)`.

    Returns the groups to train on: those whose rewards differ, at most `rl.prompts`; every group where none does.
    """
    for _ in range(rl.resample_draws):
        missing = rl.prompts - len(differing(rows))
        if missing <= 0:
            break
        rows += more(missing)
    return (differing(rows) or sorted({row["group"] for row in rows}))[: rl.prompts]


def differing(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The groups whose rewards differ, in order."""
    rewards: dict[int, list[float | None]] = defaultdict(list)
    for row in rows:
        rewards[row["group"]].append(row["reward"])
    return [group for group, rewards_G in sorted(rewards.items()) if informative(rewards_G)]


def add_reference(rows: list[dict[str, Any]], policy: Policy, request: RolloutsRequest) -> None:
    """Puts the warm-up policy's log-probabilities of the completions into `rows`, where a KL term is on."""
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows]
    with policy.reference(request.reference) as reference:
        rl = request.rl
        found = reference.completion_logprobs(tokens, rl.temperature, rl.tokens_per_micro_batch, rl.vocabulary_chunk)
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


def advantages_of(rows: Sequence[dict[str, Any]], rl: RLSettings) -> list[float]:
    """The advantage of each row, over the whole round, so that it does not matter which process trains on which row."""
    return make_estimator(rl.advantage)(penalised(rows, rl.kl), [row["group"] for row in rows])


def round_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Figures of all of a round's rollouts by name; a name is absent where nothing is to be averaged."""
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
    }
    parts = defaultdict(list)
    for row in rows:
        for name, value in json.loads(row["reward_parts"]).items():
            if value is not None:
                parts[name].append(value)
    values |= {f"reward/{name}": _mean(found) for name, found in sorted(parts.items())}
    for stage in sorted({row["stage"] for row in rows if row["stage"] is not None}):  # None: a restart
        correct = [row["correct"] for row in rows if row["stage"] == stage]
        values[f"accuracy/stage_{stage}"] = _mean(correct)
        values[f"rollouts/stage_{stage}"] = float(len(correct))
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
    states = read_rows(request.start_states, "start_states")
    warm({row["answer_kind"] for row in states})
    curriculum = make_curriculum(request.curriculum, states, request.seed)
    carried = None if request.curriculum_state is None else json.loads(request.curriculum_state.read_text())
    if carried is not None:
        curriculum.load_state_dict(carried)
    sampler = Sampler(request, Policy.load(request.policy, compute=request.compute), report, carried)
    restarts = sampler.meta.restarts() if sampler.meta else []
    drawn = sampler.draw([*curriculum.choose(request.round, rl.prompts - len(restarts)), *restarts])
    groups = set(range(len(sampler.starts)))
    if rl.resample_draws:
        groups = set(resample(drawn, lambda n: sampler.draw(curriculum.more(n)), rl))
        report.log(f"round {request.round}: {len(groups)} of {len(sampler.starts)} groups are kept")
    if not drawn:
        raise UserError(
            f"round {request.round}: no chosen demonstration fits the context of {sampler.policy.context} tokens; "
            "leave long demonstrations out or use a model with a longer context"
        )
    successes: list[list[float | None]] = [[] for _ in sampler.starts]
    for row in drawn:
        successes[row["group"]].append(_success(row))
    own = [i for i, start in enumerate(sampler.starts) if start.row["stage"] is not None]
    curriculum.observe(request.round, [sampler.starts[i].row for i in own], [successes[i] for i in own])
    extra, after = meta_round(sampler, drawn, report)
    rows = [row for row in drawn if row["group"] in groups]
    if rl.kl.coefficient:
        add_reference(rows, sampler.policy, request)
    if not isinstance(rl.advantage, GeneralisedAdvantage):
        for row, advantage in zip(rows, advantages_of(rows, rl), strict=True):
            row["advantage"] = advantage
    shares = [row["revealed_steps"] / row["total_steps"] for row in (sampler.starts[i].row for i in own)]
    metrics = round_metrics(drawn) | {"groups": float(len(groups)), "revealed_share_mean": float(np.mean(shares))}
    metrics |= extra
    if rl.kl.coefficient:
        tokens = sum(len(row["completion_ids"]) for row in rows)
        metrics["kl_reference_rollouts"] = sum(row_kl(row, rl.kl.estimator) for row in rows) / max(tokens, 1)
    return write_round(request, out, report, rows, metrics, curriculum.state_dict() | after, sampler.seconds)


def meta_round(
    sampler: Sampler, drawn: Sequence[dict[str, Any]], report: Report
) -> tuple[dict[str, float], dict[str, Any]]:
    """What follows from a round's traces: their figures, and what the next round continues from. Logs the alarms."""
    if sampler.meta is None:
        return {}, {}
    sampler.meta.annotate(drawn)
    sampler.meta.observe()
    figures = sampler.meta.metrics()
    rung, lines = sampler.meta.alarms(figures)
    for line in lines:
        report.log(f"round {sampler.request.round}: {line}")
    return figures | rung, sampler.meta.carried()


def write_round(
    request: RolloutsRequest,
    out: Path,
    report: Report,
    rows: Sequence[dict[str, Any]],
    metrics: dict[str, float],
    curriculum: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Writes the files of a round and returns its counts."""
    tokens = int(metrics["generated_tokens"])
    write_table(out / "rollouts.parquet", "rollouts", rows)
    (out / "curriculum.json").write_text(json.dumps(curriculum, sort_keys=True) + "\n")
    shared = {"step": request.round, "round": request.round}
    shared["generated_tokens_so_far"] = request.generated_tokens_so_far + tokens
    write_table(out / "metrics.parquet", "metrics", [{"name": n, "value": v, **shared} for n, v in metrics.items()])
    report.log(
        f"round {request.round}: reward {metrics.get('reward', float('nan')):.3f}, accuracy {metrics['accuracy']:.3f}, "
        f"{tokens} tokens at {tokens / max(seconds, 1e-9):.0f}/s"
    )
    return {"rollouts": len(rows), "generated_tokens": tokens, "accuracy": metrics["accuracy"]}
