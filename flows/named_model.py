"""The model that a command names: a folder, an adapter, a run's model or a hub name. Loads nothing."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data.errors import UserError
from flows.config import explain, resolve
from models.loracoe.files import EXPORTED, POOL, has_router
from models.settings import PretrainedModel


def named_model(options: argparse.Namespace) -> dict[str, Any]:
    """What the argument `model` of `ratchet evaluate` names, as values of a request.

    Gives `base`, `weights`, `name` and, for a run's model, its `prompt`, `evaluation` and `answer_kind`. Raises
    UserError where there is no such model, as far as that can be seen without loading it.
    """
    text = options.model
    from models.fetch import SMOL

    folder = Path(text).expanduser()
    if folder.is_file():
        raise UserError(f"{text} is a file; name the folder of a model or of an adapter")
    if folder.is_dir():
        return _folder_model(folder, options)
    if re.fullmatch(r"[\w.-]+(:[\w.-]+){1,2}", text):
        return _run_model(text, options)
    if text != SMOL and (text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise UserError(f"there is no folder {text} (looked in {Path.cwd()}); name a model's folder or a hub name")
    return {"base": _pretrained(text, options), "name": text.rsplit("/", 1)[-1]}


def _folder_model(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    name = folder.resolve().name
    if (folder / "base.json").is_file():
        return {"base": folder.absolute(), "name": name}
    adapter = folder
    if has_router(folder):  # its exported adapters name the base
        adapter = next((folder / EXPORTED).iterdir(), folder)
    elif (folder / POOL / "provenance.json").is_file():
        raise UserError(
            f"{folder} was composed without a router; name a task's adapter in {folder / EXPORTED}, or compose again "
            "with --router sequence"
        )
    if has_router(folder) or (folder / "adapter_config.json").is_file():
        try:
            named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{adapter}/adapter_config.json cannot be read ({error!r}); save the adapter again"
            ) from None
        base = options.base or named
        if not base:
            raise UserError(f"{folder} does not name its base model; give it with --base")
        if base.startswith(("/", ".", "~")) and not Path(base).expanduser().is_dir():
            raise UserError(f"the base model {base} of {folder} is not there; say where it is with --base")
        if Path(base).expanduser().is_dir() and (Path(base).expanduser() / "base.json").is_file():
            return {"base": Path(base).expanduser().absolute(), "weights": folder.absolute(), "name": name}
        return {"base": _pretrained(base, options), "weights": folder.absolute(), "name": name}
    if (folder / "config.json").is_file():
        return {"base": _pretrained(str(folder), options), "name": name}
    raise UserError(
        f"{folder} holds neither config.json (a model) nor adapter_config.json (an adapter); name the folder with one"
    )


def _pretrained(name: str, options: argparse.Namespace) -> PretrainedModel:
    from models.fetch import SMOL, smol_problem

    if name == SMOL and (problem := smol_problem()):
        raise UserError(problem)
    settings = {"name": name, "context": options.context}
    if options.dtype is not None:
        settings["dtype"] = options.dtype
    try:
        return PretrainedModel(**settings)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def _run_model(text: str, options: argparse.Namespace) -> dict[str, Any]:
    """A run's model: its base, weights, prompt, limits and kind of answer."""
    from flows.ask import run_model
    from flows.inspect import run_settings

    run, task, model = [*text.split(":"), None][:3]
    found = run_model(options.root, run, task, model)
    settings = resolve(run_settings(options.root, run))
    expert = settings.experts[task]
    kind = "program" if expert.answer_kind == "program" else None
    return {
        "base": found.base.absolute(),
        "weights": found.weights.absolute() if found.weights is not None else None,
        "name": f"{run}-{task}-{found.model}",
        "prompt": expert.prompt,
        "evaluation": expert.evaluation.model_dump(),
        "answer_kind": kind,
    }
