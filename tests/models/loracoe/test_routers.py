"""Gates from the input: Arrow and X-LoRA as special cases, the cache, padding, batch mates, gradient checkpointing."""

from types import SimpleNamespace

import pytest
import torch
from peft import ArrowConfig, PeftModel, XLoraConfig, create_arrow_model
from peft.tuners.xlora.layer import XLoraLinearLayer

from data.errors import UserError
from models.loracoe.examples import Batch, Example, make_batch, response_nll
from models.loracoe.gated import GatedModel
from models.loracoe.pool import save_pool
from models.loracoe.router_training import (
    all_prompt_states,
    fit_to_task_gates,
    load_router,
    make_router,
    routed_loss,
    save_router,
    stages,
    train_router,
)
from models.loracoe.routers import SequenceRouter, TokenRouter, keep_largest, prompt_states
from models.settings import SequenceRouterSettings, TokenRouterSettings
from tests.models.loracoe.helpers import examples, logits, pool_of, relative, write_adapter
from tests.tiny import tiny_llama

NAME = "model.layers.0.self_attn.q_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(["a", "b", "c"])}


@pytest.fixture(scope="module")
def pool(folders):
    return pool_of(**folders)


def spread(coefficients, pool, name):
    """One coefficient an adapter (..., E) → gates that are constant on each adapter's ranks (..., R)."""
    return torch.cat(
        [
            coefficients[..., [e]].expand(*coefficients.shape[:-1], block.rank)
            for e, block in enumerate(pool.modules[name].blocks)
        ],
        -1,
    )


def test_e5_arrow_is_a_case_of_block_constant_token_gates(pool, folders):
    """Arrow: softmax over the top adapters of |x · v|, v the first right singular vector of the adapter's delta."""
    model = create_arrow_model(
        tiny_llama(), [str(folder) for folder in folders.values()], ArrowConfig(top_k=2, router_temperature=0.5)
    )
    wanted = logits(model.eval())
    prototypes = {
        name: model.base_model.model.get_submodule(name).lora_arrow["arrow_router"].prototypes for name in pool.modules
    }

    def gates(name):
        def of(x_BTI):
            similarity = (x_BTI @ prototypes[name].T).abs()
            best, index = similarity.topk(2, dim=-1)
            score = torch.full_like(similarity, -torch.inf).scatter(-1, index, best)
            return spread(torch.softmax(score / 0.5, -1), pool, name)

        return of

    with GatedModel(tiny_llama(), pool) as gated:
        gated.set_dynamic({name: gates(name) for name in pool.modules})
        assert relative(logits(gated.model), wanted) < 1e-6
        assert relative(logits(tiny_llama()), wanted) > 1e-3


def test_e6_x_lora_is_a_case_of_block_constant_token_gates(pool, folders):
    model = PeftModel.from_pretrained(tiny_llama(), folders["a"], adapter_name="a")
    for name in ("b", "c"):
        model.load_adapter(folders[name], adapter_name=name)
    model.base_model.set_adapter(["a", "b", "c"])
    target = model.base_model.model.get_submodule(NAME)
    config = XLoraConfig(hidden_size=32, adapters={"0": "x"}, top_k_lora=2)
    layer = XLoraLinearLayer(SimpleNamespace(disabled=False), target, target.forward, 0, config)
    generator = torch.Generator().manual_seed(0)
    x_BTI = torch.randn(2, 5, 32, generator=generator)
    scalings = torch.softmax(torch.randn(2, 5, 1, 3, generator=generator), -1)
    with torch.no_grad(), GatedModel(tiny_llama(), pool) as gated:
        wanted = layer.forward(x_BTI, scalings=scalings)
        gated.modules[NAME].set_dynamic(spread(keep_largest(scalings[:, :, 0], 2), pool, NAME))
        assert relative(gated.modules[NAME](x_BTI), wanted) < 1e-6


def prompts_of(rows):
    return [Example(row.prompt_ids, []) for row in rows]


def generated(gated, batch, cached, count=8):
    return gated.model.generate(
        input_ids=batch.ids_BT,
        attention_mask=batch.attention_mask_BT,
        max_new_tokens=count,
        do_sample=False,
        use_cache=cached,
        eos_token_id=None,
        pad_token_id=0,
    )[:, -count:]


@pytest.fixture(params=["task", "sequence", "token"])
def install(request, pool):
    """Puts gates of each granularity into a model for a batch."""
    generator = torch.Generator().manual_seed(2)
    fixed = {name: torch.randn(module.rank, generator=generator) for name, module in pool.modules.items()}
    sequence, token = SequenceRouter(32, pool, active=6), TokenRouter(pool, active=5)
    for parameter in [*sequence.parameters(), *token.parameters()]:
        parameter.data += torch.randn(parameter.shape, generator=generator)

    def put(gated, batch):
        if request.param == "task":
            gated.set_gates(fixed)
        elif request.param == "sequence":
            sequence.install(gated, batch)
        else:
            token.install(gated)

    return put


def test_e11_cache_batch_mates_and_padding_side_change_nothing(pool, install):
    rows = prompts_of([Example([1, *range(5, 5 + n)], []) for n in (3, 6, 4)])
    with GatedModel(tiny_llama(), pool) as gated, torch.no_grad():
        batch = make_batch(rows, CPU, left=True)
        install(gated, batch)
        cached = generated(gated, batch, True)
        install(gated, batch)
        assert torch.equal(cached, generated(gated, batch, False))
        for index, row in enumerate(rows):
            alone = make_batch([row], CPU)
            install(gated, alone)
            assert torch.equal(cached[[index]], generated(gated, alone, True))
        losses = []
        for left in (False, True):
            scored = make_batch(examples(3), CPU, left=left)
            install(gated, scored)
            losses.append(response_nll(gated.model, scored))
        assert torch.allclose(losses[0], losses[1], atol=1e-5)


def test_a_prompts_state_does_not_see_the_response(pool):
    rows = examples(3)
    with GatedModel(tiny_llama(), pool) as gated:
        whole = prompt_states(gated, make_batch(rows, CPU))
        prompts = prompt_states(gated, make_batch(prompts_of(rows), CPU, left=True))
    assert torch.allclose(whole, prompts, atol=1e-5)


def test_equal_token_gates_have_the_mass_of_one_adapter(pool):
    router = TokenRouter(pool)
    for weight in router.weights:
        weight.data.zero_()
    x_BTI = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(router.gates(0, torch.randn(1, 3, 64)), torch.full((1, 3, 12), 4 / 12))
    whole = TokenRouter(pool, mass=12.0)
    for weight in whole.weights:
        weight.data.zero_()
    assert torch.allclose(whole.gates(1, x_BTI), torch.ones(1, 3, 12)), "with mass R, all adapters at gate 1"


def test_the_selection_bias_selects_but_never_enters_a_gate(pool):
    router = TokenRouter(pool, active=2)
    index = router.names.index(NAME)
    x_BTI = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    router.biases[index].data[[3, 7]] = 10.0
    gates = router.gates(index, x_BTI)
    probabilities = torch.sigmoid(x_BTI @ router.weights[index].T)[..., [3, 7]]
    assert gates.nonzero()[:, -1].unique().tolist() == [3, 7]
    assert torch.allclose(gates[..., [3, 7]], 4 * probabilities / probabilities.sum(-1, keepdim=True))


def test_balancing_lifts_what_is_used_too_little(pool):
    router = TokenRouter(pool, active=1)
    router.load = {NAME: torch.tensor([0.5, 0.1, 0.0, *[0.04] * 9])}  # mean 0.08
    router.update_bias(0.01)
    bias = router.biases[router.names.index(NAME)]
    assert bias.tolist() == pytest.approx([-0.01, -0.01, 0.01, *[0.01] * 9])


SETTINGS = [
    SequenceRouterSettings(steps=25, learning_rate=5e-2, batch_size=8, active=8),
    SequenceRouterSettings(steps=25, learning_rate=5e-2, batch_size=8, active=8, straight_through=True),
    TokenRouterSettings(steps=25, learning_rate=5e-2, batch_size=8, active=8, balance="loss_free"),
    TokenRouterSettings(
        steps=25, learning_rate=5e-2, batch_size=8, active=8, shared=True, balance="switch", z_loss=1e-3
    ),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["sequence", "straight-through", "token", "shared"])
def test_training_a_router_lowers_the_loss_and_leaves_pool_and_base(pool, settings):
    model = tiny_llama()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    router = make_router(pool, 32, settings, seed=0)
    with GatedModel(model, pool) as gated:
        before = {name: module.A_RI.clone() for name, module in gated.modules.items()}
        trained = train_router(gated, router, examples(8), settings, validation=examples(4, seed=9))
        assert all(torch.equal(module.A_RI, before[name]) for name, module in gated.modules.items())
        assert set(trained.validation) == {20, 22, 23, 25}, "only with the final number of open gates"
        kept = routed_loss(gated, router, examples(4, seed=9), 8)
        assert kept == pytest.approx(min(trained.validation.values()), rel=1e-6)
    assert trained.losses[-1] < trained.losses[0] - 0.01
    assert router.active == 8
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())


def test_the_cuts_come_in_stages():
    assert stages(TokenRouterSettings(steps=100, active=16)) == [(0, None), (40, 24), (70, 16)]
    assert stages(TokenRouterSettings(steps=100)) == [(0, None)]


@pytest.mark.parametrize("unfreeze", ["B", "A_and_B"])
def test_unfrozen_factors_move_late_and_slowly_and_are_kept(pool, unfreeze, tmp_path):
    settings = TokenRouterSettings(steps=10, learning_rate=1e-2, unfreeze=unfreeze, unfreeze_from=0.5)
    with GatedModel(tiny_llama(), pool) as gated:
        router = make_router(pool, 32, settings, seed=0)
        rates = []
        train_router(
            gated, router, examples(6), settings, on_step=lambda step: rates.append(factors_moved(gated, pool, step))
        )
        assert [step for step, (a, b) in enumerate(rates, 1) if b] == [6, 7, 8, 9, 10]
        assert any(a for a, _ in rates) == (unfreeze == "A_and_B")
        wanted = routed_loss(gated, router, examples(4), 4)
        save_router(router, settings, gated, tmp_path)
    loaded, again = load_router(tmp_path, tmp_path / "no pool here", 32)
    with GatedModel(tiny_llama(), loaded) as gated:
        assert routed_loss(gated, again, examples(4), 4) == pytest.approx(wanted, rel=1e-6)


def factors_moved(gated, pool, step):
    """Whether A and B of a layer differ from the pool's; at the first moved step by at most a tenth of the rate."""
    layer, start = gated.modules[NAME], pool.modules[NAME]
    moved = [
        float((now.detach() - was).abs().max()) for now, was in ((layer.A_RI, start.A_RI), (layer.B_OR, start.B_OR))
    ]
    if step == 6:
        assert max(moved) <= 0.1 * 1e-2
    return moved[0] > 0, moved[1] > 0


def test_a_sequence_router_starts_from_the_tasks_gates(pool, tmp_path):
    rows = [Example([1, *([10] * 4)], [7, 2]) for _ in range(6)] + [Example([1, *([60] * 4)], [7, 2]) for _ in range(6)]
    tasks = ["a"] * 6 + ["b"] * 6
    gates = {name: pool.one_hot_gates(name) for name in ("a", "b")}
    with GatedModel(tiny_llama(), pool) as gated:
        settings = SequenceRouterSettings()
        router = make_router(pool, 32, settings, seed=0)
        states = all_prompt_states(gated, rows, 5)
        router.fit_scale(states)
        assert fit_to_task_gates(router, states, tasks, gates, 200, 5e-2, 0) < 0.05
        with torch.no_grad():
            found = router(states[[0, 11]])
        for name in pool.modules:
            for row, task in enumerate(("a", "b")):
                assert torch.allclose(found[name][row, 0], gates[task][name], atol=0.1)
        save_router(router, settings, gated, tmp_path)
        save_pool(pool, tmp_path / "pool")
    _, again = load_router(tmp_path, tmp_path / "pool", 32)
    assert torch.equal(again(states)[NAME], router(states)[NAME])
    with pytest.raises(UserError, match="holds no router"):
        load_router(tmp_path / "pool", tmp_path / "pool", 32)


def test_straight_through_changes_gradients_only(pool):
    x_BTI = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for through in (False, True):
        router = TokenRouter(pool, active=2, straight_through=through)
        index = router.names.index(NAME)
        gates = router.gates(index, x_BTI)
        (gates * (torch.arange(gates.shape[-1]) + 1)).sum().backward()
        found.append((gates.detach(), router.weights[index].grad))
    (gates, gradient), (other_gates, other_gradient) = found
    assert torch.equal(gates, other_gates)
    open_anywhere = (gates != 0).any(0).any(0)
    assert not gradient[~open_anywhere].any(), "closed gates learn nothing"
    assert other_gradient[~open_anywhere].any(1).all(), "and all of them do with straight-through"


def test_switch_and_z_loss_by_hand(pool):
    router = TokenRouter(pool)
    router.load = {NAME: torch.tensor([1.0, 1.0, 0.0, 0.0])}  # two of four, always the same
    router._preference = {NAME: torch.tensor([0.4, 0.4, 0.1, 0.1])}
    assert router.switch_loss().item() == pytest.approx(4 * (0.5 * 0.4 + 0.5 * 0.4))
    router.load = {NAME: torch.full((4,), 0.5)}
    assert router.switch_loss().item() == pytest.approx(1.0)
    router._squares = {NAME: torch.tensor(4.0), "other": torch.tensor(1.0)}
    assert router.z_loss().item() == pytest.approx(2.5)


def test_padding_is_not_counted_by_the_losses(pool):
    found = []
    for width in (0, 5):
        router = TokenRouter(pool, active=3)
        rows = examples(3)
        batch = make_batch([*rows, Example([1] * (12 + width), [2])], CPU)
        kept = Batch(
            batch.ids_BT[:3], batch.attention_mask_BT[:3], batch.prompt_mask_BT[:3], batch.targets_N, batch.labels_N
        )
        with GatedModel(tiny_llama(), pool) as gated:
            router.install(gated, kept)
            logits(gated.model, kept.ids_BT)
        found.append((router.switch_loss().item(), router.z_loss().item()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_layers_of_one_shape_share_a_router(pool):
    router = TokenRouter(pool, shared=True)
    shapes = {(module.rank, module.A_RI.shape[1]) for module in pool.modules.values()}
    assert len(router.weights) == len(shapes) < len(pool.modules) == len(router.biases)
    assert sum(p.numel() for p in router.parameters()) < sum(p.numel() for p in TokenRouter(pool).parameters())


def test_e13_gradient_checkpointing_changes_neither_loss_nor_gradient_nor_load(pool):
    found = []
    for checkpointing in (False, True):
        model, router = tiny_llama(), TokenRouter(pool, active=4)
        model.train()  # checkpointing is only used in training mode; the model has no dropout
        if checkpointing:
            model.gradient_checkpointing_enable()
        with GatedModel(model, pool) as gated:
            batch = make_batch(examples(4), CPU)
            router.install(gated, batch)
            calls = []
            for module in gated.modules.values():
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            loss = response_nll(gated.model, batch).mean()
            loss.backward()
        found.append((loss.detach(), [weight.grad for weight in router.weights], dict(router.load), calls))
    (loss, gradients, load, once), (other_loss, other_gradients, other_load, twice) = found
    assert len(once) == 6 and len(twice) == 10, "run again for the backward pass, up to what it needs"
    assert torch.equal(loss, other_loss)
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(gradients, other_gradients, strict=True))
    assert all(torch.equal(load[name], other_load[name]) for name in load)
    assert load[NAME].sum().item() == pytest.approx(4)


def test_keep_largest_by_hand():
    gates = torch.tensor([[0.1, 0.5, 0.3], [0.9, 0.2, 0.8]])
    assert torch.allclose(keep_largest(gates, 2), torch.tensor([[0, 0.5, 0.3], [0.9, 0, 0.8]]))
    assert torch.equal(keep_largest(gates, None), gates)
