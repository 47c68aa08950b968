"""The update as the command line's computing process runs it: however it is laid out, the same loss and gradient."""

import json

import pytest
import torch
from safetensors.torch import load_file

from data.artifacts import read_rows
from models.compute import call
from models.requests import PolicyFiles
from models.settings import FullTraining
from tests.rl import LORA, make_base, rollout_rows, update_request

REWARDS = [[1.0, 0.0, 0.4], [0.0, 1.0, 0.7], [0.3, 0.9, 0.1]]
SAME = ("loss", "gradient_norm", "entropy", "kl_reference", "trained_tokens", "engine_logprob_difference_mean")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PolicyFiles:
    return make_base(tmp_path_factory.mktemp("step") / "base")


class Quiet:
    """What the computing process reports to."""

    def log(self, message: str) -> None:
        """Drops the line."""

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Drops the progress."""


def step(folder, files, rows, parameters, **changes):
    """Metrics of the first step, and the moments of Adam after it: 0.1 of the gradient, whatever the rate."""
    request = update_request(
        folder,
        files,
        rows,
        kl={"coefficient": 0.05},
        entropy_coefficient=0.01,
        loss={"kind": "clipped_ratio", "aggregation": "sequence_mean"},
        learning_rate=0,
        max_gradient_norm=1e9,
        **changes,
    )
    request = json.loads(request.model_copy(update={"parameters": parameters}).model_dump_json())
    out = folder / "out"
    out.mkdir()
    assert call("models.update:update", request, str(out), Quiet())["optimizer_steps"] == 1
    metrics = {row["name"]: row["value"] for row in read_rows(out / "metrics.parquet", "metrics")}
    moments = load_file(out / "trainer_state" / "optimizer.safetensors")
    gradients = {name: moment for name, moment in moments.items() if name.endswith(".exp_avg")}
    return metrics, gradients


@pytest.mark.parametrize("parameters", [LORA, FullTraining()], ids=["lora", "full"])
def test_however_the_step_is_laid_out(files, tmp_path, parameters):
    """Micro-batches, row layouts, chunks, checkpointing, order and repetition of rows: the gradient to 1e-5."""
    rows = [
        row | {"reference_logprobs": [x - 0.1 for x in row["reference_logprobs"]]}
        for row in rollout_rows(files, REWARDS)
    ]
    ways = {
        "one row at a time": {"tokens_per_micro_batch": 1},
        "all rows at once": {"tokens_per_micro_batch": 100_000},
        "padded": {"row_layout": "padded"},
        "packed": {"row_layout": "packed"},
        "packed, small": {"row_layout": "packed", "tokens_per_micro_batch": 40},
        "vocabulary in chunks": {"vocabulary_chunk": 30},
        "checkpointing": {"gradient_checkpointing": True},
        "checkpointing, packed, chunks": {
            "gradient_checkpointing": True,
            "row_layout": "packed",
            "vocabulary_chunk": 30,
        },
    }
    wanted, gradients = step(tmp_path / "plain", files, rows, parameters)
    assert wanted["gradient_norm"] > 1e-3
    found = {way: step(tmp_path / way, files, rows, parameters, **changes) for way, changes in ways.items()}
    found["other order"] = step(tmp_path / "order", files, rows[::-1], parameters)
    found["every row twice"] = step(tmp_path / "twice", files, [*rows, *rows], parameters)
    for way, (metrics, others) in found.items():
        for name in SAME:
            factor = 2 if (way, name) == ("every row twice", "trained_tokens") else 1
            assert metrics[name] == pytest.approx(factor * wanted[name], rel=1e-5, abs=1e-7), (way, name)
        assert metrics["ratio_deviation_max"] < 1e-5, way
        assert metrics["clip_share_low"] == metrics["clip_share_high"] == 0, way
        assert others.keys() == gradients.keys()
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        difference = torch.cat([(others[name] - gradients[name]).flatten() for name in gradients]).norm()
        assert difference < 1e-5 * norm, way
