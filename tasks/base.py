"""The base model: built and pre-trained in the run, or resolved by name."""

from data.settings import Prompt, SuiteSource
from data.storage import ArtifactRef
from models.requests import BaseRequest
from models.settings import Model
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("base-model")
def base_model(
    run: RunContext,
    model: Model,
    corpus: list[tuple[SuiteSource, Prompt]],
    demonstrations: list[ArtifactRef],
    seed: int,
    pieces: tuple[str, ...] = (),
) -> ArtifactRef:
    """Publishes `base/`. A tiny model is pre-trained on the suites of `corpus`, never on a held-out question; its
    tokenizer holds each of `pieces` as one token."""
    inputs = Inputs()
    pretrained_here = model.kind == "tiny"
    request = BaseRequest(
        model=model,
        corpus=tuple(source for source, _ in corpus) if pretrained_here else (),
        prompts=tuple(prompt for _, prompt in corpus) if pretrained_here else (),
        excluded=tuple(inputs.add(ref) / "questions.parquet" for ref in demonstrations) if pretrained_here else (),
        pieces=pieces if pretrained_here else (),
        seed=seed,
        compute=run.compute,
    )
    return run_step("base model", "models.base:prepare", request, run.url("base"), inputs, run)
