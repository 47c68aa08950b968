"""The composition step of the pipeline."""

from pathlib import Path
from typing import Any

from data.errors import UserError
from data.progress import Report
from models.loracoe.compose import compose_adapters
from models.requests import ComposeRequest


def compose(request: ComposeRequest, out: Path, report: Report) -> dict[str, Any]:
    """Composes the experts' adapters; see `compose_adapters` for the files. Every task has an expert of its own name.

    The run itself trained all experts on one base, so the base names in their configurations are not compared (a run
    that was moved has several). Raises UserError where a task's adapter or prompt is missing.
    """
    for field, keys in (("experts", request.experts), ("prompts", request.prompts)):
        missing = sorted(set(request.demonstrations) - set(keys))
        if missing:
            raise UserError(f"{field} has no entry for {missing}, whose demonstrations are given")
    return compose_adapters(
        request.experts,
        request.base,
        out,
        demonstrations=request.demonstrations,
        prompts=request.prompts,
        composition=request.composition,
        seed=request.seed,
        compute=request.compute,
        same_base=True,
        report=report,
    )
