"""The update does not depend on how it is run: cut, padding, pad side, repetition, checkpointing, other rows."""

import math
import os
import random
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from data.artifacts import read_rows, write_table
from data.progress import Silent
from models import row_scores, scoring
from models.policy import Policy
from models.requests import PolicyFiles
from models.row_scores import score
from models.scoring import TokenRow
from models.settings import FullTraining
from models.shared_prompts import completion_passes, group_batches
from models.training_rows import TrainRow, train_rows
from models.update import recompute_activations
from models.updater import Updater
from tests.rl import CPU, LORA, make_adapter, rollout_rows, update_request

REWARDS = [[1.0, 0.0], [0.0, 1.0], [0.3, 0.9], [1.0, 0.2]]
LOSSES = [
    {"kind": "clipped_ratio", "aggregation": "token_mean"},
    {"kind": "clipped_ratio", "aggregation": "sequence_mean", "dual_clip": 3.0},
    {"kind": "clipped_ratio", "aggregation": "constant"},
    {"kind": "sequence_ratio"},
    {"kind": "clipped_importance"},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    return make_adapter(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def rows(files) -> list[dict]:
    """Eight rollouts whose old, engine and reference log-probabilities differ from the policy's."""
    rows = rollout_rows(files, REWARDS)
    generator = random.Random(2)
    for row in rows:
        for name in ("sampling_logprobs", "reference_logprobs"):
            row[name] = [value + generator.gauss(0, 0.2) for value in row[name]]
    return rows


class Sgd(Updater):
    """An updater with plain SGD and given old log-probabilities, so that ratios differ from 1 and noise stays small."""

    def __init__(self, policy, rl, rows):
        super().__init__(policy, rl, rows)
        self.optimizer = torch.optim.SGD([parameter for _, parameter in self.named], lr=0.1)
        for i, row in enumerate(rows):
            generator = torch.Generator().manual_seed(len(row.tokens.completion_ids))
            noise = 0.3 * torch.randn(len(row.tokens.completion_ids), generator=generator)
            self.old_logprobs[i] = row.sampling_logprobs_C + noise


def run(folder, files, rows, prepare=None, parameters=LORA, **changes):
    """The metrics, gradients and parameters after one SGD step on all rows."""
    changes = {"kl": {"coefficient": 0.05}, "entropy_coefficient": 0.01, "max_gradient_norm": 1e9} | changes
    request = update_request(folder, files, rows, **changes)
    found = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    policy = Policy.load(files, parameters, CPU, trainable=True)
    if prepare is not None:
        prepare(policy)
    updater = Sgd(policy, request.rl, found)
    metrics = updater.step(range(len(found)))
    gradients = {name: parameter.grad.clone() for name, parameter in updater.named}
    return metrics, gradients, {name: parameter.detach().clone() for name, parameter in updater.named}


def equal(one, other) -> None:
    """Loss and gradient agree to 1e-5 relative, parameters after the step too."""
    assert one[0]["loss"] == pytest.approx(other[0]["loss"], rel=1e-5, abs=1e-7)
    assert one[0]["gradient_norm"] == pytest.approx(other[0]["gradient_norm"], rel=1e-5)
    for name, gradient in one[1].items():
        scale = gradient.abs().max().item()
        assert torch.allclose(gradient, other[1][name], rtol=1e-4, atol=1e-5 * scale + 1e-9), name
        assert torch.allclose(one[2][name], other[2][name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_micro_batches_one_by_eight_or_eight_by_one(files, rows, tmp_path, loss):
    whole = run(tmp_path / "whole", files, rows, loss=loss, tokens_per_micro_batch=10_000)
    single = run(tmp_path / "single", files, rows, loss=loss, tokens_per_micro_batch=1)
    some = run(tmp_path / "some", files, rows, loss=loss, tokens_per_micro_batch=40)
    assert abs(whole[0]["loss"]) > 1e-4
    assert whole[0]["gradient_norm"] > 1e-4
    equal(whole, single)
    equal(whole, some)
    for name, value in whole[0].items():
        assert value == pytest.approx(single[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_order_and_repetition(files, rows, tmp_path, loss):
    whole = run(tmp_path / "whole", files, rows, loss=loss)
    shuffled = random.Random(0).sample(rows, len(rows))
    equal(whole, run(tmp_path / "shuffled", files, shuffled, loss=loss))
    equal(whole, run(tmp_path / "twice", files, [*rows, *rows], loss=loss))


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_gradient_checkpointing(files, rows, tmp_path, layout):
    plain = run(tmp_path / "plain", files, rows)
    changes = {"row_layout": layout, "gradient_checkpointing": True}
    equal(plain, run(tmp_path / "recomputed", files, rows, recompute_activations, **changes))


@pytest.mark.parametrize("parameters", [LORA, FullTraining()], ids=["lora", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {"row_layout": "padded"},
        {"row_layout": "packed"},
        {"row_layout": "packed", "tokens_per_micro_batch": 40},
        {"row_layout": "shared", "vocabulary_chunk": 50},
        {"row_layout": "padded", "vocabulary_chunk": 1, "tokens_per_micro_batch": 1},
        {"row_layout": "packed", "vocabulary_chunk": 127},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_layout_and_vocabulary_chunk(files, rows, tmp_path, changes, parameters):
    """Shared, padded or packed rows, the vocabulary whole or in chunks: the same loss, gradient and step."""
    files = files if parameters == LORA else PolicyFiles(base=files.base)
    wanted = run(tmp_path / "wanted", files, rows, parameters=parameters, vocabulary_chunk=0)
    found = run(tmp_path / "found", files, rows, parameters=parameters, **changes)
    equal(wanted, found)
    for name, value in wanted[0].items():
        assert value == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("changes", [{"row_layout": "packed"}, {"vocabulary_chunk": 50}], ids=["packed", "chunk"])
def test_the_value_head_under_every_layout(files, rows, tmp_path, changes):
    """PPO: old values, advantages and the head's step are the same."""

    def ppo(folder, **more):
        request = update_request(folder, files, rows, advantage={"kind": "gae"}, epochs=2, **more)
        found = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
        updater = Updater(Policy.load(files, LORA, CPU, trainable=True), request.rl, found)
        updater.optimizer = torch.optim.SGD([parameter for _, parameter in updater.named], lr=0.1)
        figures = updater.ask_critic()
        for _ in range(2):
            figures |= updater.step(range(len(found)))
        return figures, dict(updater.named)

    one, other = ppo(tmp_path / "plain", row_layout="padded", vocabulary_chunk=0), ppo(tmp_path / "other", **changes)
    for name, value in one[0].items():
        assert value == pytest.approx(other[0][name], rel=1e-4, abs=1e-5), name
    for name, parameter in one[1].items():
        assert torch.allclose(parameter, other[1][name], rtol=1e-5, atol=1e-6), name


def test_checkpointing_is_really_on(files, rows):
    policy = Policy.load(files, LORA, CPU, trainable=True)
    recompute_activations(policy)
    calls = []
    policy.network.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    scores = score(policy, [TokenRow([1, 5, 6], [7, 8])], 1.0)
    scores.logprobs_BT.sum().backward()
    assert len(calls) == 2


def test_full_training(files, rows, tmp_path):
    base = PolicyFiles(base=files.base)
    whole = run(tmp_path / "whole", base, rows, parameters=FullTraining(), tokens_per_micro_batch=10_000)
    single = run(tmp_path / "single", base, rows, parameters=FullTraining(), tokens_per_micro_batch=1)
    equal(whole, single)


def test_rows_without_advantage_count_in_the_denominator_only(files, rows, tmp_path):
    """They are not computed, and the loss is what it would be if they were."""
    silent = [row | {"advantage": 0.0} for row in rows[:4]]
    plain = {"kl": {"coefficient": 0.0}, "entropy_coefficient": 0.0}
    alone = run(tmp_path / "alone", files, rows[4:], **plain)
    diluted = run(tmp_path / "diluted", files, [*silent, *rows[4:]], **plain)
    tokens = [sum(len(row["completion_ids"]) for row in part) for part in (rows[4:], rows)]
    share = tokens[0] / tokens[1]
    assert diluted[0]["loss"] == pytest.approx(alone[0]["loss"] * share, rel=1e-5)
    for name, gradient in alone[1].items():
        assert torch.allclose(gradient * share, diluted[1][name], rtol=1e-4, atol=1e-8), name


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padding_and_pad_side_do_not_change_logprobs(files, temperature):
    """Rows together, each alone, and padded on the left with mask and positions: the same log-probabilities."""
    policy = Policy.load(files, compute=CPU)
    generator = random.Random(1)
    rows = [
        TokenRow([1, *generator.choices(range(4, 100), k=prompt)], generator.choices(range(4, 100), k=completion))
        for prompt, completion in [(2, 9), (11, 1), (5, 5), (1, 2)]
    ]
    with torch.no_grad():
        together = score(policy, rows, temperature)
        width = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows) + 3
        for index, row in enumerate(rows):
            alone = score(policy, [row], temperature)
            length = len(row.completion_ids)
            assert torch.allclose(together.logprobs_BT[index, :length], alone.logprobs_BT[0], atol=1e-5)
            assert torch.allclose(together.entropy_BT[index, :length], alone.entropy_BT[0], atol=1e-5)
            assert together.logprobs_BT[index, length:].tolist() == [0.0] * (together.mask_BT.shape[1] - length)
            ids = [*row.prompt_ids, *row.completion_ids]
            pad = width - len(ids)
            logits = policy.network(
                input_ids=torch.tensor([[0] * pad + ids]),
                attention_mask=torch.tensor([[0] * pad + [1] * len(ids)]),
                position_ids=torch.tensor([[0] * pad + list(range(len(ids)))]),
            ).logits[0, -length - 1 : -1]
            left = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
            assert torch.allclose(left, alone.logprobs_BT[0], atol=1e-5)


def test_a_pad_id_inside_a_completion_is_a_token(files):
    """Masks come from lengths: sampled ids that equal pad or EOS are trained on like any other."""
    policy = Policy.load(files, compute=CPU)
    scores = score(policy, [TokenRow([1, 5], [0, 2, 0, 2]), TokenRow([1, 5], [9])], 1.0)
    assert scores.mask_BT.tolist() == [[True] * 4, [True, False, False, False]]
    assert (scores.logprobs_BT[0] < 0).all()


def test_tempered_logprobs_by_hand(monkeypatch):
    """Logits (2, 0), T 0.5, token 0: −0.01815; without the temperature −0.12693."""
    logits = torch.tensor([2.0, 0.0])
    assert (logits / 0.5).log_softmax(0)[0].item() == pytest.approx(-0.01815, abs=1e-5)

    monkeypatch.setattr(scoring, "logits_at", lambda *_, **__: logits[None])
    monkeypatch.setattr(scoring, "seen_by_output_layer", lambda _: nullcontext([torch.zeros(1, 1)]))
    network = Mock(device="cpu")
    network.config.get_text_config.return_value.vocab_size = 2
    for temperature, wanted in [(0.5, -0.01815), (1.0, -0.12693)]:
        scores = score(Mock(network=network), [TokenRow([1], [0])], temperature)
        assert scores.logprobs_BT.item() == pytest.approx(wanted, abs=1e-5)
        p = math.exp(wanted)
        assert scores.entropy_BT.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-4)


def test_after_an_update_the_engine_samples_from_the_new_policy(files, rows, tmp_path):
    """The engine's log-probabilities after an update are the trainer's, and not those of before."""
    from models.rollout.engine import RolloutInput
    from models.rollout.engines import make_engine
    from models.settings import TransformersEngine
    from models.update import update

    request = update_request(tmp_path, files, rows, learning_rate=1e-2)
    update(request, tmp_path, Silent())
    trained = Policy.load(PolicyFiles(base=files.base, weights=tmp_path / "weights"), compute=CPU)
    asked = [RolloutInput(row["prompt_ids"], seed, 8) for seed, row in enumerate(rows)]
    outputs = make_engine(TransformersEngine(), trained).generate(asked, 1.0)
    tokens = [TokenRow(row["prompt_ids"], output.completion_ids) for row, output in zip(rows, outputs)]
    before = Policy.load(files, compute=CPU).completion_logprobs(tokens)
    after = trained.completion_logprobs(tokens)
    sampled = [torch.tensor(output.logprobs) for output in outputs]
    assert max((one - other).abs().max() for one, other in zip(after, sampled)) < 1e-4
    assert max((one - other).abs().max() for one, other in zip(before, sampled)) > 1e-2


@pytest.mark.parametrize("advantage", [{"kind": "group_mean"}, {"kind": "gae"}], ids=lambda settings: settings["kind"])
def test_six_rounds_straight_or_three_and_three_in_another_process_state(files, rows, tmp_path, advantage):
    """Weights, moments, value head and generators after six updates are the same when all is read back after three."""
    from data.artifacts import file_hash
    from models.update import update

    request = update_request(tmp_path, files, rows, steps=2, learning_rate=1e-3, advantage=advantage)

    def six(folder, disturb):
        state, weights = None, files.weights
        for number in range(6):
            if number == 3 and disturb:
                random.seed(99), torch.manual_seed(99)
            out = folder / str(number)
            out.mkdir(parents=True)
            policy = PolicyFiles(base=files.base, weights=weights)
            update(
                request.model_copy(update={"policy": policy, "trainer_state": state, "round": number}), out, Silent()
            )
            state, weights = out / "trainer_state", out / "weights"
        return {path.relative_to(out).as_posix(): file_hash(path) for path in sorted(out.rglob("*")) if path.is_file()}

    assert six(tmp_path / "straight", False) == six(tmp_path / "resumed", True)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the process's memory from /proc")
def test_memory_does_not_grow(files, rows, tmp_path):
    request = update_request(tmp_path, files, rows, epochs=1, tokens_per_micro_batch=60)
    found: list[TrainRow] = train_rows(read_rows(request.rollouts, "rollouts"), request.rl)
    updater = Updater(Policy.load(files, LORA, CPU, trainable=True), request.rl, found)
    for step in range(200):
        updater.step(range(len(found)))
        if step == 19:
            early = resident_bytes()
    assert resident_bytes() < 1.05 * early


def test_write_table_keeps_logprobs_to_the_bit(rows, tmp_path):
    """Log-probabilities are float32 in the table, so the trainer's difference to the engine is not a rounding of it."""
    values = torch.randn(5).tolist()
    write_table(tmp_path / "rollouts.parquet", "rollouts", [rows[0] | {"sampling_logprobs": values}])
    assert read_rows(tmp_path / "rollouts.parquet", "rollouts")[0]["sampling_logprobs"] == values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_shared_prompt_is_the_repeated_prompt(files, rows, temperature, monkeypatch):
    """Prompts computed once a group: the same log-probabilities, entropies and gradients as whole rows."""
    monkeypatch.setattr("models.shared_prompts.SMALL_PASS", 1)
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"]) for row in rows] + [TokenRow([1, 7], [9])]
    results = []
    for layout in ("shared", "padded"):
        policy = Policy.load(files, LORA, CPU, trainable=True)
        scores = score(policy, tokens, temperature, entropy_gradient=True, layout=layout)
        (scores.logprobs_BT.sin().sum() + scores.entropy_BT.square().sum()).backward()
        results.append((scores, {name: p.grad for name, p in policy.trainable_parameters()}))
    (shared, gradients), (whole, wanted) = results
    assert torch.allclose(shared.logprobs_BT, whole.logprobs_BT, atol=1e-5)
    assert torch.allclose(shared.entropy_BT, whole.entropy_BT, atol=1e-5)
    assert shared.mask_BT.equal(whole.mask_BT)
    for name, gradient in wanted.items():
        scale = gradient.abs().max().item()
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale), name


def test_shared_prompts_with_full_gradients(files, rows, tmp_path, monkeypatch):
    """The gradient of every parameter, embeddings and prompts included."""
    base = PolicyFiles(base=files.base)
    shared = run(tmp_path / "shared", base, rows, parameters=FullTraining())
    monkeypatch.setattr(row_scores, "shared_prompts", row_scores.whole_rows)
    equal(shared, run(tmp_path / "whole", base, rows, parameters=FullTraining()))


def test_every_row_is_in_one_micro_batch_within_the_budget():
    generator = random.Random(3)
    rows = [TokenRow([1] * (3 + group), [5] * generator.randint(1, 30)) for group in range(6) for _ in range(5)]
    for budget in (1, 20, 60, 200, 10_000):
        batches = group_batches(rows, budget)
        assert sorted(index for batch in batches for index in batch) == list(range(30))
        for batch in batches:
            prompts = {tuple(rows[i].prompt_ids) for i in batch}
            size = len(prompts) * max(map(len, prompts)) + len(batch) * max(len(rows[i].completion_ids) for i in batch)
            assert size <= budget or len(batch) == 1
    assert len(group_batches(rows, 10_000)) == 1


def test_passes_hold_completions_of_like_length(monkeypatch):
    monkeypatch.setattr("models.shared_prompts.SMALL_PASS", 10)
    assert completion_passes([10, 0, 9, 2, 1]) == [[0, 2], [3, 4]]
    monkeypatch.setattr("models.shared_prompts.SMALL_PASS", 1000)
    assert completion_passes([10, 0, 9, 2, 1]) == [[0, 2, 3, 4]]
