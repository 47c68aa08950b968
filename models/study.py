"""The steps of a comparison study: the shared warm-up of a task and seed, and one cell (task, arm, seed)."""

import importlib
import json
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from data import storage
from data.artifacts import MANIFEST, read_rows, write_table
from data.errors import UserError
from data.meta_actions.judging import first_and_last, judge
from data.progress import Report
from data.settings import MetaActions, PlainReasoning
from data.start_states import build
from models.cell import METRICS, WARMUP, Cell
from models.evaluation import answer_questions, chosen_questions
from models.meta_actions.synthesis import synthesise
from models.policy import Policy
from models.requests import CellRequest, PolicyFiles, TracesRequest
from models.rollout.engines import make_engine
from models.scoring import TokenRow
from models.settings import WarmupSettings
from models.stage_success import STAGES, Success, held_out, judge_chain, stage_success
from models.study_requests import StudyCellRequest, StudyWarmupRequest, WarmupRule
from models.supervised import fit
from models.warmup import plan_batches, trace_rows, training_rows, within

ANSWERS, CELL = "answers.parquet", "cell.json"
SERIES = ("revealed_share_mean", "accuracy", "zero_variance_share", *(f"accuracy/stage_{i}" for i in range(STAGES)))
"""Metrics of the rounds that go into cell.json as curves."""


def outside(success: dict[int, Success], rule: WarmupRule) -> float:
    """How far a checkpoint lies outside the rule's two bands, in widths of the bands; 0: inside both."""
    bands = ((0, rule.question_low, rule.question_high), (STAGES - 1, rule.last_low, rule.last_high))
    total = 0.0
    for stage, low, high in bands:
        share = success[stage].counted
        total += max(low - share, share - high, 0.0) / (high - low)
    return total


def _fit(policy: Policy, demonstrations: Path, prompt: Any, warmup: WarmupSettings, seed: int, **named: Any) -> list:
    rows, _ = training_rows(policy, demonstrations, prompt)
    return _fit_rows(policy, rows, warmup, seed, **named)


def _fit_rows(policy: Policy, rows: list[TokenRow], warmup: WarmupSettings, seed: int, **named: Any) -> list:
    batches = [[rows[index] for index in batch] for batch in plan_batches(len(rows), warmup, seed)]
    batches = within(batches, warmup.max_tokens)
    return fit(
        policy.network,
        batches,
        learning_rate=warmup.learning_rate,
        schedule=warmup.schedule,
        warmup_ratio=warmup.warmup_ratio,
        weight_decay=warmup.weight_decay,
        max_gradient_norm=warmup.max_gradient_norm,
        tokens_per_micro_batch=warmup.tokens_per_micro_batch,
        **named,
    )


def warm_up(request: StudyWarmupRequest, out: Path, report: Report) -> dict[str, Any]:
    """Trains until the rule is met and writes the checkpoint that meets it, or the one least outside its bands.

    Every look is in `warmup.json`. Without a rule all steps are taken, and there is one look at the end.
    """
    if isinstance(request.reasoning, MetaActions):
        return _warm_up_on_traces(request, out, report)
    files = PolicyFiles(base=request.base)
    policy = Policy.load(files, request.parameters, request.compute, trainable=True, seed=request.seed)
    engine = make_engine(request.engine, policy)
    rule = request.rule or WarmupRule()
    rows = held_out(request.demonstrations, rule.demonstrations)
    looks: list[dict[str, Any]] = []
    weights = out / "weights"

    def look(steps: int) -> bool:
        found = stage_success(
            policy,
            engine,
            rows,
            {0: rule.samples, STAGES - 1: 1},
            prompt=request.prompt,
            suite=request.suite,
            temperature=request.rl.temperature,
            max_new_tokens=request.rl.max_new_tokens,
            seed=request.seed,
        )
        looks.append({"steps": steps, "outside": outside(found, rule), **_by_stage(found)})
        report.log(f"after {steps} steps: " + ", ".join(f"stage {s} {100 * v.counted:.1f} %" for s, v in found.items()))
        if looks[-1]["outside"] < min((entry["outside"] for entry in looks[:-1]), default=math.inf):
            shutil.rmtree(weights, ignore_errors=True)
            policy.save(weights)
        return looks[-1]["outside"] == 0.0

    def after_step(steps: int) -> bool:
        return request.rule is not None and steps % rule.every == 0 and look(steps)

    metrics = _fit(
        policy,
        request.demonstrations,
        request.prompt,
        request.warmup,
        request.seed,
        report=report,
        what="warm-up",
        after_step=after_step,
    )
    if not looks:
        look(len({metric["step"] for metric in metrics}))
    taken = min(
        looks, key=lambda entry: (entry["outside"], -entry["steps"] if request.rule is None else entry["steps"])
    )
    write_table(out / METRICS, "metrics", metrics)
    result = {"taken": taken, "looks": looks, "rule_met": taken["outside"] == 0.0}
    (out / "warmup.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return {"steps": taken["steps"], "rule_met": result["rule_met"], **taken["valid"]}


def _warm_up_on_traces(request: StudyWarmupRequest, out: Path, report: Report) -> dict[str, Any]:
    """Meta-action traces from the demonstrations, and the warm-up on them; `traces.parquet` and its card lie beside.

    Raises UserError for a rule (it counts plain chains), and for the synthesis from rollouts (no policy is at hand).
    """
    if request.rule is not None:
        raise UserError("warmup_rule counts plain chains, which traces of meta-actions are not; leave it out")
    if request.reasoning.synthesis.mode != "corrupt":
        raise UserError("a study makes its traces without a policy: set run.reasoning.synthesis.mode corrupt")
    files = PolicyFiles(base=request.base)
    asked = TracesRequest(
        policy=files,
        prompt=request.prompt,
        reasoning=request.reasoning,
        engine=request.engine,
        demonstrations=request.demonstrations,
        suite=request.suite,
        seed=request.seed,
        compute=request.compute,
    )
    synthesise(asked, out, report)
    policy = Policy.load(files, request.parameters, request.compute, trainable=True, seed=request.seed)
    rows, _ = trace_rows(policy, out / "traces.parquet", request.prompt)
    metrics = _fit_rows(policy, rows, request.warmup, request.seed, report=report, what="warm-up")
    policy.save(out / "weights")
    write_table(out / METRICS, "metrics", metrics)
    figures = {
        "steps": len({metric["step"] for metric in metrics}),
        "trained_tokens": sum(metric["value"] for metric in metrics if metric["name"] == "trained_tokens"),
        "rule_met": True,
    }
    (out / "warmup.json").write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return figures


def _by_stage(found: dict[int, Success]) -> dict[str, Any]:
    return {
        "right": {f"stage_{stage}": success.right for stage, success in found.items()},
        "valid": {f"stage_{stage}": success.counted for stage, success in found.items()},
    }


def run_cell(request: StudyCellRequest, out: Path, report: Report) -> dict[str, Any]:
    """Trains the cell's policy where its kind trains one, answers the questions greedily, and writes what came of it.

    Returns the figures that are in `cell.json` too. Training continues where an interrupted call stopped; only the
    answers are given anew.
    """
    if request.kind == "step":
        figures = _call(request, out, report)
        if not (out / ANSWERS).is_file():
            raise UserError(f"{request.function} of the arm {request.arm!r} wrote no {ANSWERS}; see StudyCellRequest")
    else:
        policy, figures = _trained(request, out, report)
        figures |= answer(request, policy, out, report)
    (out / CELL).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return {name: figures.get(name) for name in ("accuracy", "valid_share", "validation_accuracy", "generated_tokens")}


def _call(request: StudyCellRequest, out: Path, report: Report) -> dict[str, Any]:
    module, _, name = (request.function or "").partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"arm {request.arm!r}: the step function {request.function!r} cannot be had ({error}); "
            "name one as package.module:function that is on PYTHONPATH"
        ) from error
    return function(request, out, report)


def _trained(request: StudyCellRequest, out: Path, report: Report) -> tuple[PolicyFiles, dict[str, Any]]:
    base = PolicyFiles(base=request.base)
    if request.kind == "base":
        return base, {"generated_tokens": 0, "processed_tokens": 0, "cpu_seconds": 0.0}
    warm = PolicyFiles(base=request.base, weights=request.warmup)
    if request.kind == "warmup":
        return warm, {"generated_tokens": 0, "processed_tokens": 0, "cpu_seconds": 0.0}
    if request.kind == "supervised":
        return _supervised(request, warm, out, report)
    return _rounds(request, report)


def _rounds(request: StudyCellRequest, report: Report) -> tuple[PolicyFiles, dict[str, Any]]:
    """RL from the warm-up until the budget is spent; the policy chosen on validation, and its figures."""
    with tempfile.TemporaryDirectory() as folder:
        build(request.demonstrations / "demonstrations.parquet", request.curriculum, Path(folder), report)
        shared = {
            name: getattr(request, name) for name in CellRequest.model_fields if name in type(request).model_fields
        }
        asked = CellRequest(
            **shared | {"start_states": Path(folder) / "start_states.parquet"},
            questions=request.demonstrations / "questions.parquet",
        )
        cell = Cell(asked, report)
        while cell.wants_round:
            cell.update()
        cell.settle()
    result = storage.fetch(cell.place("result"))
    figures = json.loads((result / "result.json").read_text())
    metrics = read_rows(result / METRICS, "metrics")
    curve = _curve(cell)
    figures |= {
        "cpu_seconds": curve[-1][1],
        "curve": curve,
        "processed_tokens": _processed(metrics),
        "series": {name: _series(metrics, name) for name in SERIES},
    }
    return PolicyFiles(base=request.base, weights=result / "weights"), figures


def _curve(cell: Cell) -> list[list[float]]:
    """[generated tokens, CPU seconds of rollouts and updates, validation accuracy] of each validated checkpoint."""
    points, seconds, tokens = [[0, 0.0, cell.accuracies[WARMUP]]], 0.0, 0
    for number in range(cell.newest + 1):
        for part in ("rollouts", "update"):
            info = storage.read_json(storage.join(cell.round_place(number, part), MANIFEST))["info"]
            seconds += info["cpu_seconds"]
        tokens = info["generated_tokens_so_far"]
        if number in cell.accuracies:
            points.append([tokens, round(seconds, 3), cell.accuracies[number]])
    return points


def _processed(metrics: list[dict[str, Any]]) -> int:
    """Prompt, prefix and completion tokens of all rollouts: what was read and written to learn."""
    by_round: dict[int, dict[str, float]] = {}
    for row in metrics:
        if row["round"] is not None:
            by_round.setdefault(row["round"], {})[row["name"]] = row["value"]
    total = 0.0
    for values in by_round.values():
        rollouts = sum(value for name, value in values.items() if name.startswith("rollouts/stage_"))
        total += rollouts * (values["prompt_tokens_mean"] + values["completion_tokens_mean"])
    return round(total)


def _series(metrics: list[dict[str, Any]], name: str) -> list[list[float]]:
    return [
        [row["generated_tokens_so_far"], round(row["value"], 4)]
        for row in metrics
        if row["name"] == name and row["value"] is not None
    ]


def _supervised(
    request: StudyCellRequest, warm: PolicyFiles, out: Path, report: Report
) -> tuple[PolicyFiles, dict[str, Any]]:
    """Supervised training on from the warm-up; the checkpoint (the warm-up too) that validation likes best."""
    if request.supervised is None:
        raise ValueError(f"the arm {request.arm!r} of kind supervised has no settings")
    policy = Policy.load(warm, request.parameters, request.compute, trainable=True, seed=request.seed)
    questions = chosen_questions(request.demonstrations / "questions.parquet", "validation", None)
    weights, curve, seconds = out / "weights", [], [0.0, time.process_time()]

    def validate(steps: int) -> bool:
        if steps % request.supervised.validate_every:
            return False
        seconds[0] += time.process_time() - seconds[1]
        accuracy = _accuracy(request, policy, questions, report)
        if not curve or accuracy > max(point[2] for point in curve):
            shutil.rmtree(weights, ignore_errors=True)
            policy.save(weights)
        curve.append([steps, round(seconds[0], 3), accuracy])
        seconds[1] = time.process_time()
        return False

    validate(0)
    path, warmup = request.demonstrations / "demonstrations.parquet", request.supervised.warmup
    named = {"report": report, "what": "supervised training", "after_step": validate}
    _fit(policy, path, request.prompt, warmup, request.seed, **named)
    best = max(curve, key=lambda point: point[2])
    figures = {
        "generated_tokens": 0,
        "processed_tokens": 0,
        "cpu_seconds": curve[-1][1],
        "supervised_curve": curve,
        "chosen_steps": best[0],
        "validation_accuracy": best[2],
        "warmup_validation_accuracy": curve[0][2],
    }
    return PolicyFiles(base=request.base, weights=weights), figures


def _answers(request: StudyCellRequest, policy: Policy, questions: list[dict[str, Any]], report: Report) -> list[dict]:
    greedy = request.evaluation.model_copy(update={"temperature": 0.0, "samples": 1})
    engine = make_engine(request.engine, policy)
    reasoning = PlainReasoning() if request.kind == "base" else request.reasoning
    named = {"model": request.arm, "seed": 0, "report": report, "reasoning": reasoning}
    return answer_questions(policy, engine, questions, request.prompt, greedy, **named)


def _attempts(request: StudyCellRequest, given: list[dict]) -> dict[str, float]:
    """Accuracy at the first attempt, what revision changed, and test-time tokens, where answers are traces."""
    if not isinstance(request.reasoning, MetaActions) or request.kind == "base":
        return {}
    limit = request.reasoning.max_blocks
    pairs = [first_and_last(judge(row["completion"], row["gold"], row["answer_kind"], limit)) for row in given]
    return {
        "accuracy_first": sum(first for first, _ in pairs) / len(pairs),
        "wrong_to_right": sum(last and not first for first, last in pairs) / len(pairs),
        "right_to_wrong": sum(first and not last for first, last in pairs) / len(pairs),
    }


def _accuracy(request: StudyCellRequest, policy: Policy, questions: list[dict[str, Any]], report: Report) -> float:
    rows = _answers(request, policy, questions, report)
    return sum(row["correct"] for row in rows) / len(rows)


def answer(request: StudyCellRequest, files: PolicyFiles, out: Path, report: Report) -> dict[str, Any]:
    """Greedy answers of a policy to the cell's questions, in `answers.parquet`; accuracy and success by stage."""
    policy = Policy.load(files, compute=request.compute)
    questions = chosen_questions(request.demonstrations / "questions.parquet", request.split, request.limit)
    given = _answers(request, policy, questions, report)
    suite = None if isinstance(request.reasoning, MetaActions) else request.suite  # a trace is no chain
    rows = [
        {
            "question": number,
            "correct": row["correct"],
            "chain_valid": judge_chain(suite, row["question"], row["completion"], row["correct"]),
            "completion_tokens": row["completion_tokens"],
            "truncated": row["stop_reason"] == "length",
        }
        for number, row in enumerate(given)
    ]
    write_table(out / ANSWERS, "study_answers", rows)
    valid = [row["chain_valid"] for row in rows if row["chain_valid"] is not None]
    figures: dict[str, Any] = {
        "questions": len(rows),
        "accuracy": sum(row["correct"] for row in rows) / len(rows),
        "valid_share": sum(valid) / len(valid) if valid else None,
        "completion_tokens_mean": sum(row["completion_tokens"] for row in rows) / len(rows),
    } | _attempts(request, given)
    plain = not isinstance(request.reasoning, MetaActions)
    if request.probe and plain:  # a trace is no chain that stages could be counted on
        found = stage_success(
            policy,
            make_engine(request.engine, policy),
            held_out(request.demonstrations / "demonstrations.parquet", request.probe),
            dict.fromkeys(range(STAGES), 1),
            prompt=request.prompt,
            suite=request.suite,
            temperature=request.rl.temperature,
            max_new_tokens=request.rl.max_new_tokens,
            seed=0,
        )
        figures["success_by_stage"] = _by_stage(found)
    return figures
