"""Supervised warm-up: what is learned, in which order, and that micro-batches change nothing."""

import pytest
import torch

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.settings import PlainPrompt
from models.policy import Policy
from models.requests import PolicyFiles, WarmupRequest
from models.scoring import TokenRow
from models.settings import FullTraining, LoraTraining, WarmupSettings
from models.supervised import fit, gradient, learning_rate_at
from models.warmup import plan_batches, training_rows, warm_up
from tests.tiny import save_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def demonstrations(tmp_path):
    rows = [
        {
            "task": "t",
            "item_id": f"{number:02}",
            "question": f"What is {number} + 1?",
            "rationale": f"{number} + 1 = {number + 1}",
            "response": f"{number} + 1 = {number + 1}\n#### {number + 1}",
            "answer": str(number + 1),
            "answer_kind": "number",
            "steps": [f"{number} + 1 = {number + 1}"],
            "source": "made",
            "row_number": number,
            "split": "validation" if number == 0 else "train",
        }
        for number in range(9)
    ]
    path = tmp_path / "demonstrations.parquet"
    write_table(path, "demonstrations", rows)
    return path


def request(base, demonstrations, parameters=LoraTraining(rank=4), **settings):  # noqa: B008
    defaults = {"epochs": 6.0, "batch_size": 4, "learning_rate": 2e-2}
    return WarmupRequest(
        policy=PolicyFiles(base=base),
        parameters=parameters,
        prompt=PlainPrompt(),
        warmup=WarmupSettings(**(defaults | settings)),
        demonstrations=demonstrations,
        seed=3,
    )


@pytest.mark.parametrize("parameters", [LoraTraining(rank=4), FullTraining()])
def test_warm_up_lowers_the_loss_and_saves_what_it_learned(base, demonstrations, tmp_path, parameters):
    out = tmp_path / "out"
    out.mkdir()
    figures = warm_up(request(base, demonstrations, parameters), out, Silent())
    assert (figures["demonstrations"], figures["steps"], figures["left_out"]) == (8, 12, 0)
    assert figures["last_loss"] < figures["first_loss"] - 0.2
    losses = [row["value"] for row in read_rows(out / "metrics.parquet", "metrics") if row["name"] == "loss"]
    assert losses[0] == figures["first_loss"] and len(losses) == 12
    trained = Policy.load(PolicyFiles(base=base, weights=out / "weights"))
    rows, _ = training_rows(trained, demonstrations, PlainPrompt())
    before = -torch.cat(Policy.load(PolicyFiles(base=base)).completion_logprobs(rows)).mean().item()
    assert -torch.cat(trained.completion_logprobs(rows)).mean().item() < before - 0.2


def test_the_same_request_gives_the_same_bytes(base, demonstrations, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        warm_up(request(base, demonstrations, epochs=1.0), tmp_path / name, Silent())
    for name in ("metrics.parquet", "weights/adapter_model.safetensors", "weights/adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_rows_learn_response_and_eos_of_the_training_split_alone(base, demonstrations):
    policy = Policy.load(PolicyFiles(base=base))
    rows, left_out = training_rows(policy, demonstrations, PlainPrompt())
    assert (len(rows), left_out) == (8, 0)
    assert policy.tokenizer.decode(rows[0].prompt_ids) == "<s>What is 1 + 1?\n"
    assert policy.tokenizer.decode(rows[0].completion_ids) == "1 + 1 = 2\n#### 2</s>"


def test_demonstrations_over_the_context_are_left_out_and_counted(base, demonstrations):
    policy = Policy.load(PolicyFiles(base=base))
    policy.context = 37
    lengths = [
        len(row.prompt_ids) + len(row.completion_ids) for row in training_rows(policy, demonstrations, PlainPrompt())[0]
    ]
    assert lengths and max(lengths) <= 37
    policy.context = 20
    with pytest.raises(UserError, match="8 of its training split are longer than the model's context of 20"):
        training_rows(policy, demonstrations, PlainPrompt())


def gradients(network):
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.requires_grad])


def test_one_batch_of_eight_is_eight_batches_of_one(base, demonstrations):
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=4), trainable=True)
    torch.manual_seed(0)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = training_rows(policy, demonstrations, PlainPrompt())[0]
    rows += [TokenRow(row.prompt_ids, row.completion_ids[:3]) for row in rows[:3]]  # rows of other lengths
    found = []
    for budget in (1, 100, 100_000):
        policy.model.zero_grad()
        loss, tokens = gradient(policy.network, rows, budget)
        assert tokens == sum(len(row.completion_ids) for row in rows)
        found.append((loss, gradients(policy.network)))
    for loss, values in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert ((values - found[0][1]).norm() / found[0][1].norm()).item() < 1e-5


def test_the_loss_is_the_mean_over_tokens_not_over_micro_batches(base):
    # 100 tokens of mean 2.0 and 900 of mean 0.5 are 0.65 a token, not 1.25: rows of very different lengths.
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=4), trainable=True)
    rows = [TokenRow([1], [5, 6]), TokenRow([1], list(range(4, 90)))]
    loss, _ = gradient(policy.network, rows, 1)
    expected = -torch.cat(policy.completion_logprobs(rows)).mean().item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_plan_is_whole_passes_in_new_orders():
    settings = WarmupSettings(epochs=2.5, batch_size=3)
    plan = plan_batches(8, settings, seed=1)
    order = [index for batch in plan for index in batch]
    assert len(order) == 20 and [len(batch) for batch in plan] == [3] * 6 + [2]
    assert sorted(order[:8]) == sorted(order[8:16]) == list(range(8)) and order[:8] != order[8:16]
    assert plan_batches(8, settings, seed=1) == plan != plan_batches(8, settings, seed=2)
    assert plan_batches(8, WarmupSettings(epochs=2.5, batch_size=3, max_steps=2), seed=1) == plan[:2]
    assert plan_batches(8, WarmupSettings(epochs=0), seed=1) == []


def test_no_step_saves_the_untrained_adapter(base, demonstrations, tmp_path):
    figures = warm_up(request(base, demonstrations, max_steps=0), tmp_path, Silent())
    assert figures["steps"] == 0 and figures["first_loss"] is None
    assert Policy.load(PolicyFiles(base=base, weights=tmp_path / "weights")).has_adapter


def test_learning_rate_by_hand():
    assert [learning_rate_at(step, 10, 1.0, "constant", 0.2) for step in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, 4, 1.0, "cosine", 0.0) == 1.0
    assert learning_rate_at(2, 4, 1.0, "cosine", 0.0) == pytest.approx(0.5)
    assert learning_rate_at(3, 4, 1.0, "cosine", 0.0) == pytest.approx(0.5 * (1 + 2**0.5 / -2))


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(base):
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=4), trainable=True)
    with torch.no_grad():
        policy.trainable_parameters()[0][1].fill_(float("nan"))
    before = policy.adapter_hash()
    with pytest.raises(FloatingPointError, match="step 1"):
        fit(
            policy.network,
            [[TokenRow([1], [5])]],
            learning_rate=1e-3,
            schedule="constant",
            warmup_ratio=0.0,
            weight_decay=0.0,
            max_gradient_norm=1.0,
            tokens_per_micro_batch=100,
            report=Silent(),
            what="warm-up",
        )
    assert policy.adapter_hash() == before
