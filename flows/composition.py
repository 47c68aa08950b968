"""The flow `composition`: a finished run's experts composed again, with other settings, and evaluated."""

from itertools import product
from typing import Annotated

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from pydantic import Field

from data.errors import UserError
from flows.evaluation import accuracy_row
from flows.finished import FinishedRun, composed_folder, reasoning_of
from flows.parameters import RunName
from models.settings import CompositionSettings
from tasks.api import patiently
from tasks.composition import compose
from tasks.compute import close_shared
from tasks.evaluation import evaluate
from tasks.steps import artifact_key, configured, result_of

Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    return f"{given.get('name')}-{given.get('label')}"


@flow(name="composition", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def composition(
    name: RunName = "tiny",
    root: str = "runs",
    label: Label = "recomposed",
    tasks: list[str] | None = None,
    settings: CompositionSettings = CompositionSettings(),  # noqa: B008 - frozen settings, shown as a form
) -> list[dict[str, str]]:
    """Composes the experts of a finished run rank by rank (LoRACoE) and evaluates the composed adapters.

    Args:
        name: The run whose experts are composed.
        root: Folder of the runs, a path or any fsspec URL.
        label: Where the result goes: compositions/<label>/ of the run. The run's own loracoe/ stays as it is.
        tasks: The experts to compose, two or more; empty means all of the run.
        settings: How: whose adapters, on how many demonstrations importance is measured, how gates are trained.

    Returns:
        One row a task: accuracy of the composed adapter, interval, questions; with a router one more.
    """
    run = FinishedRun(root, name)
    chosen = run.tasks(tasks)
    if len(chosen) < 2:
        raise UserError(
            f"tasks: a composition needs two experts, got {', '.join(chosen)}; name more of the run's tasks"
        )
    if settings.arm not in run.settings.arms:
        raise UserError(
            f"settings.arm: run {name!r} has no arm {settings.arm!r}; it has {', '.join(run.settings.arms)}"
        )
    compute = run.settings.compute

    def call(step, *arguments, **named):
        return result_of(
            configured(step, compute.retries, compute.retry_delay_seconds)(run.context, *arguments, **named)
        )

    demonstrations = {task: run.output("demonstrations", task) for task in chosen}
    base = run.output("base")
    place = f"compositions/{label}"
    rows = []
    try:
        composed = call(
            compose,
            base,
            {task: run.cell(task, settings.arm) for task in chosen},
            demonstrations,
            {task: run.settings.experts[task].prompt for task in chosen},
            settings,
            run.settings.seed,
            place=place,
        )
        kinds = ["composed"] if settings.router.kind == "none" else ["composed", "routed"]
        for task, kind in product(chosen, kinds):
            expert = run.settings.experts[task]
            model = label if kind == "composed" else f"{label}-routed"
            weights = (composed, composed_folder(kind, task))
            made = call(
                evaluate,
                model,
                task,
                base,
                weights,
                demonstrations[task],
                expert.prompt,
                reasoning_of(expert, weights),
                expert.evaluation,
                run.settings.engine_of(kind),
                run.settings.seed,
            )
            rows.append(accuracy_row(task, model, made.info))
    finally:
        close_shared()
    description = f"Experts of run {name}, arm {settings.arm}, composed as {label}"
    patiently(create_table_artifact, rows, key=artifact_key(f"{name} {label}"), description=description)
    return rows
