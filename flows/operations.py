"""The commands that keep a system of runs going: their arguments and handlers. Heavy imports stay in the handlers."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import UserError
from flows import config

Handler = Callable[[argparse.Namespace], int]


def add_commands(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Adds the commands' arguments; `command` makes a subparser of a name and a text."""
    sub = command(
        "retrain", "Train the serving model on new demonstrations; promote the result only where it is better."
    )
    sub.add_argument("--preset", default="tiny", help="shipped settings to start from (default: tiny)")
    sub.add_argument("--settings", type=Path, metavar="FILE", help="TOML file laid over the preset")
    sub.add_argument("--serving", default="serving", help="folder of the serving model (default: serving)")
    sub.add_argument("--task", help="which expert of the settings (default: the first)")
    sub.add_argument("--demonstrations", metavar="FILE", help="demonstrations (default: the expert's own source)")
    sub.add_argument("--promotion-questions", type=int, default=200, help="held out to compare (default: 200)")
    sub.add_argument("--minimum-new", type=int, default=1, help="with fewer new demonstrations nothing is done")
    sub.add_argument("--confidence", type=float, default=0.95, help="of the paired interval (default: 0.95)")
    sub = command("serving", "List the versions of a serving model.")
    sub.add_argument("--serving", default="serving", help="folder of the serving model (default: serving)")
    sub = command("rollback", "Serve an earlier version again.")
    sub.add_argument("--serving", default="serving", help="folder of the serving model (default: serving)")
    sub.add_argument("--to", type=int, help="version (default: the one before the current one)")
    sub = command("compare-runs", "What two runs were told differently, and what came out differently.")
    sub.add_argument("first", help="name of a run")
    sub.add_argument("second", help="name of another")
    sub.add_argument("--root", default="runs", help="folder of the runs (default: runs)")
    sub = command("doctor", "Check versions, threads, GPU, vLLM, server, disk and write access; say what to do.")
    sub.add_argument("--root", default="runs", help="folder of the runs (default: runs)")
    sub = command("export", "Write the promoted model, or a run's, as a folder that others load, with its model card.")
    sub.add_argument("out", type=Path, help="new folder")
    sub.add_argument("--serving", default="serving", help="folder of the serving model (default: serving)")
    sub.add_argument("--version", type=int, help="of the serving model (default: the current one)")
    sub.add_argument("--run", help="export from this run instead of the serving model")
    sub.add_argument("--root", default="runs", help="folder of the runs (default: runs)")
    sub.add_argument("--task", help="of the run (default: the first)")
    sub.add_argument("--model", help="of the run: warmup, an arm, composed (default: composed, else the last arm)")
    sub.add_argument("--merge", action="store_true", help="full weights with the adapter merged in")
    sub.add_argument("--base-name", metavar="NAME", help="what the adapter is to name as its base, e.g. a hub name")
    sub.add_argument("--push", metavar="ORG/NAME", help="upload to a model hub as well (default: no)")
    sub = command("completion", "Print the shell's completion script: source <(ratchet completion bash).")
    sub.add_argument("shell", choices=["bash", "zsh", "fish"])
    sub = command("setup", "Make work pools and automations on the Prefect server at PREFECT_API_URL.")
    sub.add_argument("--webhook", metavar="URL", help="told of failed runs and refused promotions (JSON, POST)")


def retrain(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """Runs the flow `retraining` in this process; `overrides` are the settings of file and command line."""
    from flows import environment, preflight, reaper

    given = {"splits": {"promotion": options.promotion_questions}}
    preflight.check(config.load(options.preset, config.merge(overrides, given)))
    environment.prepare(console_level="CRITICAL")
    reaper.watch()
    from flows.retraining import retraining
    from tasks import display
    from tasks.compute import MayPass, StepFailed

    shown = display.for_terminal()
    display.use(shown)
    try:
        decision = retraining(
            preset=options.preset,
            serving=options.serving,
            task=options.task,
            demonstrations=options.demonstrations,
            promotion_questions=options.promotion_questions,
            minimum_new=options.minimum_new,
            confidence=options.confidence,
            overrides=overrides,
        )
    except (MayPass, StepFailed) as error:
        print(f"ratchet: the retraining failed; the same command continues it.\n{error}", file=sys.stderr)
        return 1
    finally:
        shown.close()
    print(("promoted: " if decision["promote"] else "not promoted: ") + decision["reason"])
    print(f"serving: {'nothing yet' if decision['version'] is None else 'version ' + str(decision['version'])}")
    return 0


def _serving(options: argparse.Namespace) -> int:
    from data import serving

    current = serving.current(options.serving)
    found = serving.versions(options.serving)
    if not found:
        raise UserError(f"{options.serving} has no version yet; `ratchet retrain` makes the first")
    for served in found:
        info = served.ref.info
        mark = "*" if current is not None and served.version == current.version else " "
        print(
            f"{mark} {served.version:4}  {100 * info['candidate']:5.1f} %  {info['reason']}  {served.ref.sha256[:12]}"
        )
    return 0


def _rollback(options: argparse.Namespace) -> int:
    from data import serving

    former, served = serving.rollback(options.serving, options.to)
    print(f"version {served.version} serves (before: {former})")
    return 0


def _setup(options: argparse.Namespace) -> int:
    from flows.setup import setup

    for line in setup(options.webhook):
        print(line)
    return 0


def _compare_runs(options: argparse.Namespace) -> int:
    from flows.compare_runs import compare_runs

    print(compare_runs(options.root, options.first, options.second))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from flows.doctor import report

    text, well = report(options.root)
    print(text)
    return 0 if well else 1


def _export(options: argparse.Namespace) -> int:
    from flows import export

    how = {"out": options.out, "merge": options.merge, "base_name": options.base_name}
    if options.run is None:
        made = export.export_served(options.serving, options.version, **how)
    else:
        made = export.export_run(options.root, options.run, options.task, options.model, **how)
    print(f"{made['kind']} in {options.out}, base {made['base']}")
    if options.push is not None:
        print(export.push(options.out, options.push))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from flows.cli import parser
    from flows.completion import script

    print(script(parser(), options.shell))
    return 0


HANDLERS: dict[str, Handler] = {
    "setup": _setup,
    "serving": _serving,
    "rollback": _rollback,
    "compare-runs": _compare_runs,
    "doctor": _doctor,
    "export": _export,
    "completion": _completion,
}
