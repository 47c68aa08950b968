"""Gates of a task: chosen by importance, trained from a start."""

import pytest
import torch

from models.loracoe.examples import mean_loss
from models.loracoe.gated import GatedModel
from models.loracoe.gates import gates_from_importance, train_gates
from tests.models.loracoe.helpers import examples, logits, pool_of, write_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return pool_of(a=write_adapter(root / "a", 1), b=write_adapter(root / "b", 2, r=3, target_modules=["q_proj"]))


def test_importance_opens_as_many_helpful_ranks_as_one_adapter_has(pool):
    scores = {name: torch.ones(module.rank) for name, module in pool.modules.items()}
    name = "model.layers.0.self_attn.q_proj"  # ranks 4 + 3: the mean is 3.5, so up to 4 are opened
    scores[name] = torch.tensor([-0.1, 0.5, -0.2, -0.01, -0.9, -0.3, 0.0])
    gates = gates_from_importance(pool, scores)
    assert gates[name].tolist() == [1, 0, 1, 0, 1, 1, 0]
    assert gates["model.layers.0.mlp.down_proj"].tolist() == [0, 0, 0, 0], "every rank there would raise the loss"
    assert gates_from_importance(pool, scores, active=2)[name].tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert gates_from_importance(pool, scores, active=7)[name].tolist() == [1, 0, 1, 1, 1, 1, 0]


def test_training_lowers_the_loss_and_only_moves_gates(pool):
    model = tiny_llama()
    base = logits(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    start = pool.one_hot_gates("a")
    rows = examples(8)
    with GatedModel(model, pool) as gated:
        gated.set_gates(start)
        before = mean_loss(model, rows, 4, torch.device("cpu"))
        trained = train_gates(gated, start, rows, [], steps=30, learning_rate=5e-2, batch_size=4, seed=1)
        gated.set_gates(trained.gates)
        after = mean_loss(model, rows, 4, torch.device("cpu"))
    assert after < before - 0.01
    assert len(trained.losses) == 30 and trained.chosen_step == 30
    assert all(value.equal(model.state_dict()[name]) for name, value in weights.items())
    assert torch.equal(logits(model), base)
    assert start["model.layers.0.mlp.down_proj"].tolist() == [1, 1, 1, 1], "the start is left as it was"


def test_training_never_leaves_the_start_for_a_worse_validation_loss(pool):
    start = pool.one_hot_gates("a")
    training, validation = examples(4, seed=1), examples(4, seed=2)
    with GatedModel(tiny_llama(), pool) as gated:
        trained = train_gates(gated, start, training, validation, steps=20, learning_rate=0.5, batch_size=4, seed=1)
        gated.set_gates(trained.gates)
        kept = mean_loss(gated.model, validation, 4, torch.device("cpu"))
    assert sorted(trained.validation) == [0, 5, 10, 15, 20]
    assert kept == pytest.approx(min(trained.validation.values()), abs=1e-6)
    assert trained.validation[trained.chosen_step] == min(trained.validation.values())


def test_training_is_deterministic(pool):
    start = pool.one_hot_gates("b")
    runs = []
    for _ in range(2):
        with GatedModel(tiny_llama(), pool) as gated:
            trained = train_gates(gated, start, examples(5), [], steps=4, learning_rate=2e-2, batch_size=2, seed=7)
            runs.append(trained.gates)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
