"""`ratchet plan`: what a run would do, how large it is, what it needs. Starts nothing, imports no torch."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from flows import config, scale
from flows.architectures import BYTES, architecture
from flows.published import PublishedRun, Rates
from flows.settings import RunSettings

EXPECTED_LENGTH_SHARE = 0.5
"""Expected length of a completion as a share of `max_new_tokens` (our choice, for estimates only)."""


def steps(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """(step, what it does) in the order of the flow."""
    for task, expert in settings.experts.items():
        yield f"ingest {task}", _source(expert.source)
    yield "base model", settings.model.kind + (f" {settings.model.name}" if settings.model.kind != "tiny" else "")
    for task, expert in settings.experts.items():
        warmup = expert.warmup
        length = f"{warmup.max_steps} steps" if warmup.max_steps is not None else f"{warmup.epochs:g} epochs"
        if expert.reasoning.kind == "meta_actions":
            synthesis = expert.reasoning.synthesis
            if synthesis.mode == "rollouts":
                yield f"plain warm-up {task}", "the policy whose errors become wrong attempts"
            yield f"traces {task}", f"at most {synthesis.traces} meta-action traces, mode {synthesis.mode}"
        yield f"warm-up {task}", f"{length} of {warmup.batch_size} demonstrations, rate {warmup.learning_rate:g}"
        for arm in settings.arms:
            cell = config.arm_settings(settings, task, arm)
            stages = "one a step" if cell.curriculum.kind == "adaptive" else getattr(cell.curriculum, "n_stages", 1)
            yield f"start states {task}/{arm}", f"{cell.curriculum.kind}, {stages} per demonstration"
            yield (
                f"rounds {task}/{arm}",
                f"at most {rounds(cell.rl)} of {cell.rl.prompts} × {cell.rl.samples} rollouts, "
                f"{cell.rl.generated_tokens:,} generated tokens, {cell.rl.rounds_per_task} a task",
            )
    if settings.composed_models:
        router = settings.composition.router.kind
        beside = "" if router == "none" else f", and a {router} router"
        yield "compose", f"{len(settings.experts)} adapters of arm {settings.composition.arm}{beside}"
    models = ["base", "warmup", *settings.arms, *settings.composed_models]
    for model in models:
        for task in settings.experts:
            yield f"evaluate {model} on {task}", "held-out questions, greedy"
    yield "report", "HTML, Markdown, pictures"


def rounds(rl) -> int:
    """Estimated rounds of a cell: the budget over the expected tokens of a round."""
    tokens = rl.prompts * rl.samples * rl.max_new_tokens * EXPECTED_LENGTH_SHARE
    return min(rl.max_rounds, max(1, math.ceil(rl.generated_tokens / tokens)))


def sizes(settings: RunSettings) -> list[tuple[str, str]]:
    """(quantity, figure with unit) of tokens and memory."""
    cells = [config.arm_settings(settings, task, arm) for task in settings.experts for arm in settings.arms]
    tokens = sum(
        min(cell.rl.generated_tokens, rounds(cell.rl) * cell.rl.prompts * cell.rl.samples * cell.rl.max_new_tokens)
        for cell in cells
    )
    rows = [
        ("cells (expert × arm)", f"{len(cells)}"),
        ("generated tokens, all cells, at most", f"{tokens:,}"),
        ("Prefect task runs, about", f"{task_runs(settings)}"),
    ]
    shape = architecture(settings.model)
    if shape is None:
        return [*rows, ("memory", "unknown: the model's configuration is on the hub only")]
    bytes_each = BYTES[getattr(settings.model, "dtype", "float32")]
    trained = shape.trained(settings.parameters)
    # what is trained is kept in float32; a base of 16 bit stays beside it to sample with
    masters = trained * 4 if settings.parameters.kind == "full" else 0
    cell = max(cells, key=lambda cell: cell.rl.tokens_per_micro_batch)
    # a block keeps about this many vectors of the hidden size a token for the backward pass (our estimate)
    activations = shape.layers * cell.rl.tokens_per_micro_batch * 16 * shape.hidden * bytes_each
    batch = getattr(settings.engine, "batch_size", cell.rl.prompts * cell.rl.samples)
    cache = batch * cell.rl.max_new_tokens * 2 * shape.kv_bytes_per_token(bytes_each)
    memory = scale.update_memory(shape, settings, activations)
    return [
        *rows,
        ("processes", scale.described(settings)),
        ("parameters of the base", f"{shape.parameters():,}"),
        ("trained parameters", f"{trained:,} ({settings.parameters.kind})"),
        ("memory of the base's weights", _bytes(shape.parameters() * bytes_each)),
        ("memory of gradients and Adam", _bytes(trained * (4 + 8))),
        *([("memory of the trained weights, float32", _bytes(masters))] if masters else []),
        ("memory of activations, one micro-batch", _bytes(activations)),
        (f"memory of the key/value cache, {batch} rows", _bytes(cache)),
        *((f"memory a device in updates: {part}", _bytes(size)) for part, size in memory.items()),
        ("memory a device in updates, together", _bytes(sum(memory.values()))),
    ]


def task_runs(settings: RunSettings) -> int:
    """About how many Prefect task runs the flow makes."""
    count = sum(1 for step, _ in steps(settings) if not step.startswith("rounds "))
    for task in settings.experts:
        for arm in settings.arms:
            rl = config.arm_settings(settings, task, arm).rl
            count += 2 * rounds(rl) if rl.rounds_per_task == 1 else math.ceil(rounds(rl) / rl.rounds_per_task)
    return count


def published(settings: RunSettings, generated: float | None, trained: float | None) -> list[tuple[str, str]]:
    """R³'s published run on GSM8K with this base: tokens, steps, memory and hours; nothing for a tiny model.

    `generated` and `trained` are tokens a second and GPU; None: estimated.
    """
    shape = architecture(settings.model)
    if settings.model.kind == "tiny" or shape is None:
        return []
    guess = Rates.estimated(shape)
    rates = Rates(generated or guess.generated, trained or guess.trained)
    run = PublishedRun(shape, settings.parameters, getattr(settings.model, "dtype", "float32"))
    return run.rows(rates, measured=bool(generated and trained))


def print_plan(settings: RunSettings, generated: float | None = None, trained: float | None = None) -> None:
    """Prints the resolved settings, the steps, the sizes, and the published run on this base."""
    console = Console(highlight=False, width=None)
    table = Table(title=f"run {settings.name} in {settings.root}", show_header=False, title_justify="left")
    for field, value in _flat(settings.model_dump(mode="json")):
        table.add_row(field, value)
    console.print(table)
    table = Table(title="steps", show_header=False, title_justify="left")
    for row in steps(settings):
        table.add_row(*row)
    console.print(table)
    table = Table(title="sizes (estimates)", show_header=False, title_justify="left")
    for row in sizes(settings):
        table.add_row(*row)
    console.print(table)
    if rows := published(settings, generated, trained):
        table = Table(title="R³'s published run on GSM8K with this base", show_header=False, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _source(source) -> str:
    if source.kind == "suite":
        return f"{source.demonstrations} demonstrations of suite {source.suite}"
    return f"{source.kind} {getattr(source, 'path', None) or source.name}"


def _flat(values: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
