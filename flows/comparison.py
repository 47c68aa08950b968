"""The flow `method-comparison`: the cells of a study in any order, on any number of workers, and their figures."""

import json
import shutil
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from pydantic import Field

from data import storage
from data.artifacts import file_hash, read_rows
from data.errors import UserError
from data.report.study import write_results
from data.storage import ArtifactRef
from data.study import cell_name
from flows import config
from flows.locks import run_lock
from flows.pipeline import Pipeline
from flows.study import Study, load_study
from models.requests import Device
from models.study_requests import CalibrationRequest, StudyCellRequest, StudyWarmupRequest, WarmupRule
from tasks.compute import MayPass, StepFailed, close_shared
from tasks.study import CellInputs, study_calibration, study_cell, study_warmup

Key = tuple[str, str, int]
UNSET = Path("unset")
"""Stands for the inputs that the tasks put in."""


def _flow_run_name() -> str:
    return Path(str(runtime.flow_run.parameters.get("study"))).stem


@flow(name="method-comparison", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def method_comparison(
    study: str = "r3",
    cells: list[str] | None = None,
    max_cells: int | None = Field(None, ge=1),
    root: str = "runs",
    out: str = "docs/results",
) -> dict[str, Any]:
    """Runs cells of a comparison study that are not finished, then writes the figures of all that are.

    Args:
        study: A shipped study (r3) or the path of a study file; it must be committed as it is.
        cells: Only these cells, as task/arm/seed; `*` stands for any part. Empty means all of them.
        max_cells: At most this many cells are made by this run; the next run goes on. Empty means no limit.
        root: Folder of the working files, a path or any fsspec URL.
        out: Folder of the results: a Markdown file, a JSON file and a folder with the per-answer tables.

    Returns:
        The study's figures, as in its JSON file.
    """
    try:
        return Comparing(load_study(study), root, Path(out)).run(chosen=cells, limit=max_cells)
    finally:
        close_shared()


class Comparing:
    """A study at work: what its cells start from, its tuning, its cells, its results."""

    def __init__(self, study: Study, root: str, out: Path):
        self.study = study
        self.out = out
        self.settings = study.run.model_copy(update={"root": storage.absolute(root)})
        self.pipeline = Pipeline(self.settings)
        self.context = self.pipeline.context
        self.log = get_run_logger()
        self._inputs: tuple[dict[str, ArtifactRef], ArtifactRef] | None = None
        self._tuned: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []

    @property
    def folder(self) -> Path:
        """Where the cells' results lie."""
        return self.out / self.study.settings.name

    def run(self, chosen: list[str] | None, limit: int | None) -> dict[str, Any]:
        """Makes the chosen cells and writes the results. Raises StepFailed at the end where a cell failed."""
        commit = self.study.commit()
        made = 0
        for key in self.wanted(chosen):
            if limit is not None and made >= limit:
                break
            made += self.cell(key)
        with self.lock("results", wait=True):
            figures = write_results(self.study.shape, self.out, commit)
        if self.failed:
            raise StepFailed("cells failed; the same command tries them again:\n" + "\n".join(self.failed))
        return figures

    def lock(self, part: str, *, wait: bool):
        """The lock of a part of the study, against other workers."""
        return run_lock(self.settings.root, self.settings.name, part, wait=wait, log=self.log.info)

    def wanted(self, chosen: list[str] | None) -> list[Key]:
        """The chosen cells: seed by seed, then task by task, so that whole comparisons are there early.

        Raises UserError for a choice that fits no cell.
        """
        shape = self.study.shape
        cells = [(task, arm, seed) for seed in shape.seeds for task in shape.tasks for arm in shape.arms]
        if not chosen:
            return cells
        picked: list[Key] = []
        for text in chosen:
            parts = text.split("/")
            fits = [key for key in cells if len(parts) == 3 and all(p in ("*", str(k)) for p, k in zip(parts, key))]
            if not fits:
                raise UserError(f"--cells {text}: the study has no such cell; write it as task/arm/seed, * for any")
            picked += [key for key in fits if key not in picked]
        return picked

    def exported(self, key: Key) -> bool:
        """Whether the cell's results lie in the results' folder, made from this very study file."""
        record = self.folder / f"{cell_name(*key)}.json"
        if not record.is_file() or not record.with_suffix(".parquet").is_file():
            return False
        return json.loads(record.read_text(encoding="utf-8")).get("study_sha256") == self.study_hash

    @property
    def study_hash(self) -> str | None:
        """The hash of the study file."""
        return None if self.study.path is None else file_hash(self.study.path)

    def cell(self, key: Key) -> bool:
        """Makes a cell and its results; whether it did. One that another worker has is left to it."""
        if self.exported(key):
            return False
        try:
            with self.lock("cell-" + cell_name(*key), wait=False):
                tuned = self.tuned(key[1])
                ref = self.make(key, tuned)
                self.export(key, tuned, ref)
            return True
        except UserError as error:
            if "another process" not in str(error):
                raise
            self.log.info(f"{'/'.join(map(str, key))} is being made by another worker")
            return False
        except (MayPass, StepFailed) as error:
            self.failed.append(f"{'/'.join(map(str, key))}: {str(error).splitlines()[0]}")
            self.log.error(str(error))
            return False

    def inputs(self) -> tuple[dict[str, ArtifactRef], ArtifactRef]:
        """All tasks' demonstrations and the base, made once."""
        if self._inputs is None:
            with self.lock("base", wait=True):
                self._inputs = self.pipeline.prepare()
        return self._inputs

    def suite(self, task: str) -> str | None:
        """The suite that judges the chains of a task."""
        source = self.settings.experts[task].source
        return source.suite if source.kind == "suite" else None

    def warmup(self, task: str, seed: int, arm: str) -> ArtifactRef:
        """The warm-up of a task and seed, which all arms share that learn the same texts: plain ones, or traces."""
        reasoning = self.study.reasoning(arm, task)
        demonstrations, base = self.inputs()
        expert = self.settings.experts[task]
        request = StudyWarmupRequest(
            base=UNSET,
            parameters=self.settings.parameters,
            prompt=expert.prompt,
            reasoning=reasoning,
            warmup=expert.warmup,
            rule=self.study.settings.warmup_rule,
            rl=expert.rl,
            engine=self.settings.engine,
            suite=self.suite(task),
            demonstrations=UNSET,
            seed=seed,
            compute=self.device,
        )
        given = CellInputs(base=base, demonstrations=demonstrations[task])
        with self.lock(f"warmup-{task}-{seed}", wait=True):
            return self.pipeline.call(study_warmup, task, seed, request, given)

    def calibrate(self) -> dict[str, Any]:
        """Suite → the difficulty at which the base lies least outside of the warm-up rule's bands. No test question."""
        demonstrations, base = self.inputs()
        experts = self.settings.experts
        request = CalibrationRequest(
            base=UNSET,
            suites={self.suite(task): expert.prompt for task, expert in experts.items() if self.suite(task)},
            difficulties=tuple(range(2, 11)),
            excluded=(),
            rule=self.study.settings.warmup_rule or WarmupRule(),
            rl=next(iter(experts.values())).rl,
            engine=self.settings.engine,
            compute=self.device,
        )
        return self.pipeline.call(study_calibration, request, base, list(demonstrations.values())).info

    @property
    def device(self) -> Device:
        """Where the steps compute."""
        return self.context.compute

    def make(self, key: Key, tuned: dict[str, Any], *, place: str = "cells", trial: str | None = None) -> ArtifactRef:
        """A cell's output. `trial`: a tuning trial under this name, which sees validation questions only."""
        task, arm, seed = key
        demonstrations, base = self.inputs()
        kind = self.study.settings.arms[arm]
        run = self.study.with_tuned({arm: tuned} if kind.kind == "rl" else {})
        expert = config.arm_settings(run, task, arm)
        share = getattr(kind, "budget_share", 1.0)
        rl = expert.rl.model_copy(update={"generated_tokens": round(share * expert.rl.generated_tokens)})
        request = StudyCellRequest(
            task=task,
            arm=trial or arm,
            kind=kind.kind,
            url="",
            key="",
            suite=self.suite(task),
            base=UNSET,
            warmup=UNSET,
            demonstrations=UNSET,
            parameters=self.settings.parameters,
            prompt=expert.prompt,
            curriculum=expert.curriculum,
            reasoning=self.study.reasoning(arm, task),
            reward=expert.reward,
            rl=rl,
            supervised=self.study.supervised(arm, task, tuned) if kind.kind == "supervised" else None,
            evaluation=expert.evaluation,
            engine=self.settings.engine,
            function=getattr(kind, "function", None),
            options=config.merge(kind.options, tuned) if kind.kind == "step" else {},
            split="validation" if trial else "test",
            limit=None,
            probe=0 if trial else self.study.settings.probe,
            seed=seed,
            compute=self.device,
        )
        given = CellInputs(base=base, demonstrations=demonstrations[task], warmup=self.warmup(task, seed, arm))
        return self.pipeline.call(study_cell, task, trial or arm, seed, place, request, given)

    def tuned(self, arm: str) -> dict[str, Any]:
        """The arm's frozen values: the trial with the best mean validation accuracy on the pilot tasks."""
        arm = getattr(self.study.settings.arms[arm], "tuned_as", None) or arm
        trials = self.study.settings.trials(arm)
        if not trials:
            return {}
        if arm not in self._tuned:
            scores = [self.score(arm, number) for number in range(len(trials))]
            best = max(range(len(trials)), key=lambda number: scores[number])
            self._tuned[arm] = trials[best]
            record = {"trials": trials, "validation_accuracy": scores, "chosen": best}
            with self.lock("results", wait=True):
                storage.write_json(str(self.folder / f"tuning--{arm}.json"), record)
        return self._tuned[arm]

    def score(self, arm: str, number: int) -> float:
        """Mean validation accuracy of a trial over the pilot tasks."""
        tuning = self.study.settings.tuning
        found = []
        for task in tuning.tasks:
            with self.lock(f"trial-{arm}-{number}-{task}", wait=True):
                values = self.study.settings.trials(arm)[number]
                ref = self.make((task, arm, tuning.seed), values, place="tuning", trial=f"{arm}.trial{number}")
            if ref.info["validation_accuracy"] is None:
                raise UserError(f"arm {arm!r} has trials, but its step function returns no validation_accuracy")
            found.append(ref.info["validation_accuracy"])
        return sum(found) / len(found)

    def export(self, key: Key, tuned: dict[str, Any], ref: ArtifactRef) -> None:
        """Copies a cell's answers and record into the results' folder."""
        made = storage.fetch(ref)
        record = json.loads((made / "cell.json").read_text(encoding="utf-8"))
        warm = self.warmup(key[0], key[2], key[1])
        record |= {"tuned": tuned, "study_sha256": self.study_hash, "warmup_sha256": warm.sha256, "warmup": warm.info}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{cell_name(*key)}.parquet"
        shutil.copyfile(made / "answers.parquet", path)
        storage.write_json(str(path.with_suffix(".json")), record)

    def again(self, key: Key) -> list[str]:
        """Runs an exported cell anew, from its warm-up on; returns what came out differently."""
        record = json.loads((self.folder / f"{cell_name(*key)}.json").read_text(encoding="utf-8"))
        place = self.context.url("check")
        if storage.is_local(place):
            shutil.rmtree(storage.local_path(place), ignore_errors=True)
        ref = self.make(key, record["tuned"], place="check")
        new = read_rows(storage.fetch(ref) / "answers.parquet", "study_answers")
        old = read_rows(self.folder / f"{cell_name(*key)}.parquet", "study_answers")
        if len(new) != len(old):
            return [f"{len(new)} answers instead of {len(old)}"]
        different = sum(a != b for a, b in zip(new, old))
        return [f"{different} of {len(old)} answers"] if different else []
