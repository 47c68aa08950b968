"""`ratchet ask`: one question to a run's model."""

from dataclasses import dataclass
from pathlib import Path

from data import storage
from data.errors import UserError
from data.progress import Silent
from flows.config import arm_settings, resolve
from flows.inspect import run_settings
from flows.preflight import computing_python
from models.requests import AnswerRequest, Device, PolicyFiles
from tasks.compute import Compute

TIMEOUT_SECONDS = 600.0


def weights_place(settings: dict, task: str, model: str) -> tuple[str, str] | None:
    """(output, folder in it) of a model's weights inside the run; None for the base."""
    if model == "base":
        return None
    if model == "warmup":
        return f"experts/{task}/warmup", "weights"
    if model == "composed":
        return "loracoe", f"exported/{task}"
    if model == "routed":
        if settings["composition"]["router"]["kind"] == "none":
            raise UserError("--model routed: the run's composition has no router; set composition.router.kind")
        return "loracoe", "."
    if model in settings["arms"]:
        return f"experts/{task}/{model}/{settings['seed']}/result", "weights"
    raise UserError(
        f"--model {model!r}: choose base, warmup, composed, routed or an arm ({', '.join(settings['arms'])})"
    )


@dataclass(frozen=True)
class RunModel:
    """A model of a run, as local folders."""

    task: str
    model: str
    base: Path
    weights: Path | None
    """None: the base itself."""


def run_model(root: str, name: str, task: str | None, model: str | None) -> RunModel:
    """The model of a task (the first where None): by default the composed one, else the last arm's.

    Raises UserError for an unknown run, task or model, and for one that is not trained yet.
    """
    raw = run_settings(root, name)
    task = task or next(iter(raw["experts"]))
    if task not in raw["experts"]:
        raise UserError(f"--task {task!r}: the run has {', '.join(raw['experts'])}")
    composed = raw["composition"]["enabled"] and len(raw["experts"]) > 1
    model = model or ("composed" if composed else list(raw["arms"])[-1])
    place = weights_place(raw, task, model)
    folders = []
    for output in ["base", *([place[0]] if place else [])]:
        found, reason = storage.find(storage.join(root, name, output))
        if found is None:
            raise UserError(f"{model} of run {name!r} cannot answer: {output}: {reason}; `ratchet run` makes it")
        folders.append(storage.fetch(found))
    return RunModel(task, model, folders[0], folders[1] / place[1] if place else None)


def ask(root: str, name: str, question: str, *, task: str | None, model: str | None, prefix: str) -> None:
    """Prints the answer of the run's model, the given prefix of the reasoning marked.

    Raises UserError for an unknown run, task or model, and for one that is not trained yet.
    """
    found = run_model(root, name, task, model)
    task, model = found.task, found.model
    settings = resolve(run_settings(root, name))
    expert = arm_settings(settings, task, model) if model in settings.arms else settings.experts[task]
    request = AnswerRequest(
        policy=PolicyFiles(base=found.base, weights=found.weights),
        prompt=expert.prompt,
        evaluation=expert.evaluation,
        engine=settings.engine_of(model),
        question=question,
        prefix=prefix,
        compute=Device(device=settings.compute.device, threads=settings.compute.threads),
    )
    compute = Compute(settings.compute.threads, computing_python(settings.engine_of(model)))
    try:
        answer = compute.call("models.evaluation:answer", request, None, Silent(), TIMEOUT_SECONDS)
    finally:
        compute.close()
    print_answer(model, task, prefix, answer)


def print_answer(model: str, task: str, prefix: str, answer: dict) -> None:
    """The completion after its prefix (in brackets), and what the grader reads in it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"{model} ({task})", style="bold"))
    console.print(Text.assemble((f"[{prefix}]" if prefix else "", "cyan"), answer["completion"]))
    console.print(Text(f"{answer['tokens']} tokens, ended by {answer['stop_reason']}", style="dim"))
