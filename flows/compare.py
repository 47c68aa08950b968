"""`ratchet compare`: a study's cells in this process, and the check of its published results."""

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from data.errors import UserError
from flows import environment, reaper
from flows.study import Study, load_study

RESULTS = Path("docs/results")


def add_command(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Adds the command's arguments."""
    sub = command(
        "compare",
        "Run a comparison study, or go on with it (finished cells are not made again); or, given two finished "
        "evaluations of the same questions, compare these (paired bootstrap).",
    )
    sub.add_argument("study", help="a shipped study or a study file (TOML); or evaluations.parquet, or its folder")
    sub.add_argument("second", type=Path, nargs="?", help="the second evaluation, where the first is one")
    sub.add_argument("--confidence", type=float, default=0.95, help="of the interval between two evaluations")
    sub.add_argument("--cells", nargs="+", metavar="TASK/ARM/SEED", help="only these cells; * stands for any part")
    sub.add_argument("--max-cells", type=int, metavar="N", help="stop after N new cells; the same command goes on")
    sub.add_argument("--root", default="runs", help="folder of the working files (default: runs)")
    sub.add_argument(
        "--out",
        type=Path,
        help=f"folder of a study's results (default: {RESULTS}); for two evaluations: write the comparison here",
    )
    sub.add_argument("--check", action="store_true", help="recompute every figure and run one random cell again")
    text = "sample the base at every difficulty of the tasks' suites, before the study is committed; run no cell"
    sub.add_argument("--calibrate", action="store_true", help=text)
    sub.add_argument("--list", action="store_true", help="show the cells and which of them are finished; run nothing")


def compare(options: argparse.Namespace) -> int:
    """Runs, lists or checks; returns the exit code."""
    study = load_study(options.study)
    out = options.out or RESULTS
    if options.max_cells is not None and options.max_cells < 1:
        raise UserError(f"--max-cells {options.max_cells}: give a number of at least 1")
    if options.list:
        return _list(study, out)
    if options.check:
        _check_figures(study, out)
    elif not options.calibrate:
        study.commit()
    environment.prepare(console_level="CRITICAL")
    reaper.watch()
    from tasks import display
    from tasks.compute import MayPass, StepFailed

    shown = display.for_terminal()
    display.use(shown)
    try:
        if options.check:
            return _rerun(study, options.root, out)
        if options.calibrate:
            return _calibrate(study, options.root, out)
        from flows.comparison import method_comparison

        figures = method_comparison(options.study, options.cells, options.max_cells, options.root, str(out))
    except (MayPass, StepFailed) as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 1
    finally:
        shown.close()
    missing = len(figures["missing"])
    print(f"{figures['cells']} cells are finished, {missing} are missing; results: {out / study.settings.name}.md")
    return 0


def _list(study: Study, out: Path) -> int:
    from data.study import cell_name

    shape = study.shape
    for seed in shape.seeds:
        for task in shape.tasks:
            for arm in shape.arms:
                done = (out / shape.name / f"{cell_name(task, arm, seed)}.parquet").is_file()
                print(f"{task}/{arm}/{seed}  {'finished' if done else 'missing'}")
    return 0


def _check_figures(study: Study, out: Path) -> None:
    """Recomputes the results' JSON from the per-answer tables. Raises UserError where a figure is another one."""
    from data.study import figures, read_cells

    path = out / f"{study.settings.name}.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: the study has no results yet; run ratchet compare without --check")
    said = json.loads(path.read_text(encoding="utf-8"))
    found = figures(read_cells(out / study.settings.name, study.shape), study.shape, said["commit"])
    if json.loads(json.dumps(found)) != said:
        wrong = [name for name in found if json.loads(json.dumps(found[name])) != said.get(name)]
        raise UserError(
            f"{path}: {', '.join(wrong)} do not follow from the per-answer tables; run ratchet compare again"
        )
    print(f"every figure of {path} follows from {found['cells']} per-answer tables", flush=True)


def _calibrate(study: Study, root: str, out: Path) -> int:
    from prefect import flow

    from flows.comparison import Comparing
    from tasks.compute import close_shared

    @flow(name="comparison-calibration", persist_result=False)
    def calibration() -> dict:
        try:
            return Comparing(study, root, out).calibrate()
        finally:
            close_shared()

    for suite, difficulty in calibration().items():
        print(f"{suite}: difficulty {difficulty} lies least outside of the rule's bands")
    return 0


def _rerun(study: Study, root: str, out: Path) -> int:
    from prefect import flow

    from data.study import read_cells
    from flows.comparison import Comparing
    from tasks.compute import close_shared

    cells = sorted(read_cells(out / study.settings.name, study.shape))
    key = cells[secrets.randbelow(len(cells))]
    print(f"running {'/'.join(map(str, key))} again", flush=True)

    @flow(name="comparison-check", persist_result=False)
    def check() -> list[str]:
        try:
            return Comparing(study, root, out).again(key)
        finally:
            close_shared()

    different = check()
    if different:
        print(
            f"ratchet: {'/'.join(map(str, key))} came out differently: {'; '.join(different)} "
            "(other processors and library versions round differently)",
            file=sys.stderr,
        )
        return 1
    print(f"{'/'.join(map(str, key))} came out the same, answer by answer")
    return 0
