"""What the report is made from. Imports neither torch nor prefect, nor anything else that is slow to import."""

from pathlib import Path
from typing import Any

from pydantic import Field

from data.settings import Settings


class IngestedTask(Settings):
    """One task's ingestion: the folder with demonstrations.parquet, rejected.parquet and questions.parquet."""

    task: str
    folder: Path
    start_states: Path | None = None
    """start_states.parquet of the task's curriculum; None: no curriculum was built."""


class CellFiles(Settings):
    """One trained cell (task, arm, seed)."""

    task: str
    arm: str
    seed: int
    folder: Path
    """Holds result.json (what the cell returned); its numbers are listed as they are. May lack it."""
    metrics: Path | None = None
    """metrics.parquet over all rounds: the learning curves and the success by stage."""
    rollouts: Path | None = None
    """rollouts.parquet of one round (the newest): the samples. None: pruned, or not kept."""
    start_states: Path | None = None
    """start_states.parquet of the cell: questions and prefixes of the samples. None: the task's own."""


class ReportRequest(Settings):
    """data.report.build:build → `report.html`, `report.md`, `*.png`, `summary.parquet`.

    Every part may be absent; the report says what is not there.
    """

    run_name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """The run's resolved settings as JSON values; shown, not interpreted."""
    ingestion: tuple[IngestedTask, ...] = ()
    evaluations: tuple[Path, ...] = ()
    """evaluations.parquet files, any number of models and tasks in each."""
    cells: tuple[CellFiles, ...] = ()
    """In the order in which the arms are to be shown."""
    importance: Path | None = None
    """importance.parquet of the composition."""
    composed_arm: str | None = None
    """The arm whose adapters were composed, for the lineage; None: not said."""
    generated: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Model → task → tokens sampled in its training. What is missing is read from the cells' metrics; give it where
    a model is no arm of a cell (the composed one: the tokens of its experts)."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library → version."""
    headline: tuple[str, str] | None = None
    """(model, reference model) of the verdict; None: the last arm against the first, else what there is."""
    confidence: float = 0.95
    """Of the intervals."""
    root: Path | None = None
    """Folder that file names are shown relative to; None: the longest folder they have in common."""
