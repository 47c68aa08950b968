"""Intervals and estimates against values worked by hand, closed forms and one another."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.statistics import (
    avg_at_k,
    bootstrap_mean,
    maj_at_k,
    paired_bootstrap,
    paired_bootstrap_seeds,
    pass_at_k,
    wilson,
)

Z = 1.959963984540054  # 97.5 % point of the normal distribution


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        (0, 10, 0.0, Z**2 / (10 + Z**2)),  # p = 0: the upper end is z² / (n + z²)
        (10, 10, 10 / (10 + Z**2), 1.0),
        (1, 1, 1 / (1 + Z**2), 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),  # the same table
    ],
)
def test_wilson_values(successes, n, low, high):
    estimate = wilson(successes, n)
    assert estimate.mean == successes / n
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=6e-5)


def test_wilson_of_nothing_is_the_whole_range():
    estimate = wilson(0, 0)
    assert math.isnan(estimate.mean) and (estimate.low, estimate.high) == (0.0, 1.0)


@pytest.mark.parametrize("arguments", [(-1, 3), (4, 3), (1, 3, 0.0), (1, 3, 1.0), (1, -1)])
def test_wilson_refuses(arguments):
    with pytest.raises(ValueError):
        wilson(*arguments)


@given(n=st.integers(1, 5000), data=st.data(), confidence=st.floats(0.5, 0.999))
def test_wilson_holds_the_share_mirrors_and_solves_its_equation(n, data, confidence):
    successes = data.draw(st.integers(0, n))
    share, low, high = wilson(successes, n, confidence)
    assert 0 <= low <= share <= high <= 1
    mirrored = wilson(n - successes, n, confidence)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=1e-12)
    wider = wilson(successes, n, (1 + confidence) / 2)
    assert wider.low <= low and high <= wider.high
    # The bounds are where the score statistic reaches z: (share - p)² = z² p (1 - p) / n.
    z2 = ((share - low) ** 2 * n / (low * (1 - low))) if 0 < low < 1 else None
    z2_high = ((share - high) ** 2 * n / (high * (1 - high))) if 0 < high < 1 else None
    if z2 is not None and z2_high is not None:
        assert z2 == pytest.approx(z2_high, rel=1e-6)


@pytest.mark.parametrize(
    "n, c, k, value",
    [(4, 1, 4, 1.0), (4, 1, 2, 0.5), (10, 3, 5, 0.9166666666666667), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (5, 2, 1, 0.4)],
)
def test_pass_at_k_values(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


@given(n=st.integers(1, 200), data=st.data())
def test_pass_at_k_is_the_ratio_of_binomials(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-9)


def test_pass_at_k_takes_arrays_and_large_counts():
    assert pass_at_k([4, 10], [1, 3], 2) == pytest.approx([0.5, 1 - 21 / 45])
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k([], [], 3).shape == (0,)


def test_pass_at_k_is_unbiased():
    """The mean over all 2-subsets of 6 samples with 2 right ones."""
    right = [True, True, False, False, False, False]
    pairs = [(i, j) for i in range(6) for j in range(i)]
    assert pass_at_k(6, 2, 2) == pytest.approx(sum(right[i] or right[j] for i, j in pairs) / len(pairs))


@pytest.mark.parametrize("n, c, k", [(3, 1, 4), ([8, 3], [1, 1], 4), (4, 5, 2), (4, -1, 2), (4, 1, 0)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    "answers, correct, k, value",
    [
        (["7", "7", "8"], [True, True, False], None, 1.0),
        (["7", "8", "8"], [True, False, False], None, 0.0),
        (["7", "8"], [True, False], None, 0.5),  # a tie: either wins equally often
        (["7", "8", "9"], [True, False, False], None, 1 / 3),
        ([None, None, "7"], [False, False, True], None, 1.0),  # no answer has no vote
        ([None, None], [False, False], None, 0.0),
        (["8", "7", "7"], [False, True, True], 1, 0.0),  # the first sample only
        (["8", "7", "7"], [False, True, True], 2, 0.5),
    ],
)
def test_maj_at_k_values(answers, correct, k, value):
    assert maj_at_k(answers, correct, k) == pytest.approx(value)


@pytest.mark.parametrize(
    "answers, correct, k", [([], [], None), (["1"], [True], 2), (["1"], [True], 0), (["1"], [], 1)]
)
def test_maj_at_k_refuses(answers, correct, k):
    with pytest.raises(ValueError):
        maj_at_k(answers, correct, k)


def test_avg_at_k():
    assert avg_at_k([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]) == pytest.approx(0.5)
    with pytest.raises(ValueError):
        avg_at_k([])


def test_bootstrap_of_two_items_is_the_binomial_of_its_draws():
    """Two items 0 and 1: a resample's mean is 0, 1/2 or 1 with chances 1/4, 1/2 and 1/4."""
    assert bootstrap_mean([0, 1], 0.95) == (0.5, 0.0, 1.0)
    assert bootstrap_mean([0, 1], 0.4) == (0.5, 0.5, 0.5)
    assert bootstrap_mean([3.0]) == (3.0, 3.0, 3.0)


def test_bootstrap_agrees_with_the_normal_interval_for_many_items():
    values_N = np.repeat([0.0, 1.0], [700, 300])
    half = Z * math.sqrt(0.3 * 0.7 / 1000)
    estimate = bootstrap_mean(values_N, resamples=20_000)
    assert (estimate.low, estimate.high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.002)


def test_bootstrap_is_seeded():
    values_N = np.random.default_rng(0).random(200)
    assert bootstrap_mean(values_N, seed=1) == bootstrap_mean(values_N, seed=1)
    assert bootstrap_mean(values_N, seed=1) != bootstrap_mean(values_N, seed=2)


def test_bootstrap_does_not_depend_on_how_many_draws_are_held_at_once(monkeypatch):
    values_N = np.random.default_rng(0).random(50)
    whole = bootstrap_mean(values_N)
    monkeypatch.setattr("data.statistics._CHUNK", 99)
    assert bootstrap_mean(values_N) == whole


def test_the_pairing_is_used():
    """Models that differ on every item by the same amount: no uncertainty, however much the items differ."""
    first_N = np.random.default_rng(0).random(100)
    assert paired_bootstrap(first_N, first_N - 0.25) == pytest.approx((0.25, 0.25, 0.25))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_paired_bootstrap_is_antisymmetric_and_holds_the_mean(pairs):
    first_N, second_N = np.array(pairs, dtype=float).T
    forward, backward = paired_bootstrap(first_N, second_N), paired_bootstrap(second_N, first_N)
    assert forward.mean == pytest.approx(-backward.mean)
    assert (forward.low, forward.high) == pytest.approx((-backward.high, -backward.low))
    assert forward.low <= forward.mean + 1e-12 and forward.mean <= forward.high + 1e-12


def test_two_levels_with_one_seed_are_the_plain_paired_bootstrap():
    generator = np.random.default_rng(3)
    first_RN, second_RN = generator.integers(0, 2, (2, 1, 400))
    plain = paired_bootstrap(first_RN[0], second_RN[0], resamples=20_000)
    assert paired_bootstrap_seeds(first_RN, second_RN, resamples=20_000) == pytest.approx(plain, abs=0.003)


def test_two_levels_draw_the_seeds():
    """Two seeds, one always better, one never: means 0, 1/2, 1 as for two items, whatever the questions."""
    first_RN = np.array([[1.0] * 50, [0.0] * 50])
    assert paired_bootstrap_seeds(first_RN, np.zeros((2, 50))) == (0.5, 0.0, 1.0)


def test_two_levels_share_their_questions():
    """Twenty seeds that answer alike know no more of the questions than one."""
    row_N = np.random.default_rng(4).integers(0, 2, 300).astype(float)
    one = paired_bootstrap(row_N, np.zeros(300), resamples=20_000)
    many = paired_bootstrap_seeds(np.tile(row_N, (20, 1)), np.zeros((20, 300)), resamples=20_000)
    assert many == pytest.approx(one, abs=0.004)


def test_coverage_of_the_two_level_interval():
    """Seeds and questions both random around a true difference of 0.1: near 95 % of intervals hold it."""
    generator = np.random.default_rng(5)
    held = 0
    for trial in range(200):
        seeds_R, items_N = generator.normal(0, 0.1, (10, 1)), generator.normal(0, 0.5, (1, 100))
        differences_RN = 0.1 + seeds_R + items_N + generator.normal(0, 0.5, (10, 100))
        estimate = paired_bootstrap_seeds(differences_RN, np.zeros((10, 100)), resamples=400, seed=trial)
        held += estimate.low <= 0.1 <= estimate.high
    assert held >= 180


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap_mean([]),
        lambda: bootstrap_mean([math.nan]),
        lambda: bootstrap_mean([[1.0]]),
        lambda: bootstrap_mean([1.0], confidence=1.5),
        lambda: bootstrap_mean([1.0], resamples=0),
        lambda: paired_bootstrap([1.0], [1.0, 2.0]),
        lambda: paired_bootstrap_seeds([[1.0]], [[1.0, 2.0]]),
        lambda: paired_bootstrap_seeds([1.0], [1.0]),
    ],
)
def test_bootstraps_refuse(call):
    with pytest.raises(ValueError):
        call()
