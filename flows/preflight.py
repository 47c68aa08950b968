"""What can be seen to be wrong before anything is started: files, names, folders. Imports neither torch nor prefect."""

import errno
import os
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from data import storage
from data.errors import UserError
from data.settings import FileSource
from data.suites import SUITES
from flows.launch import layout
from flows.settings import ExpertSettings, RunSettings
from models.fetch import SMOL, smol_problem
from models.rollout import vllm_python
from models.rollout.vllm_python import VLLM_LARGEST_RANK
from models.settings import Engine, Model, Tracking

TRIAL_BYTES = 1 << 20
"""Files up to this size are ingested on trial (our choice: about half a second)."""
TRIAL_WRITE = 1 << 16
CONNECT_SECONDS = 3.0


def check(settings: RunSettings) -> None:
    """Raises UserError, one line each, for what `problems` finds, and where no server listens that could by now."""
    found = problems(settings)
    if settings.engine.kind == "vllm_server" and settings.model.kind == "pretrained":
        found += _server_problems(settings.engine.urls)
    if found:
        raise UserError("\n".join(found))


def problems(settings: RunSettings) -> list[str]:
    """What is not there: a source, suite, benchmark, model, engine; and a root that is no folder to write in."""
    checks = [lambda: _model(settings.model), lambda: _engine(settings), lambda: _root(settings.root)]
    checks.append(lambda: layout(settings.compute))
    checks.append(lambda: _tracking(settings.tracking, settings.root))
    for task, expert in settings.experts.items():
        checks.append(lambda task=task, expert=expert: _expert(f"experts.{task}", expert))
        if expert.reward.functions:
            checks.append(
                lambda task=task, expert=expert: _functions(
                    f"experts.{task}", expert.reward.functions, computing_python(settings.engine)
                )
            )
    found = []
    for check_one in checks:
        try:
            check_one()
        except UserError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def computing_python(engine: Engine) -> str | None:
    """The Python that the computing process runs on: one with vLLM for the engine `vllm`; None: this one.

    Raises UserError where there is none.
    """
    if engine.kind != "vllm":
        return None
    found = vllm_python.find(engine.python, "engine.python").path
    return None if found == sys.executable else found


def _server_problems(urls: tuple[str, ...]) -> list[str]:
    """Says so where none of the servers listens: better now than after the warm-up."""
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            with socket.create_connection((parts.hostname, port), CONNECT_SECONDS):
                return []
        except OSError:
            continue
    return [f"engine.urls: no vLLM server listens at {', '.join(urls)}; start one with `ratchet serve`"]


def _engine(settings: RunSettings) -> None:
    engine = settings.engine
    computing_python(engine)
    rank = getattr(settings.parameters, "rank", 0)
    if engine.kind != "transformers" and rank > VLLM_LARGEST_RANK:
        raise UserError(f"parameters.rank is {rank}, but vLLM takes adapters up to rank {VLLM_LARGEST_RANK}; lower it")
    largest = rank * len(settings.experts)
    if engine.kind != "transformers" and settings.composed_models and largest > VLLM_LARGEST_RANK:
        raise UserError(
            f"composed adapters may have the rank of all {len(settings.experts)} experts together, {largest}, but vLLM "
            f"takes adapters up to rank {VLLM_LARGEST_RANK}; lower parameters.rank, set composition.enabled false, or "
            "compose the finished run with engine.kind transformers"
        )


def _tracking(tracking: Tracking, root: str) -> None:
    for name in tracking.trackers:
        package = "mlflow-skinny" if name == "mlflow" else name
        if find_spec(name) is None:
            raise UserError(f"tracking.trackers: {name} is not installed; run `pip install {package}` or leave it out")
    folder = tracking.folder if tracking.folder is not None else root
    if {"tensorboard", "mlflow", "wandb"} & set(tracking.trackers) and not storage.is_local(folder):
        raise UserError(f"tracking.folder: trackers write to a local folder, not to {folder}; set tracking.folder")


def _functions(field: str, paths: tuple[str, ...], python: str | None) -> None:
    """The reward functions are there, looked for where the computing process does: in the folder of the command too."""
    from data.rewards import load_function

    if python is not None:  # another Python, which may have other packages
        return
    sys.path.insert(0, os.getcwd())
    try:
        for path in paths:
            load_function(path)
    except UserError as error:
        raise UserError(f"{field}.reward.functions: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


def _expert(field: str, expert: ExpertSettings) -> None:
    source = expert.source
    if expert.test is not None:
        _benchmark(f"{field}.test", expert.test.name, expert.test.path)
    if source.kind == "file":
        _file(f"{field}.source.path", source.path)
        _rows(field, source, expert)
    elif source.kind == "suite":
        _suite(f"{field}.source", source.suite, source.difficulty)
        kind = expert.answer_kind or SUITES[source.suite].answer_kind
        if expert.reasoning.kind == "meta_actions" and kind == "program":
            raise UserError(
                f"{field}.reasoning.kind: meta_actions needs answers that stand in a text, but suite {source.suite!r} "
                "is answered by programs; use reasoning.kind plain for this expert"
            )


def _rows(field: str, source: FileSource, expert: ExpertSettings) -> None:
    """Ingests a small local file on trial, so that what is wrong with its content is said before anything starts."""
    benchmark_is_here = expert.test is None or expert.test.path is not None
    if not storage.is_local(source.path) or not benchmark_is_here:
        return
    if storage.local_path(source.path).stat().st_size > TRIAL_BYTES:
        return
    from data.ingestion import ingest
    from data.progress import Silent

    with tempfile.TemporaryDirectory(prefix="ratchet-") as folder:
        try:
            ingest(
                source,
                "trial",
                Path(folder),
                splits=expert.splits,
                segmentation=expert.segmentation,
                answer_kind=expert.answer_kind,
                test=expert.test,
                report=Silent(),
            )
        except UserError as error:
            raise UserError(f"{field}: {error}") from None


def _model(model: Model) -> None:
    if model.kind == "pretrained" and model.name == SMOL and (problem := smol_problem()):
        raise UserError(f"model.name: {problem}")
    if model.kind == "pretrained" and model.name.startswith((".", "/", "~")):
        folder = Path(model.name).expanduser()
        if not (folder / "config.json").is_file():
            raise UserError(f"model.name: {model.name} holds no config.json; name a model's folder or a hub name")


def _file(field: str, path: str) -> None:
    if not storage.is_local(path):
        return
    local = storage.local_path(path)
    if local.is_dir():
        raise UserError(f"{field}: {path} is a folder; name a file in it")
    if not local.exists():
        raise UserError(f"{field}: {path} does not exist (looked in {Path.cwd()}); name an existing file")
    if not os.access(local, os.R_OK):
        raise UserError(f"{field}: {path} may not be read by this user; change its permissions")


def _suite(field: str, name: str, difficulty: int | None) -> None:
    if name not in SUITES:
        raise UserError(f"{field}.suite: there is no suite {name!r}; choose one of {', '.join(sorted(SUITES))}")
    allowed = SUITES[name].difficulties
    if difficulty is not None and difficulty not in allowed:
        raise UserError(
            f"{field}.difficulty: suite {name!r} has no difficulty {difficulty}; choose from {list(allowed)}"
        )


def _benchmark(field: str, name: str, path: str | None) -> None:
    from data.benchmarks import BENCHMARKS

    if name not in BENCHMARKS:
        raise UserError(f"{field}.name: there is no benchmark {name!r}; choose one of {', '.join(sorted(BENCHMARKS))}")
    if path is not None:
        _file(f"{field}.path", path)


def _root(root: str) -> None:
    if not storage.is_local(root):
        return
    folder = storage.local_path(root).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise UserError(f"root: {existing} is a file; choose a folder with --root")
    check_writable("root", existing, "--root")


def check_writable(field: str, folder: Path, option: str) -> None:
    """Raises UserError where nothing can be written into the existing `folder`: no permission, read-only, full."""
    try:
        with tempfile.TemporaryDirectory(prefix=".ratchet-", dir=folder) as trial:
            (Path(trial) / "trial").write_bytes(bytes(TRIAL_WRITE))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else "may not be written by this user"
        remedy = "free space there or " if full else ""
        raise UserError(f"{field}: {folder}: {reason}; {remedy}choose another folder with {option}") from None
