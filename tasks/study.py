"""The tasks of a comparison study: the shared warm-up of a task and seed, and a cell (task, arm, seed)."""

from prefect.client.schemas.objects import State

from data.artifacts import stable_hash
from data.settings import MetaActions, Settings
from data.storage import ArtifactRef
from models.study_requests import CalibrationRequest, StudyCellRequest, StudyWarmupRequest
from tasks.steps import Inputs, RunContext, run_step, step_key, step_task


class CellInputs(Settings):
    """What the steps of a study start from."""

    model_config = {**Settings.model_config, "arbitrary_types_allowed": True}

    base: ArtifactRef
    demonstrations: ArtifactRef
    warmup: ArtifactRef | None = None
    """None: for the warm-up itself."""


@step_task("warmup-{task}-{seed}")
def study_warmup(run: RunContext, task: str, seed: int, request: StudyWarmupRequest, given: CellInputs) -> ArtifactRef:
    """Publishes `warmups/<task>/<seed>/`, where all arms of the task and seed with the same texts start."""
    inputs = Inputs()
    request = request.model_copy(
        update={
            "base": inputs.add(given.base),
            "demonstrations": inputs.add(given.demonstrations) / "demonstrations.parquet",
        }
    )
    tagged = isinstance(request.reasoning, MetaActions)
    texts = f"-traces-{stable_hash(request.reasoning.synthesis.model_dump())[:8]}" if tagged else ""
    url = run.url("warmups", task, f"{seed}{texts}")
    return run_step(f"warm-up {task} {seed}", "models.study:warm_up", request, url, inputs, run)


@step_task("calibration")
def study_calibration(
    run: RunContext, request: CalibrationRequest, base: ArtifactRef, demonstrations: list[ArtifactRef]
) -> ArtifactRef:
    """Publishes `calibration/`: the base's sampled success by suite and difficulty."""
    inputs = Inputs()
    excluded = tuple(inputs.add(ref) / "questions.parquet" for ref in demonstrations)
    request = request.model_copy(update={"base": inputs.add(base), "excluded": excluded})
    url = run.url("calibration")
    return run_step("calibration", "models.calibration:calibrate", request, url, inputs, run)


@step_task("cell-{task}-{arm}-{seed}")
def study_cell(
    run: RunContext, task: str, arm: str, seed: int, place: str, request: StudyCellRequest, given: CellInputs
) -> ArtifactRef | State:
    """Publishes `<place>/<task>/<arm>/<seed>/answers/`; its rounds lie beside, so that an interrupted one continues."""
    inputs = Inputs()
    request = request.model_copy(
        update={
            "base": inputs.add(given.base),
            "demonstrations": inputs.add(given.demonstrations),
            "warmup": inputs.add(given.warmup) / "weights",
            "url": run.url(place, task, arm, str(seed), "work"),
        }
    )
    request = request.model_copy(update={"key": step_key("models.study:run_cell", 1, request, inputs, run.python)})
    url = run.url(place, task, arm, str(seed), "answers")
    return run_step(f"cell {task}/{arm}/{seed}", "models.study:run_cell", request, url, inputs, run)
