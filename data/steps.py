"""The step functions of the data room: request in, files out."""

from pathlib import Path

from data.progress import Report
from data.requests import IngestRequest, StartStatesRequest


def ingest(request: IngestRequest, out: Path, report: Report) -> dict:
    """Reads a source into accepted and rejected demonstrations and held-out questions; returns the counts."""
    from data.ingestion import ingest as ingest_source

    return ingest_source(
        request.source,
        request.task,
        out,
        splits=request.splits,
        segmentation=request.segmentation,
        answer_kind=request.answer_kind,
        test=request.test,
        report=report,
    )


def start_states(request: StartStatesRequest, out: Path, report: Report) -> dict:
    """Cuts the training demonstrations into the curriculum's start states; returns the counts."""
    from data.start_states import build

    return build(request.demonstrations, request.curriculum, out, report)
