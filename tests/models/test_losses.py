"""Policy losses, aggregation and KL: hand-worked values, masks, and the gradients that the estimators promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.losses import (
    Statistics,
    TokenBatch,
    Totals,
    engine_weights,
    kl_estimate,
    make_loss,
    token_weights,
    weighted_sum,
)
from models.settings import ClippedImportance, ClippedRatio, RLSettings, SequenceRatio

LOSSES = [ClippedRatio(), ClippedRatio(dual_clip=3), SequenceRatio(), ClippedImportance()]


def token(advantage: float, ratio: float) -> TokenBatch:
    """One trained token with this advantage and ratio."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    return TokenBatch(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("how", "advantage", "ratio", "loss", "low", "high"),
    [
        (ClippedRatio(), 1, 1.5, -1.2, False, True),
        (ClippedRatio(), -1, 0.5, 0.8, True, False),
        (ClippedRatio(), 1, 0.5, -0.5, False, False),
        (ClippedRatio(), -1, 1.5, 1.5, False, False),
        (ClippedRatio(), -1, 10, 10, False, False),
        (ClippedRatio(dual_clip=3), -1, 10, 3, False, False),
        (ClippedRatio(dual_clip=3), 1, 10, -1.2, False, True),
        (ClippedRatio(clip_high=0.28), 1, 1.5, -1.28, False, True),
        (ClippedRatio(clip_low=0.1), -1, 0.5, 0.9, True, False),
    ],
)
def test_clip_directions(how, advantage, ratio, loss, low, high):
    losses = make_loss(how)(token(advantage, ratio))
    assert losses.loss_BT.item() == pytest.approx(loss, abs=1e-6)
    assert (losses.clipped_low_BT.item(), losses.clipped_high_BT.item()) == (low, high)


def test_clipped_tokens_have_no_gradient():
    for advantage, ratio, moves in [(1.0, 1.5, False), (-1.0, 0.5, False), (1.0, 0.5, True), (-1.0, 1.5, True)]:
        batch = token(advantage, ratio)
        make_loss(ClippedRatio())(batch).loss_BT.sum().backward()
        assert (batch.logprobs_BT.grad.abs().sum() > 0) == moves


def test_capped_importance_keeps_every_gradient():
    batch = token(1.0, 10.0)
    losses = make_loss(ClippedImportance(cap=5))(batch)
    losses.loss_BT.sum().backward()
    assert losses.loss_BT.item() == pytest.approx(-5 * math.log(10), rel=1e-6)
    assert batch.logprobs_BT.grad.item() == pytest.approx(-5)
    assert losses.clipped_high_BT.item()


def test_sequence_ratio_is_the_geometric_mean_at_every_token():
    batch = TokenBatch(
        torch.tensor([[0.1, -0.3, 0.5, 7.0]]),
        torch.tensor([[0.0, 0.0, 0.0, math.nan]]),
        torch.ones(1, 4),
        torch.tensor([[True, True, True, False]]),
    )
    loss = make_loss(SequenceRatio(clip_high=1.0))
    assert loss.ratio(batch)[0, :3].tolist() == pytest.approx([1.10517] * 3, abs=1e-5)
    assert loss(batch).loss_BT[0].tolist() == pytest.approx([-1.10517] * 3 + [0], abs=1e-5)
    # With the published bounds the whole row is clipped.
    assert make_loss(SequenceRatio())(batch).clipped_high_BT.tolist() == [[True, True, True, False]]


def test_the_ratio_of_a_row_as_one_action():
    """Without the length the ratio is the product: exp(0.1 − 0.3 + 0.5) at every token."""
    batch = TokenBatch(
        torch.tensor([[0.1, -0.3, 0.5]]), torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)
    )
    loss = make_loss(SequenceRatio(length_normalised=False, clip_high=1.0))
    assert loss.ratio(batch)[0].tolist() == pytest.approx([math.exp(0.3)] * 3)


def aggregate(rows: list[list[float]], how: str, max_new_tokens: int = 8, width: int | None = None) -> float:
    """Loss of rows of token losses, padded with NaN to `width`."""
    width = width or max(map(len, rows))
    values = torch.full((len(rows), width), math.nan)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = True
    totals = Totals(sum(map(len, rows)), sum(bool(row) for row in rows), max_new_tokens)
    return weighted_sum(values, token_weights(mask, how, totals), mask).item()


@pytest.mark.parametrize(("how", "wanted"), [("sequence_mean", 2.5), ("token_mean", 3.0), ("constant", 1.125)])
def test_which_mean(how, wanted):
    rows = [[1.0] * 2, [4.0] * 4]
    assert aggregate(rows, how) == pytest.approx(wanted)
    assert aggregate(rows, how, width=9) == pytest.approx(wanted)
    assert aggregate(rows * 2, how) == pytest.approx(wanted)
    assert aggregate([*rows, []], how) == pytest.approx(wanted)


def test_one_denominator_for_all_micro_batches():
    totals = Totals(tokens=1000, rows=2, max_new_tokens=900)
    loss = 0.0
    for value, length in [(2.0, 100), (0.5, 900)]:
        mask = torch.ones(1, length, dtype=torch.bool)
        loss += weighted_sum(torch.full((1, length), value), token_weights(mask, "token_mean", totals), mask).item()
    assert loss == pytest.approx(0.65)


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_nan_in_masked_slots_is_harmless(how, aggregation):
    logprobs = torch.zeros(2, 2, requires_grad=True)
    nan = math.nan
    batch = TokenBatch(
        logprobs,
        torch.tensor([[0.0, nan], [nan, nan]]),
        torch.tensor([[1.0, nan], [nan, math.inf]]),
        torch.tensor([[True, False], [False, False]]),
    )
    losses = make_loss(how)(batch)
    weights = token_weights(batch.mask_BT, aggregation, Totals(1, 1, 2))
    loss = weighted_sum(losses.loss_BT, weights, batch.mask_BT)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0, 0] != 0
    statistics = Statistics()
    statistics.add(batch, losses, torch.tensor([[0.5, nan], [nan, nan]]))
    assert statistics.values()["entropy"] == 0.5
    assert all(math.isfinite(value) for value in statistics.values().values())


@pytest.mark.parametrize("how", LOSSES)
def test_everything_masked_is_zero(how):
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    logprobs = torch.full((2, 3), math.nan, requires_grad=True)
    losses = make_loss(how)(TokenBatch(logprobs, logprobs.detach(), logprobs.detach(), nothing))
    loss = weighted_sum(losses.loss_BT, token_weights(nothing, "token_mean", Totals(0, 0, 8)), nothing)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("how", LOSSES)
def test_at_ratio_one_every_loss_has_the_policy_gradient(how):
    batch = TokenBatch(
        torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True),
        torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]),
        torch.tensor([[0.7, 0.7], [-0.4, -0.4]]),
        torch.ones(2, 2, dtype=torch.bool),
    )
    losses = make_loss(how)(batch)
    weights = token_weights(batch.mask_BT, "token_mean", Totals(4, 2, 2))
    weighted_sum(losses.loss_BT, weights, batch.mask_BT).backward()
    assert torch.allclose(batch.logprobs_BT.grad, -batch.advantages_BT / 4, atol=1e-6)
    assert not losses.clipped_low_BT.any()
    assert not losses.clipped_high_BT.any()


def test_kl_values():
    logprob, reference = torch.tensor(-1.0), torch.tensor(-1.5)
    assert kl_estimate(logprob, reference, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(logprob, reference, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(logprob, reference, "k3").item() == pytest.approx(0.10653, abs=1e-5)


def test_gradients_of_the_kl_estimators_over_a_whole_vocabulary():
    """Expected gradients by enumeration: k1 gives 0, k2 the true gradient of KL(π ‖ reference)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    expected = {}
    for estimator in ("k1", "k2", "k3"):
        sampled = (policy.exp().detach() * kl_estimate(policy, reference, estimator)).sum()
        (expected[estimator],) = torch.autograd.grad(sampled, logits, retain_graph=True)
    assert torch.allclose(expected["k1"], torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected["k2"], true, atol=1e-12)
    assert not torch.allclose(expected["k3"], true, atol=1e-3)
    # Weighted with the ratio (1 here, but with its gradient) k1 and k3 have the true gradient, k2 has not.
    ratio = (policy - policy.detach()).exp()
    for estimator, right in [("k1", True), ("k2", False), ("k3", True)]:
        sampled = (policy.exp().detach() * ratio * kl_estimate(policy, reference, estimator)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        assert torch.allclose(gradient, true, atol=1e-12) == right


def test_engine_correction_is_truncated_and_counted():
    mask = torch.tensor([[True, True, True, False]])
    weights, truncated = engine_weights(
        torch.tensor([[-1.0, -1.0, -1.0, math.nan]]), torch.tensor([[-1.0, -3.0, -0.5, math.nan]]), mask, cap=2.0
    )
    assert weights[0, :3].tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert truncated.tolist() == [[False, True, False, False]]
    assert not weights.requires_grad


def test_statistics_of_two_tokens():
    batch = TokenBatch(
        torch.tensor([[math.log(1.5), 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    )
    statistics = Statistics()
    statistics.add(batch, make_loss(ClippedRatio())(batch), torch.tensor([[0.2, 0.4]]))
    values = statistics.values()
    assert values["clip_share_high"] == 0.5
    assert values["clip_share_low"] == 0
    assert values["kl_old"] == pytest.approx((0.5 - math.log(1.5)) / 2)
    assert values["entropy"] == pytest.approx(0.3)
    assert values["ratio_deviation_max"] == pytest.approx(0.5)
    assert values["ratio_deviation_mean"] == pytest.approx(0.25)
    assert Statistics().values() == {}


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), how=st.sampled_from(LOSSES), data=st.data())
def test_any_cut_into_micro_batches_gives_the_same_loss(lengths, how, data):
    generator = torch.Generator().manual_seed(1)
    width = max(*lengths, 1)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    logprobs, old, advantages = (torch.randn(len(lengths), width, generator=generator) for _ in range(3))
    totals = Totals(int(mask.sum()), sum(length > 0 for length in lengths), 6)

    def part(rows: slice) -> float:
        batch = TokenBatch(logprobs[rows], old[rows], advantages[rows], mask[rows])
        weights = token_weights(mask[rows], how.aggregation, totals)
        return weighted_sum(make_loss(how)(batch).loss_BT, weights, mask[rows]).item()

    cut = data.draw(st.integers(0, len(lengths)))
    assert part(slice(None)) == pytest.approx(part(slice(cut)) + part(slice(cut, None)), rel=1e-5, abs=1e-6)


def test_settings_refuse_what_would_train_nothing():
    with pytest.raises(ValueError, match="gradient of mean 0"):
        RLSettings(kl={"coefficient": 0.1, "estimator": "k1"})
    RLSettings(kl={"coefficient": 0.1, "estimator": "k1", "importance_weighted": True})
    with pytest.raises(ValueError, match="mends the gradient"):
        RLSettings(kl={"coefficient": 0.1, "estimator": "k2", "importance_weighted": True})
    with pytest.raises(ValueError, match="does not divide"):
        RLSettings(prompts=16, steps=3)
    with pytest.raises(ValueError, match="samples is 1"):
        RLSettings(samples=1)


def test_a_cap_of_one_does_not_count_rounding():
    """Both caps may be 1: ratios that are 1 to rounding are not told as cut, and the weight is cut all the same."""
    old = torch.full((1, 4), -1.0)
    batch = TokenBatch(old + torch.tensor([[5e-7, -5e-7, 0.0, 0.1]]), old, torch.ones(1, 4), torch.ones(1, 4).bool())
    losses = make_loss(ClippedImportance(cap=1.0))(batch)
    assert losses.clipped_high_BT.tolist() == [[False, False, False, True]]
    weights_BT, truncated_BT = engine_weights(batch.logprobs_BT, old, batch.mask_BT, 1.0)
    assert truncated_BT.tolist() == [[False, False, False, True]]
    assert weights_BT.max() == 1.0


@pytest.mark.parametrize(
    "how", [*LOSSES, SequenceRatio(length_normalised=False, clip_low=0.2, clip_high=0.2)], ids=repr
)
@pytest.mark.parametrize(("advantage", "log_ratio"), [(a, d) for a in (0, 1, -1) for d in (19, 100, 1000, -1000)])
def test_a_ratio_that_float32_cannot_hold_makes_no_nan(how, advantage, log_ratio):
    """exp(100) is infinite: ∞ · 0 was NaN in the loss without advantage, and in the gradient of the clipped branch."""
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    old = logprobs.detach() - log_ratio
    batch = TokenBatch(logprobs, old, torch.full((1, 3), float(advantage)), torch.ones(1, 3).bool())
    loss_BT = make_loss(how)(batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs)
    assert loss_BT.isfinite().all() and gradient_BT.isfinite().all()
    if advantage == 0:
        assert not loss_BT.any() and not gradient_BT.any()
    elif advantage > 0 and log_ratio > 0 and hasattr(how, "clip_high"):
        assert loss_BT[0].tolist() == pytest.approx([-1 - how.clip_high] * 3)
        assert not gradient_BT.any()
    statistics = Statistics()
    statistics.add(batch, make_loss(how)(batch), torch.zeros(1, 3))
    assert all(math.isfinite(value) for value in statistics.values().values())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_that_float32_cannot_hold_stays_finite(estimator):
    logprobs = torch.tensor([-150.0, -1.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-1.0, -150.0]), estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.isfinite().all() and gradient.isfinite().all()
