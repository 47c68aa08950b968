"""One round's policy update: rollouts.parquet in, weights and trainer state out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Report
from data.seeds import derive_seed
from data.settings import MetaActions
from models.base import read_base
from models.meta_actions.actions import ActionTerm, is_regularised
from models.meta_actions.tags import read_tags
from models.policy import Policy, release_base
from models.requests import UpdateRequest
from models.sharding import shard, whole
from models.trainer_state import Counters, load_trainer_state, save_trainer_state, seed_generators
from models.training_rows import check_fits, plan_steps, train_rows
from models.updater import Updater
from models.world import collective, world


def recompute_activations(policy: Policy) -> None:
    """Turns gradient checkpointing on; dropout stays off, since only the layers' own flags say "training"."""
    policy.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in policy.network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


@collective
def update(request: UpdateRequest, out: Path, report: Report) -> dict[str, Any]:
    """Trains the policy on a round's rollouts; writes weights/, trainer_state/ and metrics.parquet into `out`.

    Of several processes each computes its share of the rows and rank 0 writes; the numbers are those of one process.
    Returns the counts of steps taken and skipped. Raises UserError for rollouts that do not fit the settings, for a
    policy without trainable parameters and for a trainer state of other parameters.
    """
    rl = request.rl
    rollouts = read_rows(request.rollouts, "rollouts")
    rows = train_rows(rollouts, rl, request.reasoning)
    if not rows:
        report.log(
            f"round {request.round}: none of {len(rollouts)} rollouts can be trained on (no completion, no reward, or "
            "cut at the length limit with rl.train_truncated off): the policy stays as it is"
        )
    policy = Policy.load(request.policy, request.parameters, request.compute, trainable=True, seed=request.seed)
    check_fits(rows, policy.network.get_input_embeddings().num_embeddings, policy.context)
    if rl.gradient_checkpointing:
        recompute_activations(policy)
    if world().sharded:
        release_base()  # or the whole base would stay beside its shards
        # Trained weights of a 16-bit model are float32; its products are not.
        half = request.compute.mixed_precision == "bf16" or read_base(request.policy.base)["dtype"] == "bfloat16"
        shard(policy.network, half)
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
    save_weights(policy, request, out / "weights")
    save_trainer_state(out / "trainer_state", updater.optimizer, updater.named, counters)
    figures = {"optimizer_steps": counters.optimizer_steps, "skipped_steps": counters.skipped_steps}
    if not world().main:
        return figures
    if updater.critic is not None:
        updater.critic.save(out / "trainer_state")
    shared = {"round": request.round, "generated_tokens_so_far": request.generated_tokens_so_far}
    write_table(out / "metrics.parquet", "metrics", [metric | shared for metric in metrics])
    return figures


def save_weights(policy: Policy, request: UpdateRequest, folder: Path) -> None:
    """Writes what was trained, from rank 0; what is sharded is put together tensor by tensor, on the CPU."""
    if not world().sharded:
        if world().main:
            policy.save(folder)
        return
    target: dict[str, torch.nn.Parameter] = {}
    if world().main:
        compute = request.compute.model_copy(update={"device": "cpu"})
        unsharded = Policy.load(request.policy, request.parameters, compute, trainable=True, seed=request.seed)
        target = dict(unsharded.trainable_parameters())
    for name, parameter in policy.trainable_parameters():
        tensor = whole(parameter)
        if world().main:
            target[name].data.copy_(tensor)
    if world().main:
        unsharded.save(folder)
        release_base()


def action_term(request: UpdateRequest, policy: Policy, counters: Counters) -> ActionTerm | None:
    """The loss's term of the action distribution, continued from `counters`; None where it has none."""
    reasoning = request.reasoning
    if not (isinstance(reasoning, MetaActions) and is_regularised(reasoning.regularisation)):
        return None
    if world().sharded:
        raise UserError(
            "reasoning.regularisation reads the output layer beside a pass, which a sharded policy does not allow; "
            "set compute.sharding ddp"
        )
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
    told = False
    for number, positions in enumerate(plan):
        if not updater.trained(positions):
            counters.skipped_steps += 1
            continue
        values = updater.step(positions)
        if updater.out_of_memory and not told:
            told = True
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
