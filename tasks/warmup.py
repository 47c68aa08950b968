"""Warm-up: supervised fine-tuning of an expert on its demonstrations."""

from data.settings import Prompt
from data.storage import ArtifactRef
from models.requests import PolicyFiles, WarmupRequest
from models.settings import Parameters, WarmupSettings
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("{folder}-{task}")
def warm_up(
    run: RunContext,
    task: str,
    base: ArtifactRef,
    demonstrations: ArtifactRef,
    parameters: Parameters,
    prompt: Prompt,
    settings: WarmupSettings,
    seed: int,
    start: tuple[ArtifactRef, str] | None = None,
    traces: ArtifactRef | None = None,
    folder: str = "warmup",
) -> ArtifactRef:
    """Publishes `experts/<task>/<folder>/`; learns `traces` in place of the demonstrations where they are given.

    `start`: (output, folder in it) of weights to go on from; None: the base.
    """
    inputs = Inputs()
    request = WarmupRequest(
        policy=PolicyFiles(base=inputs.add(base), weights=inputs.add(start[0]) / start[1] if start else None),
        parameters=parameters,
        prompt=prompt,
        warmup=settings,
        demonstrations=inputs.add(demonstrations) / "demonstrations.parquet",
        traces=inputs.add(traces) / "traces.parquet" if traces is not None else None,
        seed=seed,
        compute=run.compute,
    )
    url = run.url("experts", task, folder)
    subject = "warm-up" if folder == "warmup" else "plain warm-up"
    return run_step(f"{subject} {task}", "models.warmup:warm_up", request, url, inputs, run)
