"""`ratchet compose`: PEFT adapters of one base, made by anyone, composed rank by rank into one adapter a task."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from data import storage
from data.errors import UserError
from data.requests import IngestRequest
from data.settings import ChatPrompt, FileSource, PlainPrompt, Prompt, Splits, SuiteSource
from flows.config import explain, merge, parse_overrides
from flows.named_model import named_model
from models.requests import BaseRequest, ComposeRequest, Device
from models.rollout.vllm_python import VLLM_LARGEST_RANK
from models.settings import CompositionSettings, Dtype, PretrainedModel

DEMONSTRATIONS = "demonstrations.parquet"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """The arguments of `ratchet compose`."""
    sub.add_argument(
        "adapters", nargs="+", metavar="ADAPTER", help="folder of a PEFT LoRA adapter, or NAME=FOLDER; one is enough"
    )
    sub.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="NAME=FILE",
        help="demonstrations of each task: any file that `ratchet run` reads, or NAME=suite:SUITE. A task with the "
        "name of an adapter starts from that adapter",
    )
    sub.add_argument("--out", type=Path, default=Path("composed"), help="folder of the results (default: composed)")
    sub.add_argument("--base", help="base model: folder or hub name (default: what the first adapter names)")
    sub.add_argument("--router", choices=["none", "sequence", "token"], help="gates without the task's name, beside")
    sub.add_argument(
        "--steps", type=int, help="optimiser steps of each task's gates (default: 40; 0: importance alone)"
    )
    sub.add_argument("--prompt", choices=["chat", "plain"], default="plain")
    sub.add_argument("--template", help="prompt with {question} in it (in chat: the user's turn)")
    sub.add_argument("--validation", type=int, default=50, help="demonstrations a task held out to choose by (50)")
    sub.add_argument("--same-base", action="store_true", help="do not compare the base that the adapters name")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--dtype", choices=get_args(Dtype), help="of the base's weights (default: float32)")
    sub.add_argument("--context", type=int, help="longest prompt plus response (default: the model's)")
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    sub.add_argument("--threads", type=int, help="of torch (default: one for each core)")
    sub.epilog = "Any setting of the composition: --SETTING VALUE, for example --router.active 16 or --export pattern."


def compose(options: Namespace, rest: Sequence[str]) -> int:
    """Composes and prints what came of it. Returns the exit code.

    Raises UserError for what can be seen before a model is loaded, and for adapters that cannot be pooled.
    """
    settings = composition_settings(options, rest)
    adapters = named(options.adapters, "ADAPTER", lambda text: Path(text).expanduser().resolve().name)
    folders = {name: Path(text).expanduser().absolute() for name, text in adapters.items()}
    for name, folder in folders.items():
        if not (folder / "adapter_config.json").is_file():
            raise UserError(f"adapter {name}: {folder} holds no adapter_config.json; name the folder of a PEFT adapter")
    sources = {task: _source(task, text) for task, text in named(options.tasks, "--tasks", None).items()}
    prompt = _prompt(options)
    place = named_model(Namespace(model=str(next(iter(folders.values()))), **_model_options(options)))
    out = options.out.absolute()
    if out.exists() and not (out / storage.MANIFEST).is_file():
        raise UserError(f"--out: {out} exists and is no composition; name a new folder")
    from tasks.compute import NO_TIMEOUT, Compute, MayPass, StepFailed
    from tasks.display import StepLines

    compute, report = Compute(options.threads), StepLines("compose")
    try:
        with storage.staging(str(out)) as folder:
            device = Device(device=options.device, threads=options.threads)

            def call(function: str, request: Any, place: Path) -> dict[str, Any]:
                place.mkdir(parents=True, exist_ok=True)
                return compute.call(function, request, place, report, NO_TIMEOUT)

            base = place["base"]
            if isinstance(base, PretrainedModel):
                call("models.base:prepare", BaseRequest(model=base, compute=device), folder / "base")
                base = folder / "base"
            demonstrations = {}
            for task, source in sources.items():
                if isinstance(source, Path):
                    demonstrations[task] = source
                    continue
                request = IngestRequest(
                    task=task,
                    source=source,
                    splits=Splits(validation=options.validation, test=0),
                    segmentation=None,
                    answer_kind=None,
                    test=None,
                )
                call("data.steps:ingest", request, folder / "demonstrations" / task)
                demonstrations[task] = folder / "demonstrations" / task / DEMONSTRATIONS
            request = ComposeRequest(
                base=base,
                experts=folders,
                demonstrations=demonstrations,
                prompts={task: prompt for task in sources},
                composition=settings,
                seed=options.seed,
                same_base=options.same_base,
                compute=device,
            )
            found = call("models.loracoe.step:compose", request, folder)
            storage.publish(folder, str(out), "compose", found)
    except (MayPass, StepFailed) as error:
        print(f"ratchet: the composition failed.\n{error}", file=sys.stderr)
        return 1
    finally:
        report.close()
        compute.close()
    print("\n".join(told(found, settings, out)))
    return 0


def composition_settings(options: Namespace, rest: Sequence[str]) -> CompositionSettings:
    """The settings that the command line asks for. Raises UserError with the field, the reason and the remedy."""
    given: dict[str, Any] = {}
    if options.router is not None:
        given["router"] = {"kind": options.router}
    if options.steps is not None:
        given["gate_steps"] = options.steps
    try:
        return CompositionSettings.model_validate(merge(given, parse_overrides(rest)))
    except ValidationError as error:
        raise UserError(explain(error, "--", (CompositionSettings,))) from None


def named(texts: Sequence[str], option: str, default: Any) -> dict[str, str]:
    """NAME=VALUE pairs; without NAME, `default(value)` names it. Raises UserError for a name used twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if default is None:
                raise UserError(f"{option} {text}: give NAME=FILE")
            name, value = default(text), text
        if not name or not value:
            raise UserError(f"{option} {text}: give NAME=VALUE")
        if name in found:
            raise UserError(f"{option}: {name} is used twice ({found[name]} and {value}); give each a NAME= of its own")
        found[name] = value
    return found


def _model_options(options: Namespace) -> dict[str, Any]:
    return {"base": options.base, "context": options.context, "dtype": options.dtype, "root": "runs"}


def _source(task: str, text: str) -> FileSource | SuiteSource | Path:
    """What `text` names; a table of demonstrations that Ratchet wrote is taken as it is, with its splits."""
    if text.startswith("suite:"):
        from data.suites import SUITES

        name = text.removeprefix("suite:")
        if name not in SUITES:
            raise UserError(f"--tasks {task}: there is no suite {name!r}; choose one of {', '.join(SUITES)}")
        return SuiteSource(suite=name)
    if "://" in text:
        return FileSource(path=text)
    path = Path(text).expanduser().absolute()
    if path.is_dir() and (path / DEMONSTRATIONS).is_file():
        return path / DEMONSTRATIONS
    if not path.is_file():
        raise UserError(f"--tasks {task}: {path} is no file; name a file of demonstrations")
    if path.name == DEMONSTRATIONS:
        return path
    return FileSource(path=str(path))


def _prompt(options: Namespace) -> Prompt:
    values = {} if options.template is None else {"template": options.template}
    if options.template is not None and "{question}" not in options.template:
        raise UserError("--template holds no {question}; say where the question stands")
    return ChatPrompt(**values) if options.prompt == "chat" else PlainPrompt(**values)


def told(found: dict[str, Any], settings: CompositionSettings, out: Path) -> list[str]:
    """The result in words: each task's adapter, the router's losses beside the gates', where the files are."""
    lines = [f"{found['adapters']} adapters, {found['modules']} layers, {found['ranks']} ranks in the pool"]
    for task, figures in found["tasks"].items():
        loss = ""
        if "validation_loss" in figures:
            loss = f", validation loss {figures['validation_loss_before']:.4f} → {figures['validation_loss']:.4f}"
        lines.append(
            f"{task}: {figures['active_ranks']} ranks from {figures['start']}, rank {figures['rank']} exported{loss}"
        )
    router = found.get("router")
    if router:
        lines.append(f"{router['kind']} router, {router['parameters']:,} parameters, without the task's name:")
        for task in found["tasks"]:
            if f"validation_loss/{task}" in router:
                lines.append(f"  {task}: validation loss {router[f'validation_loss/{task}']:.4f}")
    ranks = [figures["max_lora_rank"] for figures in found["tasks"].values()]
    lines.append(f"adapters for PEFT and vLLM: {out / 'exported'}/<task>")
    if None in ranks:
        largest = max(figures["rank"] for figures in found["tasks"].values())
        lines.append(f"vLLM does not serve rank {largest} (it takes at most {VLLM_LARGEST_RANK}); PEFT loads it")
    else:
        lines.append(f"vLLM serves them with --max-lora-rank {max(ranks)}")
    return lines
