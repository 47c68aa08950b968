"""Loading, saving, sharing of the base, and log-probabilities."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from data.errors import UserError
from models import policy as policy_module
from models.policy import Policy, resident_base
from models.requests import PolicyFiles
from models.scoring import TokenRow, logits_at, micro_batches
from models.settings import FullTraining, LoraTraining
from tests.tiny import save_base, tiny_gpt2, tiny_llama

LORA = LoraTraining(rank=4, alpha=8)
ROWS = [
    TokenRow([1, 5, 6], [7, 8, 2]),
    TokenRow([1, 5], [7]),
    TokenRow([1, 5, 6, 9, 9, 9, 11, 12], [7, 8, 2, 4, 50, 51, 52]),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


def disturbed(base, scale=0.3, seed=1):
    """A trainable LoRA policy whose adapter does something."""
    policy = Policy.load(PolicyFiles(base=base), LORA, trainable=True)
    torch.manual_seed(seed)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return policy


def digest(model):
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()


def test_logprobs_are_the_tempered_log_softmax_of_an_unpadded_pass(base):
    policy = disturbed(base)
    for temperature in (0.0, 0.5, 1.0):
        found = policy.completion_logprobs(ROWS, temperature)
        for row, logprobs in zip(ROWS, found, strict=True):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            logits = policy.network(ids).logits[0].float() / (temperature or 1.0)
            expected = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
            expected = expected.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
            assert logprobs.dtype == torch.float32
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_temperature_by_hand():
    # logits (2, 0), temperature 0.5, token 0: -log(1 + exp(-4)) = -0.01815.
    class Head(torch.nn.Module):
        def forward(self, hidden):
            return torch.tensor([2.0, 0.0]).expand(*hidden.shape[:-1], 2)

    model = tiny_llama(vocabulary=2)
    model.lm_head = Head()
    [found] = policy_module.completion_logprobs(model, [TokenRow([1], [0])], 0.5)
    assert found.item() == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 12, 10_000])
def test_micro_batches_do_not_change_logprobs(base, budget):
    policy = disturbed(base)
    for found, expected in zip(policy.completion_logprobs(ROWS, 0.7, budget), policy.completion_logprobs(ROWS, 0.7)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_left_padding_with_mask_and_positions_gives_the_same_logits():
    for model in (tiny_llama(), tiny_gpt2()):
        row = [1, 5, 6, 9, 12]
        padded = torch.tensor([[0, 0, 0, *row]])
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
        with torch.no_grad():
            left = model(padded, attention_mask=mask, position_ids=positions).logits[0, 3:]
            right = logits_at(model, torch.tensor([[*row, 7, 7]]), torch.arange(5))
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


def test_a_later_row_and_padding_do_not_reach_other_rows(base):
    policy = disturbed(base)
    alone = policy.completion_logprobs(ROWS[:1])[0]
    torch.testing.assert_close(
        policy.completion_logprobs([*ROWS, TokenRow([1] * 90, [5] * 90)])[0], alone, atol=1e-6, rtol=0
    )


def test_a_row_without_a_prompt_is_refused(base):
    with pytest.raises(ValueError, match="no prompt"):
        Policy.load(PolicyFiles(base=base)).completion_logprobs([TokenRow([], [5])])


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = [3, 9, 4, 4, 12, 1]
    batches = micro_batches(lengths, 10)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 10


def test_a_new_adapter_is_the_base_and_depends_on_the_seed_alone(base):
    plain = Policy.load(PolicyFiles(base=base))
    first, again, other = (Policy.load(PolicyFiles(base=base), LORA, trainable=True, seed=seed) for seed in (1, 1, 2))
    for found, expected in zip(first.completion_logprobs(ROWS), plain.completion_logprobs(ROWS)):
        assert torch.equal(found, expected)
    assert first.adapter_hash() == again.adapter_hash() != other.adapter_hash()
    assert plain.adapter_hash() is None


def test_the_base_is_read_once_and_bit_identical_after_adapters_came_and_went(base, tmp_path):
    model, _ = resident_base(base, torch.device("cpu"))
    before, logits = digest(model), model(torch.tensor([[1, 5, 6]])).logits
    trained = disturbed(base)
    optimizer = torch.optim.SGD([parameter for _, parameter in trained.trainable_parameters()], lr=1.0)
    (-torch.cat(trained.completion_logprobs(ROWS)).sum()).backward()
    optimizer.step()
    trained.save(tmp_path / "adapter")
    Policy.load(PolicyFiles(base=base, weights=tmp_path / "adapter")).completion_logprobs(ROWS)
    full = Policy.load(PolicyFiles(base=base), FullTraining(), trainable=True)
    with torch.no_grad():
        for _, parameter in full.trainable_parameters():
            parameter.add_(1.0)
    again, _ = resident_base(base, torch.device("cpu"))
    assert again is model
    assert digest(model) == before
    assert torch.equal(model(torch.tensor([[1, 5, 6]])).logits, logits)
    assert torch.equal(Policy.load(PolicyFiles(base=base)).network(torch.tensor([[1, 5, 6]])).logits, logits)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_another_base_takes_the_place_of_the_resident_one(base, tmp_path):
    model, _ = resident_base(base, torch.device("cpu"))
    other, _ = resident_base(save_base(tmp_path / "other", tiny_llama(seed=5)), torch.device("cpu"))
    assert other is not model and len(policy_module._resident) == 1
    copied = save_base(tmp_path / "copy", tiny_llama(seed=5))
    assert resident_base(copied, torch.device("cpu"))[0] is other  # same content elsewhere


def test_save_and_load_an_adapter(base, tmp_path):
    trained = disturbed(base)
    trained.save(tmp_path / "a")
    trained.save(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base / "model")
    loaded = Policy.load(PolicyFiles(base=base, weights=tmp_path / "a"))
    assert loaded.adapter_hash() == trained.adapter_hash()
    assert not loaded.trainable_parameters()
    for found, expected in zip(loaded.completion_logprobs(ROWS), trained.completion_logprobs(ROWS)):
        assert torch.equal(found, expected)
    further = Policy.load(PolicyFiles(base=base, weights=tmp_path / "a"), LORA, trainable=True)
    assert [name for name, _ in further.trainable_parameters()] == [name for name, _ in trained.trainable_parameters()]


def test_save_and_load_full_weights(base, tmp_path):
    full = Policy.load(PolicyFiles(base=base), FullTraining(), trainable=True)
    with torch.no_grad():
        for _, parameter in full.trainable_parameters():
            parameter.mul_(1.1)
    full.save(tmp_path / "full")
    assert "model.safetensors" in {path.name for path in (tmp_path / "full").iterdir()}
    loaded = Policy.load(PolicyFiles(base=base, weights=tmp_path / "full"), FullTraining(), trainable=True)
    assert len(loaded.trainable_parameters()) == len(full.trainable_parameters())
    for found, expected in zip(loaded.completion_logprobs(ROWS), full.completion_logprobs(ROWS)):
        assert torch.equal(found, expected)
    assert load_file(tmp_path / "full" / "model.safetensors")


def test_reference_beside_a_policy_that_moves(base, tmp_path):
    trained = disturbed(base)
    trained.save(tmp_path / "start")
    before = [logprobs.detach() for logprobs in trained.completion_logprobs(ROWS)]
    with torch.no_grad():
        for _, parameter in trained.trainable_parameters():
            parameter.add_(0.1)
    with trained.reference(PolicyFiles(base=base, weights=tmp_path / "start")) as reference:
        found = reference.completion_logprobs(ROWS)
    for logprobs, expected in zip(found, before):
        assert torch.equal(logprobs, expected) and not logprobs.requires_grad
    assert all(parameter.requires_grad for _, parameter in trained.trainable_parameters())
    assert not torch.equal(trained.completion_logprobs(ROWS)[0].detach(), before[0])


def test_nothing_to_train_is_an_error(base):
    with pytest.raises(UserError, match="target_modules"):
        Policy.load(PolicyFiles(base=base), LoraTraining(target_modules=("no_such_projection",)), trainable=True)
    with pytest.raises(UserError, match="parameters"):
        Policy.load(PolicyFiles(base=base), None, trainable=True)


def test_weights_and_parameters_that_do_not_fit_are_errors(base, tmp_path):
    disturbed(base).save(tmp_path / "adapter")
    Policy.load(PolicyFiles(base=base), FullTraining(), trainable=True).save(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    for weights, parameters, match in (
        ("adapter", FullTraining(), "holds an adapter"),
        ("adapter", LoraTraining(rank=2), "rank 4"),
        ("full", LORA, "holds full weights"),
        ("empty", LORA, "safetensors only"),
    ):
        with pytest.raises(UserError, match=match):
            Policy.load(PolicyFiles(base=base, weights=tmp_path / weights), parameters, trainable=True)


def test_a_pickled_adapter_is_not_read(base, tmp_path):
    disturbed(base).save(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "adapter" / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match="safetensors only"):
        Policy.load(PolicyFiles(base=base, weights=tmp_path / "adapter"))


def test_weights_of_another_model_are_refused(base, tmp_path):
    tiny_llama(layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another model"):
        Policy.load(PolicyFiles(base=base, weights=tmp_path / "other"))


def test_context_is_the_smaller_of_settings_and_model(tmp_path):
    folder = save_base(tmp_path / "base")
    description = json.loads((folder / "base.json").read_text())
    assert Policy.load(PolicyFiles(base=folder)).context == 256
    (folder / "base.json").write_text(json.dumps(description | {"context": 100}))
    assert Policy.load(PolicyFiles(base=folder)).context == 100
