"""Evaluation: greedy answers of one model to the held-out questions of one task."""

from data.settings import Prompt, Reasoning
from data.storage import ArtifactRef
from models.requests import EvaluateRequest, PolicyFiles
from models.settings import Engine, EvaluationSettings
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("evaluate-{model}-{task}")
def evaluate(
    run: RunContext,
    model: str,
    task: str,
    base: ArtifactRef,
    weights: tuple[ArtifactRef, str] | None,
    demonstrations: ArtifactRef,
    prompt: Prompt,
    reasoning: Reasoning,
    settings: EvaluationSettings,
    engine: Engine,
    seed: int,
    split: str = "test",
    limit: int | None = None,
) -> ArtifactRef:
    """Publishes `evaluation/<model>/<task>/`, of other questions `evaluation/<split>-<limit>/...`.

    `weights` is the output and the folder in it; None: the base itself.
    """
    inputs = Inputs()
    weights_folder = inputs.add(weights[0]) / weights[1] if weights else None
    request = EvaluateRequest(
        policy=PolicyFiles(base=inputs.add(base), weights=weights_folder),
        model=model,
        prompt=prompt,
        reasoning=reasoning,
        evaluation=settings,
        engine=engine,
        questions=inputs.add(demonstrations) / "questions.parquet",
        split=split,
        limit=limit,
        seed=seed,
        compute=run.compute,
    )
    usual = split == "test" and limit is None
    url = run.url("evaluation", *([] if usual else [f"{split}-{limit or 'all'}"]), model, task)
    return run_step(f"evaluate {model} on {task}", "models.evaluation:evaluate", request, url, inputs, run)
