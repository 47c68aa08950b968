"""Key-state restarts: candidates and their pre-scores, values and the key rule, balance, limits, the schedule."""

import json

import pytest

from data.meta_actions.restarts import KeyState, RestartBuffer, Rollout, candidates
from data.settings import Restarts


def rollout(item: str, candidates_: list, correct: bool, entropies=None, name: str = "0/0/0") -> Rollout:
    """A rollout whose blocks end at tokens 10, 20, ... and characters 5, 10, ..."""
    n = len(candidates_)
    return Rollout(
        row={"item_id": item, "task": "t", "question": "q", "answer": "7", "answer_kind": "number"},
        ids=list(range(100 * ord(item), 100 * ord(item) + 10 * n + 4)),
        prompt=4,
        name=f"{item}/{name}",
        actions=[*["reason", "critique", "refine", "critique", "refine"][: n - 1], "answer"],
        ends=[4 + 10 * (k + 1) for k in range(n)],
        texts=[5 * (k + 1) for k in range(n)],
        text="x" * 5 * n,
        candidates=candidates_,
        entropies=entropies or [None] * n,
        correct=correct,
    )


def state(item: str, right: bool, value: float | None = None, prescore: float = 0.0, version: int = 0, **more):
    row = {"item_id": item, "question": "q", "answer": "7", "answer_kind": "number", "task": "t", "prefix": "p"}
    return KeyState(row, [1, 2, len(item)], 1, item, 1, ["reason"], right, 0.5, version, prescore, value, **more)


def test_candidates_and_pre_scores_by_hand():
    # wrong attempt, critique, right refinement, critique, wrong refinement, answer: wrong in the end
    found = candidates(
        rollout("a", [False, None, True, None, False, None], False, [0, 0.9, 0, 0, 0, None]), 0.25, 3, 0.9
    )
    assert [(s.block, s.right, s.prescore) for s in found] == [
        (1, False, 1.0),
        (2, False, 1.0),
        (3, True, 0.0),
        (4, True, 0.0),
        (5, False, 2.5),
    ]
    assert found[1].ids == rollout("a", [None] * 6, False).ids[:24] and found[1].prefix_length == 20
    assert found[1].row["prefix"] == "x" * 10 and found[1].actions == ["reason", "critique"] and found[1].version == 3
    assert candidates(rollout("a", [None, None], True), 0.5, 0, 1.0) == []


def test_only_mixed_and_all_wrong_groups_give_candidates():
    buffer = RestartBuffer(Restarts(), seed=0)
    assert buffer.add([[rollout("a", [True, None], True)] * 2], 0) == 0
    assert buffer.add([[rollout("b", [False, None], False)] * 2], 0) == 1  # equal states are one
    mixed = [rollout("c", [True, None], True, name="1"), rollout("c", [False, None, None], False, name="2")]
    mixed[1] = Rollout(**{**mixed[1].__dict__, "ids": [9, *mixed[1].ids[1:]]})
    assert buffer.add([mixed], 0) == 3
    assert sum(s.right for s in buffer.states) == 1


def test_value_by_hand_and_the_key_rule():
    buffer = RestartBuffer(Restarts(value_low=0.15, value_high=0.85), seed=0)
    states = [state(name, True) for name in ("a", "bb", "ccc")]
    buffer.states = list(states)
    buffer.observe([(states[0], [True] * 8), (states[1], [True, False] * 4), (states[2], [False] * 8)])
    assert [s.value for s in states] == pytest.approx([0.9, 0.5, 0.1])
    assert buffer.states == [states[1]]


def test_two_visits_that_end_alike_and_too_many_visits_drop_a_state():
    buffer = RestartBuffer(Restarts(max_visits=3), seed=0)
    one, two = state("a", True), state("bb", False)
    buffer.states = [one, two]
    buffer.observe([(one, [True] * 8), (two, [True, False])])
    assert buffer.states == [one, two]  # 0.9 is still key with the default limits
    buffer.observe([(one, [True] * 8), (two, [True, False])])
    assert buffer.states == [two]
    buffer.observe([(two, [True, False])])
    assert buffer.states == []


def test_score_by_hand():
    buffer = RestartBuffer(Restarts(), seed=0)
    here, after = state("a", True, value=0.5), state("a", False, value=0.1)
    after.block = 2
    buffer.states = [here, after]
    assert buffer.score(here) == pytest.approx(0.25 + 0.5 * 0.4)
    assert buffer.score(after) == pytest.approx(0.09)
    assert buffer.score(state("b", True, prescore=1.0)) == pytest.approx(0.125)


def test_choice_is_balanced_one_a_problem_and_young():
    buffer = RestartBuffer(Restarts(share=0.5, start=0.0, max_age=2), seed=0)
    wrong = [state(f"w{'x' * i}", False, prescore=2.0, version=5) for i in range(6)]
    right = [state(f"r{'x' * i}", True, prescore=1.0, version=5) for i in range(2)]
    old = state("old", True, prescore=9.0, version=1)
    twin = state("w", False, prescore=3.0, version=5)
    buffer.states = [*wrong, *right, old, twin]
    chosen = buffer.choose(6, 12, 0.5)
    assert sorted(s.right for s in chosen) == [False, False, True, True]
    assert len({s.row["item_id"] for s in chosen}) == 4 and old not in buffer.states
    buffer.settings = Restarts(share=0.5, start=0.0, balanced=False)
    assert len([s for s in buffer.choose(6, 12, 0.5) if not s.right]) == 6


def test_random_choice_depends_on_seed_and_round_alone():
    def chosen(seed: int, round: int) -> list[str]:
        buffer = RestartBuffer(Restarts(share=0.5, start=0, choose="random", balanced=False), seed)
        buffer.states = [state(f"w{'x' * i}", False, prescore=i) for i in range(9)]
        return [s.row["item_id"] for s in buffer.choose(round, 8, 0.5)]

    assert chosen(1, 2) == chosen(1, 2) != chosen(1, 3)


def test_share_begins_late_and_is_annealed():
    buffer = RestartBuffer(Restarts(share=0.3, start=0.05, anneal=0.25), seed=0)
    assert [buffer.share(p) for p in (0.0, 0.04)] == [0, 0]
    assert [buffer.share(p) for p in (0.05, 0.75)] == pytest.approx([0.3, 0.3])
    assert [buffer.share(p) for p in (0.875, 1.0, 1.2)] == pytest.approx([0.15, 0.0, 0.0])
    assert RestartBuffer(Restarts(share=0.0), 0).choose(0, 16, 0.5) == []


def test_state_survives_json():
    buffer = RestartBuffer(Restarts(), seed=0)
    buffer.add([[rollout("b", [False, None, True, None], False), rollout("b", [True, None], True, name="2")]], 0)
    buffer.observe([(buffer.states[0], [True, False])])
    other = RestartBuffer(Restarts(), seed=0)
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert other.states == buffer.states and len(other.states) > 1


def test_capacity_keeps_both_sides():
    buffer = RestartBuffer(Restarts(capacity=4), seed=0)
    buffer.states = [state(f"w{'x' * i}", i < 2, version=i) for i in range(9)]
    buffer.add([], 9)
    assert sorted(s.right for s in buffer.states) == [False, False, True, True]
