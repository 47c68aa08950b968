"""Retraining: what is held out for good, which demonstrations are new, whether a candidate is promoted."""

from data.requests import DecideRequest, HoldOutRequest, SelectRequest
from data.storage import ArtifactRef
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("hold-out")
def hold_out(run: RunContext, ingested: ArtifactRef) -> ArtifactRef:
    """Publishes `held_out/`: the questions on which all candidates of a serving model are chosen and compared."""
    inputs = Inputs()
    request = HoldOutRequest(questions=inputs.add(ingested) / "questions.parquet")
    return run_step("hold out", "data.retraining:hold_out", request, run.url("held_out"), inputs, run)


@step_task("select-new")
def select_new(
    run: RunContext, ingested: ArtifactRef, held_out: ArtifactRef, decisions: list[ArtifactRef]
) -> ArtifactRef:
    """Publishes `new/`: the demonstrations that none of the earlier `decisions` has used up."""
    inputs = Inputs()
    request = SelectRequest(
        demonstrations=inputs.add(ingested) / "demonstrations.parquet",
        held_out=inputs.add(held_out) / "questions.parquet",
        seen=tuple(inputs.add(ref) / "seen.parquet" for ref in decisions),
    )
    return run_step("select new", "data.retraining:select_new", request, run.url("new"), inputs, run)


@step_task("decide")
def decide(
    run: RunContext,
    candidate: ArtifactRef,
    serving: ArtifactRef,
    demonstrations: ArtifactRef,
    compared_with: int | None,
    confidence: float,
    seed: int,
) -> ArtifactRef:
    """Publishes `decision/`, and with it that the demonstrations are used up."""
    inputs = Inputs()
    request = DecideRequest(
        candidate=inputs.add(candidate) / "evaluations.parquet",
        serving=inputs.add(serving) / "evaluations.parquet",
        demonstrations=inputs.add(demonstrations) / "demonstrations.parquet",
        compared_with=compared_with,
        confidence=confidence,
        seed=seed,
    )
    return run_step("decide", "data.retraining:decide", request, run.url("decision"), inputs, run)
