"""Everything the report says, read from the run's tables once; the HTML, the Markdown and the artifacts only set it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path

import pyarrow.parquet as pq

from data import storage
from data.artifacts import file_hash, read_rows, read_table
from data.report.composition import Importance, read_importance
from data.report.meta_actions import MetaCell, TestAttempts, read_attempts, read_cells
from data.report.request import CellFiles, IngestedTask, ReportRequest
from data.report.summary import (
    Difference,
    SummaryRow,
    caveats,
    compared_models,
    differences,
    generated_tokens,
    model_order,
    read_answers,
    summarise,
    verdict,
)
from data.report.training import Sample, Training, read_training, samples_of


@dataclass(frozen=True)
class Rejection:
    """The rows refused for one reason, and one of their messages."""

    task: str
    reason: str
    rows: int
    message: str


@dataclass(frozen=True)
class Ingested:
    """One task's rows."""

    task: str
    accepted: dict[str, int]
    """Split → accepted demonstrations."""
    questions: dict[str, int]
    """Split → held-out questions."""
    rejected: int
    start_states: dict[int, int]
    """Stage → start states; empty where no curriculum was built."""


@dataclass(frozen=True)
class FileEntry:
    """A table the report was made from."""

    name: str
    rows: int | None
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Content:
    """The report's content."""

    request: ReportRequest
    verdict: str
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    models: tuple[str, ...]
    seeds: dict[str, int]
    """Arm → number of seeds."""
    caveats: tuple[str, ...]
    summary: tuple[SummaryRow, ...]
    differences: tuple[Difference, ...]
    training: Training
    samples: tuple[Sample, ...]
    importance: Importance | None
    ingested: tuple[Ingested, ...]
    rejections: tuple[Rejection, ...]
    files: tuple[FileEntry, ...]
    meta: tuple[MetaCell, ...] = ()
    """The cells that were trained on meta-actions."""
    attempts: tuple[TestAttempts, ...] = ()
    """Their models' first and last attempts at the test questions."""

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """The (task, benchmark, split) of the accuracy table, in order."""
        return list(dict.fromkeys(row.column for row in self.summary))

    def cell(self, model: str, column: tuple[str, str, str]) -> SummaryRow | None:
        """The accuracy of `model` in `column`; None where it was not evaluated there."""
        return next((row for row in self.summary if row.model == model and row.column == column), None)

    def spent(self, model: str) -> int | None:
        """Tokens sampled in the model's training over all its evaluated tasks; None where none are known."""
        known = {row.task: row.generated_tokens for row in self.summary if row.model == model}
        counts = [n for n in known.values() if n is not None]
        return sum(counts) if counts else None


def column_title(column: tuple[str, str, str], columns: Sequence[tuple[str, str, str]]) -> str:
    """The task; with the benchmark and the split only where they tell columns apart."""
    task, benchmark, split = column
    same = [other for other in columns if other[0] == task]
    if len(same) == 1:
        return task
    return f"{task} ({split})" if len({other[1] for other in same}) == 1 else f"{task} ({benchmark}, {split})"


def _counted(path: Path, table: str, column: str) -> dict:
    if not path.is_file():
        return {}
    return dict(sorted(Counter(read_table(path, table).column(column).to_pylist()).items()))


def read_ingested(
    tasks: Sequence[IngestedTask], cells: Sequence[CellFiles] = ()
) -> tuple[list[Ingested], list[Rejection]]:
    """Row counts of each task, and its rejected rows by reason, the most frequent first.

    A task's start states are its own, else those of the cell with the most stages.
    """
    ingested, rejections = [], []
    for task in tasks:
        starts = [task.start_states] if task.start_states else [c.start_states for c in cells if c.task == task.task]
        starts = list(dict.fromkeys(path for path in starts if path))
        reasons: dict[str, list[str]] = defaultdict(list)
        if (task.folder / "rejected.parquet").is_file():
            for row in read_rows(task.folder / "rejected.parquet", "rejected"):
                reasons[row["reason"] or "unknown"].append(row["message"] or "")
        found = [Rejection(task.task, reason, len(said), said[0]) for reason, said in reasons.items()]
        rejections += sorted(found, key=lambda rejection: (-rejection.rows, rejection.reason))
        ingested.append(
            Ingested(
                task=task.task,
                accepted=_counted(task.folder / "demonstrations.parquet", "demonstrations", "split"),
                questions=_counted(task.folder / "questions.parquet", "questions", "split"),
                rejected=sum(len(said) for said in reasons.values()),
                start_states=max((_counted(path, "start_states", "stage") for path in starts), key=len, default={}),
            )
        )
    return ingested, rejections


def _paths(request: ReportRequest) -> Iterable[Path]:
    for task in request.ingestion:
        yield from (task.folder / f"{name}.parquet" for name in ("demonstrations", "rejected", "questions"))
        yield from filter(None, [task.start_states])
    for cell in request.cells:
        yield from filter(None, [cell.folder / "result.json", cell.metrics, cell.rollouts, cell.start_states])
    yield from request.evaluations
    yield from filter(None, [request.importance])


def _place(path: Path) -> Path:
    """Where a file lies in its run: of a cached copy of an object store's folder, the place there."""
    for folder in path.absolute().parents:
        published = storage.origin(folder)
        if published is not None:
            return Path(published[0]) / path.absolute().relative_to(folder)
    return path.absolute()


def list_files(request: ReportRequest) -> list[FileEntry]:
    """The files that the report was made from: rows, bytes, SHA-256."""
    paths = list(dict.fromkeys(path for path in _paths(request) if path.is_file()))
    if not paths:
        return []
    places = {path: _place(path) for path in paths}
    parents = [place.parent for place in places.values()]
    root = request.root.absolute() if request.root else Path(commonpath(parents))
    entries = []
    for path, absolute in places.items():
        name = absolute.relative_to(root) if absolute.is_relative_to(root) else Path(path.name)
        rows = pq.read_metadata(path).num_rows if path.suffix == ".parquet" else None
        entries.append(FileEntry(name.as_posix(), rows, path.stat().st_size, file_hash(path)))
    return sorted(entries, key=lambda entry: entry.name)


def collect(request: ReportRequest) -> Content:
    """Reads the request's tables. Raises FileNotFoundError for a named table that is missing, ValueError for one that
    is of another kind or schema version."""
    arms = tuple(dict.fromkeys(cell.arm for cell in request.cells))
    seeds = {arm: len({cell.seed for cell in request.cells if cell.arm == arm}) for arm in arms}
    training = read_training(request.cells)
    answers = read_answers(request.evaluations)
    named = [task.task for task in request.ingestion] + [cell.task for cell in request.cells]
    tasks = list(dict.fromkeys([*named, *(key[0] for key in answers)]))
    tokens = generated_tokens(request, training.tokens)
    models = model_order([key[3] for key in answers], arms)
    pair = compared_models(request, arms, models)
    found = differences(answers, pair, tasks, request.confidence) if pair else []
    said = caveats(pair, [d.task for d in found], seeds, tokens) if found else []
    ingested, rejections = read_ingested(request.ingestion, request.cells)
    states = {task.task: task.start_states for task in request.ingestion}
    return Content(
        request=request,
        verdict=verdict(pair, found, said, request.confidence),
        arms=arms,
        tasks=tuple(tasks),
        models=tuple(models),
        seeds=seeds,
        caveats=tuple(said),
        summary=tuple(summarise(answers, tokens, tasks, models, request.confidence)),
        differences=tuple(found),
        training=training,
        samples=tuple(s for c in request.cells for s in samples_of(c, c.start_states or states.get(c.task))),
        importance=read_importance(request.importance) if request.importance else None,
        ingested=tuple(ingested),
        rejections=tuple(rejections),
        files=tuple(list_files(request)),
        meta=tuple(read_cells(request.cells)),
        attempts=tuple(read_attempts(request.evaluations)),
    )
