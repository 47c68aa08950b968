"""Start states: where the rollouts of an arm begin."""

from data.requests import StartStatesRequest
from data.settings import Curriculum
from data.storage import ArtifactRef
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("start-states-{task}-{arm}")
def start_states(
    run: RunContext, task: str, arm: str, demonstrations: ArtifactRef, curriculum: Curriculum
) -> ArtifactRef:
    """Publishes `experts/<task>/<arm>/start_states/`."""
    inputs = Inputs()
    request = StartStatesRequest(
        demonstrations=inputs.add(demonstrations) / "demonstrations.parquet", curriculum=curriculum
    )
    url = run.url("experts", task, arm, "start_states")
    return run_step(f"start states {task}/{arm}", "data.steps:start_states", request, url, inputs, run)
