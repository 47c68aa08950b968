"""The rollouts of a round: what is conditioned on, seeds, grading, advantages, metrics."""

import json
import math

import pytest

from data.artifacts import file_hash, read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.seeds import derive_seed
from data.settings import MixedCurriculum, NoCurriculum, PlainPrompt, RewardSettings
from models.policy import Policy
from models.requests import PolicyFiles, RolloutsRequest
from models.rounds import Sampler, generate, penalised, resample, round_metrics, row_kl
from models.settings import KLSettings, RLSettings, TransformersEngine
from tests.rl import CPU, make_base, write_start_states


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> PolicyFiles:
    return make_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def request_of(base, tmp_path):
    def build(**changes) -> RolloutsRequest:
        values = {
            "policy": base,
            "reference": base,
            "prompt": PlainPrompt(),
            "curriculum": MixedCurriculum(n_stages=3),
            "curriculum_state": None,
            "reward": RewardSettings(functions=("tests.rl:early_letters",)),
            "rl": RLSettings(prompts=4, samples=3, max_new_tokens=12),
            "engine": TransformersEngine(),
            "start_states": write_start_states(tmp_path / "start_states.parquet"),
            "round": 0,
            "generated_tokens_so_far": 0,
            "seed": 5,
            "compute": CPU,
        }
        return RolloutsRequest(**values | changes)

    return build


def rows_of(request, out):
    out.mkdir()
    info = generate(request, out, Silent())
    metrics = {row["name"]: row for row in read_rows(out / "metrics.parquet", "metrics")}
    return info, read_rows(out / "rollouts.parquet", "rollouts"), metrics


def test_a_round(request_of, tmp_path):
    info, rows, metrics = rows_of(request_of(generated_tokens_so_far=100), tmp_path / "out")
    assert len(rows) == info["rollouts"] == 12
    assert [(row["group"], row["sample"]) for row in rows] == [(g, s) for g in range(4) for s in range(3)]
    assert all(1 <= len(row["completion_ids"]) <= 12 for row in rows)
    assert all(len(row["completion_ids"]) == len(row["sampling_logprobs"]) for row in rows)
    assert all(math.isfinite(row["advantage"]) for row in rows)
    assert any(row["advantage"] for row in rows)
    for group in range(4):
        assert sum(row["advantage"] for row in rows if row["group"] == group) == pytest.approx(0, abs=1e-9)
    assert info["generated_tokens"] == sum(len(row["completion_ids"]) for row in rows)
    assert metrics["generated_tokens"]["value"] == info["generated_tokens"]
    assert metrics["reward"]["generated_tokens_so_far"] == 100 + info["generated_tokens"]
    stages = {row["stage"] for row in rows}
    assert {f"accuracy/stage_{stage}" for stage in stages} <= set(metrics)
    assert sum(metrics[f"rollouts/stage_{stage}"]["value"] for stage in stages) == 12
    assert rows[0]["reference_logprobs"] is None


def test_the_prefix_is_conditioned_on_and_graded(request_of, base, tmp_path):
    request = request_of()
    _, rows, _ = rows_of(request, tmp_path / "out")
    states = {row["start_state_id"]: row for row in read_rows(request.start_states, "start_states")}
    tokenizer = Policy.load(base, compute=CPU).tokenizer
    for row in rows:
        state = states[row["start_state_id"]]
        # The character tokenizer has a token per character, so the cut is exact.
        wanted = [1, *tokenizer(state["question"] + "\n" + state["prefix"], add_special_tokens=False)["input_ids"]]
        assert row["prompt_ids"] == wanted
        assert row["prefix_length"] == len(state["prefix"])
        assert row["completion"].startswith(state["prefix"])
        assert json.loads(row["reward_parts"])["outcome"] in (0.0, 1.0)


def test_seeds_name_the_sample(request_of, tmp_path):
    _, rows, _ = rows_of(request_of(), tmp_path / "out")
    for row in rows:
        assert row["seed"] == derive_seed(5, 0, row["start_state_id"], row["sample"])
    assert len({tuple(row["completion_ids"]) for row in rows}) > 6


def test_a_start_state_chosen_twice_is_sampled_on(request_of, tmp_path):
    few = write_start_states(tmp_path / "few.parquet", items=1, n_stages=1)
    _, rows, _ = rows_of(request_of(start_states=few, curriculum=NoCurriculum()), tmp_path / "out")
    assert {row["start_state_id"] for row in rows} == {"item0/0"}
    assert len({row["seed"] for row in rows}) == 12


def test_the_same_request_gives_the_same_files(request_of, tmp_path):
    rows_of(request_of(), tmp_path / "one")
    rows_of(request_of(), tmp_path / "two")
    for name in ("rollouts.parquet", "metrics.parquet", "curriculum.json"):
        assert file_hash(tmp_path / "one" / name) == file_hash(tmp_path / "two" / name)


def test_another_round_and_another_seed_draw_other_samples(request_of, tmp_path):
    _, first, _ = rows_of(request_of(), tmp_path / "one")
    state = tmp_path / "one/curriculum.json"
    _, second, _ = rows_of(request_of(round=1, curriculum_state=state), tmp_path / "two")
    assert {row["start_state_id"] for row in first}.isdisjoint({row["start_state_id"] for row in second})
    _, other, _ = rows_of(request_of(seed=6), tmp_path / "three")
    assert [row["completion_ids"] for row in other] != [row["completion_ids"] for row in first]


def test_cut_zero_is_ordinary_sampling(request_of, tmp_path):
    """A start state without a prefix and plain RL from the same question are the same row."""
    state = {row["start_state_id"]: row for row in read_rows(request_of().start_states, "start_states")}["item0/0"]
    assert state["prefix"] == ""
    _, rows, _ = rows_of(request_of(), tmp_path / "out")
    assert all(row["prefix_length"] == 0 for row in rows if row["stage"] == 0)


def test_kl_keeps_the_reference_logprobs(request_of, tmp_path):
    rl = RLSettings(prompts=4, samples=3, max_new_tokens=12, temperature=0.7, kl=KLSettings(coefficient=0.1))
    _, rows, metrics = rows_of(request_of(rl=rl), tmp_path / "out")
    for row in rows:
        assert row["reference_logprobs"] == pytest.approx(row["sampling_logprobs"], abs=1e-4)
    assert metrics["kl_reference_rollouts"]["value"] == pytest.approx(0, abs=1e-6)


def test_kl_in_the_reward_lowers_it():
    row = {"sampling_logprobs": [-1.0, -2.0], "reference_logprobs": [-1.5, -2.5], "reward": 1.0}
    assert row_kl(row, "k1") == pytest.approx(1.0)
    assert penalised([row, row | {"reward": None}], KLSettings(coefficient=0.1, estimator="k1", place="reward")) == [
        pytest.approx(0.9),
        None,
    ]
    assert penalised([row], KLSettings(coefficient=0.1)) == [1.0]


def test_rows_that_do_not_fit_the_context_are_left_out(request_of, base, tmp_path):
    policy = Policy.load(base, compute=CPU)
    rows = read_rows(request_of().start_states, "start_states")
    long = rows[0] | {"remainder": "x" * policy.context, "prefix": ""}
    sampler = Sampler(request_of(), policy, Silent())
    assert [start.row for start in sampler.encode([long, rows[1]])] == [rows[1]]
    write_table(tmp_path / "long.parquet", "start_states", [long])
    with pytest.raises(UserError, match="context"):
        generate(request_of(start_states=tmp_path / "long.parquet", curriculum=NoCurriculum()), tmp_path, Silent())


def group_of(number: int, rewards: list) -> list[dict]:
    return [{"group": number, "reward": reward} for reward in rewards]


def test_silent_groups_are_drawn_again_but_not_for_ever():
    asked = []

    def silent(n):
        asked.append(n)
        return [row for k in range(n) for row in group_of(10 * len(asked) + k, [1.0, 1.0])]

    rl = RLSettings(prompts=3, samples=2, resample_draws=4)
    rows = group_of(0, [1.0, 0.0]) + group_of(1, [1.0, 1.0]) + group_of(2, [None, 0.0])
    assert resample(rows, silent, rl) == [0]
    assert asked == [2] * 4
    assert len(rows) == 6 + 4 * 4
    # Nothing differs at all: everything stays, and the update skips its steps.
    assert resample(group_of(0, [1.0, 1.0]), lambda n: [], rl) == [0]


def test_resampling_stops_when_the_round_is_full():
    rl = RLSettings(prompts=2, samples=2, resample_draws=9)
    asked = []

    def more(n):
        asked.append(n)
        return group_of(5, [0.0, 1.0])

    rows = group_of(0, [1.0, 0.0]) + group_of(1, [1.0, 1.0])
    assert resample(rows, more, rl) == [0, 5]
    assert asked == [1]


def test_a_round_with_resampling_counts_all_tokens(request_of, tmp_path):
    reward = RewardSettings(functions=("tests.rl:early_letters_of_stage_0",))
    rl = RLSettings(prompts=4, samples=3, max_new_tokens=6, resample_draws=2)
    info, rows, metrics = rows_of(request_of(reward=reward, rl=rl), tmp_path / "out")
    assert {row["stage"] for row in rows} == {0}
    assert metrics["groups"]["value"] == len(rows) / 3 <= 4
    assert info["generated_tokens"] > sum(len(row["completion_ids"]) for row in rows)
    assert metrics["generated_tokens"]["value"] == info["generated_tokens"]
    again, same, _ = rows_of(request_of(reward=reward, rl=rl), tmp_path / "again")
    assert (again, same) == (info, rows)
    state = json.loads((tmp_path / "out/curriculum.json").read_text())
    assert state["cursor"] + 18 * state["pass"] > 4


def test_metrics_leave_unscorable_rows_out_of_the_reward():
    common = {"completion_ids": [5, 2], "prompt_ids": [1], "prefix_length": 0, "reward_parts": "{}", "correct": False}
    rows = [
        common | {"reward": 1.0, "correct": True, "group": 0, "stage": 0, "stop_reason": "eos"},
        common | {"reward": None, "group": 0, "stage": 0, "stop_reason": "error"},
        common | {"reward": 0.0, "group": 1, "stage": 1, "stop_reason": "length"},
        common | {"reward": 0.0, "group": 1, "stage": 1, "stop_reason": "eos", "reward_parts": '{"outcome": 0.5}'},
    ]
    metrics = round_metrics(rows)
    assert metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["accuracy"] == 0.25
    assert metrics["unscorable_share"] == metrics["engine_error_share"] == metrics["truncated_share"] == 0.25
    assert metrics["zero_variance_share"] == 1.0
    assert metrics["accuracy/stage_0"] == 0.5
    assert metrics["accuracy/stage_1"] == 0.0
    assert metrics["reward/outcome"] == 0.5
    assert metrics["generated_tokens"] == 8
