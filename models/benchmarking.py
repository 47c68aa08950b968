"""One model on public benchmarks: answered in parts that survive a kill, graded, scored, with all it depended on."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, read_table, replace_table, stable_hash
from data.benchmarks import load_questions
from data.benchmarks.base import Questions
from data.benchmarks.metrics import GREEDY
from data.benchmarks.score import counts_json, score_json
from data.errors import UserError
from data.grading import warm
from data.progress import Report
from data.settings import ChatPrompt, PlainPrompt, Prompt
from data.storage import write_json
from models.base import BASE_FILE, file_hashes, model_hash, read_base
from models.evaluation import answer_questions, fitting_prompt
from models.policy import Policy
from models.requests import BenchmarkRequest, PolicyFiles
from models.rollout.engine import RolloutEngine
from models.rollout.engines import make_engine
from models.settings import EvaluationSettings, PretrainedModel

EVALUATIONS, SCORE, UNFINISHED, MADE_FROM = "evaluations.parquet", "score.json", "unfinished", "made_from.json"
LIBRARIES = ("reasoning-ratchet", "torch", "transformers", "peft", "math-verify", "pydantic-monty")


def evaluate_benchmarks(request: BenchmarkRequest, report: Report) -> dict[str, Any]:
    """Answers and grades the benchmarks' questions; writes `evaluations.parquet` and `score.json` into the folder.

    Questions are answered in parts, in the order of their content hash, and each part is saved: a killed evaluation
    continues after the last whole part and ends in the same files. A finished one is returned as it is.

    Returns the content of `score.json`: `scores` (see data.benchmarks.score) and `made_from`. Raises UserError, before
    anything is sampled, for a file that cannot be used, a question that does not fit the context, or a folder that
    holds another evaluation.
    """
    found = {source.name: load_questions(source, source.name) for source in request.benchmarks}
    questions = [_question(row, request) for one in found.values() for row in one.rows]
    questions.sort(key=lambda row: (list(found).index(row["benchmark"]), row["item_id"]))
    with tempfile.TemporaryDirectory(prefix="ratchet-") as folder:
        return _evaluate(request, _policy_files(request, Path(folder)), found, questions, report)


def _evaluate(
    request: BenchmarkRequest,
    files: PolicyFiles,
    found: dict[str, Questions],
    questions: Sequence[dict[str, Any]],
    report: Report,
) -> dict[str, Any]:
    work = request.folder / UNFINISHED
    policy = Policy.load(files, compute=request.compute)
    engine = make_engine(request.engine, policy)
    prompt = request.prompt or _own_prompt(policy)
    made_from = _made_from(request, prompt, policy, engine, found, questions)
    if (request.folder / SCORE).is_file():
        score = json.loads((request.folder / SCORE).read_text())
        _check_same(request.folder, score["made_from"], made_from)
        report.log(f"{request.folder} is finished already")
        shutil.rmtree(work, ignore_errors=True)
        return score
    if (work / MADE_FROM).is_file():
        _check_same(request.folder, json.loads((work / MADE_FROM).read_text()), made_from)
    for row in questions:
        fitting_prompt(policy, row, prompt, request.evaluation)
    warm({row["answer_kind"] for row in questions})
    write_json(str(work / MADE_FROM), made_from)
    parts = _answer_parts(request, work, policy, engine, prompt, questions, report)
    return _finish(request, work, parts, made_from)


def _question(row: dict[str, Any], request: BenchmarkRequest) -> dict[str, Any]:
    return row | {"answer_kind": request.answer_kind or row["answer_kind"]}


def _policy_files(request: BenchmarkRequest, folder: Path) -> PolicyFiles:
    """The policy's files; a model that is named gets a base folder, in the empty `folder`."""
    if not isinstance(request.base, PretrainedModel):
        return PolicyFiles(base=request.base, weights=request.weights)
    local = Path(request.base.name).expanduser()
    name = str(local.resolve()) if local.is_dir() else request.base.name
    write_json(str(folder / BASE_FILE), request.base.model_dump() | {"name": name})
    return PolicyFiles(base=folder, weights=request.weights)


def _own_prompt(policy: Policy) -> Prompt:
    return ChatPrompt() if getattr(policy.tokenizer, "chat_template", None) else PlainPrompt()


def _made_from(
    request: BenchmarkRequest,
    prompt: Prompt,
    policy: Policy,
    engine: RolloutEngine,
    found: dict[str, Questions],
    questions: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Everything that the answers depend on, as JSON; paths and times are not part of it."""
    base = read_base(policy.files.base)
    weights = policy.files.weights
    benchmarks = {
        name: {
            "questions_sha256": stable_hash([row for row in questions if row["benchmark"] == name]),
            **counts_json(one),
        }
        for name, one in found.items()
    }
    made_from = {
        "model": request.model,
        "base": {"sha256": model_hash(policy.files.base), "dtype": base["dtype"], "context": policy.context},
        "weights_sha256": stable_hash(file_hashes(weights)) if weights is not None else None,
        "engine": asdict(engine.describe()) | {"device": policy.device.type, "kind": request.engine.kind},
        "prompt": prompt.model_dump(),
        "chat_template_sha256": stable_hash(policy.tokenizer.chat_template) if prompt.kind == "chat" else None,
        "evaluation": request.evaluation.model_dump(),
        "eos_ids": sorted(policy.eos_ids),
        "greedy": _asks_greedy_too(request),
        "answer_kind": request.answer_kind,
        "questions_per_part": request.questions_per_part,
        "seed": request.seed,
        "benchmarks": benchmarks,
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    return json.loads(json.dumps(made_from))


def _version(name: str) -> str | None:
    """None where it is not installed: a Python made for vLLM runs this package from its folder."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_same(folder: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises UserError, naming what differs, where `folder` holds an evaluation made from something else."""
    differing = []
    for name in sorted({*held, *wanted}):
        old, new = held.get(name), wanted.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            differing += [f"{name}.{key}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        elif old != new:
            differing.append(name)
    if differing:
        raise UserError(
            f"{folder} holds an evaluation made with another {', '.join(differing)}; choose another folder with --out, "
            "or delete this one"
        )


def _asks_greedy_too(request: BenchmarkRequest) -> bool:
    return request.greedy and request.evaluation.temperature > 0


def _answer_parts(
    request: BenchmarkRequest,
    work: Path,
    policy: Policy,
    engine: RolloutEngine,
    prompt: Prompt,
    questions: Sequence[dict[str, Any]],
    report: Report,
) -> list[Path]:
    """Answers what no whole part holds yet; returns the parts' files in their order."""
    size = request.questions_per_part
    starts = range(0, len(questions), size)
    parts = [work / f"{start // size:06d}.parquet" for start in starts]
    missing = [start for start, part in zip(starts, parts) if not part.is_file()]
    if len(missing) < len(parts):
        report.log(f"{len(parts) - len(missing)} of {len(parts)} parts are there already")
    for start in missing:
        some = questions[start : start + size]
        rows = _answers(request, policy, engine, prompt, some, _Share(report, start, len(some), len(questions)))
        replace_table(parts[start // size], "evaluations", rows)
    return parts


def _answers(
    request: BenchmarkRequest,
    policy: Policy,
    engine: RolloutEngine,
    prompt: Prompt,
    questions: Sequence[dict[str, Any]],
    report: Report,
) -> list[dict[str, Any]]:
    """The graded answers of some questions, question by question, a greedy one in front of samples."""

    def ask(settings: EvaluationSettings) -> list[dict[str, Any]]:
        return answer_questions(
            policy, engine, questions, prompt, settings, model=request.model, seed=request.seed, report=report
        )

    rows = ask(request.evaluation)
    if _asks_greedy_too(request):
        greedy = request.evaluation.model_copy(update={"samples": 1, "temperature": 0.0})
        rows += [row | {"sample": GREEDY} for row in ask(greedy)]
    place = {(row["benchmark"], row["item_id"]): number for number, row in enumerate(questions)}
    return sorted(rows, key=lambda row: (place[row["benchmark"], row["item_id"]], row["sample"]))


class _Share:
    """A part's progress as progress of the whole."""

    def __init__(self, report: Report, start: int, size: int, total: int) -> None:
        self.report, self.start, self.size, self.total = report, start, size, total

    def log(self, message: str) -> None:
        """As it is."""
        self.report.log(message)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """`done` of the part's `total`, in questions of the whole."""
        self.report.progress(self.start + self.size * done / max(total, 1), self.total, f"questions ({text})")


def _finish(request: BenchmarkRequest, work: Path, parts: Sequence[Path], made_from: dict[str, Any]) -> dict[str, Any]:
    """Puts the parts together; `score.json` comes last, so a folder with it is finished."""
    import pyarrow as pa

    table = pa.concat_tables([read_table(part, "evaluations") for part in parts])
    replace_table(request.folder / EVALUATIONS, "evaluations", table)
    rows = read_rows(request.folder / EVALUATIONS, "evaluations")
    score = {"scores": score_json(rows, request.evaluation.confidence), "made_from": made_from}
    write_json(str(request.folder / SCORE), score)
    shutil.rmtree(work, ignore_errors=True)
    return score
