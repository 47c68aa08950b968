"""PPO's value head: advantages by hand, returns, the value loss, and an update with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data.artifacts import file_hash, read_rows
from data.errors import UserError
from data.progress import Silent
from models.critic import (
    ValueHead,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_losses,
    whitened,
)
from models.policy import Policy
from models.requests import PolicyFiles
from models.settings import GeneralisedAdvantage, KLSettings, RLSettings
from models.training_rows import train_rows
from models.update import update
from models.updater import Updater
from tests.rl import CPU, LORA, make_base, rollout_rows, update_request


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    rewards, values = torch.tensor([rewards], dtype=torch.float), torch.tensor([values], dtype=torch.float)
    advantages, returns = generalised_advantages(rewards, values, torch.tensor([mask], dtype=torch.bool), gamma, lam)
    return advantages[0].tolist(), returns[0].tolist()


def test_padding_is_not_bootstrapped_from():
    advantages, returns = gae([0, 1, 0], [0, 0, 100], [1, 1, 0])
    assert advantages == pytest.approx([0.95, 1.0, 0])
    assert returns == pytest.approx([0.95, 1.0, 0])


def test_a_gap_in_the_mask_is_stepped_over():
    advantages, _ = gae([0, 0, 0, 1], [0.5, 0.5, 9, 0.5], [1, 1, 0, 1])
    assert advantages == pytest.approx([0.45125, 0.475, 0, 0.5])


def test_nan_in_masked_slots_is_harmless():
    advantages, returns = gae([0, 1, math.nan], [0, 0, math.nan], [1, 1, 0])
    assert advantages == pytest.approx([0.95, 1.0, 0])
    assert returns == pytest.approx([0.95, 1.0, 0])


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    gamma=st.sampled_from([0.9, 1.0]),
)
def test_lambda_one_is_the_discounted_return_and_padding_changes_nothing(rewards, pad, gamma):
    values = [0.3] * len(rewards)
    mask = [1] * len(rewards) + [0] * pad
    advantages, returns = gae(rewards + [7.0] * pad, values + [9.0] * pad, mask, gamma=gamma, lam=1.0)
    wanted = 0.0
    for t in reversed(range(len(rewards))):
        wanted = rewards[t] + gamma * wanted
        assert returns[t] == pytest.approx(wanted, abs=1e-5)
        assert advantages[t] == pytest.approx(wanted - 0.3, abs=1e-5)
    assert advantages[len(rewards) :] == [0.0] * pad


def test_the_outcome_stands_on_the_last_token():
    kl = KLSettings(coefficient=0.1, estimator="k1", place="reward")
    assert token_rewards(1.0, torch.zeros(3), None, kl).tolist() == [0, 0, 1]
    rewards = token_rewards(1.0, torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), kl)
    assert rewards.tolist() == pytest.approx([-0.05, 1.1])


def test_value_loss_takes_the_worse_of_clipped_and_unclipped():
    mask = torch.tensor([[True, True, True, False]])
    values, old, returns = torch.tensor([[1.0, 0.1, 0.0, math.nan]]), torch.zeros(1, 4), torch.tensor([[1.0] * 4])
    loss, clipped = value_losses(values, old, returns, mask, GeneralisedAdvantage(value_clip=0.2))
    # The first value jumped to its return: it is charged as if it had moved by 0.2 only.
    assert loss[0].tolist() == pytest.approx([0.32, 0.405, 0.5, 0])
    assert clipped.tolist() == [[True, False, False, False]]
    loss, clipped = value_losses(values, old, returns, mask, GeneralisedAdvantage(value_clip=None))
    assert loss[0].tolist() == pytest.approx([0, 0.405, 0.5, 0])
    assert not clipped.any()


def test_whitening_and_explained_variance():
    white = torch.cat(whitened([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]))
    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.var(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert whitened([torch.tensor([3.0])])[0].tolist() == [3.0]
    assert all(torch.isfinite(row).all() for row in whitened([torch.ones(2), torch.ones(1)]))
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 0.5), returns) == 0
    assert explained_variance(returns, torch.ones(4)) == 0


REWARDS = [[1.0, 0.0, 0.0, None], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    folder = tmp_path_factory.mktemp("policy")
    base = make_base(folder / "base")
    Policy.load(base, LORA, CPU, trainable=True, seed=1).save(folder / "weights")
    return PolicyFiles(base=base.base, weights=folder / "weights")


def ppo(folder, files, **changes):
    rows = [row | {"advantage": None} for row in rollout_rows(files, REWARDS)]
    advantage = {"kind": "gae", "value_learning_rate": 1e-2} | changes.pop("advantage", {})
    return update_request(folder, files, rows, advantage=advantage, **changes)


def test_ppo_update_keeps_the_head_apart(files, tmp_path):
    request = ppo(tmp_path, files, epochs=4)
    update(request, tmp_path, Silent())
    metrics = {}
    for row in read_rows(tmp_path / "metrics.parquet", "metrics"):
        metrics.setdefault(row["name"], []).append(row["value"])
    # Values start at 0: the first returns are the discounted outcomes and nothing is explained.
    assert metrics["explained_variance"] == [0.0]
    assert metrics["value_mean"] == [0.0]
    assert metrics["ratio_deviation_max"][0] < 1e-5
    assert metrics["value_loss"][-1] < metrics["value_loss"][0]
    adapter = load_file(tmp_path / "weights/adapter_model.safetensors")
    assert not [name for name in adapter if "value" in name]
    head = load_file(tmp_path / "trainer_state/value_head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {"weight": (1, 32), "bias": (1,)}
    again = request.model_copy(
        update={
            "policy": PolicyFiles(base=files.base, weights=tmp_path / "weights"),
            "trainer_state": tmp_path / "trainer_state",
            "round": 1,
        }
    )
    (tmp_path / "two").mkdir()
    update(again, tmp_path / "two", Silent())
    values = {row["name"]: row["value"] for row in read_rows(tmp_path / "two/metrics.parquet", "metrics")}
    assert values["value_mean"] != 0
    (tmp_path / "trainer_state/value_head.safetensors").unlink()
    with pytest.raises(UserError, match="gae"):
        update(again, tmp_path / "two", Silent())


def test_the_critic_learns_what_to_expect(files, tmp_path):
    request = ppo(tmp_path, files, advantage={"value_clip": None})
    rows = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    assert len(rows) == 15
    updater = Updater(Policy.load(files, LORA, CPU, trainable=True), request.rl, rows)
    updater.ask_critic()
    explained = []
    for _ in range(40):
        updater.step(range(len(rows)))
        explained.append(updater.ask_critic()["explained_variance"])
    assert explained[-1] > explained[0]


def test_micro_batches_do_not_change_ppo(files, tmp_path):
    hashes = set()
    gradients = []
    for budget in (1, 10_000):
        request = ppo(tmp_path / str(budget), files, tokens_per_micro_batch=budget)
        rows = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
        updater = Updater(Policy.load(files, LORA, CPU, trainable=True), request.rl, rows)
        updater.ask_critic()
        updater.step(range(len(rows)))
        gradients.append({name: p.grad.clone() for name, p in updater.named})
        hashes.add(file_hash(request.rollouts))
    assert len(hashes) == 1
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name


def test_a_single_sample_a_prompt_is_allowed():
    assert RLSettings(samples=1, advantage=GeneralisedAdvantage()).samples == 1


def test_what_r3_published_is_a_setting():
    """γ 1, λ 0.95, clips 0.2, 2 epochs, value coefficient 5, KL 0.05 (k1) in the reward, means of token means."""
    rl = RLSettings.model_validate(
        {
            "advantage": {"kind": "gae"},
            "loss": {"kind": "clipped_ratio", "aggregation": "sequence_mean"},
            "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"},
            "epochs": 2,
            "samples": 1,
            "learning_rate": 3e-7,
        }
    )
    gae = rl.advantage
    assert (gae.gamma, gae.lam, gae.value_clip, gae.value_coefficient, gae.whiten) == (1.0, 0.95, 0.2, 5.0, True)
    assert (rl.loss.clip_low, rl.loss.clip_high) == (0.2, 0.2)


def test_the_head_starts_at_zero():
    head = ValueHead(8, torch.device("cpu"))
    assert head.values(torch.randn(3, 8, dtype=torch.bfloat16)).tolist() == [0.0] * 3
