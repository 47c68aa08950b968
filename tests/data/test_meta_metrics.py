"""Figures of traces by hand, and alarms: each rings on its fault and stays silent without it."""

import json
import math

import pytest

from data.meta_actions.alarms import RULES, WINDOW, AlarmHistory, line_of, new_lines
from data.meta_actions.grammar import block
from data.meta_actions.judging import judge
from data.meta_actions.metrics import Record, round_figures
from tests.data.meta_traces import FIXED, GOLD, attempt, critique, trace
from tests.documented import documented, general

RIGHT = trace(block("reason", attempt(7)))
WRONG = trace(block("reason", attempt(8)), answer=8)
CONFIRMED = trace(block("reason", attempt(7)), critique(None))
FOOLED = trace(block("reason", attempt(8)), critique(None), answer=8)
SPOILT = trace(block("reason", attempt(7)), critique(1), block("refine", attempt(8)), answer=8)


def record(text: str, group: int = 0, restart: bool = False, success: float = 0.5, entropies=(0.5,)) -> Record:
    judged = judge(text, GOLD, "number")
    return Record(judged, group, restart, 12, 0, success, judged.trace.status != "ok", entropies, text)


def test_figures_by_hand():
    records = [
        record(t, g) for t, g in ((FIXED, 0), (RIGHT, 0), (CONFIRMED, 1), (CONFIRMED, 1), (FOOLED, 2), (SPOILT, 2))
    ]
    records += [record(RIGHT, 3, restart=True), record(WRONG, 3, restart=True, entropies=(1.0,))]
    found = {name.removeprefix("meta/"): value for name, value in round_figures(records, 8).items()}
    # of the six roots: first right are RIGHT, twice CONFIRMED, SPOILT; last right FIXED, RIGHT, twice CONFIRMED
    assert (found["accuracy_first"], found["accuracy_last"]) == pytest.approx((4 / 6, 4 / 6))
    assert (found["wrong_to_right"], found["right_to_wrong"]) == pytest.approx((1 / 6, 1 / 6))
    # candidates judged: right ones by CONFIRMED ×2 (correct) and SPOILT (wrong), wrong ones by FIXED (wrong), FOOLED
    assert found["verdict_true_positive"] == pytest.approx(2 / 3)
    assert found["verdict_false_positive"] == pytest.approx(1 / 2)
    assert found["verdict_balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["verdict_correct_rate"] == pytest.approx(3 / 5)
    assert found["refine_success"] == 1 and found["changed_share"] == 1
    # blocks: 4 + 2 + 3 + 3 + 3 + 4 = 19, of them 6 reason, 5 critique, 2 refine, 6 answer
    assert found["share_critique"] == pytest.approx(5 / 19) and found["blocks_mean"] == pytest.approx(19 / 6)
    assert found["blocks_medium"] == found["blocks_mean"] and "blocks_hard" not in found
    assert found["choice_reason_critique"] == pytest.approx(5 / 6) and found["choice_critique_wrong_refine"] == 1
    assert found["boundary_entropy"] == pytest.approx((7 * 0.5 + 1) / 8)
    assert found["zero_variance_root"] == pytest.approx(1 / 3 * 3)  # groups 0 and 1 all right, 2 all wrong
    assert found["zero_variance_restart"] == 0 and found["restart_share"] == 0.25 and found["restart_accuracy"] == 0.5
    assert found["tokens_per_block"] == pytest.approx(72 / 19)
    # Useful actions: FIXED; RIGHT, FOOLED and SPOILT one attempt each; CONFIRMED twice.
    shares = (1 / 6, 3 / 6, 2 / 6)
    assert found["signature_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert found["signature_top_share"] == pytest.approx(0.5)


def test_every_figure_is_documented():
    records = [record(FIXED, success=s) for s in (0.1, 0.5, 0.9)] + [record(CONFIRMED), record(RIGHT, restart=True)]
    written = {general(name) for name in round_figures(records, 8)}
    meta = {name for name in documented("Meta-actions") if name.startswith("meta/")}
    restarts = {name for name in meta if name.startswith("meta/restart_")} | {"meta/alarm_<name>"}
    assert written | restarts == meta


def ring(figures: dict, rounds: int = 2 * WINDOW + 1, before: dict | None = None, progress: float = 0.5) -> set[str]:
    """Alarms of the last of `rounds` rounds with `figures`, after WINDOW rounds with `before`."""
    history = AlarmHistory()
    rung: list = []
    for number in range(rounds):
        rung = history.ring(before if before is not None and number < WINDOW else figures, number, progress)
    return {alarm.name for alarm in rung}


HEALTHY = {
    "meta/malformed_share": 0.01,
    "meta/verdict_balanced_accuracy": 0.92,
    "meta/boundary_entropy": 0.5,
    "meta/repeated_share": 0.0,
    "meta/blocks_mean": 4.0,
    "meta/tokens_per_block": 12.0,
    "meta/full_share": 0.02,
    "meta/share_critique": 0.25,
    "meta/changed_share": 0.5,
    "meta/signature_top_share": 0.5,
    "meta/verdict_correct_rate": 0.5,
    "meta/accuracy_first": 0.5,
    "meta/accuracy_last": 0.6,
    "meta/restart_accuracy": 0.6,
    "meta/restart_wrong_share": 0.5,
    "meta/zero_variance_root": 0.3,
    "meta/zero_variance_restart": 0.2,
}
FAULTS = {
    "repetition": {"meta/repeated_share": 0.3},
    "length_collapse": {"meta/blocks_mean": 2.0},
    "long_blocks": {"meta/tokens_per_block": 30.0},
    "endless_critique": {"meta/full_share": 0.5},
    "no_critique": {"meta/share_critique": 0.0},
    "never_correcting": {"meta/changed_share": 0.0},
    "one_template": {"meta/signature_top_share": 0.95},
    "decorative_critique": {"meta/verdict_balanced_accuracy": 0.5},
    "always_correct": {"meta/verdict_correct_rate": 0.95},
    "always_wrong": {"meta/verdict_correct_rate": 0.05},
    "planted_error": {"meta/accuracy_first": 0.4},
    "malformed": {"meta/malformed_share": 0.2},
    "entropy_collapse": {"meta/boundary_entropy": 0.02},
    "entropy_blow_up": {"meta/boundary_entropy": 0.97},
    "restart_overfit": {"meta/restart_accuracy": 0.9},
    "buffer_imbalance": {"meta/restart_wrong_share": 0.9},
    "dead_root_groups": {"meta/zero_variance_root": 0.9},
    "dead_restart_groups": {"meta/zero_variance_restart": 0.9},
}


def test_no_alarm_rings_on_healthy_figures():
    assert ring(HEALTHY) == set()
    assert {alarm.name for alarm in AlarmHistory().ring(HEALTHY, 0, 0.0)} == set()


@pytest.mark.parametrize("name", FAULTS)
def test_each_alarm_rings_on_its_fault(name):
    assert ring(HEALTHY | FAULTS[name], before=HEALTHY) == {name}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gate_malformed", {"meta/malformed_share": 0.08}),
        ("gate_verdicts", {"meta/verdict_balanced_accuracy": 0.8}),
        ("gate_entropy", {"meta/boundary_entropy": 0.05}),
    ],
)
def test_the_gates_look_at_the_first_round_alone(name, fault):
    assert {alarm.name for alarm in AlarmHistory().ring(HEALTHY | fault, 0, 0.0)} == {name}
    history = AlarmHistory()
    history.ring(HEALTHY, 0, 0.0)
    assert history.ring(HEALTHY | fault, 1, 0.1) == []


def test_every_rule_is_tested_and_says_what_to_change():
    assert {rule.name for rule in RULES if not rule.first_round} == set(FAULTS)
    for rule in RULES:
        assert rule.advice in line_of(rule.name)
    assert line_of("unknown") is None


def test_the_log_names_an_alarm_when_it_begins():
    history = AlarmHistory()
    said = []
    for number in range(8):
        figures = HEALTHY | ({"meta/repeated_share": 0.9} if number >= 3 else {})
        said.append(new_lines(history, history.ring(figures, number, 0.5)))
        copy = AlarmHistory()
        copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
        assert copy == history
    lines = [line for lines in said for line in lines]
    assert len(lines) == 1 and lines[0].startswith("alarm repetition: meta/repeated_share is")
