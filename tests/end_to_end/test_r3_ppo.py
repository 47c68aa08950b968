"""The preset r3-ppo, and its twin on a CPU: the same algorithm on a tiny model, run from end to end."""

import json

import pytest

from data.artifacts import read_rows
from flows import config
from tests.documented import documented, general
from tests.end_to_end.mini import ratchet

TWIN = """
--model.kind tiny --model.hidden_size 32 --model.layers 2 --model.intermediate_size 64 --model.pretrain_steps 60
--model.pretrain_batch 16 --model.pretrain_documents 500 --engine.kind transformers
--experts.gsm8k null --experts.svamp null
--experts.arithmetic.source.kind suite --experts.arithmetic.source.suite arithmetic_words
--experts.arithmetic.source.difficulty 2 --experts.arithmetic.source.demonstrations 24
--experts.arithmetic.reward.partial 0.2 --splits.validation 4 --splits.test 4
--prompt.template Q:{question}
--warmup.max_steps 2 --warmup.batch_size 8 --rl.generated_tokens 400 --rl.prompts 8 --rl.max_new_tokens 16
--rl.learning_rate 1e-4 --rl.validate_every 2 --evaluation.max_new_tokens 16 --compute.threads 1
""".split()


def test_the_preset_is_what_was_published():
    settings = config.load("r3-ppo")
    rl = config.arm_settings(settings, "gsm8k", "r3").rl
    assert (rl.advantage.kind, rl.advantage.gamma, rl.advantage.lam) == ("gae", 1.0, 0.95)
    assert (rl.advantage.value_coefficient, rl.advantage.value_clip, rl.advantage.whiten) == (5.0, 0.2, True)
    assert (rl.loss.kind, rl.loss.clip_low, rl.loss.clip_high) == ("clipped_ratio", 0.2, 0.2)
    assert (rl.epochs, rl.steps, rl.samples, rl.learning_rate) == (2, 1, 1, 3e-7)
    assert (rl.kl.coefficient, rl.kl.estimator, rl.kl.place) == (0.05, "k1", "reward")
    assert {task: expert.reward.partial for task, expert in settings.experts.items()} == {"gsm8k": 0.2, "svamp": 0.1}
    assert settings.parameters.kind == "full"


@pytest.mark.prefect
def test_its_twin_runs_from_end_to_end(tmp_path):
    process = ratchet("run", "--preset", "r3-ppo", "--root", str(tmp_path), *TWIN, home=tmp_path / "prefect")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    run = tmp_path / "r3-ppo"
    rl = json.loads((run / "settings.json").read_text())["experts"]["arithmetic"]["rl"]
    published = config.load("r3-ppo").experts["gsm8k"].rl.model_dump(mode="json")
    for name in ("advantage", "loss", "kl", "epochs", "steps", "samples"):
        assert rl[name] == published[name], name
    cells = sorted(run.glob("experts/arithmetic/*/*/result"))
    assert [cell.parts[-3] for cell in cells] == ["plain_rl", "r3"]
    for cell in cells:
        rows = read_rows(cell / "metrics.parquet", "metrics")
        names = {row["name"] for row in rows}
        assert {"value_loss", "value_clip_share", "explained_variance", "kl_reference_rollouts"} <= names
        assert {general(name) for name in names} <= documented()
        steps = [row["step"] for row in rows if row["name"] == "gradient_norm"]
        rounds = len([row for row in rows if row["name"] == "explained_variance"])
        assert len(steps) == 2 * rounds > 2
        values = [row["value"] for row in rows if row["name"] == "gradient_norm"]
        assert all(value > 0 for value in values)
    assert "95 % interval" in printed
