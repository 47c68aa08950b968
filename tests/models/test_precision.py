"""Training with a base in 16 bits: what is trained is kept in float32, so that small steps add up."""

import json

import pytest
import torch
from safetensors.torch import load_file

from data.artifacts import read_rows
from data.errors import UserError
from data.progress import Silent
from models.policy import Policy
from models.requests import PolicyFiles
from models.row_scores import score
from models.scoring import TokenRow
from models.settings import FullTraining
from models.training_rows import train_rows
from models.update import update
from models.updater import Updater
from tests.rl import CPU, LORA, make_base, rollout_rows, update_request

REWARDS = [[1.0, 0.0, 0.3], [0.0, 1.0, 0.6]]
ROWS = [TokenRow([1, 5, 9], [7, 8, 2]), TokenRow([1, 5, 9], [31, 0])]


def low_precision_base(folder, dtype: str) -> PolicyFiles:
    files = make_base(folder)
    description = json.loads((files.base / "base.json").read_text())
    (files.base / "base.json").write_text(json.dumps(description | {"dtype": dtype}))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    return low_precision_base(tmp_path_factory.mktemp("bfloat16") / "base", "bfloat16")


def spacing(tensor: torch.Tensor) -> torch.Tensor:
    """Distance from each value to the next bfloat16."""
    return 2.0 ** (tensor.abs().clamp(min=1e-30).log2().floor() - 7)


def test_steps_below_the_resolution_of_bfloat16_add_up(files, tmp_path):
    """Rounds whose steps are each far below half a spacing move the weights that are sampled with in the end."""
    request = update_request(tmp_path, files, rollout_rows(files, REWARDS), learning_rate=2e-6, epochs=4)
    request = request.model_copy(update={"parameters": FullTraining()})
    before = Policy.load(files, compute=CPU).model.state_dict()
    weights, state = None, None
    moved = []
    for number in range(6):
        out = tmp_path / str(number)
        out.mkdir()
        policy = PolicyFiles(base=files.base, weights=weights)
        update(request.model_copy(update={"policy": policy, "trainer_state": state, "round": number}), out, Silent())
        weights, state = out / "weights", out / "trainer_state"
        trained = load_file(weights / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        assert trained[name].dtype == torch.float32
        moved.append((trained[name] - before[name].float()).abs())
    # For these a round of four steps, and so each step, is below a quarter of the distance to the next bfloat16:
    # rounded after every step or every round they would never have moved.
    fine = moved[0] < spacing(before[name].float()) / 4
    assert fine.float().mean() > 0.5
    assert moved[5][fine].mean() > 4 * moved[0][fine].mean()
    after = Policy.load(PolicyFiles(base=files.base, weights=weights), compute=CPU)
    assert after.network.dtype == torch.bfloat16
    changed = (after.model.state_dict()[name] != before[name])[fine].float().mean()
    assert changed > 0.1


def test_products_are_computed_in_bfloat16(files):
    """Weights in float32, products in bfloat16, whatever is shared, packed or in chunks; gradients in float32."""
    policy = Policy.load(files, FullTraining(), CPU, trainable=True)
    assert {parameter.dtype for _, parameter in policy.trainable_parameters()} == {torch.float32}
    seen = set()
    policy.network.get_decoder().layers[0].mlp.up_proj.register_forward_hook(lambda *a: seen.add(a[2].dtype))
    sampling = torch.cat(Policy.load(files, compute=CPU).completion_logprobs(ROWS))
    for layout in ("shared", "padded", "packed"):
        for chunk in (0, 50):
            policy.model.zero_grad()
            scores = score(policy, ROWS, 1.0, layout=layout, vocabulary_chunk=chunk)
            assert torch.allclose(scores.logprobs_BT[scores.mask_BT], sampling, atol=0.05)
            scores.logprobs_BT.sum().backward()
            gradients = [parameter.grad for _, parameter in policy.trainable_parameters()]
            assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert seen == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


def test_a_pass_that_fails_leaves_no_autocast_behind(files):
    policy = Policy.load(files, FullTraining(), CPU, trainable=True)
    with pytest.raises(IndexError):
        policy.network(input_ids=torch.tensor([[10_000]]))
    assert not torch.is_autocast_enabled("cpu")


def test_gradient_of_the_float32_model_to_the_precision_of_bfloat16(files, tmp_path):
    """The same update on the same weights in float32: gradients point the same way."""
    single = low_precision_base(tmp_path / "single", "float32")
    gradients = []
    for base in (files, single):
        request = update_request(tmp_path / "rows", base, rollout_rows(single, REWARDS))
        found = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
        updater = Updater(Policy.load(base, FullTraining(), CPU, trainable=True), request.rl, found)
        updater.step(range(len(found)))
        gradients.append(torch.cat([parameter.grad.flatten() for _, parameter in updater.named]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def test_an_adapter_on_a_bfloat16_base_is_float32(files, tmp_path):
    policy = Policy.load(files, LORA, CPU, trainable=True)
    policy.save(tmp_path / "weights")
    again = Policy.load(PolicyFiles(base=files.base, weights=tmp_path / "weights"), LORA, CPU, trainable=True)
    for loaded in (policy, again):
        assert {parameter.dtype for _, parameter in loaded.trainable_parameters()} == {torch.float32}
        assert loaded.network.get_input_embeddings().weight.dtype == torch.bfloat16


def test_whole_training_in_float16_is_refused(tmp_path):
    files = low_precision_base(tmp_path / "base", "float16")
    with pytest.raises(UserError, match="use 'bfloat16'"):
        Policy.load(files, FullTraining(), CPU, trainable=True)
