"""One round's policy update: rollouts.parquet in, weights and trainer state out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.artifacts import read_rows, write_table
from data.progress import Report
from data.seeds import derive_seed
from data.settings import MetaActions
from models.meta_actions.actions import ActionTerm, is_regularised
from models.meta_actions.tags import read_tags
from models.policy import Policy
from models.requests import UpdateRequest
from models.trainer_state import Counters, load_trainer_state, save_trainer_state, seed_generators
from models.training_rows import plan_steps, train_rows
from models.updater import Updater


def recompute_activations(policy: Policy) -> None:
    """Turns gradient checkpointing on; dropout stays off, since only the layers' own flags say "training"."""
    policy.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in policy.network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def update(request: UpdateRequest, out: Path, report: Report) -> dict[str, Any]:
    """Trains the policy on a round's rollouts; writes weights/, trainer_state/ and metrics.parquet into `out`.

    Returns the counts of steps taken and skipped. Raises UserError for rollouts that do not fit the settings, for a
    policy without trainable parameters and for a trainer state of other parameters.
    """
    rl = request.rl
    rows = train_rows(read_rows(request.rollouts, "rollouts"), rl, request.reasoning)
    policy = Policy.load(request.policy, request.parameters, request.compute, trainable=True, seed=request.seed)
    if rl.gradient_checkpointing:
        recompute_activations(policy)
    updater = Updater(policy, rl, rows)
    if request.trainer_state is None:
        counters = Counters()
        seed_generators(derive_seed(request.seed, "update"))
    else:
        counters = load_trainer_state(request.trainer_state, updater.optimizer, updater.named)
        if updater.critic is not None:
            updater.critic.restore(request.trainer_state)
    updater.actions = action_term(request, policy, counters)
    seed = derive_seed(request.seed, "update", request.round)
    plan = plan_steps([row.group for row in rows], rl.epochs, rl.steps, seed)
    metrics = take_steps(updater, plan, counters, report)
    if updater.actions is not None:
        counters.action_coefficient, counters.action_entropy = updater.actions.coefficient, updater.actions.last
    policy.save(out / "weights")
    save_trainer_state(out / "trainer_state", updater.optimizer, updater.named, counters)
    if updater.critic is not None:
        updater.critic.save(out / "trainer_state")
    shared = {"round": request.round, "generated_tokens_so_far": request.generated_tokens_so_far}
    write_table(out / "metrics.parquet", "metrics", [metric | shared for metric in metrics])
    return {"optimizer_steps": counters.optimizer_steps, "skipped_steps": counters.skipped_steps}


def action_term(request: UpdateRequest, policy: Policy, counters: Counters) -> ActionTerm | None:
    """The loss's term of the action distribution, continued from `counters`; None where it has none."""
    reasoning = request.reasoning
    if not (isinstance(reasoning, MetaActions) and is_regularised(reasoning.regularisation)):
        return None
    tags = read_tags(policy.tokenizer)
    return ActionTerm(reasoning.regularisation, tags, counters.action_coefficient, counters.action_entropy)


def take_steps(
    updater: Updater, plan: Sequence[Sequence[int]], counters: Counters, report: Report
) -> list[dict[str, Any]]:
    """Takes the planned steps and returns rows (step, name, value) of the metrics table."""
    critic_figures = updater.ask_critic() if updater.critic is not None else {}
    busy = [positions for positions in plan if updater.trained(positions)]
    if busy:
        updater.remember_old(sorted({i for positions in busy[1:] for i in updater.trained(positions)} - {*busy[0]}))
    metrics = []
    for number, positions in enumerate(plan):
        if not updater.trained(positions):
            counters.skipped_steps += 1
            continue
        memory_before = updater.out_of_memory
        values = updater.step(positions)
        if updater.out_of_memory and not memory_before:
            report.log(f"out of memory: micro-batches hold at most {updater.budget} tokens from here on")
        counters.optimizer_steps += 1
        metrics += [{"step": counters.optimizer_steps, "name": name, "value": value} for name, value in values.items()]
        report.progress(number + 1, len(plan), "optimiser steps")
    skipped = len(plan) - len(busy)
    if skipped:
        report.log(f"{skipped} of {len(plan)} optimiser steps are skipped: every advantage in them is 0")
    whole = updater.engine_difference() | critic_figures
    whole |= {
        "skipped_steps": float(skipped),
        "learning_rate": updater.rl.learning_rate,
    }
    return metrics + [{"step": counters.optimizer_steps, "name": name, "value": value} for name, value in whole.items()]
