"""A model as others load it: a PEFT adapter, or full weights with the adapter merged in, with its model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from data.artifacts import file_hash, files_of
from data.errors import UserError
from data.progress import Report
from models.base import base_name
from models.loracoe.files import check_not_routed
from models.policy import ADAPTER_CONFIG, Policy
from models.requests import ExportRequest
from models.shared_modules import shared_copy


def export(request: ExportRequest, out: Path, report: Report) -> dict[str, Any]:
    """Writes the adapter as it is, or with `merge` (or full weights) a model that transformers loads, and README.md.

    Returns the kind and the name of the base. Raises UserError where there are no weights, or where an adapter trained
    on a base without a public name would be pushed without one.
    """
    base = request.base_name or base_name(request.policy.base)
    weights = request.policy.weights
    if weights is None:
        raise UserError("the base itself is nothing to export; name a model that was trained")
    check_not_routed(weights, "export")
    adapter = (weights / ADAPTER_CONFIG).is_file()
    if adapter and not request.merge:
        shutil.copytree(weights, out, dirs_exist_ok=True)
        config = json.loads((out / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": base}
        (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    else:
        policy = Policy.load(request.policy, compute=request.compute)
        network = _merged(policy) if policy.has_adapter else policy.network
        network.save_pretrained(out)
        policy.tokenizer.save_pretrained(out)
    kind = "adapter" if adapter and not request.merge else "model"
    (out / "README.md").write_text(card(request, kind, base, out), encoding="utf-8")
    report.log(f"{kind} of {request.title} on base {base}")
    return {"kind": kind, "base": base}


def _merged(policy: Policy) -> Any:
    """The adapter merged into copies of its own matrices: those of the resident base stay as they are."""
    changed = {id(module.base_layer.weight) for module in policy.model.modules() if hasattr(module, "base_layer")}
    return shared_copy(policy.model, changed).merge_and_unload()


def card(request: ExportRequest, kind: str, base: str, folder: Path) -> str:
    """The model card: what it is, how it was made, how well it does, how it is loaded, the hashes of its files."""
    load = (
        "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)"
        if kind == "adapter"
        else "AutoModelForCausalLM.from_pretrained(folder)"
    )
    lines = [
        "---",
        f"base_model: {base}",
        f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
        "tags: [reasoning, reinforcement-learning]",
        "---",
        "",
        f"# {request.title}",
        "",
        f"Made with Ratchet from the base `{base}`. Load it with `{load}`.",
        "",
        f"Prompt: `{request.prompt.model_dump_json()}`",
        "",
        "| fact | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in request.facts.items()),
        "",
        "| file | SHA-256 |",
        "|---|---|",
        *(
            f"| {path.relative_to(folder)} | `{file_hash(path)}` |"
            for path in files_of(folder)
            if path.name != "README.md"
        ),
    ]
    return "\n".join(lines) + "\n"
