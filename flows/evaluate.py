"""`ratchet evaluate`: any model on public benchmarks. `ratchet regrade`, `ratchet compare`: what comes of its file."""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from data.errors import UserError
from data.settings import AnswerKind, BenchmarkSource, ChatPrompt, PlainPrompt, Prompt
from flows.config import explain
from flows.named_model import named_model
from models.loracoe.files import check_not_routed
from models.requests import BenchmarkRequest, Device
from models.settings import Dtype

DEFAULT_TOKENS = 512


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """The arguments of `ratchet evaluate`."""
    sub.add_argument(
        "model", help="a model's folder, a PEFT adapter's folder, RUN:TASK[:MODEL] of a run, or a hub name"
    )
    sub.add_argument(
        "--benchmark", action="append", required=True, metavar="NAME", help="gsm8k, math500, ...; may be repeated"
    )
    sub.add_argument(
        "--file", action="append", default=[], metavar="PATH", help="the publisher's file, one for each --benchmark"
    )
    sub.add_argument("--hub", action="store_true", help="take benchmarks without --file from the hub")
    sub.add_argument("--out", type=Path, help="folder of the results (default: evaluations/NAME)")
    sub.add_argument("--name", help="name under which the answers are filed (default: from the model)")
    sub.add_argument("--base", help="base model of the adapter (default: what its configuration names)")
    sub.add_argument("--root", default="runs", help="folder of the runs (default: runs)")
    sub.add_argument("--limit", type=int, help="at most so many questions of each benchmark, by content hash")
    sub.add_argument("--prompt", choices=["chat", "plain"], help="default: the run's; else chat where the model has it")
    sub.add_argument("--template", help="prompt with {question} in it (in chat: the user's turn)")
    sub.add_argument("--system", help="system prompt (chat only)")
    sub.add_argument("--samples", type=int, help="answers to a question, beside a greedy one; needs --temperature")
    sub.add_argument("--temperature", type=float, help="0 (default): greedy")
    sub.add_argument("--no-greedy", action="store_true", help="no greedy answer beside the samples")
    sub.add_argument("--max-new-tokens", type=int, help=f"default: the run's, else {DEFAULT_TOKENS}")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    sub.add_argument("--confidence", type=float, help="of the intervals (default: 0.95)")
    sub.add_argument("--answer-kind", choices=get_args(AnswerKind), help="grade as this kind (program: by running it)")
    sub.add_argument("--engine", choices=["transformers", "vllm_server", "vllm"], default="transformers")
    sub.add_argument("--url", action="append", default=[], help="of a vLLM server; may be repeated")
    sub.add_argument("--batch-size", type=int, help="rows decoded together (transformers)")
    sub.add_argument("--dtype", choices=get_args(Dtype), help="of the weights (default: float32)")
    sub.add_argument("--context", type=int, help="longest prompt plus answer (default: the model's)")
    sub.add_argument("--questions-per-part", type=int, default=64, help="questions between two saves (default: 64)")
    sub.add_argument("--seed", type=int, default=0, help="of the samples")
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    sub.add_argument("--threads", type=int, help="of torch (default: one for each core)")


def evaluate(options: argparse.Namespace) -> int:
    """Answers, grades, scores; prints the figures and where the files are. Returns the exit code.

    Raises UserError for what the user can mend, before a model is loaded where it can be seen before.
    """
    request = evaluation_request(options)
    from flows.preflight import computing_python
    from tasks.compute import NO_TIMEOUT, Compute, MayPass, StepFailed
    from tasks.display import StepLines

    compute = Compute(options.threads, computing_python(request.engine))
    lines = StepLines("evaluate")
    try:
        score = compute.call("models.benchmarking:evaluate_benchmarks", request, None, lines, NO_TIMEOUT)
    except (MayPass, StepFailed) as error:
        print(f"ratchet: the evaluation failed; the same command continues it.\n{error}", file=sys.stderr)
        return 1
    finally:
        lines.close()
        compute.close()
    print_score(score, request.folder)
    return 0


def print_score(score: dict[str, Any], folder: Path) -> None:
    """The figures, and what was left out."""
    from data.benchmarks.score import score_lines

    print("\n".join(score_lines(score["scores"])))
    for name, counts in score["made_from"]["benchmarks"].items():
        for reason, left in counts["excluded"].items():
            print(f"{name}: {left['count']} questions left out ({reason}), named in score.json")
    print(f"answers: {folder / 'evaluations.parquet'}; figures and settings: {folder / 'score.json'}")


def evaluation_request(options: argparse.Namespace) -> BenchmarkRequest:
    """The request that the command line asks for; every UserError that needs no model comes from here."""
    sources = _sources(options)
    place = named_model(options)
    name = options.name or place.pop("name")
    place.pop("name", None)
    if options.engine != "transformers":
        check_not_routed(place.get("weights"), f"--engine {options.engine}")
    defaults = place.pop("evaluation", {"max_new_tokens": DEFAULT_TOKENS})
    own_prompt = place.pop("prompt", None)
    own_kind = place.pop("answer_kind", None)
    given = {
        "samples": options.samples,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "confidence": options.confidence,
        "stop_strings": options.stop or None,
    }
    evaluation = defaults | {key: value for key, value in given.items() if value is not None}
    if evaluation.get("samples", 1) > 1 and not evaluation.get("temperature"):
        raise UserError(
            f"--samples is {evaluation['samples']} with --temperature 0: greedy answers are all the same; "
            "give a temperature, such as --temperature 0.7"
        )
    folder = options.out or Path("evaluations") / re.sub(r"[^\w.-]+", "-", name)
    _check_folder(folder)
    try:
        return BenchmarkRequest(
            folder=folder.absolute(),
            model=name,
            benchmarks=sources,
            answer_kind=options.answer_kind or own_kind,
            prompt=_prompt(options, own_prompt),
            evaluation=evaluation,
            greedy=not options.no_greedy,
            engine=_engine(options),
            questions_per_part=options.questions_per_part,
            seed=options.seed,
            compute=Device(device=options.device, threads=options.threads),
            **place,
        )
    except ValidationError as error:
        raise UserError(explain(error)) from None


def _sources(options: argparse.Namespace) -> list[BenchmarkSource]:
    """The benchmarks with their files, each read once so that a bad one stops here."""
    from data.benchmarks import load_questions

    names, files = options.benchmark, options.file
    if len(set(names)) < len(names):
        raise UserError("--benchmark: a benchmark is named twice; name each once")
    if len(files) > len(names):
        raise UserError(f"--file: {len(files)} files for {len(names)} benchmarks; give one for each, in their order")
    if len(files) < len(names) and not options.hub:
        raise UserError(
            f"--benchmark {names[len(files)]} has no --file; give the publisher's file, in the benchmarks' order, "
            "or --hub to download it"
        )
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}; give 1 or more")
    sources = [
        BenchmarkSource(name=name, path=path, limit=options.limit)
        for name, path in zip(names, [*files, *[None] * (len(names) - len(files))])
    ]
    for source in sources:
        if source.path is not None:
            load_questions(source, source.name)
        else:
            _known(source.name)
    return sources


def _known(name: str) -> None:
    from data.benchmarks import BENCHMARKS

    if name not in BENCHMARKS:
        raise UserError(f"benchmark {name!r} is unknown; the benchmarks are {', '.join(sorted(BENCHMARKS))}")


def _check_folder(folder: Path) -> None:
    from flows.preflight import check_writable

    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise UserError(f"--out: {existing} is a file; name a folder")
    check_writable("--out", existing, "--out")
    others = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if others and not {"score.json", "unfinished"} & set(others):
        raise UserError(f"--out: {folder} holds other files ({', '.join(sorted(others)[:3])}); name a new folder")


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": options.engine}
    if options.batch_size is not None:
        engine["batch_size"] = options.batch_size
    if options.url:
        engine["urls"] = options.url
    return engine


def _prompt(options: argparse.Namespace, own: Prompt | None) -> Prompt | None:
    """The prompt that the options describe, over the run's own; None: the model's chat template where it has one."""
    if options.template is not None and "{question}" not in options.template:
        raise UserError("--template holds no {question}; say where the question stands")
    kind = options.prompt or (own.kind if own is not None else None)
    if kind is None and (options.template is not None or options.system is not None):
        raise UserError("--template and --system need --prompt chat or --prompt plain")
    if kind is None:
        return None
    if kind == "plain" and options.system is not None:
        raise UserError("--system needs --prompt chat: a plain prompt has no system turn; write it into --template")
    values = own.model_dump() if own is not None and own.kind == kind else {"kind": kind}
    for name in ("template", "system"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    return (ChatPrompt if kind == "chat" else PlainPrompt).model_validate(values)


def regrade(file: Path, out: Path | None) -> int:
    """`ratchet regrade`: grades a finished evaluation again without a model and prints what changed."""
    from data.benchmarks import metrics
    from data.benchmarks.score import score_json, score_lines

    found = metrics.regrade(file, out)
    print("\n".join(metrics.regraded_lines(found)))
    print("\n".join(score_lines(score_json(found.rows, 0.95))))
    return 0


def compare(first: Path, second: Path, confidence: float, out: Path | None) -> int:
    """`ratchet compare`: the paired bootstrap between two finished evaluations."""
    from data import storage
    from data.benchmarks.comparison import compare as compare_files
    from data.benchmarks.comparison import comparison_lines

    if not 0 < confidence < 1:
        raise UserError(f"--confidence is {confidence}; give a share between 0 and 1, such as 0.95")
    found = compare_files(first, second, confidence)
    if out is not None:
        storage.write_json(str(out), [asdict(one) | {"difference": one.difference._asdict()} for one in found])
    print("\n".join(comparison_lines(found)))
    return 0
