"""Rounds of one cell (task, arm, seed): rollouts, then an update, until the budget of generated tokens is spent."""

from prefect.client.schemas.objects import State
from prefect.states import Completed

from data import storage
from data.settings import Curriculum, Prompt, Reasoning, RewardSettings
from data.storage import ArtifactRef
from models.requests import CellRequest
from models.settings import Engine, EvaluationSettings, Parameters, RLSettings, Tracking
from tasks import compute
from tasks.steps import Inputs, RunContext, TaskReport, configured, result_of, step_key, step_task

SCHEDULING_ONLY = ("rounds_per_task", "keep_rounds")


def run_cell(
    run: RunContext,
    task: str,
    arm: str,
    *,
    base: ArtifactRef,
    warmup: ArtifactRef,
    starts: ArtifactRef,
    demonstrations: ArtifactRef,
    parameters: Parameters,
    prompt: Prompt,
    curriculum: Curriculum,
    reasoning: Reasoning,
    reward: RewardSettings,
    rl: RLSettings,
    evaluation: EvaluationSettings,
    engine: Engine,
    tracking: Tracking,
    seed: int,
    retries: int,
    retry_delay_seconds: float,
) -> ArtifactRef:
    """Runs the tasks of a cell and returns its result: the checkpoint chosen on validation, and all metrics.

    With `rl.rounds_per_task` 1 rollouts and update of a round are tasks of their own, with the Parquet file between
    them; otherwise one task covers several rounds. The numbers are the same.
    """
    inputs = Inputs()
    request = CellRequest(
        url=run.url("experts", task, arm, str(seed)),
        key="",
        base=inputs.add(base),
        warmup=inputs.add(warmup) / "weights",
        parameters=parameters,
        prompt=prompt,
        curriculum=curriculum,
        reasoning=reasoning,
        reward=reward,
        rl=rl,
        evaluation=evaluation,
        engine=engine,
        start_states=inputs.add(starts) / "start_states.parquet",
        questions=inputs.add(demonstrations) / "questions.parquet",
        seed=seed,
        compute=run.compute,
        tracking=tracked(run, tracking, f"{task}-{arm}-{seed}"),
    )
    default = RLSettings()
    scheduling = {name: getattr(default, name) for name in SCHEDULING_ONLY}
    keyed = request.model_copy(update={"rl": rl.model_copy(update=scheduling)})
    request = request.model_copy(update={"key": step_key("models.cell:run_rounds", 1, keyed, inputs, run.python)})
    steps = [generate_round, update_round] if rl.rounds_per_task == 1 else [run_rounds]
    first = 0
    while True:
        last = first + rl.rounds_per_task - 1
        due = request.model_copy(update={"last_round": last})
        for step in steps:
            progress = result_of(configured(step, retries, retry_delay_seconds)(run, task, arm, first, last, due))
        if progress["finished"]:
            found, reason = storage.find(storage.join(request.url, "result"), request.key)
            if found is None:
                raise RuntimeError(f"{request.url}/result: {reason}, although its rounds say that they are finished")
            return found
        first = last + 1


def tracked(run: RunContext, tracking: Tracking, cell: str) -> Tracking:
    """`tracking` with the names of one cell, and the run's folder where none is set."""
    folder = tracking.folder if tracking.folder is not None else run.url("trackers")
    name = f"{tracking.run_name or run.name}-{cell}".replace("/", "-")  # a retraining's run lies in a folder of its own
    return tracking.model_copy(update={"run_name": name, "folder": folder})


@step_task("rounds-{task}-{arm}-{first}-to-{last}")
def run_rounds(run: RunContext, task: str, arm: str, first: int, last: int, request: CellRequest) -> dict | State:
    """Rounds `first` to `last` of a cell, rollouts and updates; continues from the newest complete round."""
    return _call("models.cell:run_rounds", f"rounds {task}/{arm} {first} to {last}", run, request)


@step_task("rollouts-{task}-{arm}-{first}")
def generate_round(run: RunContext, task: str, arm: str, first: int, last: int, request: CellRequest) -> dict | State:
    """The rollouts of round `first`."""
    return _call("models.cell:generate_round", f"rollouts {task}/{arm} {first}", run, request)


@step_task("update-{task}-{arm}-{first}")
def update_round(run: RunContext, task: str, arm: str, first: int, last: int, request: CellRequest) -> dict | State:
    """The policy-gradient steps of round `first`, and its validation when one is due."""
    return _call("models.cell:update_round", f"update {task}/{arm} {first}", run, request)


def _call(function: str, subject: str, run: RunContext, request: CellRequest) -> dict | State:
    report = TaskReport(subject)
    process = compute.shared(run.threads, run.python, run.launch)
    try:
        progress = process.call(function, request, None, report, run.timeout)
    except BaseException:
        report.finish("failed")
        raise
    done = not progress["new"]
    report.finish("already complete" if done else f"done, {process.cpu_seconds:.1f} CPU s")
    return Completed(name="Cached", message=f"already complete at {request.url}", data=progress) if done else progress
