"""A cell's metrics sent to experiment trackers (TensorBoard, Weights & Biases, MLflow, trackio), round by round.

They are fed from the metrics tables of complete rounds through accelerate's trackers, so no number depends on them. The
file `trackers.json` beside the rounds says what has been sent: it is written before a round is sent, so that a resumed
run sends no round twice (a kill in the midst of sending leaves the rest of that round out; the tables have it).
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data import storage
from data.artifacts import read_rows
from data.progress import Report
from models.settings import Tracking

LEDGER = "trackers.json"
STEPPED = ("tensorboard", "mlflow")
"""Trackers that keep a step for each name. The others have one rising step for all: there the axes are values."""

_open: dict[tuple[str, str], Any] = {}
"""(cell, tracker) → the tracker of the cell that this process works on."""


class Trackers:
    """The trackers of one cell. Whatever one of them raises is said once and ends it: rounds go on without."""

    def __init__(self, url: str, tracking: Tracking, report: Report):
        self.url = url
        self.tracking = tracking
        self.report = report
        self.place = storage.join(url, LEDGER)
        self.ledger: dict[str, dict[str, Any]] = storage.read_json(self.place) or {}

    def send(self, number: int, tables: Iterable[Path], settings: dict[str, Any]) -> None:
        """Sends the metrics tables of round `number` (-1: of the warm-up), each round once and in order.

        `settings` are kept as the configuration of a tracker's run that is new.
        """
        rows = None
        for name in self.tracking.trackers:
            state = self.ledger.setdefault(name, {"round": -2, "run": None, "ended": False})
            if number <= state["round"] or state["ended"]:
                continue
            rows = rows if rows is not None else [row for path in tables for row in read_rows(path, "metrics")]
            try:
                tracker = self._tracker(name, state, settings)
                state["round"] = number
                storage.write_json(self.place, self.ledger)
                for values, step in calls(rows, name in STEPPED):
                    tracker.log(values, step=step)
                if name == "tensorboard":
                    tracker.writer.flush()
            except Exception as error:  # each tracker has errors of its own, and none may end a run
                state["ended"] = True
                storage.write_json(self.place, self.ledger)
                self.report.log(
                    f"tracker {name}: {type(error).__name__}: {error}; it gets nothing more of this cell. All numbers "
                    "are in metrics.parquet"
                )

    def finish(self) -> None:
        """Closes the cell's trackers: what they hold back is sent."""
        for key in [key for key in _open if key[0] == self.url]:
            _open.pop(key).finish()

    def _tracker(self, name: str, state: dict[str, Any], settings: dict[str, Any]) -> Any:
        if (self.url, name) in _open:
            return _open[self.url, name]
        for key in [key for key in _open if key[0] != self.url]:  # another cell's, which this process has left
            _open.pop(key).finish()
        tracker = make(name, self.tracking, state["run"])
        tracker.start()
        _open[self.url, name] = tracker
        if state["run"] is None:
            state["run"] = run_id(name, tracker, self.tracking)
            if name != "tensorboard":  # it files them under a run of their own, named by the time
                tracker.store_init_configuration(settings)
        return tracker


def make(name: str, tracking: Tracking, run: str | None) -> Any:
    """accelerate's tracker `name` for this run: a new one, or the one known as `run`."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    match name:
        case "tensorboard":
            return kind(tracking.run_name, logging_dir=str(Path(tracking.folder) / tracking.project))
        case "mlflow":
            import mlflow

            folder = Path(tracking.folder).absolute()
            if not os.environ.get("MLFLOW_TRACKING_URI"):
                folder.mkdir(parents=True, exist_ok=True)
                mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            return kind(tracking.project, logging_dir=str(folder / "mlflow"), run_id=run, run_name=tracking.run_name)
        case "wandb":
            known = {"id": run} if run else {}
            return kind(tracking.project, name=tracking.run_name, resume="allow", dir=tracking.folder, **known)
        case "trackio":
            return kind(tracking.project, name=tracking.run_name, resume="allow")
    raise ValueError(f"unknown tracker {name!r}")


def run_id(name: str, tracker: Any, tracking: Tracking) -> str:
    """How a started tracker finds its run again."""
    if name == "mlflow":
        return tracker.active_run.info.run_id
    return tracker.run.id if name == "wandb" else tracking.run_name


def calls(rows: Iterable[dict[str, Any]], stepped: bool) -> list[tuple[dict[str, float], int | None]]:
    """(values, step) of each call that sends `rows` of the metrics table, steps rising.

    Without a step of its own for each name, the round, step and generated tokens are sent as values.
    """
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        axes = (row["step"], row["round"], row["generated_tokens_so_far"])
        found.setdefault(axes, {})[row["name"]] = row["value"]
    if stepped:
        return [(values, axes[0]) for axes, values in found.items()]
    names = ("axis/step", "axis/round", "axis/generated_tokens")
    return [
        (values | {name: axis for name, axis in zip(names, axes) if axis is not None}, None)
        for axes, values in found.items()
    ]
