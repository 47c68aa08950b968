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


class HoldOutRequest(Settings):
    """data.retraining:hold_out → `questions.parquet`, the same for all retrainings of a serving model."""

    questions: Path


class SelectRequest(Settings):
    """data.retraining:select_new → `demonstrations.parquet` (new ones only), `questions.parquet`."""

    demonstrations: Path
    held_out: Path
    """questions.parquet of hold_out"""
    seen: tuple[Path, ...]
    """seen.parquet of every earlier decision"""


class DecideRequest(Settings):
    """data.retraining:decide → `decision.json`, `seen.parquet`."""

    candidate: Path
    """evaluations.parquet of the candidate"""
    serving: Path
    """evaluations.parquet of the serving model, or of the base before the first promotion"""
    demonstrations: Path
    """The new demonstrations that the candidate was trained on."""
    compared_with: int | None
    """The serving version; None: the base."""
    confidence: float
    seed: int
