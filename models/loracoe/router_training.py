"""Training a router on the mixed demonstrations of all tasks, and keeping it: router/ of a composition."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from data.errors import UserError
from models.loracoe.examples import Example, batches_of, make_batch, response_nll
from models.loracoe.files import ROUTER_SETTINGS
from models.loracoe.gated import GatedModel
from models.loracoe.pool import POOL_FILE, Gates, Pool, load_pool, save_pool
from models.loracoe.routers import SequenceRouter, TokenRouter, prompt_states
from models.settings import Router, SequenceRouterSettings, TokenRouterSettings

AnyRouter = SequenceRouter | TokenRouter
ROUTER_WEIGHTS = "router.safetensors"
CHECKS = 4
"""How many steps are compared on validation demonstrations."""


@dataclass(frozen=True)
class RouterLosses:
    """Training loss of every step, validation loss by step, and the step whose router was kept."""

    losses: list[float]
    validation: dict[int, float]
    chosen_step: int


def make_router(pool: Pool, width: int, settings: SequenceRouterSettings | TokenRouterSettings, seed: int) -> AnyRouter:
    """The untrained router of the settings; `width`: the model's hidden size."""
    if isinstance(settings, SequenceRouterSettings):
        return SequenceRouter(width, pool, settings.active, seed, settings.straight_through)
    return TokenRouter(pool, settings.active, settings.mass, seed, settings.shared, settings.straight_through)


def stages(settings: SequenceRouterSettings | TokenRouterSettings) -> list[tuple[int, int | None]]:
    """(first step, open gates a layer): all at first, 1.5 times as many as wanted from 40 %, as wanted from 70 %."""
    if settings.active is None:
        return [(0, None)]
    cuts = ((0.0, None), (0.4, math.ceil(1.5 * settings.active)), (0.7, settings.active))
    return [(round(share * settings.steps), active) for share, active in cuts]


@torch.no_grad()
def all_prompt_states(gated: GatedModel, examples: Sequence[Example], batch_size: int) -> Tensor:
    """`prompt_states` of every example (N, H)."""
    device = next(iter(gated.modules.values())).scale_R.device
    return torch.cat([prompt_states(gated, batch) for batch in batches_of(examples, batch_size, device)])


def fit_to_task_gates(
    router: SequenceRouter,
    states_NH: Tensor,
    tasks: Sequence[str],
    gates: Mapping[str, Gates],
    steps: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Fits the router's gates to those of each prompt's own task (clipped to 0 to 1); returns the last cross-entropy.

    A start for the training on responses that already knows the tasks apart, from their names in the demonstrations
    alone; a prompt at use needs none. Our choice.
    """
    targets = {
        task: torch.cat([values.get(name, torch.zeros(size)).clamp(0, 1) for name, size in router.sizes.items()])
        for task, values in gates.items()
    }
    wanted_NR = torch.stack([targets[task] for task in tasks]).to(states_NH)
    optimizer = torch.optim.AdamW(router.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randperm(len(states_NH), generator=generator)[:64].to(states_NH.device)
        loss = binary_cross_entropy_with_logits(router.logits(states_NH[chosen]), wanted_NR[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def train_router(
    gated: GatedModel,
    router: AnyRouter,
    training: Sequence[Example],
    settings: SequenceRouterSettings | TokenRouterSettings,
    *,
    validation: Sequence[Example] = (),
    seed: int = 0,
    on_step: Callable[[int], None] = lambda step: None,
) -> RouterLosses:
    """Trains the router (and what `settings.unfreeze` names of the pool) on mixed tasks' demonstrations.

    AdamW without decay, cosine to 0; only the response's tokens carry loss. Balancing is over the mixed batch. Of the
    steps at which the final number of gates is open, `CHECKS` are compared on `validation` and the best is kept;
    without validation examples the last one.
    """
    device = next(iter(gated.modules.values())).scale_R.device
    router.to(device).train()
    factors = _factors(gated, settings.unfreeze)
    trained = [parameter for parameter in router.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "share": 1.0}, {"params": factors, "share": settings.factor_rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, weight_decay=0.0)
    cuts = stages(settings)
    at_steps = {round(cuts[-1][0] + (settings.steps - cuts[-1][0]) * (n + 1) / CHECKS) for n in range(CHECKS)}
    order: list[int] = []
    generator = torch.Generator().manual_seed(seed % 2**63)
    size = min(settings.batch_size, len(training))
    losses: list[float] = []
    found: dict[int, float] = {}
    kept: tuple[int, list[Tensor]] | None = None
    for step in range(settings.steps):
        router.active = [active for first, active in cuts if step >= first][-1]
        unfrozen = step >= settings.unfreeze_from * settings.steps
        for factor in factors:
            factor.requires_grad_(unfrozen)
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
            group["lr"] = settings.learning_rate * group["share"] * cosine
        if len(order) < size:
            order = torch.randperm(len(training), generator=generator).tolist()
        batch = make_batch([training[order.pop()] for _ in range(size)], device)
        losses.append(_step(gated, router, batch, optimizer, settings))
        on_step(step + 1)
        if validation and step + 1 in at_steps:
            found[step + 1] = routed_loss(gated, router, validation, settings.batch_size)
            if kept is None or found[step + 1] < found[kept[0]]:
                kept = step + 1, [value.detach().clone() for value in [*router.parameters(), *factors]]
    if kept is not None:
        with torch.no_grad():
            for value, best in zip([*router.parameters(), *factors], kept[1], strict=True):
                value.copy_(best)
    for factor in factors:
        factor.requires_grad_(False)
    router.eval()
    return RouterLosses(losses, found, kept[0] if kept else settings.steps)


def _factors(gated: GatedModel, unfreeze: str) -> list[torch.nn.Parameter]:
    if unfreeze == "none":
        return []
    modules = list(gated.modules.values())
    factors = [module.B_OR for module in modules] + (
        [module.A_RI for module in modules] if unfreeze == "A_and_B" else []
    )
    for factor in factors:
        factor.data = factor.data.clone()  # the layers share the pool's own tensors, which must stay as they are
    return factors


def _step(
    gated: GatedModel,
    router: AnyRouter,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    settings: SequenceRouterSettings | TokenRouterSettings,
) -> float:
    """One optimiser step; returns the mean response loss without the auxiliary ones."""
    router.install(gated, batch)
    loss = response_nll(gated.model, batch).mean()
    total = loss
    if isinstance(settings, TokenRouterSettings) and isinstance(router, TokenRouter):
        if settings.balance == "switch":
            total = total + settings.balance_rate * router.switch_loss()
        if settings.z_loss:
            total = total + settings.z_loss * router.z_loss()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    # after the step, once: a forward pass may be repeated by gradient checkpointing
    if isinstance(settings, TokenRouterSettings) and isinstance(router, TokenRouter):
        if settings.balance == "loss_free":
            router.update_bias(settings.balance_rate)
    return loss.item()


@torch.no_grad()
def routed_loss(gated: GatedModel, router: AnyRouter, examples: Sequence[Example], batch_size: int) -> float:
    """Mean negative log-likelihood over all response tokens with the router's gates."""
    device = next(iter(gated.modules.values())).scale_R.device
    total, tokens = 0.0, 0
    for batch in batches_of(examples, batch_size, device):
        if isinstance(router, TokenRouter):
            router.install(gated)
        else:
            router.install(gated, batch)
        total += response_nll(gated.model, batch).double().sum().item()
        tokens += batch.tokens
    return total / tokens


def save_router(router: AnyRouter, settings: Router, gated: GatedModel, folder: Path) -> None:
    """Writes router.safetensors and router.json, and the pool itself where training changed it, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in router.state_dict().items()}
    save_file(weights, folder / ROUTER_WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(settings.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    (folder / ROUTER_SETTINGS).write_text(text, encoding="utf-8")
    if settings.kind != "none" and settings.unfreeze != "none":
        save_pool(gated.current_pool(), folder)


def load_router(folder: Path, pool_folder: Path, width: int) -> tuple[Pool, AnyRouter]:
    """The pool that the router gates and the router in `folder`; `width`: the model's hidden size.

    Raises UserError where the folder holds no router.
    """
    from pydantic import TypeAdapter

    try:
        settings = TypeAdapter(Router).validate_json((folder / ROUTER_SETTINGS).read_text(encoding="utf-8"))
        weights = load_file(folder / ROUTER_WEIGHTS)
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no router ({error.filename}); compose with a router first") from None
    pool = load_pool(folder if (folder / POOL_FILE).is_file() else pool_folder)
    router = make_router(pool, width, settings, seed=0)
    router.load_state_dict(weights)
    return pool, router.eval()
