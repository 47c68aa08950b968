"""A small task whose reward must rise: every family of algorithms learns it in a few rounds."""

from statistics import fmean

import pytest
import torch

from data.artifacts import read_rows
from data.progress import Silent
from data.settings import NoCurriculum, PlainPrompt, RewardSettings
from models.cell import run_rounds
from models.policy import Policy
from models.requests import CellRequest, PolicyFiles
from models.settings import EvaluationSettings, RLSettings, TransformersEngine
from tests.rl import CPU, LORA, write_questions, write_start_states
from tests.tiny import save_base, tiny_llama


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # as it is, its logits are too small for an adapter below them to matter
    base = PolicyFiles(base=save_base(folder / "base", model))
    Policy.load(base, LORA, CPU, trainable=True, seed=3).save(folder / "warmup")
    return {
        "base": base.base,
        "warmup": folder / "warmup",
        "start_states": write_start_states(folder / "start_states.parquet", n_stages=1),
        "questions": write_questions(folder / "questions.parquet"),
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"advantage": {"kind": "group_mean_std"}, "loss": {"kind": "sequence_ratio"}},
        {"advantage": {"kind": "leave_one_out"}, "loss": {"kind": "clipped_importance"}},
        {"advantage": {"kind": "gae", "value_learning_rate": 1e-2}, "epochs": 2},
        {"kl": {"coefficient": 0.001, "estimator": "k1", "place": "reward"}, "loss": {"dual_clip": 3.0}},
    ],
    ids=["default", "grpo-gspo", "rloo-cispo", "ppo", "kl-in-reward"],
)
def test_the_reward_rises(inputs, tmp_path, algorithm):
    rl = {
        "prompts": 6,
        "samples": 8,
        "max_new_tokens": 8,
        "max_rounds": 12,
        "validate_every": 12,
        "learning_rate": 3e-2,
    }
    request = CellRequest(
        url=str(tmp_path / "cell"),
        key="key",
        parameters=LORA,
        prompt=PlainPrompt(),
        curriculum=NoCurriculum(),
        reward=RewardSettings(functions=("tests.rl:low_ids",)),
        rl=RLSettings.model_validate(rl | algorithm),
        evaluation=EvaluationSettings(max_new_tokens=4),
        engine=TransformersEngine(),
        seed=7,
        compute=CPU,
        **inputs,
    )
    run_rounds(request, Silent())
    metrics = read_rows(tmp_path / "cell/result/metrics.parquet", "metrics")
    rewards = [row["value"] for row in metrics if row["name"] == "reward"]
    assert fmean(rewards[-3:]) > rewards[0] + 0.2
    assert all(row["value"] < 1e-4 for row in metrics if row["name"] == "engine_logprob_difference_max")
