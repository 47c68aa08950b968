"""`ratchet export`: the promoted model, or a run's, as a folder for others; pushed to a hub only when told to."""

import json
import shutil
from pathlib import Path
from typing import Any

from data import serving as store
from data import storage
from data.errors import UserError
from data.progress import Silent
from flows.ask import TIMEOUT_SECONDS
from models.requests import Device, ExportRequest, PolicyFiles
from tasks.compute import Compute


def export_served(serving: str, version: int | None, out: Path, merge: bool, base_name: str | None) -> dict[str, Any]:
    """Exports a version of a serving model, the current one by default. Raises UserError where there is none."""
    served = store.current(serving) if version is None else store.version(serving, version)
    if served is None:
        raise UserError(f"{serving} serves nothing yet; `ratchet retrain` promotes the first version")
    info = served.ref.info
    base, reason = storage.find(storage.join(serving, "lineage", "base"))
    if base is None:
        raise UserError(f"{serving}/lineage/base: {reason}")
    facts = {
        "version": str(served.version),
        "retraining": info["retraining"],
        "promotion questions": str(info["questions"]),
        "accuracy on them": f"{100 * info['candidate']:.1f} %",
        "accuracy of the version before": f"{100 * info['serving']:.1f} %",
        "decision": info["reason"],
        "SHA-256 of the version": served.ref.sha256,
    }
    request = ExportRequest(
        policy=PolicyFiles(base=storage.fetch(base), weights=store.weights(served)),
        merge=merge,
        base_name=base_name,
        title=f"{info['task']}, version {served.version}",
        prompt=info["prompt"],
        facts=facts,
    )
    return _export(request, out)


def export_run(
    root: str, name: str, task: str | None, model: str | None, out: Path, merge: bool, base_name: str | None
) -> dict[str, Any]:
    """Exports a model of a run. Raises UserError for names that the run does not have."""
    from flows.finished import FinishedRun

    run = FinishedRun(root, name)
    task = run.tasks([task] if task else None)[0]
    model = model or [name for name in run.models() if name != "routed"][-1]  # gates of the input are no adapter
    place = run.weights(task, model)
    if place is None:
        raise UserError("--model base is nothing to export; name a model that was trained")
    facts = {"run": name, "model": model, "SHA-256 of its output": place[0].sha256}
    evaluated, _ = storage.find(run.context.url("evaluation", model, task))
    if evaluated is not None:
        facts["test questions"] = str(evaluated.info["questions"])
        facts["accuracy on them"] = f"{100 * evaluated.info['accuracy']:.1f} %"
    request = ExportRequest(
        policy=PolicyFiles(base=storage.fetch(run.output("base")), weights=storage.fetch(place[0]) / place[1]),
        merge=merge,
        base_name=base_name,
        title=f"{name}: {model} for {task}",
        prompt=run.expert(task, model).prompt,
        facts=facts,
        compute=Device(device=run.settings.compute.device, threads=run.settings.compute.threads),
    )
    return _export(request, out)


def _export(request: ExportRequest, out: Path) -> dict[str, Any]:
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with storage.staging(str(out.absolute())) as folder:
        compute = Compute(request.compute.threads)
        try:
            made = compute.call("models.export:export", request, folder, Silent(), TIMEOUT_SECONDS)
        finally:
            compute.close()
        if out.exists():
            out.rmdir()
        shutil.move(folder, out)
    return made


def push(folder: Path, repository: str) -> str:
    """Uploads an exported folder to a model hub; the token comes from HF_TOKEN or the Prefect block ratchet-hub-token.

    Returns the URL. Raises UserError where the adapter's base is a folder of this machine, or no token is found.
    """
    config = folder / "adapter_config.json"
    if config.is_file():
        base = json.loads(config.read_text())["base_model_name_or_path"]
        if Path(base).exists() or "#sha256=" in base:
            raise UserError(f"the adapter's base is {base}, which nobody else has; give --base-name, or --merge")
    from huggingface_hub import HfApi

    api = HfApi(token=hub_token())
    api.create_repo(repository, exist_ok=True, private=True)
    return str(api.upload_folder(folder_path=str(folder), repo_id=repository))


def hub_token() -> str:
    """The hub's token: HF_TOKEN, else the Secret block ratchet-hub-token. Raises UserError where there is neither."""
    import os

    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"]
    from prefect.blocks.system import Secret

    try:
        return str(Secret.load("ratchet-hub-token").get())
    except ValueError:
        raise UserError("no hub token: export HF_TOKEN, or make the Prefect Secret block ratchet-hub-token") from None
