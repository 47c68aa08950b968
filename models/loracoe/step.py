"""The composition step of the pipeline."""

from pathlib import Path
from typing import Any

from data.errors import UserError
from data.progress import Report
from models.loracoe.compose import compose_adapters
from models.requests import ComposeRequest


def compose(request: ComposeRequest, out: Path, report: Report) -> dict[str, Any]:
    """Composes adapters; see `compose_adapters` for the files.

    A run trained all its experts on one base, so the base names in their configurations are not compared there (a run
    that was moved has several). Raises UserError where a task's prompt is missing.
    """
    missing = sorted(set(request.demonstrations) - set(request.prompts))
    if missing:
        raise UserError(f"prompts has no entry for {missing}, whose demonstrations are given")
    return compose_adapters(
        request.experts,
        request.base,
        out,
        demonstrations=request.demonstrations,
        prompts=request.prompts,
        composition=request.composition,
        seed=request.seed,
        compute=request.compute,
        same_base=request.same_base,
        report=report,
    )
