"""On the same rollouts our losses and gradients are those of TRL's own trainers, to 1e-5."""

import copy
import random

import pytest
import torch
from transformers import TrainerCallback

from data.artifacts import read_rows
from models.advantages import make_estimator
from models.policy import Policy
from models.requests import PolicyFiles
from models.scoring import TokenRow
from models.settings import FullTraining, GroupMean, GroupMeanStd
from models.training_rows import train_rows
from models.updater import Updater
from tests.rl import CPU, LORA, make_adapter, rollout_rows, update_request
from tests.trl_peer import grpo_trainer, rloo_trainer

REWARDS = [[1.0, 0.0, 0.2, 0.9], [0.0, 1.0, 1.0, 0.5], [0.3, 0.9, 0.1, 0.0], [1.0, 0.2, 0.4, 0.8]]
SAMPLES = 4
MAX_NEW_TOKENS = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    """A base with an adapter that is not the identity."""
    return make_adapter(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def rows(files) -> list[dict]:
    """Sixteen rollouts of unlike lengths whose reference log-probabilities differ from the policy's."""
    rows = rollout_rows(files, REWARDS)
    generator = random.Random(2)
    for row in rows:
        row["reference_logprobs"] = [value + generator.gauss(0, 0.2) for value in row["reference_logprobs"]]
    return rows


def policy_of(files: PolicyFiles, kind: str) -> Policy:
    if kind == "full":
        return Policy.load(PolicyFiles(base=files.base), FullTraining(), CPU, trainable=True)
    return Policy.load(files, LORA, CPU, trainable=True)


def token_rows(rows) -> list[TokenRow]:
    return [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows]


def off_policy(rows, spread: float) -> list[torch.Tensor]:
    """Old log-probabilities that lie `spread` nats beside the sampler's: ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.tensor(row["sampling_logprobs"]) + spread * torch.randn(len(row["completion_ids"]), generator=generator)
        for row in rows
    ]


def padded(values, side: str, fill: float = 0.0) -> torch.Tensor:
    """Rows of unlike lengths as one tensor, padded on `side`."""
    width = max(map(len, values))
    result = torch.full((len(values), width), fill, dtype=torch.as_tensor(values[0]).dtype)
    for row, value in zip(result, values):
        row[slice(width - len(value), None) if side == "left" else slice(len(value))] = torch.as_tensor(value)
    return result


def trl_inputs(rows, old, advantages) -> dict[str, torch.Tensor]:
    """A batch as TRL's trainer makes it: prompts padded on the left, completions on the right."""
    prompts, completions = ([row[name] for row in rows] for name in ("prompt_ids", "completion_ids"))
    mask = padded([[1] * len(ids) for ids in completions], "right").long()
    return {
        "prompt_ids": padded(prompts, "left").long(),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], "left").long(),
        "completion_ids": padded(completions, "right").long(),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": padded(old, "right"),
        "old_logps": torch.stack([values.sum() for values in old]),
        "ref_per_token_logps": padded([row["reference_logprobs"] for row in rows], "right"),
        "num_items_in_batch": mask.sum(),
    }


def our_gradient(folder, files, kind, rows, old, advantages, **changes):
    """Loss, metrics and gradient by parameter of one step, without taking it."""
    rows = [row | {"advantage": advantage} for row, advantage in zip(rows, advantages)]
    changes = {"max_gradient_norm": 1e9, "engine_ratio_cap": None, "max_new_tokens": MAX_NEW_TOKENS} | changes
    request = update_request(folder, files, rows, **changes)
    found = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    updater = Updater(policy_of(files, kind), request.rl, found)
    updater.old_logprobs = dict(enumerate(old))
    updater.optimizer = torch.optim.SGD([parameter for _, parameter in updater.named], lr=0.0)
    metrics = updater.step(range(len(found)))
    return metrics, {name: parameter.grad.clone() for name, parameter in updater.named}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Gradients agree to 1e-5 relative: of all parameters together, and of each one's largest entry."""
    assert ours.keys() == theirs.keys()
    difference = sum((ours[name] - theirs[name]).double().square().sum() for name in ours).sqrt()
    norm = sum(gradient.double().square().sum() for gradient in theirs.values()).sqrt()
    assert norm > 1e-3
    assert difference < 1e-5 * norm
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-8, name


CLIP = {"kind": "clipped_ratio"}
CASES = {
    "grpo": ({"loss_type": "grpo"}, {"loss": CLIP | {"aggregation": "sequence_mean"}}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss": CLIP | {"aggregation": "constant"}},
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss": CLIP | {"aggregation": "token_mean", "clip_high": 0.28}},
    ),
    "bnpo": ({"loss_type": "bnpo"}, {"loss": CLIP | {"aggregation": "token_mean"}}),
    "dual clip": (
        {"loss_type": "grpo", "delta": 1.5},
        {"loss": CLIP | {"aggregation": "sequence_mean", "dual_clip": 1.5}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        {"loss": {"kind": "sequence_ratio", "clip_low": 3e-2, "clip_high": 4e-2}},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"loss": {"kind": "clipped_importance", "cap": 1.2}},
    ),
    "k3": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"loss": CLIP | {"aggregation": "sequence_mean"}, "kl": {"coefficient": 0.04, "estimator": "k3"}},
    ),
    "k3 with the true gradient": (
        {"loss_type": "grpo", "beta": 0.04},
        {
            "loss": CLIP | {"aggregation": "sequence_mean"},
            "kl": {"coefficient": 0.04, "estimator": "k3", "importance_weighted": True},
        },
    ),
    "entropy bonus": (
        {"loss_type": "dapo", "entropy_coef": 0.02},
        {"loss": CLIP | {"aggregation": "token_mean"}, "entropy_coefficient": 0.02},
    ),
    "temperature": ({"loss_type": "grpo", "temperature": 0.7}, {"loss": CLIP | {"aggregation": "sequence_mean"}}),
}


def given(rows, **changes) -> tuple[list, list[float]]:
    """Old log-probabilities and advantages of the algorithm."""
    settings = GroupMean() if changes.get("loss_type") == "dr_grpo" else GroupMeanStd()
    advantages = make_estimator(settings)([row["reward"] for row in rows], [row["group"] for row in rows])
    return off_policy(rows, 0.3), advantages


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_grpo_of_every_kind(files, rows, tmp_path, case, kind):
    theirs, ours = CASES[case]
    old, advantages = given(rows, **theirs)
    model = copy.deepcopy(policy_of(files, kind).model)
    rewards = [row["reward"] for row in rows]
    trainer = grpo_trainer(
        tmp_path, model, token_rows(rows), rewards, SAMPLES, max_completion_length=MAX_NEW_TOKENS, **theirs
    )
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, trl_inputs(rows, old, advantages))
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
    changes = dict(ours) | {"temperature": theirs.get("temperature", 1.0)}
    metrics, found = our_gradient(tmp_path / "ours", files, kind, rows, old, advantages, **changes)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    same(found, gradients)
    assert metrics["clip_share_high"] > 0 and (metrics["clip_share_low"] > 0 or case == "cispo")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_rloo(files, rows, tmp_path, kind):
    """A row as one action: the ratio of whole rows, leave-one-out advantages."""
    old = off_policy(rows, 0.1)
    advantages = [(-1.0) ** number * (0.3 + 0.1 * number) for number in range(len(rows))]
    model = copy.deepcopy(policy_of(files, kind).model)
    trainer = rloo_trainer(tmp_path, model, SAMPLES, len(rows))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, trl_inputs(rows, old, advantages))
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
    how = {"kind": "sequence_ratio", "clip_low": 0.2, "clip_high": 0.2, "length_normalised": False}
    metrics, found = our_gradient(tmp_path / "ours", files, kind, rows, old, advantages, loss=how)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    same(found, gradients)
    assert metrics["clip_share_high"] > 0 and metrics["clip_share_low"] > 0


class Gradients(TrainerCallback):
    """What each optimiser step is given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest) -> None:
        """Before the optimiser's step."""
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})


@pytest.mark.parametrize(("kind", "parts"), [("full", 1), ("lora", 1), ("full", 4)])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_two_epochs_of_trl_train(files, rows, tmp_path, loss_type, kind, parts):
    """trainer.train() on given rollouts: its own advantages, old log-probabilities, accumulation and SGD steps."""
    rewards = [row["reward"] for row in rows]
    model = copy.deepcopy(policy_of(files, kind).model)
    scaled = loss_type == "grpo"
    rate = 2.0 if scaled else 20.0
    sgd = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)
    callback = Gradients()
    trainer = grpo_trainer(
        tmp_path / "trl",
        model,
        token_rows(rows),
        rewards,
        SAMPLES,
        optimizer=sgd,
        callbacks=[callback],
        loss_type=loss_type,
        scale_rewards="group" if scaled else "none",
        num_iterations=2,
        max_steps=2,
        learning_rate=rate,
        per_device_train_batch_size=len(rows) // parts,
        gradient_accumulation_steps=parts,
        max_completion_length=MAX_NEW_TOKENS,
    )
    trainer.train()
    estimator = make_estimator(GroupMeanStd() if scaled else GroupMean())
    advantages = estimator(rewards, [row["group"] for row in rows])
    with_advantages = [row | {"advantage": advantage} for row, advantage in zip(rows, advantages)]
    request = update_request(
        tmp_path / "ours",
        files,
        with_advantages,
        loss=CLIP | {"aggregation": "sequence_mean" if scaled else "constant"},
        max_gradient_norm=1e9,
        engine_ratio_cap=None,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    found = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    updater = Updater(policy_of(files, kind), request.rl, found)
    updater.optimizer = torch.optim.SGD([parameter for _, parameter in updater.named], lr=rate)
    assert len(callback.steps) == 2
    for number, wanted in enumerate(callback.steps):
        metrics = updater.step(range(len(found)))
        same({name: parameter.grad for name, parameter in updater.named}, wanted)
        assert (metrics["clip_share_high"] > 0) == (number == 1)
    trained = dict(trainer.model.named_parameters())
    for name, parameter in updater.named:
        assert torch.allclose(parameter, trained[name], rtol=1e-5, atol=1e-6), name
