"""The report of a run, and what of it is shown as Prefect artifacts."""

from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State

from data import storage
from data.report.request import CellFiles, IngestedTask, ReportRequest
from data.storage import ArtifactRef
from tasks.api import patiently
from tasks.steps import Inputs, RunContext, artifact_key, run_step, step_task


@step_task("report")
def report(
    run: RunContext,
    settings: dict[str, Any],
    demonstrations: dict[str, ArtifactRef],
    starts: dict[tuple[str, str], ArtifactRef],
    cells: dict[tuple[str, str], ArtifactRef],
    composition: ArtifactRef | None,
    evaluations: list[ArtifactRef],
    seed: int,
    versions: dict[str, str],
) -> ArtifactRef | State:
    """Publishes `report/`."""
    inputs = Inputs()
    request = ReportRequest(
        run_name=run.name,
        settings=settings,
        ingestion=tuple(IngestedTask(task=task, folder=inputs.add(ref)) for task, ref in demonstrations.items()),
        evaluations=tuple(inputs.add(ref) / "evaluations.parquet" for ref in evaluations),
        cells=tuple(
            CellFiles(
                task=task,
                arm=arm,
                seed=seed,
                folder=inputs.add(ref),
                metrics=inputs.add(ref) / "metrics.parquet",
                rollouts=inputs.add(ref) / "rollouts.parquet",
                start_states=inputs.add(starts[task, arm]) / "start_states.parquet",
            )
            for (task, arm), ref in cells.items()
        ),
        importance=inputs.add(composition) / "importance.parquet" if composition is not None else None,
        composed_arm=settings["composition"]["arm"] if composition is not None else None,
        versions=versions,
    )
    return run_step("report", "data.report.build:build", request, run.url("report"), inputs, run, step_version=2)


def report_artifacts(run: RunContext, made: ArtifactRef) -> None:
    """Shows the report in Prefect under the run's own keys, so that an artifact's history is that of the run's name."""
    texts = storage.read_json(str(storage.fetch(made) / "artifacts.json"))
    verdict = made.info["verdict"]
    patiently(create_table_artifact, texts["accuracy"], key=artifact_key(f"{run.name} accuracy"), description=verdict)
    for part, description in (
        ("report", verdict),
        ("samples", "Rollouts, the revealed prefix marked"),
        ("meta_actions", "Choices, verdicts, revisions, alarms"),
        ("data", "Rows read, accepted and rejected; the run's files with their hashes"),
        ("ranks", "Rank importance of the composition"),
    ):
        if texts[part] is not None:
            key = artifact_key(f"{run.name} {part}")
            patiently(create_markdown_artifact, texts[part], key=key, description=description)
