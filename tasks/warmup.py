"""Warm-up: supervised fine-tuning of an expert on its demonstrations."""

from data.settings import Prompt
from data.storage import ArtifactRef
from models.requests import Device, PolicyFiles, WarmupRequest
from models.settings import Parameters, WarmupSettings
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("warmup-{task}")
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
) -> ArtifactRef:
    """Publishes `experts/<task>/warmup/`. `start`: (output, folder in it) of weights to go on from; None: the base."""
    inputs = Inputs()
    request = WarmupRequest(
        policy=PolicyFiles(base=inputs.add(base), weights=inputs.add(start[0]) / start[1] if start else None),
        parameters=parameters,
        prompt=prompt,
        warmup=settings,
        demonstrations=inputs.add(demonstrations) / "demonstrations.parquet",
        seed=seed,
        compute=Device(device=run.device, threads=run.threads),
    )
    url = run.url("experts", task, "warmup")
    return run_step(f"warm-up {task}", "models.warmup:warm_up", request, url, inputs, run)
