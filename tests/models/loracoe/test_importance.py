"""Rank importance: exact identities of the gate gradient, and its invariances."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.loracoe.concentration import gini, jaccard_of_top, mass_in_top, share_by_source
from models.loracoe.examples import batches_of, make_batch, mean_loss, position_ids, response_nll
from models.loracoe.gated import GatedModel
from models.loracoe.importance import ablation, adalora_score, gate_fisher, gate_gradient, mask_count
from models.loracoe.pool import Pool, svd_basis
from tests.models.loracoe.helpers import examples, logits, pool_of, relative, write_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return pool_of(a=write_adapter(root / "a", 1), b=write_adapter(root / "b", 2, r=3, lora_alpha=5, use_rslora=True))


def scores_of(pool, at=1.0, rows=5, measure=gate_gradient):
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        return measure(gated, examples(rows), pool.constant_gates(at))


def changed(pool, change):
    """The pool with `change(A, B)` applied to every layer's factors, in float64."""
    modules = {}
    for name, module in pool.modules.items():
        A, B = change(module.A_RI.double(), module.B_OR.double())
        modules[name] = replace(module, A_RI=A, B_OR=B)
    return Pool(modules, pool.sources)


def close(one, other, tolerance=1e-12):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


def test_e10_the_gate_gradient_is_the_inner_product_of_factor_and_gradient(pool):
    """At gates 1: c_i = <dL/dA_i, A_i> = <dL/dB_i, B_i>."""
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        scores = gate_gradient(gated, examples(5), pool.constant_gates(1.0), batch_size=2)
        gated.set_dynamic({name: torch.ones(module.rank) for name, module in pool.modules.items()})
        for module in gated.modules.values():
            module.A_RI.requires_grad_(True), module.B_OR.requires_grad_(True)
        batch = make_batch(examples(5), torch.device("cpu"))
        response_nll(gated.model, batch).mean().backward()
        for name, module in gated.modules.items():
            by_a = (module.A_RI.grad * module.A_RI).sum(1)
            by_b = (module.B_OR.grad * module.B_OR).sum(0)
            # the loss is taken in float32: its own rounding, not that of the identity, is what differs
            assert torch.allclose(by_a, by_b, rtol=0, atol=1e-15)
            assert torch.allclose(scores[name], by_a.detach(), rtol=0, atol=1e-8)


def test_e10_rescaling_a_rank_changes_nothing(pool):
    def rescale(A, B):
        factor = torch.linspace(0.25, 4, len(A), dtype=torch.float64)[:, None]
        return A * factor, B / factor.T

    assert close(scores_of(pool), scores_of(changed(pool, rescale)), 1e-9)


def test_e9_permuted_ranks_have_permuted_scores_and_the_same_output(pool):
    one = pool_of_one(pool)
    order = {
        name: torch.randperm(module.rank, generator=torch.Generator().manual_seed(3))
        for name, module in one.modules.items()
    }
    permuted = Pool(
        {
            name: replace(module, A_RI=module.A_RI[order[name]], B_OR=module.B_OR[:, order[name]])
            for name, module in one.modules.items()
        },
        one.sources,
    )
    before, after = scores_of(one), scores_of(permuted)
    assert close({name: before[name][order[name]] for name in before}, after, 1e-9)
    with GatedModel(tiny_llama(), one) as gated:
        gated.set_gates(one.constant_gates(1.0))
        wanted = logits(gated.model)
    with GatedModel(tiny_llama(), permuted) as gated:
        gated.set_gates(one.constant_gates(1.0))
        assert relative(logits(gated.model), wanted) < 1e-6


def pool_of_one(pool):
    """The pool of its first adapter alone (single mode)."""
    modules = {}
    for name, module in pool.modules.items():
        block = module.blocks[0]
        modules[name] = replace(
            module,
            A_RI=module.A_RI[: block.stop],
            B_OR=module.B_OR[:, : block.stop],
            scale_R=module.scale_R[: block.stop],
            blocks=(block,),
        )
    return Pool(modules, pool.sources[:1])


def test_svd_basis_keeps_the_function_and_the_sum_of_scores_but_not_the_scores(pool):
    rotated = svd_basis(changed(pool, lambda A, B: (A, B)))
    before, after = scores_of(pool), scores_of(rotated)
    for name, module in rotated.modules.items():
        start = 0
        for block in module.blocks:
            ranks = slice(start, block.stop)
            start = block.stop
            old = pool.modules[name]
            delta = old.B_OR[:, ranks].double() @ old.A_RI[ranks].double()
            assert relative(module.B_OR[:, ranks] @ module.A_RI[ranks], delta) < 1e-12
            assert before[name][ranks].sum().item() == pytest.approx(after[name][ranks].sum().item(), abs=1e-8)
            strength = module.B_OR[:, ranks].norm(dim=0)
            assert (strength[:-1] >= strength[1:]).all()
    assert not close(before, after, 1e-6)


def test_scores_do_not_depend_on_the_batch_size(pool):
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        whole = gate_gradient(gated, examples(5), pool.constant_gates(0.0), batch_size=16)
        pieces = gate_gradient(gated, examples(5), pool.constant_gates(0.0), batch_size=2)
    assert close(whole, pieces, 1e-9)


def test_the_gate_gradient_predicts_ablation(pool):
    name = "model.layers.1.mlp.down_proj"
    at = pool.constant_gates(1.0)
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        scores = gate_gradient(gated, examples(6), at)[name]
        exact = torch.tensor(ablation(gated, examples(6), [(name, rank) for rank in range(7)], at))
    # L(g_i = 0) - L(g_i = 1) ~ -c_i, up to curvature
    assert torch.corrcoef(torch.stack([exact, -scores.float()]))[0, 1] > 0.9


def test_fisher_is_the_mean_of_squared_per_example_gradients(pool):
    rows = examples(3)
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        at = pool.constant_gates(1.0)
        fisher = gate_fisher(gated, rows, at)
        single = [gate_gradient(gated, [row], at) for row in rows]
    for name, value in fisher.items():
        wanted = sum(scores[name] ** 2 for scores in single) / 3
        assert torch.allclose(value, wanted, rtol=1e-6, atol=1e-16)


def test_mask_counts_share_out_the_top_elements(pool):
    scores = scores_of(pool, measure=mask_count)
    for name, module in pool.modules.items():
        wanted = sum(max(1, round(0.01 * factor.numel())) for factor in (module.A_RI, module.B_OR))
        assert scores[name].sum() == wanted
        assert (scores[name] == scores[name].round()).all()


def test_elementwise_measures_leave_the_pool_frozen_and_are_zero_where_gates_are(pool):
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        scores = adalora_score(gated, examples(5), pool.one_hot_gates("a"), batch_size=2)
        assert not any(parameter.requires_grad for parameter in gated.model.parameters())
    for name, module in pool.modules.items():
        for block in module.blocks:
            part = scores[name][block.start : block.stop]
            assert (part > 0).all() if block.source == "a" else (part == 0).all()


def test_adalora_of_one_batch_by_its_definition(pool):
    """One batch from 0: Ibar = 0.15 I, Ubar = 0.15 |I - Ibar| = 0.1275 I, so an element scores 0.019125 I²."""
    name, rows = "model.layers.0.self_attn.q_proj", examples(3)
    with GatedModel(tiny_llama().double(), pool, torch.float64) as gated:
        at = pool.constant_gates(1.0)
        scores = adalora_score(gated, rows, at)[name]
        gate = gate_gradient(gated, rows, at)[name]
        module = gated.modules[name]
        gated.set_dynamic(at)
        module.A_RI.requires_grad_(True), module.B_OR.requires_grad_(True)
        response_nll(gated.model, make_batch(rows, torch.device("cpu"))).mean().backward()
    squares = (
        gate**2 + ((module.A_RI.grad * module.A_RI) ** 2).mean(1) + ((module.B_OR.grad * module.B_OR) ** 2).mean(0)
    )
    assert torch.allclose(scores, 0.15 * 0.15 * 0.85 * squares.detach(), rtol=1e-5, atol=1e-18)


def test_left_padding_and_batch_mates_change_no_loss():
    rows, model = examples(4), tiny_llama()
    device = torch.device("cpu")
    with torch.no_grad():
        right = response_nll(model, make_batch(rows, device))
        left = response_nll(model, make_batch(rows, device, left=True))
        alone = torch.cat([response_nll(model, make_batch([row], device)) for row in rows])
    assert torch.allclose(right, left, atol=1e-5)
    assert torch.allclose(right, alone, atol=1e-5)
    assert mean_loss(model, rows, 3, device) == pytest.approx(float(right.double().mean()), abs=1e-6)


def test_batches_by_hand():
    rows = examples(2)
    batch = next(batches_of(rows, 2, torch.device("cpu")))
    assert [len(row.prompt_ids) + len(row.response_ids) for row in rows] == [8, 9]
    assert batch.attention_mask_BT.sum(1).tolist() == [8, 9]
    assert batch.prompt_mask_BT.sum(1).tolist() == [4, 4]
    assert batch.targets_N.tolist() == [3, 4, 5, 6, 12, 13, 14, 15, 16]
    assert batch.labels_N.tolist() == [*rows[0].response_ids, *rows[1].response_ids]
    left = make_batch(rows, torch.device("cpu"), left=True)
    assert left.targets_N.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 16]
    assert position_ids(left)[0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_concentration_by_hand(pool):
    assert gini(torch.tensor([1.0, 1, 1, 1])) == pytest.approx(0)
    assert gini(torch.tensor([0.0, 0, 0, 8])) == pytest.approx(0.75)
    assert gini(torch.tensor([1.0, 3])) == pytest.approx(0.25)  # (−1·1 + 1·3) / (2·4)
    scores = {"x": torch.tensor([1.0, -6, 2, 1]), "y": torch.tensor([0.0, 0, 0, 0])}
    assert mass_in_top(scores, 2) == pytest.approx((0.8 + 0.5) / 2)
    other = {"x": torch.tensor([0.0, 5, 0, 4]), "y": torch.tensor([1.0, 0, 0, 0])}
    assert jaccard_of_top(scores, other, 2) == pytest.approx((1 / 3 + 1.0) / 2)
    flat = {name: torch.ones(module.rank) for name, module in pool.modules.items()}
    assert share_by_source(pool, flat) == pytest.approx({"a": 4 / 7, "b": 3 / 7})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_gini_is_between_0_and_its_bound(values):
    value = gini(torch.tensor(values))
    assert -1e-9 <= value <= (len(values) - 1) / len(values) + 1e-9
