"""Faults of other systems as hand-worked values that no other test holds; docs/known-faults.md lists them all."""

import math
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from data.progress import Silent
from models.advantages import zero_variance_share
from models.critic import token_rewards
from models.loracoe.examples import Batch, position_ids
from models.losses import Statistics, TokenBatch, engine_weights, make_loss
from models.policy import Policy
from models.requests import PolicyFiles, RolloutsRequest
from models.rollout.engine import RolloutOutput
from models.rounds import Start, sampling_inputs
from models.rounds import rollout_rows as graded_rows
from models.settings import ClippedRatio, KLSettings, RLSettings
from models.update import update
from tests.models.test_update import run
from tests.rl import CPU, make_base, rollout_rows, update_request
from tests.tiny import bpe_tokenizer, save_base, tiny_llama

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "known-faults.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    return make_base(tmp_path_factory.mktemp("faults") / "base")


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOCUMENT.read_text())
    assert len(named) > 40
    root = DOCUMENT.parents[1]
    for file, name in named:
        assert f"def {name}(" in (root / file).read_text(), (file, name)


def test_a_group_is_silent_by_its_own_rewards_alone():
    """Equal rewards that are no round numbers are silent; nearly equal ones are not."""
    assert zero_variance_share([0.1 + 0.2] * 3 + [0.0, 1.0, 1.0], [0] * 3 + [1] * 3) == 0.5
    assert zero_variance_share([0.3, 0.1 + 0.2], [0, 0]) == 0.0


def test_the_outcome_stands_on_eos_and_padding_earns_nothing():
    """[t0, t1, eos, pad, pad] with score 1 → [0, 0, 1, 0, 0]."""
    rows = [token_rewards(1.0, torch.zeros(length), None, KLSettings()) for length in (3, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert padded.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]


def test_means_are_over_trained_tokens_not_over_padding():
    """KL 0.5 at two tokens of a row as wide as eight is 0.5, whatever stands in the padding."""
    mask = torch.tensor([[True, True] + [False] * 6])
    values = torch.where(mask, torch.tensor(0.5), torch.tensor(math.nan))
    zeros = torch.zeros(1, 8)
    statistics = Statistics()
    batch = TokenBatch(zeros, zeros, zeros, mask)
    statistics.add(batch, make_loss(ClippedRatio())(batch), values)
    statistics.add_tokens("kl_reference", values, mask)
    assert statistics.values()["kl_reference"] == statistics.values()["entropy"] == 0.5


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_of_the_base_does_not_part_the_first_ratio_from_one(tmp_path, recompute):
    """A base whose configuration asks for dropout: at rate 0 every ratio is 1, in both passes over the round."""
    model = tiny_llama()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    base = PolicyFiles(base=save_base(tmp_path / "base", model))
    request = update_request(
        tmp_path,
        base,
        rollout_rows(base, [[1.0, 0.0], [0.0, 1.0]]),
        learning_rate=0,
        epochs=2,
        gradient_checkpointing=recompute,
    )
    _, metrics = run(request, tmp_path / "out")
    assert max(metrics["ratio_deviation_max"]) < 1e-5
    assert set(metrics["clip_share_low"] + metrics["clip_share_high"]) == {0.0}
    assert metrics["engine_logprob_difference_max"][0] < 1e-5


@pytest.mark.parametrize("changes", [{}, {"row_layout": "packed"}, {"vocabulary_chunk": 50}, {"temperature": 0.6}])
def test_rate_zero_in_every_layout(files, tmp_path, changes):
    """Old log-probabilities and those of the loss come out of different passes and agree to 1e-5."""
    temperature = changes.get("temperature", 1.0)
    rows = rollout_rows(files, [[1.0, 0.0, 0.5], [0.0, 1.0, 0.2]], temperature)
    request = update_request(
        tmp_path, files, rows, learning_rate=0, epochs=2, steps=2, tokens_per_micro_batch=30, **changes
    )
    _, metrics = run(request, tmp_path / "out")
    assert max(metrics["ratio_deviation_max"]) < 1e-5
    assert set(metrics["clip_share_low"] + metrics["clip_share_high"]) == {0.0}


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_training_samples_with_temperature_alone(name):
    """Cut distributions are renormalised on one side (kept mass 0.8: ratio 0.8, not 1): there is no such setting."""
    with pytest.raises(ValidationError):
        RLSettings.model_validate({name: 0.8})


def test_the_correction_does_not_explode_with_length():
    """100 tokens that differ by 0.012 nats each: a row's product would be 3.32; each token's weight is 1.01207."""
    old, sampling = torch.full((1, 100), -1.0), torch.full((1, 100), -1.012)
    weights, truncated = engine_weights(old, sampling, torch.ones(1, 100, dtype=torch.bool), cap=2.0)
    assert weights.flatten().tolist() == pytest.approx([math.exp(0.012)] * 100, rel=1e-5)
    assert weights.prod().item() == pytest.approx(3.3201, abs=1e-3)
    assert not truncated.any()


def test_positions_count_from_the_first_token_of_a_row():
    """Mask [0, 0, 1, 1, 1] → the positions end 0, 1, 2."""
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    found = position_ids(Batch(mask, mask, mask, mask, mask))
    assert found[0, 2:].tolist() == [0, 1, 2]


def test_sampled_ids_are_kept_though_their_text_encodes_otherwise(files, tmp_path):
    """Ids [he, llo] whose text encodes as [hello] stay [he, llo]; a row is its prompt and what was sampled."""
    tokenizer = bpe_tokenizer()
    whole = tokenizer("total", add_special_tokens=False)["input_ids"]
    parts = [id for piece in ("to", "tal") for id in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(parts) == tokenizer.decode(whole) and parts != whole
    request = RolloutsRequest.model_validate(
        {
            "policy": files,
            "reference": files,
            "prompt": {"kind": "plain"},
            "curriculum": {"kind": "none"},
            "curriculum_state": None,
            "reward": {},
            "rl": {"prompts": 1, "samples": 2, "max_new_tokens": 8},
            "engine": {"kind": "transformers"},
            "start_states": tmp_path / "none.parquet",
            "round": 0,
            "generated_tokens_so_far": 0,
            "seed": 0,
        }
    )
    state = {"item_id": "i", "start_state_id": "i/0", "stage": 0, "answer": "1", "answer_kind": "number"}
    state |= {"question": "?", "task": "t", "prefix": ""}
    starts = [Start(state, [9, 8, 7], 0, 0)]
    inputs = sampling_inputs(starts, request, 64)
    outputs = [RolloutOutput(parts, [-1.0] * len(parts), "length") for _ in inputs]
    for row in graded_rows(starts, inputs, outputs, request, tokenizer):
        assert row["completion_ids"] == parts
        assert row["prompt_ids"] == [9, 8, 7]
        assert row["completion"] == "total"


def test_a_round_of_nothing_but_truncated_rows_trains_nothing(files, tmp_path):
    """Masked whole: no step, no NaN, the weights of before."""
    rows = [row | {"stop_reason": "length"} for row in rollout_rows(files, [[1.0, 0.0], [0.0, 1.0]])]
    request = update_request(tmp_path, files, rows, train_truncated=False)
    out = tmp_path / "out"
    out.mkdir()
    assert update(request, out, Silent()) == {"optimizer_steps": 0, "skipped_steps": 0}
    trained = Policy.load(PolicyFiles(base=files.base, weights=out / "weights"), compute=CPU)
    assert not any(parameter.any() for name, parameter in trained.model.named_parameters() if "lora_B" in name)


def test_a_truncated_row_keeps_its_last_id(files, tmp_path):
    """No EOS is written over it: the trainer scores the ids that were sampled."""
    rows = rollout_rows(files, [[1.0, 0.0]])
    cut = [
        row
        | {"completion_ids": row["completion_ids"][:-1], "sampling_logprobs": row["sampling_logprobs"][:-1]}
        | {"reference_logprobs": row["reference_logprobs"][:-1], "stop_reason": "length"}
        for row in rows
    ]
    _, metrics = run(update_request(tmp_path, files, cut), tmp_path / "out")
    assert metrics["engine_logprob_difference_max"][0] < 1e-5
    assert metrics["trained_tokens"] == [sum(len(row["completion_ids"]) for row in cut)]


def test_in_16_bits_an_adapter_is_never_merged_to_sample(tmp_path):
    """Merging would move the base by rounding, round trip after round trip."""
    from tests.models.test_precision import low_precision_base
    from tests.rl import LORA

    files = low_precision_base(tmp_path / "base", "bfloat16")
    policy = Policy.load(files, LORA, CPU, trainable=True)
    before = {name: parameter.clone() for name, parameter in policy.network.named_parameters()}
    assert policy.sampling_network() is policy.network
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.network.named_parameters())
