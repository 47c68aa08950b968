"""A cell's rounds by two processes, led by rank 0: the rollouts and updates of one, whoever began them."""

import json

import pytest

from data.artifacts import read_rows
from data.progress import Silent
from flows.launch import SHIPPED
from models.cell import run_rounds
from models.requests import Launch
from tasks.compute import Compute
from tests.models.test_cell import inputs, request_for  # noqa: F401 - a fixture


def by_two(sharding: str, request) -> dict:
    process = Compute(1, launch=Launch(config=SHIPPED / f"{sharding}.yaml", processes=2))
    try:
        return process.call("models.cell:run_rounds", request, None, Silent(), 240.0)
    finally:
        process.close()


def test_two_processes_continue_what_one_began_with_the_same_numbers(inputs, tmp_path):  # noqa: F811
    """Rounds 0 of one process, 1 and 2 of two: tokens are equal, figures to the rounding that AdamW makes of them."""
    settings = {"max_rounds": 3, "learning_rate": 1e-4}
    run_rounds(request_for(inputs, tmp_path / "one", **settings), Silent())
    run_rounds(request_for(inputs, tmp_path / "two", last_round=0, **settings), Silent())
    progress = by_two("fsdp2", request_for(inputs, tmp_path / "two", **settings))
    assert progress["finished"]
    results = [json.loads((tmp_path / name / "result/result.json").read_text()) for name in ("one", "two")]
    assert results[0] == results[1]
    tables = [read_rows(tmp_path / name / "result/rollouts.parquet", "rollouts") for name in ("one", "two")]
    for one, other in zip(*tables, strict=True):
        assert other["completion_ids"] == one["completion_ids"]
        assert other["sampling_logprobs"] == pytest.approx(one["sampling_logprobs"], abs=1e-3)
    metrics = [read_rows(tmp_path / name / "result/metrics.parquet", "metrics") for name in ("one", "two")]
    assert [(row["step"], row["name"]) for row in metrics[0]] == [(row["step"], row["name"]) for row in metrics[1]]
    for one, other in zip(*metrics):
        assert other["value"] == pytest.approx(one["value"], rel=1e-2, abs=1e-3), one["name"]
