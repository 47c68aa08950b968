"""A router for all tasks of a composition: trained on their mixed demonstrations, judged on each task's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.progress import Report
from data.seeds import derive_seed
from models.loracoe.examples import TaskExamples
from models.loracoe.gated import GatedModel
from models.loracoe.pool import Gates
from models.loracoe.router_training import (
    all_prompt_states,
    fit_to_task_gates,
    make_router,
    routed_loss,
    save_router,
    train_router,
)
from models.loracoe.routers import SequenceRouter
from models.settings import SequenceRouterSettings, TokenRouterSettings


def route_tasks(
    gated: GatedModel,
    tasks: Mapping[str, TaskExamples],
    gates: Mapping[str, Gates],
    settings: SequenceRouterSettings | TokenRouterSettings,
    seed: int,
    out: Path,
    report: Report,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains the router, writes it into `out`, and returns its figures and rows of the table `metrics`.

    `gates`: each task's own, from which a sequence router may start. The loss on every task's validation
    demonstrations is a figure of its own: a router that serves one task well may fail another.
    """
    device = next(gated.model.parameters()).device
    width = gated.model.config.get_text_config().hidden_size
    router = make_router(gated.pool, width, settings, derive_seed(seed, "router")).to(device)
    training = [example for examples in tasks.values() for example in examples.training]
    validation = [example for examples in tasks.values() for example in examples.validation]
    figures: dict[str, Any] = {"kind": settings.kind, "parameters": sum(p.numel() for p in router.parameters())}
    if isinstance(router, SequenceRouter) and isinstance(settings, SequenceRouterSettings):
        states_NH = all_prompt_states(gated, training, settings.batch_size)
        router.fit_scale(states_NH)
        if settings.start == "task_gates":
            names = [task for task, examples in tasks.items() for _ in examples.training]
            rate, start = settings.learning_rate, derive_seed(seed, "router start")
            figures["start_loss"] = fit_to_task_gates(
                router, states_NH, names, gates, settings.start_steps, rate, start
            )
    trained = train_router(
        gated,
        router,
        training,
        settings,
        validation=validation,
        seed=derive_seed(seed, "router order"),
        on_step=lambda step: report.progress(step, settings.steps, f"{settings.kind} router"),
    )
    save_router(router, settings, gated, out)
    figures |= {"first_loss": trained.losses[0], "last_loss": trained.losses[-1], "chosen_step": trained.chosen_step}
    rows = [{"step": n, "name": "router/loss", "value": loss} for n, loss in enumerate(trained.losses)]
    for step, loss in trained.validation.items():
        rows.append({"step": step, "name": "router/validation_loss", "value": loss})
    for task, examples in tasks.items():
        if examples.validation:
            loss = routed_loss(gated, router, examples.validation, settings.batch_size)
            figures[f"validation_loss/{task}"] = loss
            rows.append({"step": trained.chosen_step, "name": f"{task}/routed_validation_loss", "value": loss})
    report.log(f"{settings.kind} router: loss {trained.losses[0]:.4f} → {trained.losses[-1]:.4f}")
    return figures, rows
