"""From adapters of one base to one adapter a task: pool, importance, gates, export, and a check of the export."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from data.artifacts import write_table
from data.errors import UserError
from data.progress import Report, Silent
from data.seeds import derive_seed
from data.settings import PlainPrompt, Prompt
from models.base import base_name, read_base
from models.loracoe.adapters import check_against_base, check_same_base, read_adapter
from models.loracoe.card import model_card
from models.loracoe.concentration import gini, jaccard_of_top, mass_in_top, share_by_source
from models.loracoe.examples import Example, TaskExamples, make_batch, read_examples, response_nll
from models.loracoe.export import Exported, export_adapter, one_source
from models.loracoe.gated import GatedModel
from models.loracoe.gates import gates_from_importance, train_gates
from models.loracoe.importance import Scores, adalora_score, gate_fisher, gate_gradient, mask_count
from models.loracoe.pool import Gates, Pool, build_pool, save_pool, svd_basis
from models.loracoe.routing import route_tasks
from models.policy import Policy
from models.requests import Device, PolicyFiles
from models.settings import CompositionSettings
from models.shared_modules import shared_copy

PROBE_ROWS = 4
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a response token's log-probability between the gated model and the exported adapter in PEFT."""


@dataclass
class Composition:
    """What `compose_tasks` found: gates by task, scores by measure and task, table rows, what was exported."""

    gates: dict[str, Gates] = field(default_factory=dict)
    scores: dict[str, dict[str, Scores]] = field(default_factory=dict)
    """Measure → task → scores; the first measure is the one that chooses gates."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    exported: dict[str, Exported] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


def compose_adapters(
    adapters: Sequence[Path] | Mapping[str, Path],
    base: Path,
    out: Path,
    *,
    demonstrations: Mapping[str, Path],
    prompts: Mapping[str, Prompt] | None = None,
    composition: CompositionSettings = CompositionSettings(),  # noqa: B008 - frozen settings
    seed: int = 0,
    compute: Device = Device(),  # noqa: B008 - frozen settings
    same_base: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Composes PEFT LoRA adapters of one base, made by anyone, into one adapter for each task of `demonstrations`.

    `adapters`: folders (named after themselves), or name → folder; `base`: a folder of models.base:prepare; one adapter
    is a pool of its own ranks. `demonstrations`: task → demonstrations.parquet; a task with the name of an adapter
    starts from that adapter. `prompts`: task → prompt, the plain one by default. `same_base` skips comparing the base
    that the adapters name with `base`. Writes pool/, importance.parquet, gates.json, exported/<task>/ and
    metrics.parquet into `out` and returns counts and figures. Raises UserError for adapters that cannot be pooled, with
    the reason.
    """
    report = report or Silent()
    folders = dict(adapters) if isinstance(adapters, Mapping) else _named(adapters)
    if not demonstrations:
        raise UserError("name at least one task and its demonstrations: gates are chosen for a task")
    read = [read_adapter(folder, name) for name, folder in folders.items()]
    if not same_base:
        check_same_base(read, base_name(base), read_base(base)["revision"])
    policy = Policy.load(PolicyFiles(base=base), compute=compute)
    for adapter in read:
        check_against_base(policy.network, adapter)
    pool = build_pool(read)
    report.log(f"pool: {len(read)} adapters, {len(pool.modules)} layers, {pool.ranks} ranks")
    save_pool(pool, out / "pool")
    tasks = {}
    for task, path in demonstrations.items():
        prompt = (prompts or {}).get(task, PlainPrompt())
        training, too_long = read_examples(path, "train", policy.tokenizer, prompt, policy.context)
        validation, also = read_examples(path, "validation", policy.tokenizer, prompt, policy.context)
        if not training:
            raise UserError(f"{path} has no demonstrations with split 'train': gates of {task!r} cannot be chosen")
        tasks[task] = TaskExamples(training, validation, too_long + also)
    with GatedModel(policy.network, pool) as gated:
        result = compose_tasks(gated, tasks, composition, out, base_name(base), seed, report)
    if composition.router.kind != "none":
        # its own modules: what it may unfreeze is the router's copy, never the pool of the exports
        with GatedModel(policy.network, pool) as gated:
            figures, rows = route_tasks(gated, tasks, result.gates, composition.router, seed, out / "router", report)
        result.metrics += rows
    else:
        figures = None
    if "gate_gradient_svd" in composition.measures:
        _score_in_svd_basis(policy.network, tasks, composition, pool, seed, result)
    _verify(policy.network, result, tasks, pool, out, report)
    _write(result, pool, out)
    found = {"adapters": len(read), "modules": len(pool.modules), "ranks": pool.ranks, "tasks": result.figures}
    return found | ({"router": figures} if figures else {})


def _named(adapters: Sequence[Path]) -> dict[str, Path]:
    named = {Path(folder).resolve().name: Path(folder) for folder in adapters}
    if len(named) < len(adapters):
        raise UserError("two adapter folders have the same name: pass a mapping of names to folders")
    return named


def compose_tasks(
    gated: GatedModel,
    tasks: Mapping[str, TaskExamples],
    settings: CompositionSettings,
    out: Path,
    base_called: str,
    seed: int,
    report: Report,
) -> Composition:
    """Importance, gates and export of every task on a model with the pool attached; writes exported/<task>/."""
    result = Composition()
    pool = gated.pool
    total = len(tasks) * (settings.gate_steps + 1)
    for number, (task, examples) in enumerate(tasks.items()):
        done = number * (settings.gate_steps + 1)
        report.progress(done, total, f"importance of the ranks for {task}")
        sample = _sample(examples.training, settings.importance_examples, derive_seed(seed, "importance", task))
        at = pool.constant_gates(0.0 if settings.importance_at == "zeros" else 1.0)
        scores = gate_gradient(gated, sample, at, settings.batch_size)
        result.scores.setdefault(f"gate_gradient_at_{settings.importance_at}", {})[task] = scores
        for name, found in _further_measures(gated, sample, at, settings).items():
            result.scores.setdefault(name, {})[task] = found

        def on_step(step: int, start: int = done) -> None:
            report.progress(start + 1 + step, total, "gate steps")

        gates, figures = _choose_gates(gated, task, examples, scores, settings, seed, result.metrics, on_step)
        how = "exact" if one_source(pool, gates) else settings.export
        card = model_card(task, pool, gates, base_called, settings, figures)
        exported = export_adapter(pool, gates, out / "exported" / task, how, base_called, card)
        figures |= {"format": how, "rank": exported.rank, "active_ranks": exported.active_ranks}
        figures |= {"max_lora_rank": exported.max_lora_rank, "too_long": examples.too_long}
        result.gates[task], result.exported[task], result.figures[task] = gates, exported, figures
        report.log(f"{task}: {_told(figures)}")
    report.progress(total, total, "gates")
    return result


def _further_measures(
    gated: GatedModel, sample: Sequence[Example], at: Gates, settings: CompositionSettings
) -> dict[str, Scores]:
    """The other measures in the trained basis. Elementwise ones are taken at gates 1: at 0 they have no gradient."""
    ones = gated.pool.constant_gates(1.0)
    found = {}
    if "gate_fisher" in settings.measures:
        found[f"gate_fisher_at_{settings.importance_at}"] = gate_fisher(gated, sample, at)
    if "mask_count" in settings.measures:
        found["mask_count_at_ones"] = mask_count(gated, sample, ones, settings.batch_size)
    if "adalora" in settings.measures:
        found["adalora_at_ones"] = adalora_score(gated, sample, ones, settings.batch_size)
    return found


def _score_in_svd_basis(
    network: Any,
    tasks: Mapping[str, TaskExamples],
    settings: CompositionSettings,
    pool: Pool,
    seed: int,
    result: Composition,
) -> None:
    """The gate gradient on the same demonstrations, in each adapter's singular basis."""
    rotated = svd_basis(pool)
    at = rotated.constant_gates(0.0 if settings.importance_at == "zeros" else 1.0)
    found = {}
    with GatedModel(network, rotated) as gated:
        for task, examples in tasks.items():
            sample = _sample(examples.training, settings.importance_examples, derive_seed(seed, "importance", task))
            found[task] = gate_gradient(gated, sample, at, settings.batch_size)
    result.scores[f"gate_gradient_at_{settings.importance_at}_svd_basis"] = found


def _sample(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed % 2**63))[:count]
    return [examples[index] for index in order.tolist()]


def _choose_gates(
    gated: GatedModel,
    task: str,
    examples: TaskExamples,
    scores: Scores,
    settings: CompositionSettings,
    seed: int,
    metrics: list[dict[str, Any]],
    on_step: Callable[[int], None],
) -> tuple[Gates, dict[str, Any]]:
    """The task's gates and their figures; appends the losses to the metrics."""
    pool = gated.pool
    own = task if task in {source.name for source in pool.sources} else None
    if settings.gate_steps == 0:
        start, origin = gates_from_importance(pool, scores), "importance"
    elif own is not None:
        start, origin = pool.one_hot_gates(own), "own adapter"
    elif len(pool.sources) == 1:
        start, origin = pool.constant_gates(1.0), "the whole adapter"
    else:
        start, origin = gates_from_importance(pool, scores), "importance"
    figures: dict[str, Any] = {"start": origin, "training_examples": len(examples.training)}
    gates = start
    if settings.gate_steps:
        validation = examples.validation[: settings.importance_examples]
        trained = train_gates(
            gated,
            start,
            examples.training,
            validation,
            steps=settings.gate_steps,
            learning_rate=settings.gate_learning_rate,
            batch_size=settings.batch_size,
            seed=derive_seed(seed, "gates", task),
            on_step=on_step,
        )
        gates = trained.gates
        figures |= {
            "chosen_step": trained.chosen_step,
            "first_loss": trained.losses[0],
            "last_loss": trained.losses[-1],
        }
        if trained.validation:
            figures["validation_loss_before"] = trained.validation[0]
            figures["validation_loss"] = trained.validation[trained.chosen_step]
        for step, loss in enumerate(trained.losses):
            metrics.append({"step": step, "name": f"{task}/gate_loss", "value": loss})
        for step, loss in trained.validation.items():
            metrics.append({"step": step, "name": f"{task}/gate_validation_loss", "value": loss})
    return gates, figures


def _told(figures: dict[str, Any]) -> str:
    parts = [f"gates from {figures['start']}"]
    if "validation_loss" in figures:
        parts.append(f"validation loss {figures['validation_loss_before']:.4f} → {figures['validation_loss']:.4f}")
    parts.append(f"{figures['active_ranks']} active ranks, exported ({figures['format']}) with rank {figures['rank']}")
    needed = figures["max_lora_rank"]
    parts.append(f"vLLM needs --max-lora-rank {needed}" if needed else "vLLM takes no rank that large")
    if figures["too_long"]:
        parts.append(f"{figures['too_long']} demonstrations longer than the context left out")
    return ", ".join(parts)


def _verify(
    network: Any, result: Composition, tasks: Mapping[str, TaskExamples], pool: Pool, out: Path, report: Report
) -> None:
    """Loads every exported adapter with PEFT and compares log-probabilities with the gated model's on a few rows.

    An adapter can load without being applied (other names, other base); that must not pass in silence.
    Raises RuntimeError where they differ by more than rounding.
    """
    device = next(network.parameters()).device
    for task, gates in result.gates.items():
        batch = make_batch(tasks[task].training[:PROBE_ROWS], device)
        with torch.no_grad():
            with GatedModel(network, pool) as gated:
                gated.set_gates(gates)
                wanted_N = response_nll(network, batch)
            loaded = PeftModel.from_pretrained(shared_copy(network), out / "exported" / task).eval()
            difference = _largest(wanted_N, response_nll(loaded.get_base_model(), batch))
        result.figures[task]["export_difference"] = difference
        result.metrics.append({"step": 0, "name": f"{task}/export_difference", "value": difference})
        if difference > _TOLERANCE[network.dtype]:
            raise RuntimeError(
                f"the exported adapter of {task!r} is not the gated model: log-probabilities differ by {difference}"
            )
    report.log("exported adapters agree with the gated model")


def _largest(one_N: Tensor, other_N: Tensor) -> float:
    return float((one_N - other_N).abs().max())


def _write(result: Composition, pool: Pool, out: Path) -> None:
    """importance.parquet, gates.json and metrics.parquet."""
    metrics = [*result.metrics]
    for measure, by_task in result.scores.items():
        for name, value in _concentration(pool, by_task).items():
            metrics.append({"step": 0, "name": f"{measure}/{name}", "value": value})
    write_table(out / "importance.parquet", "importance", _importance_rows(result, pool))
    write_table(out / "metrics.parquet", "metrics", metrics)
    gates = {task: {name: gate.tolist() for name, gate in values.items()} for task, values in result.gates.items()}
    (out / "gates.json").write_text(json.dumps(gates, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _importance_rows(result: Composition, pool: Pool) -> list[dict[str, Any]]:
    """Rows of the table `importance`. Gate gradients are signed: below 0, opening the rank lowers the loss.

    The gate is that of the trained basis, null where a measure has another one.
    """
    return [
        {
            "task": task,
            "module": name,
            "rank": rank,
            "source": source,
            "measure": measure,
            "value": float(scores[name][rank]),
            "gate": None if measure.endswith("svd_basis") else float(result.gates[task][name][rank]),
        }
        for measure, by_task in result.scores.items()
        for task, scores in by_task.items()
        for name, module in pool.modules.items()
        for rank, source in enumerate(module.sources_of_ranks())
    ]


def _adapter_rank(pool: Pool) -> int:
    """Ranks of one adapter in one layer, on average over the pool, at least 1."""
    return max(1, round(pool.ranks / sum(len(module.blocks) for module in pool.modules.values())))


def _concentration(pool: Pool, by_task: Mapping[str, Scores]) -> dict[str, float]:
    """Mass in one adapter's number of ranks, Gini, share of each adapter by task, and overlap of every two tasks."""
    k = _adapter_rank(pool)
    figures = {}
    for task, scores in by_task.items():
        figures[f"{task}/mass_in_top_{k}"] = mass_in_top(scores, k)
        figures[f"{task}/gini"] = sum(gini(value.abs()) for value in scores.values()) / len(scores)
        figures |= {f"{task}/share_of/{source}": share for source, share in share_by_source(pool, scores).items()}
        for other in by_task:
            if other > task:
                figures[f"jaccard_of_top_{k}/{task}/{other}"] = jaccard_of_top(scores, by_task[other], k)
    return figures
