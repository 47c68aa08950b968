"""Composition (LoRACoE): the experts' adapters as one pool of ranks, one exported adapter a task."""

from data.settings import Prompt
from data.storage import ArtifactRef
from models.requests import ComposeRequest
from models.settings import CompositionSettings
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("compose")
def compose(
    run: RunContext,
    base: ArtifactRef,
    experts: dict[str, ArtifactRef],
    demonstrations: dict[str, ArtifactRef],
    prompts: dict[str, Prompt],
    settings: CompositionSettings,
    seed: int,
    place: str = "loracoe",
) -> ArtifactRef:
    """Publishes `loracoe/`, or another `place` in the run.

    `experts` are the results of their cells, whose adapter lies in `weights/`.
    """
    inputs = Inputs()
    request = ComposeRequest(
        base=inputs.add(base),
        experts={task: inputs.add(ref) / "weights" for task, ref in experts.items()},
        demonstrations={task: inputs.add(ref) / "demonstrations.parquet" for task, ref in demonstrations.items()},
        prompts=prompts,
        composition=settings,
        seed=seed,
        compute=run.compute,
    )
    return run_step("compose", "models.loracoe.step:compose", request, run.url(place), inputs, run)
