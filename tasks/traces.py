"""Warm-up traces: plain demonstrations and wrong attempts made into traces of meta-actions."""

from data.settings import MetaActions, Prompt, Segmentation
from data.storage import ArtifactRef
from models.requests import Device, PolicyFiles, TracesRequest
from models.settings import Engine
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("traces-{task}")
def traces(
    run: RunContext,
    task: str,
    base: ArtifactRef,
    warmup: ArtifactRef | None,
    demonstrations: ArtifactRef,
    prompt: Prompt,
    reasoning: MetaActions,
    engine: Engine,
    suite: str | None,
    segmentation: Segmentation | None,
    seed: int,
) -> ArtifactRef:
    """Publishes `experts/<task>/traces/`. `warmup` is the warm-up on the plain demonstrations, whose errors are used;
    None: the demonstrations are corrupted."""
    inputs = Inputs()
    weights = inputs.add(warmup) / "weights" if warmup is not None else None
    request = TracesRequest(
        policy=PolicyFiles(base=inputs.add(base), weights=weights),
        prompt=prompt,
        reasoning=reasoning,
        engine=engine,
        demonstrations=inputs.add(demonstrations) / "demonstrations.parquet",
        suite=suite,
        segmentation=segmentation or "lines",
        seed=seed,
        compute=Device(device=run.device, threads=run.threads),
    )
    function = "models.meta_actions.synthesis:synthesise"
    return run_step(f"traces {task}", function, request, run.url("experts", task, "traces"), inputs, run)
