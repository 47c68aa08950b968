"""Rounds of meta-actions on a tiny policy: restarts, rewards, the update's term, and resuming."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.artifacts import read_rows
from data.meta_actions.grammar import parse
from data.progress import Silent
from data.settings import MetaActions, PlainPrompt, TraceSynthesis
from models.cell import run_rounds
from models.meta_actions.rollouts import as_trace
from models.meta_actions.synthesis import synthesise
from models.policy import Policy
from models.requests import TracesRequest, WarmupRequest
from models.settings import FullTraining, TransformersEngine, WarmupSettings
from models.tokenization import decode
from models.training_rows import train_rows
from models.warmup import trace_rows, warm_up
from tests.documented import documented, general
from tests.models.meta_actions.helpers import CPU, cell_request, demonstrations, tagged_base

REASONING = MetaActions(
    synthesis=TraceSynthesis(mode="corrupt", longest_critique=9),
    restarts={"start": 0.0, "share": 0.5},
    reward={"diversity": 0.05, "length": {"start": 0.0}},
)


def traces_request(base, table, reasoning=REASONING, **more):
    return TracesRequest(
        policy=base,
        prompt=PlainPrompt(),
        reasoning=reasoning,
        engine=TransformersEngine(),
        demonstrations=table,
        seed=1,
        compute=CPU,
        **more,
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A base, and a warm-up after which a tiny policy writes traces: it has learned a few by heart."""
    folder = tmp_path_factory.mktemp("taught")
    base = tagged_base(folder / "base")
    made = folder / "traces"
    made.mkdir()
    card = synthesise(traces_request(base, demonstrations(folder / "demonstrations.parquet")), made, Silent())
    assert card["traces"] + sum(card["refused"].values()) >= 11
    request = WarmupRequest(
        policy=base,
        parameters=FullTraining(),
        prompt=PlainPrompt(),
        warmup=WarmupSettings(epochs=120, batch_size=8, learning_rate=1e-2),
        demonstrations=folder / "demonstrations.parquet",
        traces=made / "traces.parquet",
        seed=1,
        compute=CPU,
    )
    (folder / "warmup").mkdir()
    figures = warm_up(request, folder / "warmup", Silent())
    assert figures["last_loss"] < 0.5
    return base, folder / "warmup" / "weights", made / "traces.parquet"


@pytest.fixture(scope="module")
def straight(taught, tmp_path_factory):
    """Five rounds without an interruption."""
    base, weights, _ = taught
    folder = tmp_path_factory.mktemp("straight")
    request = cell_request(folder, base, weights, REASONING, max_rounds=5, keep_rounds=9, generated_tokens=10**6)
    run_rounds(request, Silent())
    return request


def rollouts(request, number):
    return read_rows(f"{request.url}/rounds/{number:04d}/rollouts/rollouts.parquet", "rollouts")


def test_unlearned_tokens_are_those_of_the_wrong_decision(taught):
    base, _, traces = taught
    policy = Policy.load(base, compute=CPU)
    rows, left_out = trace_rows(policy, traces, PlainPrompt())
    table = read_rows(traces, "traces")
    assert left_out == 0 and len(rows) == len(table)
    for row, trace in zip(rows, table):
        spans = json.loads(trace["unlearned"])
        silent = [i for i, learned in zip(row.completion_ids, row.learned or []) if not learned]
        assert decode(policy.tokenizer, silent) == "".join(trace["text"][s:e] for s, e in spans)
    assert any(row.learned_tokens < len(row.completion_ids) for row in rows)


def test_rollouts_are_judged_and_their_choices_noted(straight):
    rows = rollouts(straight, 0)
    traces = [json.loads(row["trace"]) for row in rows]
    assert sum(trace["status"] == "ok" for trace in traces) > len(rows) / 3
    for row, trace in zip(rows, traces):
        assert parse(row["completion"]).status == trace["status"]
        assert len(trace["boundaries"]) == len(trace["logprobs"]) == len(trace["reference"])
        # Round 0 samples from the warm-up itself.
        assert np.allclose(trace["logprobs"], trace["reference"], atol=1e-4)
        parts = json.loads(row["reward_parts"])
        assert row["reward"] == pytest.approx(sum(parts.values()))
        assert (row["reward"] > 0.4) == row["correct"]


def test_restarts_continue_sampled_ids_and_keep_their_own_baseline(straight):
    seen = 0
    for number in range(1, 5):
        before = [[*r["prompt_ids"], *r["completion_ids"]] for n in range(number) for r in rollouts(straight, n)]
        rows = rollouts(straight, number)
        for group in {row["group"] for row in rows if row["stage"] is None}:
            members = [row for row in rows if row["group"] == group]
            ids = members[0]["prompt_ids"]
            assert members[0]["prefix_length"] > 0 and all(row["prompt_ids"] == ids for row in members)
            assert any(other[: len(ids)] == ids for other in before)
            assert sum(row["advantage"] for row in members) == pytest.approx(0, abs=1e-9)
            prefix = ids[len(ids) - members[0]["prefix_length"] :]
            text = decode(Policy.load(straight_policy(straight), compute=CPU).tokenizer, prefix)
            assert parse(text).status == "truncated" and parse(text).tail == ""
            assert all(row["completion"].startswith(text) for row in members)
            seen += 1
        roots = [row for row in rows if row["stage"] is not None]
        assert len({row["group"] for row in rows}) == 6 and roots
    assert seen > 0


def straight_policy(request):
    from models.requests import PolicyFiles

    return PolicyFiles(base=request.base, weights=request.warmup)


def test_the_prefix_is_no_part_of_what_is_trained(straight):
    rows = rollouts(straight, 3)
    trained = train_rows(rows, straight.rl, straight.reasoning)
    assert any(row["stage"] is None for row in rows)
    for row, made in zip(rows, trained):
        assert list(made.tokens.completion_ids) == row["completion_ids"]
        assert all(0 <= column < len(row["completion_ids"]) for column in made.boundaries.columns_K)
        assert (
            made.boundaries.legal_K4.sum(1).tolist() == [sum(legal) for legal in made.boundaries.legal_K4.tolist()]
            and (made.boundaries.legal_K4.sum(1) > 1).all()
        )


def test_figures_of_the_rounds(straight):
    metrics = read_rows(f"{straight.url}/result/metrics.parquet", "metrics")
    names = {row["name"] for row in metrics}
    wanted = {"meta/boundary_entropy", "meta/accuracy_first", "meta/accuracy_last", "meta/share_reason"}
    wanted |= {"action_entropy", "action_kl_reference", "action_entropy_coefficient", "meta/restart_value_mean"}
    assert wanted <= names
    assert {general(name) for name in names if name.startswith(("meta/", "action_"))} <= documented()
    for row in metrics:
        if row["name"] == "meta/boundary_entropy":
            assert 0 <= row["value"] <= 1
        if row["name"] == "action_kl_reference":
            assert row["value"] >= -1e-6
    first = [row["value"] for row in metrics if row["name"] == "ratio_deviation_max" and row["round"] in (0, 3)]
    assert max(first) < 1e-3  # step 0 of a round with restarts: the ratio is 1


@pytest.mark.parametrize("lost", ["rounds/0003/update", "rounds/0004/rollouts", "rounds/0002"])
def test_killed_and_continued_the_tables_are_the_same(straight, tmp_path, lost):
    shutil.copytree(straight.url, tmp_path / "cell")
    shutil.rmtree(tmp_path / "cell" / "result")
    for number in range(int(lost[10]), 5):
        if number > int(lost[10]):
            shutil.rmtree(tmp_path / "cell" / f"rounds/{number:04d}")
    shutil.rmtree(tmp_path / "cell" / lost)
    request = straight.model_copy(update={"url": str(tmp_path / "cell")})
    run_rounds(request, Silent())
    for name in ("metrics.parquet", "rollouts.parquet", "weights/model.safetensors"):
        assert (tmp_path / "cell/result" / name).read_bytes() == Path(straight.url, "result", name).read_bytes()
    for number in range(5):
        state = Path(straight.url, f"rounds/{number:04d}/rollouts/curriculum.json")
        assert (tmp_path / f"cell/rounds/{number:04d}/rollouts/curriculum.json").read_text() == state.read_text()


def test_start_states_within_a_demonstration_begin_a_trace():
    prefix, remainder = as_trace("1 + 1 = 2\n", "2 + 2 = 4\n#### 4", "4")
    assert prefix == "<reason>\n1 + 1 = 2\n" and parse(prefix + remainder).status == "ok"
    assert as_trace("", "1 + 1 = 2\n#### 2", "2")[0] == ""


def test_own_errors_are_located_and_repaired(taught, tmp_path):
    base, _, _ = taught
    table = demonstrations(tmp_path / "demonstrations.parquet")
    request = WarmupRequest(
        policy=base,
        parameters=FullTraining(),
        prompt=PlainPrompt(),
        warmup=WarmupSettings(epochs=40, batch_size=8, learning_rate=1e-2),
        demonstrations=table,
        seed=1,
        compute=CPU,
    )
    (tmp_path / "plain").mkdir()
    warm_up(request, tmp_path / "plain", Silent())
    policy = base.model_copy(update={"weights": tmp_path / "plain" / "weights"})
    synthesis = TraceSynthesis(
        longest_critique=9,
        samples=8,
        continuations=4,
        max_new_tokens=60,
        mix={"plain": 0, "confirm": 0, "fix": 1, "two_fixes": 0},
    )
    reasoning = MetaActions(synthesis=synthesis)
    (tmp_path / "traces").mkdir()
    card = synthesise(traces_request(policy, table, reasoning), tmp_path / "traces", Silent())
    assert card["generated_tokens"] > 0
    for row in read_rows(tmp_path / "traces" / "traces.parquet", "traces"):
        blocks = parse(row["text"]).blocks
        if row["kind"] != "fix":
            continue
        steps = blocks[0].body.strip("\n").split("\n")
        assert 1 <= blocks[1].wrong_step <= len(steps)
        assert steps[blocks[1].wrong_step - 1] in blocks[1].body
    assert card["kinds"].get("fix", 0) > 0
