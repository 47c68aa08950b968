"""Where a composition keeps its router, for code that must not import torch to ask."""

from pathlib import Path

from data.errors import UserError

ROUTER, POOL, EXPORTED = "router", "pool", "exported"
ROUTER_SETTINGS = "router.json"


def has_router(folder: Path | None) -> bool:
    """Whether `folder` is a composition that was made with a router: a model of its own."""
    return folder is not None and (folder / ROUTER / ROUTER_SETTINGS).is_file()


def check_not_routed(folder: Path | None, what: str) -> None:
    """Raises UserError, with the reason, where `folder` holds a router and `what` takes no gates of the input."""
    if has_router(folder):
        raise UserError(
            f"{what}: the router of {folder} sets gates for every prompt or token, and vLLM and PEFT files hold one "
            f"fixed adapter a request; use the engine transformers, or a task's own adapter in {folder / EXPORTED}"
        )
