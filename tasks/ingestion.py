"""Ingestion: a source becomes accepted and rejected demonstrations and held-out questions."""

from data.requests import IngestRequest
from data.settings import AnswerKind, BenchmarkSource, Segmentation, Source, Splits
from data.storage import ArtifactRef, fingerprint
from tasks.steps import Inputs, RunContext, run_step, step_task


@step_task("ingest-{task}")
def ingest(
    run: RunContext,
    task: str,
    source: Source,
    splits: Splits,
    segmentation: Segmentation | None,
    answer_kind: AnswerKind | None,
    test: BenchmarkSource | None,
) -> ArtifactRef:
    """Publishes `demonstrations/<task>/`; made again when the content of a source file changes."""
    files = [source.path] if source.kind == "file" else []
    files += [test.path] if test is not None and test.path is not None else []
    request = IngestRequest(
        task=task,
        source=source,
        splits=splits,
        segmentation=segmentation,
        answer_kind=answer_kind,
        test=test,
        fingerprints={path: fingerprint(path) for path in files},
    )
    return run_step(f"ingest {task}", "data.steps:ingest", request, run.url("demonstrations", task), Inputs(), run)
