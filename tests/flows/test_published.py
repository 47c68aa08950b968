"""The published run's numbers, by hand."""

import pytest

from flows.architectures import PUBLISHED
from flows.published import PublishedRun, Rates, mean_remaining_share
from models.settings import FullTraining, LoraTraining

SHAPE = PUBLISHED["meta-llama/Llama-2-7b-hf"]


def test_counts_follow_from_7473_demonstrations_and_five_stages():
    run = PublishedRun(SHAPE, FullTraining(), "bfloat16")
    assert run.start_states == 37_365 and run.rollouts == 373_650
    assert run.optimiser_steps == 2 * 11_677  # 373,650 / 32 is 11,676.6
    assert mean_remaining_share() == pytest.approx(0.6)
    assert run.generated_tokens == 373_650 * 84
    assert run.processed_tokens == 373_650 * 260


def test_hours_fall_with_the_gpus_and_follow_from_the_rates():
    run = PublishedRun(SHAPE, FullTraining(), "bfloat16")
    rates = Rates(generated=1000.0, trained=2000.0)
    wanted = (373_650 * 84 / 1000 + 373_650 * 260 * (8 / 3) / 2000) / 3600
    assert run.hours(rates, 1) == pytest.approx(wanted)
    assert run.hours(rates, 8) == pytest.approx(wanted / 8)
    assert Rates.estimated(SHAPE).trained == pytest.approx(0.4 * 312e12 / (6 * SHAPE.parameters()))


def test_memory_is_divided_but_for_what_every_gpu_holds():
    full = dict(PublishedRun(SHAPE, FullTraining(), "bfloat16").memory(8))
    assert full["weights to sample with"] == pytest.approx(2 * SHAPE.parameters())
    assert full["gradients and Adam's moments, float32"] == pytest.approx(12 * SHAPE.parameters() / 8)
    # 32 / 8 rows of 260 tokens; 2 × 32 layers × 32 heads × 128 × 2 bytes a token
    assert full["key/value cache of a round"] == pytest.approx(4 * 260 * 524_288)
    lora = dict(PublishedRun(SHAPE, LoraTraining(), "bfloat16").memory(1))
    assert lora["reference weights"] == 0 and lora["adapters"] < 0.2e9
