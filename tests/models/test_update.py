"""The update step on a tiny policy: files, counters, old log-probabilities, and what must not change."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from data.artifacts import file_hash, read_rows
from data.errors import UserError
from data.progress import Silent
from models.policy import Policy
from models.requests import PolicyFiles
from models.settings import FullTraining, LoraTraining
from models.training_rows import plan_steps, train_rows
from models.update import update
from models.updater import Updater
from tests.rl import CPU, LORA, make_adapter, rollout_rows, update_request

REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, None, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    """A base with an adapter that is not the identity."""
    return make_adapter(tmp_path_factory.mktemp("policy"))


def run(request, out: Path) -> tuple[dict, dict[str, list[float]]]:
    """The counters, and the values of each metric by step."""
    out.mkdir(parents=True)
    counters = update(request, out, Silent())
    metrics: dict[str, list[float]] = {}
    for row in read_rows(out / "metrics.parquet", "metrics"):
        metrics.setdefault(row["name"], []).append(row["value"])
    return counters, metrics


def weights_hash(folder: Path) -> str:
    return file_hash(folder / "adapter_model.safetensors")


def test_a_step_changes_the_weights_and_writes_everything(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS))
    counters, metrics = run(request, tmp_path / "out")
    assert counters == {"optimizer_steps": 1, "skipped_steps": 0}
    assert weights_hash(tmp_path / "out/weights") != weights_hash(files.weights)
    assert sorted(path.name for path in (tmp_path / "out/trainer_state").iterdir()) == [
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    assert metrics["ratio_deviation_max"] == [0.0]
    assert metrics["clip_share_low"] == metrics["clip_share_high"] == [0.0]
    assert metrics["engine_logprob_difference_max"][0] < 1e-5
    assert metrics["gradient_norm"][0] > 0
    assert 0 < metrics["entropy"][0] <= math.log(128)
    # Advantages sum to 0 in each group, so at ratio 1 the loss is −Σ length · advantage / tokens.
    rows = request.rollouts and read_rows(request.rollouts, "rollouts")
    tokens = sum(len(row["completion_ids"]) for row in rows)
    wanted = -sum(len(row["completion_ids"]) * row["advantage"] for row in rows) / tokens
    assert metrics["loss"][0] == pytest.approx(wanted, abs=1e-6)


def test_rate_zero_leaves_the_weights_as_they_are(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), learning_rate=0, epochs=3, steps=2)
    counters, metrics = run(request, tmp_path / "out")
    assert counters["optimizer_steps"] == 6
    assert weights_hash(tmp_path / "out/weights") == weights_hash(files.weights)
    assert max(metrics["ratio_deviation_max"]) < 1e-5
    assert set(metrics["clip_share_low"] + metrics["clip_share_high"]) == {0.0}


def test_a_new_adapter_starts_from_the_base(files, tmp_path):
    base = PolicyFiles(base=files.base)
    request = update_request(tmp_path, base, rollout_rows(base, REWARDS))
    run(request, tmp_path / "out")
    trained = Policy.load(PolicyFiles(base=files.base, weights=tmp_path / "out/weights"), compute=CPU)
    assert trained.has_adapter


def test_full_training(files, tmp_path):
    base = PolicyFiles(base=files.base)
    request = update_request(tmp_path, base, rollout_rows(base, REWARDS), learning_rate=1e-4, steps=2)
    request = request.model_copy(update={"parameters": FullTraining()})
    counters, _ = run(request, tmp_path / "one")
    assert counters["optimizer_steps"] == 2
    again = request.model_copy(
        update={
            "policy": PolicyFiles(base=files.base, weights=tmp_path / "one/weights"),
            "trainer_state": tmp_path / "one/trainer_state",
        }
    )
    counters, metrics = run(again, tmp_path / "two")
    assert counters["optimizer_steps"] == 4
    assert metrics["engine_logprob_difference_max"][0] > 1e-6
    assert file_hash(tmp_path / "one/weights/model.safetensors") != file_hash(
        tmp_path / "two/weights/model.safetensors"
    )


def test_all_advantages_zero_skips_the_step(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, [[1.0] * 4, [0.0] * 4, [None] * 4, [0.0] * 4]))
    counters, metrics = run(request, tmp_path / "out")
    assert counters == {"optimizer_steps": 0, "skipped_steps": 1}
    assert metrics["skipped_steps"] == [1.0]
    assert weights_hash(tmp_path / "out/weights") == weights_hash(files.weights)


def test_zero_advantages_still_feel_the_kl(files, tmp_path):
    rows = rollout_rows(files, [[1.0] * 4] * 4)
    for row in rows:
        row["reference_logprobs"] = [value - 0.5 for value in row["reference_logprobs"]]
    request = update_request(tmp_path, files, rows, kl={"coefficient": 0.1})
    counters, metrics = run(request, tmp_path / "out")
    assert counters == {"optimizer_steps": 1, "skipped_steps": 0}
    assert metrics["kl_reference"][0] == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-5)
    assert metrics["loss"][0] == pytest.approx(0.1 * (math.exp(-0.5) - 0.5), abs=1e-6)
    assert weights_hash(tmp_path / "out/weights") != weights_hash(files.weights)


def test_kl_without_reference_logprobs_is_refused(files, tmp_path):
    rows = [row | {"reference_logprobs": None} for row in rollout_rows(files, REWARDS)]
    request = update_request(tmp_path, files, rows, kl={"coefficient": 0.1})
    with pytest.raises(UserError, match="reference_logprobs"):
        update(request, tmp_path, Silent())


def test_the_kl_of_an_adapter_to_itself_is_zero(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), kl={"coefficient": 0.1})
    _, metrics = run(request, tmp_path / "out")
    assert metrics["kl_reference"][0] == pytest.approx(0, abs=1e-9)


def test_old_logprobs_are_from_before_the_first_step(files, tmp_path):
    rows = rollout_rows(files, REWARDS)
    request = update_request(tmp_path, files, rows, steps=2, epochs=2, learning_rate=1e-2)
    _, metrics = run(request, tmp_path / "out")
    assert metrics["ratio_deviation_max"][0] == 0
    assert min(metrics["ratio_deviation_max"][1:]) > 1e-4
    # What the trainer recomputed is what the engine (the same policy) reported, whichever step a row belongs to.
    assert metrics["engine_logprob_difference_max"][0] < 1e-5


def test_an_engine_that_disagrees_is_measured_and_corrected(files, tmp_path):
    rows = rollout_rows(files, REWARDS)
    for row in rows:
        row["sampling_logprobs"] = [value - 1.0 for value in row["sampling_logprobs"]]
    _, metrics = run(update_request(tmp_path, files, rows, engine_ratio_cap=2.0), tmp_path / "capped")
    assert metrics["engine_logprob_difference_mean"][0] == pytest.approx(1.0, abs=1e-5)
    assert metrics["engine_ratio_truncated_share"] == [1.0]
    _, plain = run(update_request(tmp_path, files, rows, engine_ratio_cap=None), tmp_path / "plain")
    assert metrics["loss"][0] == pytest.approx(2 * plain["loss"][0], rel=1e-5)


def test_temperature_is_on_both_sides(files, tmp_path):
    rows = rollout_rows(files, REWARDS, temperature=0.5)
    _, metrics = run(update_request(tmp_path, files, rows, temperature=0.5), tmp_path / "same")
    assert metrics["engine_logprob_difference_max"][0] < 1e-5
    _, metrics = run(update_request(tmp_path, files, rows, temperature=1.0), tmp_path / "other")
    assert metrics["engine_logprob_difference_max"][0] > 1e-2


def test_a_late_step_needs_the_old_logprobs_of_its_rows(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS))
    rows = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    updater = Updater(Policy.load(files, LORA, CPU, trainable=True), request.rl, rows)
    updater.step(range(4))
    with pytest.raises(RuntimeError, match="remember_old"):
        updater.step(range(len(rows)))


def test_nothing_to_train_is_an_error(files, tmp_path):
    base = PolicyFiles(base=files.base)
    request = update_request(tmp_path, base, rollout_rows(base, REWARDS))
    nothing = request.model_copy(update={"parameters": LoraTraining(target_modules=("nothing",))})
    with pytest.raises(UserError, match="target_modules"):
        update(nothing, tmp_path, Silent())


def test_truncated_rollouts_can_be_left_out(files, tmp_path):
    rows = rollout_rows(files, REWARDS)
    for row in rows:
        row["stop_reason"] = "length"
    counters, _ = run(update_request(tmp_path, files, rows, train_truncated=False), tmp_path / "none")
    assert counters == {"optimizer_steps": 0, "skipped_steps": 0}
    assert weights_hash(tmp_path / "none/weights") == weights_hash(files.weights)
    request = update_request(tmp_path, files, rows)
    assert len(train_rows(rows, request.rl)) == 16
    assert train_rows([rows[0] | {"completion_ids": []}, rows[1] | {"stop_reason": "error"}], request.rl) == []


def test_entropy_bonus_raises_the_entropy(files, tmp_path):
    rows = rollout_rows(files, [[1.0] * 4] * 4)
    request = update_request(tmp_path, files, rows, entropy_coefficient=1.0, learning_rate=3e-2, epochs=4)
    counters, metrics = run(request, tmp_path / "out")
    assert counters["optimizer_steps"] == 4
    entropies = metrics["entropy"]
    assert entropies[-1] > entropies[0]
    assert metrics["loss"][0] == pytest.approx(-entropies[0], rel=1e-5)


def test_rounds_continue_the_optimiser(files, tmp_path):
    """Two updates with the trainer state between them are one update of two epochs, where the rollouts are the same."""
    rows = rollout_rows(files, REWARDS)
    request = update_request(tmp_path, files, rows, engine_ratio_cap=None, loss={"clip_high": 50, "clip_low": 1})
    run(request, tmp_path / "one")
    state = json.loads((tmp_path / "one/trainer_state/state.json").read_text())
    assert set(state["adam_steps"].values()) == {1.0}
    again = request.model_copy(
        update={
            "policy": PolicyFiles(base=files.base, weights=tmp_path / "one/weights"),
            "trainer_state": tmp_path / "one/trainer_state",
            "round": 1,
        }
    )
    counters, _ = run(again, tmp_path / "two")
    assert counters["optimizer_steps"] == 2
    fresh = again.model_copy(update={"trainer_state": None})
    run(fresh, tmp_path / "fresh")
    assert weights_hash(tmp_path / "fresh/weights") != weights_hash(tmp_path / "two/weights")


def test_the_same_request_gives_the_same_files(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), steps=2, epochs=2)
    run(request, tmp_path / "one")
    random.random(), np.random.random(), torch.rand(3)
    run(request, tmp_path / "two")
    for path in sorted((tmp_path / "one").rglob("*")):
        if path.is_file():
            assert file_hash(path) == file_hash(tmp_path / "two" / path.relative_to(tmp_path / "one")), path


def test_a_state_of_other_parameters_is_refused(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS))
    run(request, tmp_path / "one")
    base = PolicyFiles(base=files.base)
    wrong = request.model_copy(
        update={
            "policy": base,
            "parameters": LoraTraining(rank=2, target_modules=("q_proj",)),
            "trainer_state": tmp_path / "one/trainer_state",
        }
    )
    with pytest.raises(UserError, match="other parameters"):
        update(wrong, tmp_path, Silent())
    wrong = wrong.model_copy(update={"parameters": LoraTraining(rank=3)})
    with pytest.raises(UserError, match="shape"):
        update(wrong, tmp_path, Silent())


def test_out_of_memory_halves_the_micro_batch_once(files, tmp_path, monkeypatch):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), steps=2)
    run(request, tmp_path / "plain")
    whole = Updater.micro_batch_loss
    calls = []

    def fails_once(self, positions, totals, statistics):
        calls.append(len(positions))
        if len(calls) == 1:
            whole(self, positions, totals, statistics)
            raise torch.OutOfMemoryError("planned")
        return whole(self, positions, totals, statistics)

    monkeypatch.setattr(Updater, "micro_batch_loss", fails_once)
    request = request.model_copy(update={"rl": request.rl.model_copy(update={"tokens_per_micro_batch": 100})})
    _, metrics = run(request, tmp_path / "halved")
    assert calls[1] < calls[0]
    assert max(metrics["ratio_deviation_max"][:1]) == 0

    def always_fails(self, positions, totals, statistics):
        raise torch.OutOfMemoryError("planned")

    monkeypatch.setattr(Updater, "micro_batch_loss", always_fails)
    with pytest.raises(torch.OutOfMemoryError):
        update(request, tmp_path, Silent())


def test_out_of_memory_while_the_critic_is_asked_is_redone_too(files, tmp_path, monkeypatch):
    """PPO's pass before the first step: half the budget, the same values, advantages and metrics."""
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), advantage={"kind": "gae"}, epochs=2)
    _, wanted = run(request, tmp_path / "plain")
    scored = Updater.score
    calls = []

    def fails_once(self, positions, *arguments):
        calls.append(len(positions))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planned")
        return scored(self, positions, *arguments)

    monkeypatch.setattr(Updater, "score", fails_once)
    request = request.model_copy(update={"rl": request.rl.model_copy(update={"tokens_per_micro_batch": 100})})
    said = []
    monkeypatch.setattr(Silent, "log", lambda self, message: said.append(message))
    _, metrics = run(request, tmp_path / "halved")
    assert [line for line in said if "at most 50 tokens" in line]
    assert max(calls[1:]) < calls[0]
    assert metrics.keys() == wanted.keys()
    for name in ("explained_variance", "value_mean", "return_mean"):
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    assert metrics["loss"][0] == pytest.approx(wanted["loss"][0], rel=1e-5, abs=1e-6)


def test_nan_stops_the_update(files, tmp_path):
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS))
    rows = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    policy = Policy.load(files, LORA, CPU, trainable=True)
    with torch.no_grad():
        policy.trainable_parameters()[0][1].fill_(math.nan)
    with pytest.raises(FloatingPointError, match="gradient norm"):
        Updater(policy, request.rl, rows).step(range(len(rows)))


def test_groups_stay_whole_and_every_row_is_trained_once_an_epoch():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    plan = plan_steps(groups, epochs=2, steps=2, seed=7)
    assert [len(step) for step in plan] == [4] * 4
    for epoch in (plan[:2], plan[2:]):
        assert sorted(epoch[0] + epoch[1]) == list(range(8))
        for step in epoch:
            assert all((position ^ 1) in step for position in step)
    assert plan != plan_steps(groups, epochs=2, steps=2, seed=8)
    assert plan == plan_steps(groups, epochs=2, steps=2, seed=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"sampling_logprobs": [-1.0]}, "1 sampling_logprobs for 3"),
        ({"sampling_logprobs": None}, "0 sampling_logprobs for 3"),
        ({"sampling_logprobs": [-1.0, math.nan, -1.0]}, "sampling_logprobs are not all finite"),
        ({"sampling_logprobs": [-1.0, -math.inf, -1.0]}, "sampling_logprobs are not all finite"),
        ({"reference_logprobs": [-1.0]}, "1 reference_logprobs for 3"),
        ({"reference_logprobs": [-1.0, math.nan, -1.0]}, "reference_logprobs are not all finite"),
        ({"advantage": 1e39, "reward": 1e39}, "is 1e\\+39"),
        ({"advantage": -1e30, "reward": -1e30}, "is -1e\\+30"),
        ({"advantage": math.nan, "reward": math.nan}, "is nan"),
    ],
    ids=str,
)
@pytest.mark.parametrize("advantage", ["group_mean", "gae"])
def test_a_rollout_that_is_not_whole_is_refused(files, tmp_path, changes, message, advantage):
    """Short or non-finite numbers would train on other tokens' numbers, or end in NaN without saying where."""
    rows = rollout_rows(files, REWARDS)
    assert len(rows[0]["completion_ids"]) == 3
    rows[0] |= changes
    request = update_request(tmp_path, files, rows, advantage={"kind": advantage}, kl={"coefficient": 0.1})
    with pytest.raises(UserError, match=f"rollouts row 0.*{message}.*make the rollouts again"):
        update(request, tmp_path, Silent())


@pytest.mark.parametrize(("ids", "message"), [([5, 128, 2], "5 to 128|2 to 128"), ([5] * 300, "longer than")])
def test_rollouts_of_another_model_are_refused(files, tmp_path, ids, message):
    rows = rollout_rows(files, REWARDS)
    rows[0] |= {"prompt_ids": [2], "completion_ids": ids, "sampling_logprobs": [-1.0] * len(ids)}
    with pytest.raises(UserError, match=message):
        update(update_request(tmp_path, files, rows, engine_ratio_cap=None), tmp_path, Silent())


@pytest.mark.parametrize("advantage", ["group_mean", "gae"])
def test_a_round_without_trainable_rows_says_so_and_changes_nothing(files, tmp_path, monkeypatch, advantage):
    said = []
    monkeypatch.setattr(Silent, "log", lambda self, message: said.append(message))
    rows = [row | {"stop_reason": "error", "reward": None} for row in rollout_rows(files, REWARDS)]
    request = update_request(tmp_path, files, rows, advantage={"kind": advantage}, row_layout="packed")
    counters, metrics = run(request, tmp_path / "out")
    assert counters == {"optimizer_steps": 0, "skipped_steps": 0}
    assert metrics == {"skipped_steps": [0.0], "learning_rate": [1e-3]}
    assert weights_hash(tmp_path / "out/weights") == weights_hash(files.weights)
    assert [line for line in said if "none of 16 rollouts can be trained on" in line]
