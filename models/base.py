"""The base model: built and pre-trained in the run (tiny), or named and read from safetensors (pretrained).

A base folder holds `base.json` (what it is) and, for a tiny model, `model/` (safetensors, configuration, tokenizer).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data import storage
from data.artifacts import file_hash, stable_hash, write_table
from data.errors import UserError, disk_problem
from data.progress import Report
from models.device import select_device
from models.fetch import SMOL, smol_folder, smol_problem
from models.requests import BaseRequest

BASE_FILE = "base.json"
MODEL_FOLDER = "model"

_file_hashes: dict[tuple[str, int, int], str] = {}


def read_base(folder: Path) -> dict[str, Any]:
    """`base.json` of a base folder: kind, name, revision, dtype, context. Raises UserError where it is missing."""
    path = folder / BASE_FILE
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no base model folder: it has no {BASE_FILE}; make it with models.base:prepare"
        ) from None


def base_name(folder: Path) -> str:
    """What an adapter's configuration names as its base: the hub name or folder of the weights.

    For a base that was built in a run on an object store: its URL and content hash, not the cached copy.
    """
    base = read_base(folder)
    local = _weights_folder(folder, base)
    published = storage.origin(folder)
    if published is not None and local is not None and folder in local.parents:
        return f"{storage.join(published[0], local.relative_to(folder).as_posix())}#sha256={published[1]}"
    return base["name"] if local is None else str(local)


def base_hash(folder: Path) -> str:
    """A hash over the content of the base: equal for equal weights wherever they lie. A hub model goes by its name."""
    base = read_base(folder)
    source = _weights_folder(folder, base)
    return stable_hash(base, {} if source is None else file_hashes(source))


def model_hash(folder: Path) -> str:
    """A hash over the files of a base folder's model, wherever they lie; a hub model goes by its name and revision."""
    base = read_base(folder)
    source = _weights_folder(folder, base)
    return stable_hash(base["name"], base["revision"]) if source is None else stable_hash(file_hashes(source))


def file_hashes(folder: Path) -> dict[str, str]:
    """Path below `folder` → SHA-256 of every file; a file that has not changed is read once per process."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _remembered_hash(path) for path in files}


def _weights_folder(folder: Path, base: dict[str, Any]) -> Path | None:
    if base["kind"] == "tiny":
        return folder / MODEL_FOLDER
    if base["name"] == SMOL:
        problem = smol_problem()
        if problem:
            raise UserError(problem)
        return smol_folder()
    local = Path(base["name"]).expanduser()
    return local if local.is_dir() else None


def _remembered_hash(path: Path) -> str:
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _file_hashes:
        _file_hashes[key] = file_hash(path)
    return _file_hashes[key]


def load_base(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a base folder, from safetensors, running no code that comes with a model.

    Raises UserError where the model is not there, has no safetensors, or the hub that has it cannot be reached.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # progress is the step's own; a bar would be torn apart by log lines
    base = read_base(folder)
    local = _weights_folder(folder, base)
    where = str(local) if local is not None else base["name"]
    if local is not None and not list(local.glob("*.safetensors")):
        raise UserError(f"{where} holds no *.safetensors; convert the model's weights to safetensors")
    options = {"revision": base["revision"], "trust_remote_code": False}
    dtype = getattr(torch, base["dtype"])
    with _named(where, base):
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, attn_implementation="sdpa", **options
        )
        return model, AutoTokenizer.from_pretrained(where, **options)


@contextmanager
def _named(where: str, base: dict[str, Any]) -> Iterator[None]:
    """A model that is not there, not readable, or in no cache while its hub is out of reach, as a UserError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, (UserError, ConnectionError, TimeoutError)) or disk_problem(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model {where!r} (revision {base['revision']}) cannot be read: {reason}; name a folder with config.json, "
            "tokenizer and safetensors, or a model of the hub (where it can be reached)"
        ) from None


def prepare(request: BaseRequest, out: Path, report: Report) -> dict[str, Any]:
    """Makes the base folder: pre-trains a tiny model, or notes a pretrained one and sees that it can be read.

    Writes `base.json` and `metrics.parquet`, and `model/` for a tiny model. Returns counts.
    """
    device = select_device(request.compute)
    model = request.model
    if model.kind == "tiny":
        from models.pretraining import pretrain

        network, tokenizer, metrics, figures = pretrain(request, device, report)
        network.save_pretrained(out / MODEL_FOLDER)
        tokenizer.save_pretrained(out / MODEL_FOLDER)
        base = {"name": MODEL_FOLDER, "revision": None, "dtype": "float32", "context": model.context}
    else:
        local = Path(model.name).expanduser()
        name = str(local.resolve()) if local.is_dir() else model.name
        base = {"name": name, "revision": model.revision, "dtype": model.dtype, "context": model.context}
        metrics = []
    (out / BASE_FILE).write_text(json.dumps({"kind": model.kind, **base}, indent=1, sort_keys=True) + "\n")
    write_table(out / "metrics.parquet", "metrics", metrics)
    if model.kind == "pretrained":
        network, _ = load_base(out)
        figures = {"parameters": sum(parameter.numel() for parameter in network.parameters())}
        report.log(f"{base['name']}: {figures['parameters']:,} parameters")
    return figures
