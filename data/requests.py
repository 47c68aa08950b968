"""What a step of the data room is asked to do, as JSON. See models/requests.py; imports nothing slow."""

from pathlib import Path

from data.settings import AnswerKind, BenchmarkSource, Curriculum, Segmentation, Settings, Source, Splits


class IngestRequest(Settings):
    """data.steps:ingest → `demonstrations.parquet`, `rejected.parquet`, `questions.parquet`."""

    task: str
    source: Source
    splits: Splits
    segmentation: Segmentation | None
    """None: what the source implies."""
    answer_kind: AnswerKind | None
    test: BenchmarkSource | None
    fingerprints: dict[str, str] = {}
    """Path of each file that is read → what its content is known by, so that a changed file is another request."""


class StartStatesRequest(Settings):
    """data.steps:start_states → `start_states.parquet`."""

    demonstrations: Path
    """demonstrations.parquet"""
    curriculum: Curriculum
