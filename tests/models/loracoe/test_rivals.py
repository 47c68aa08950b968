"""The rivals on tiny adapters: PEFT's merges against their formulae, the gate rivals against hand-made cases, costs."""

from itertools import pairwise

import pytest
import torch
from peft import PeftModel

from data.errors import UserError
from models.loracoe.examples import mean_loss
from models.loracoe.gated import GatedModel
from models.loracoe.rivals import (
    BlockRouter,
    arrow,
    fresh_pool,
    gated_rival,
    lora_soups,
    lorahub,
    merged,
    smora_settings,
    spread,
)
from models.loracoe.router_training import make_router, train_router
from models.loracoe.xlora import train_xlora, xlora_model, xlora_rival
from models.policy import Policy
from models.requests import Device, PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.transformers_engine import TransformersEngine
from models.settings import TokenRouterSettings
from tests.models.loracoe.helpers import examples, logits, pool_of, relative, write_adapter
from tests.tiny import save_base, tiny_llama

CPU = Device(device="cpu", threads=1)
NAME = "model.layers.0.self_attn.q_proj"
DEVICE = torch.device("cpu")
ROWS = [RolloutInput([1, 5, 6], 1, 5), RolloutInput([1, 40, 41, 42], 2, 7), RolloutInput([1, 9], 3, 4)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("rivals")
    base = save_base(root / "base", tiny_llama())
    return PolicyFiles(base=base), {name: write_adapter(root / name, seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def pool(place):
    return pool_of(**place[1])


def policy_of(place):
    policy = Policy.load(place[0], compute=CPU)
    policy.eos_ids = frozenset()
    return policy


def delta(module, block):
    own = slice(block.start, block.stop)
    return block.scale * module.B_OR[:, own] @ module.A_RI[own]


@pytest.mark.parametrize("how", ["cat", "cat_mean", "linear", "svd", "ties_svd", "dare_linear_svd"])
def test_a_merge_is_an_adapter_that_the_engine_samples(place, pool, how, tmp_path):
    rival = merged(how, place[0], place[1], tmp_path, seed=0, compute=CPU)
    assert rival.stored_rank == rival.active_rank == (12 if how.startswith("cat") else 4)
    assert rival.trainable_parameters == 0
    assert [
        len(output.completion_ids) <= row.max_new_tokens for output, row in zip(rival.engine.generate(ROWS, 1.0), ROWS)
    ]
    layer = rival.engine.policy.network.get_submodule(NAME)
    found = layer.get_delta_weight("default")
    wanted = sum(delta(pool.modules[NAME], block) for block in pool.modules[NAME].blocks)
    if how in ("cat", "cat_mean"):
        assert relative(found, wanted / (1 if how == "cat" else 3)) < 1e-5
    elif how == "svd":
        u, s, vh = torch.linalg.svd(wanted)
        assert relative(found, (u[:, :4] * s[:4]) @ vh[:4]) < 1e-4, "the best approximation of rank 4"
    else:
        assert relative(found, wanted) > 0.05, "neither sum nor mean"


def test_a_merge_that_peft_does_wrongly_is_refused(place, tmp_path):
    stabilised = write_adapter(tmp_path / "s", 5, use_rslora=True)
    with pytest.raises(UserError, match="too strongly"):
        merged("cat", place[0], place[1] | {"s": stabilised}, tmp_path / "out", seed=0, compute=CPU)
    wide = write_adapter(tmp_path / "w", 5, r=6)
    with pytest.raises(UserError, match="of one rank"):
        merged("linear", place[0], place[1] | {"w": wide}, tmp_path / "out", seed=0, compute=CPU)


def test_arrow_is_pefts(place, pool):
    from peft import ArrowConfig, create_arrow_model

    policy = policy_of(place)
    rival = arrow(policy, place[1], pool, top=2, temperature=0.5)
    config = ArrowConfig(top_k=2, router_temperature=0.5)
    peft = create_arrow_model(tiny_llama(), [str(folder) for folder in place[1].values()], config).eval()
    torch.manual_seed(0)  # of PEFT's power iteration
    assert relative(logits(peft), logits(policy.network)) < 1e-6
    assert (rival.stored_rank, rival.active_rank) == (12, 8.0)
    greedy = [output.completion_ids for output in rival.engine.generate(ROWS, 0)]
    ids = torch.tensor([ROWS[0].prompt_ids])
    wanted = peft.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy[0] == wanted[0, 3:].tolist()


def test_x_lora_trains_its_classifier_only_and_answers_as_pefts_generate(place):
    policy = policy_of(place)
    model = xlora_model(policy.network, place[1], seed=0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    losses = train_xlora(model, examples(8), steps=8, learning_rate=5e-2, batch_size=8, seed=0)
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("classifier" in name for name in moved)
    assert losses[-1] < losses[0]
    rival = xlora_rival(policy, model)
    assert rival.trainable_parameters == 32 * 6 * 3 + 6 * 3 and (rival.stored_rank, rival.active_rank) == (12, 12.0)
    found = rival.engine.generate(ROWS, 0)
    for row, output in zip(ROWS, found):
        ids = torch.tensor([row.prompt_ids])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": row.max_new_tokens}
        assert output.completion_ids == model.generate(input_ids=ids, **options)[0, len(row.prompt_ids) :].tolist()
        assert output.stop_reason == "length"


def test_the_engine_without_a_cache_samples_as_the_cached_one(place):
    from models.loracoe.xlora import WholeRowEngine

    policy = policy_of(place)
    policy.eos_ids = frozenset(range(4, 30))
    one = WholeRowEngine(policy, policy.network, batch_size=2).generate(ROWS * 3, 1.0)
    other = TransformersEngine(policy).generate(ROWS * 3, 1.0)
    assert [output.completion_ids for output in one] == [output.completion_ids for output in other]
    assert {output.stop_reason for output in one} == {"eos", "length"}
    for a, b in zip(one, other):
        assert a.stop_reason == b.stop_reason and torch.allclose(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4
        )


def test_soups_learns_a_weight_for_each_adapter_and_layer(place, pool):
    policy = policy_of(place)
    with GatedModel(policy.network, pool) as gated:
        start = lora_soups(gated, examples(8), steps=0, learning_rate=1e-2, batch_size=8, seed=0)
        gates = lora_soups(gated, examples(8), steps=12, learning_rate=5e-2, batch_size=8, seed=0)
        losses = []
        for tried in (start, gates):
            gated.set_gates(tried)
            losses.append(mean_loss(gated.model, examples(8), 8, DEVICE))
    assert all(torch.allclose(gate, torch.full((12,), 1 / 3)) for gate in start.values())
    assert losses[1] < losses[0]
    assert (
        all(len(set(gate.tolist())) == 3 for gate in gates.values())
        and len({tuple(g.tolist()) for g in gates.values()}) == 6
    )


def test_lorahub_finds_one_weight_an_adapter_without_gradients(place, pool):
    asked = {"trials": 25, "batch_size": 6, "seed": 0}
    with GatedModel(policy_of(place).network, pool) as gated:
        gates, scores = lorahub(gated, examples(6), l1_weight=1e-3, **asked)
        gated.set_gates(gates)
        weights = gates[NAME].reshape(3, 4)[:, 0]
        wanted = mean_loss(gated.model, examples(6), 6, DEVICE) + 1e-3 * weights.abs().mean()
        penalised, _ = lorahub(gated, examples(6), l1_weight=10.0, **asked)
    assert all(later <= earlier for earlier, later in pairwise(scores)) and scores[-1] < scores[0] - 1e-3
    assert scores[-1] == pytest.approx(float(wanted), rel=1e-5)
    assert len({tuple(gate.tolist()) for gate in gates.values()}) == 1 and len(set(gates[NAME].tolist())) == 3
    assert not any(gate.any() for gate in penalised.values()), "nothing pays the penalty"


def test_softmax_blocks_start_near_one_over_t_and_learn(place, pool):
    policy = policy_of(place)
    router = BlockRouter(pool)
    settings = TokenRouterSettings(steps=12, learning_rate=5e-2, batch_size=8)
    with GatedModel(policy.network, pool) as gated:
        losses = train_router(gated, router, examples(8), settings).losses
        assert losses[-1] < losses[0]
        router.install(gated)
        wanted = logits(gated.model)
    rival = gated_rival("mole", policy, pool, router, sum(p.numel() for p in router.parameters()))
    assert torch.equal(logits(policy.network), wanted)
    assert (rival.stored_rank, rival.active_rank) == (
        12,
        12.0,
    ) and rival.trainable_parameters == 4 * 32 * 3 + 2 * 64 * 3
    assert len(rival.engine.generate(ROWS, 0)) == 3


def test_smora_trains_fresh_ranks_and_the_router_together(place, pool):
    policy, fresh = policy_of(place), fresh_pool(pool, seed=1)
    settings = smora_settings(active=4, steps=10, learning_rate=2e-2, batch_size=8)
    router = make_router(fresh, 32, settings, seed=0)
    with GatedModel(policy.network, fresh) as gated:
        router.install(gated)
        assert torch.equal(logits(gated.model), logits(tiny_llama())), "B is 0: the base"
        losses = train_router(gated, router, examples(8), settings).losses
        trained = gated.current_pool()
    assert losses[-1] < losses[0] and float(trained.modules[NAME].B_OR.abs().max()) > 0
    assert not torch.equal(trained.modules[NAME].A_RI, fresh.modules[NAME].A_RI)
    rival = gated_rival("smora", policy, trained, router, 1, active=4.0)
    assert rival.active_rank == 4.0 and len(rival.engine.generate(ROWS, 0)) == 3


def test_static_gates_count_the_ranks_that_are_open(place, pool):
    policy = policy_of(place)
    rival = gated_rival("one", policy, pool, pool.one_hot_gates("b"), 0)
    assert (rival.stored_rank, rival.active_rank) == (12, 4.0)
    alone = PeftModel.from_pretrained(tiny_llama(), place[1]["b"]).eval()
    assert torch.equal(logits(policy.network), logits(alone))


def test_coefficients_are_spread_over_an_adapters_ranks(place, tmp_path):
    pool = pool_of(a=place[1]["a"], w=write_adapter(tmp_path / "w", 5, r=6))
    gates = spread(torch.tensor([[0.25, 2.0]]), pool.modules[NAME])
    assert gates.tolist() == [[0.25] * 4 + [2.0] * 6]
