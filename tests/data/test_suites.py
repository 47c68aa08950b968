"""The procedural suites: deterministic, distinct, right, hard to guess, and chains that are judged step by step."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.segmentation import split_steps
from data.suites import (
    SUITES,
    arithmetic_words,
    deduction,
    entailment_scene,
    entailment_times,
    exchange_words,
    state_tracking,
)
from data.suites.base import Draw

NAMES = sorted(SUITES)
LONGEST_QUESTION = {
    "deduction": 150,
    "deduction_conflict": 300,
    "entailment_scene": 150,
    "entailment_times": 150,
    "exchange_words": 150,
    "multihop_reading": 320,
}
"""Characters at the default difficulty, where a kind needs more than 125."""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), level=st.integers(0, 11))
def test_every_example_is_valid(name, seed, level):
    suite = SUITES[name]
    difficulty = suite.difficulties[level % len(suite.difficulties)]
    for example in suite.examples(3, seed, difficulty):
        assert suite.check_chain(example.question, example.response) is True
        assert example.answer_kind == suite.answer_kind
        assert example.subject == f"{name}/{difficulty}"
        steps = split_steps(example.rationale, suite.segmentation)
        assert "".join(steps) == example.rationale
        # A program has its `def` line, the base amount and the `return` line besides.
        assert len(steps) == difficulty + (3 if suite.answer_kind == "program" else 0)
        if suite.answer_kind == "program":
            assert example.response == example.rationale
        else:
            assert example.response == f"{example.rationale}\n#### {example.answer}"


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_examples_and_a_longer_call_begins_with_the_shorter(name):
    suite = SUITES[name]
    assert list(suite.examples(30, 7)) == list(suite.examples(60, 7))[:30]
    assert list(suite.examples(30, 7)) != list(suite.examples(30, 8))
    first, second = suite.difficulties[2:4]
    assert list(suite.examples(30, 7, first)) != list(suite.examples(30, 7, second))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 2])
def test_questions_are_distinct_and_exclusions_are_kept(name, level):
    suite = SUITES[name]
    difficulty = suite.difficulties[level]
    held_out = {example.question for example in suite.examples(500, 0, difficulty)}
    assert len(held_out) == 500
    drawn = [example.question for example in suite.examples(500, 0, difficulty, excluding=held_out)]
    assert len(set(drawn)) == 500 and not held_out & set(drawn)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_short_and_answers_are_hard_to_guess_at_the_default_difficulty(name):
    suite = SUITES[name]
    examples = list(suite.examples(4000, 11))
    assert max(len(example.question) for example in examples) <= LONGEST_QUESTION.get(name, 125)
    assert max(len(example.response) for example in examples) <= (250 if name in LONGEST_QUESTION else 125)
    commonest = Counter(example.answer for example in examples).most_common(1)[0][1] / len(examples)
    assert commonest < suite.chance + 0.01  # 4,000 draws of a chance of 1 to 2 %: two standard errors are under 0.5 %


def _place(text):
    return dict(zip(("Ann", "Bob", "Cal"), text.split(" ")))


def test_events_of_the_new_suites_do_not_commute():
    both = ("Ann", "Bob")
    assert exchange_words.apply(both, (10, 20), "Ann gives 4") == (6, 24)
    assert exchange_words.apply(both, (6, 24), "Ann doubles") == (12, 24)
    assert exchange_words.apply(both, (20, 20), "Ann gives 4") == (16, 24)
    assert exchange_words.apply(both, (10, 21), "Bob halves") is None
    assert exchange_words.apply(both, (10, 21), "both swap") == (21, 10)
    with pytest.raises(ValueError, match="no event"):
        exchange_words.apply(both, (1, 2), "Cal doubles")
    red = ("red", "big", "calm")
    assert deduction.apply(red, [("red", "tiny")]) == ("yes", ("red", "tiny", "calm"))
    assert deduction.apply(red, [("blue", "tiny")]) == ("no", red)
    pair = [("red", "tiny"), ("calm", "wide")]
    assert deduction.apply(red, pair, 1) == ("second", ("red", "wide", "calm"))
    assert deduction.apply(("blue", "big", "calm"), pair, 0) == ("second", ("blue", "wide", "calm"))
    assert deduction.apply(("blue", "big", "loud"), pair, 0) == ("none", ("blue", "big", "loud"))
    scene = _place("hall park shed")
    assert entailment_scene.apply(scene, "Ann joins Bob") == _place("park park shed")
    assert entailment_scene.apply(scene, "Ann swaps Cal") == _place("shed park hall")
    assert entailment_scene.apply(scene, "Cal leaves") == _place("hall park away")
    assert entailment_scene.verdict(_place("hall park away"), "Cal", "shed") == "unknown"
    with pytest.raises(ValueError, match="no event"):
        entailment_scene.apply(scene, "Ann sings")
    assert entailment_times.apply(entailment_times.read("9:40"), "on the hour") == 600
    assert entailment_times.apply(600, "20 before") == entailment_times.read("9:40")
    assert entailment_times.verdict(580, True, "before", 600) == "yes"
    assert entailment_times.verdict(580, True, "after", 600) == "no"
    assert entailment_times.verdict(580, False, "after", 600) == "unknown"


def test_a_blind_guess_at_the_reading_task_is_rarely_right():
    """Three homes of the passage, drawn at random in an order that the relations allow."""
    right = 0
    for example in SUITES["multihop_reading"].examples(4000, 5):
        cities = re.findall(r" in (\w+)", example.question)
        right += example.answer == " ".join((cities[0], cities[1], cities[2]))
    assert right / 4000 < 0.02  # 1 of 6 × 5 × 5 on average


def test_arithmetic_answers_are_uniform_at_every_difficulty():
    low, high = arithmetic_words.LOW, arithmetic_words.HIGH
    for difficulty in (1, 2, 3, 12):
        examples = SUITES["arithmetic_words"].examples(100 * (high - low + 1), 3, difficulty)
        counts = Counter(example.answer for example in examples)
        assert set(counts) == {str(value) for value in range(low, high + 1)}
        # 100 expected each, standard deviation 10: five of them.
        assert 50 < min(counts.values()) and max(counts.values()) < 150


def test_the_last_square_is_hard_to_guess_from_the_first_square():
    """The commonest displacement and heading: what a policy that reads no step could reach."""
    displacements: Counter[tuple[int, int, str]] = Counter()
    for example in SUITES["state_tracking"].examples(8000, 5):
        column, row = example.question.removeprefix("Robot at ").split(" ")[:2]
        last_column, last_row, heading = example.answer.split(" ")
        displacements[ord(last_column) - ord(column), int(last_row) - int(row), heading] += 1
    assert displacements.most_common(1)[0][1] / 8000 < 0.06


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_difficulty_is_an_error(name):
    levels = SUITES[name].difficulties
    with pytest.raises(UserError, match=f"has no difficulty 0; choose one from {levels[0]} to {levels[-1]}"):
        SUITES[name].examples(1, 0, 0)


def test_an_exhausted_suite_says_so():
    one = replace(
        SUITES["program_words"], draw=lambda generator, level: Draw("only?", "def solution():\n return 1", "1")
    )
    assert [example.answer for example in one.examples(1, 0, 1)] == ["1"]
    with pytest.raises(UserError, match="ran out of new questions at difficulty 1 after 1 of 2"):
        list(one.examples(2, 0, 1))
    with pytest.raises(UserError, match=r"after 0 of 1 \(1 excluded\)"):
        list(one.examples(1, 0, 1, excluding={"only?"}))


@pytest.mark.parametrize("operator, operand, after", [("+", 7, 21), ("-", 5, 9), ("*", 2, 28), ("/", 2, 7)])
def test_arithmetic_events(operator, operand, after):
    assert arithmetic_words.apply(14, operator, operand) == after


@pytest.mark.parametrize(
    "start, step, after",
    [
        ("c 4 north", "ahead 2", "c 6 north"),
        ("c 4 north", "back 3", "c 1 north"),
        ("c 4 east", "ahead 2", "e 4 east"),
        ("c 4 south", "back 1", "c 5 south"),
        ("c 4 west", "ahead 2", "a 4 west"),
        ("c 4 west", "left", "c 4 south"),
        ("c 4 west", "right", "c 4 north"),
        ("c 4 north", "around", "c 4 south"),
    ],
)
def test_steps_of_the_robot(start, step, after):
    column, row, heading = start.split(" ")
    state = "abcdefgh".index(column), int(row) - 1, ("north", "east", "south", "west").index(heading)
    assert state_tracking.written(state_tracking.move(state, step)) == after


def test_steps_of_the_robot_do_not_commute():
    turned = state_tracking.move(state_tracking.move((2, 3, 0), "right"), "ahead 2")
    assert turned == (4, 3, 1)
    assert state_tracking.move(state_tracking.move((2, 3, 0), "ahead 2"), "right") == (2, 5, 1)


def test_the_robot_stays_on_the_board():
    assert state_tracking.move((0, 0, 2), "ahead 1") is None
    assert state_tracking.move((7, 0, 1), "ahead 1") is None
    with pytest.raises(ValueError, match="'jump' is no step"):
        state_tracking.move((0, 0, 0), "jump")


AMOUNTS = "Ann has 12 pens, Bob 9. Jan Ann gives 3, Feb both swap, Mar Bob doubles. How many each?"
RULES = "Rex is red big calm. 1 red makes wild, 2 tiny makes blue. What now?"
PAIRS = "Rex is red big calm. 1 red makes tall but calm makes tiny. Prefer 1 second. What now?"
SCENE = "Ann in hall, Bob in park, Cal in shed. 1 Ann joins Bob, 2 Cal leaves. Is Ann in hall?"
TIMES = "Ann at 9:35, Bob 20 after, Cal on the hour. Is Cal before 10:30?"
PASSAGE = (
    "Ann in Rome, boss Bob, friend Cal. Bob in Oslo, boss Cal, friend Ann. Cal in Bern, boss Ann, friend Bob. "
    "From Ann: boss, friend. Homes?"
)
SUMS = "Ann has 14 pens. Jan buys 6, Feb loses 5, Mar doubles them. How many now?"
PROGRAM = "Pens: Cal 9, Bob twice Cal, Ann 3 over Bob. Ann and Cal together?"
ROBOT = "Robot at c 4 north: 1 ahead 2, 2 right, 3 back 1. Where now?"
STEPS = ("Jan 14 + 6 = 20", "Feb 20 - 5 = 15", "Mar 15 * 2 = 30")
CODE = ("def solution():", "Cal = 9", "Bob = Cal * 2", "Ann = Bob + 3")
STATES = ("1 ahead 2: c 6 north", "2 right: c 6 east", "3 back 1: b 6 east")


def lines(*parts):
    return "\n".join(parts)


def code(*parts, indent=" "):
    return f"\n{indent}".join(parts)


@pytest.mark.parametrize(
    "name, question, response, verdict",
    [
        ("arithmetic_words", SUMS, lines(*STEPS, "#### 30"), True),
        ("arithmetic_words", SUMS, lines("Jan 14+6=20", "Feb 20-5=15", "Mar 15*2=30", "####30", ""), True),
        ("arithmetic_words", SUMS, lines(STEPS[0], "Feb 20 - 5 = 16", "Mar 16 * 2 = 32", "#### 32"), False),
        # Right answer, steps in another order:
        ("arithmetic_words", SUMS, lines("Jan 14 - 5 = 9", "Feb 9 + 6 = 15", STEPS[2], "#### 30"), False),
        ("arithmetic_words", SUMS, lines(STEPS[0], STEPS[2], "#### 30"), False),  # a step left out
        ("arithmetic_words", SUMS, lines(*STEPS, "Apr 30 + 0 = 30", "#### 30"), False),  # a step too many
        ("arithmetic_words", SUMS, lines(*STEPS, "#### 31"), False),
        ("arithmetic_words", SUMS, lines(*STEPS), False),  # no answer
        ("arithmetic_words", SUMS, "", False),
        ("arithmetic_words", ROBOT, lines(*STATES, "#### b 6 east"), None),
        ("program_words", PROGRAM, code(*CODE, "return Ann + Cal"), True),
        ("program_words", PROGRAM, code(*CODE, "return Cal + Ann", indent="    "), True),
        (
            "program_words",
            PROGRAM,
            code(CODE[0], CODE[2], CODE[1], CODE[3], "return Ann + Cal"),
            False,
        ),  # not yet known
        ("program_words", PROGRAM, code(*CODE[:3], "Ann = Cal + 3", "return Ann + Cal"), False),
        ("program_words", PROGRAM, code(*CODE, "return Ann + Bob"), False),
        ("program_words", PROGRAM, code(CODE[0], "return 30"), False),
        ("program_words", PROGRAM, code(*CODE[:2], *CODE[1:], "return Ann + Cal"), False),  # a line twice
        ("program_words", PROGRAM, "", False),
        ("program_words", SUMS, code(CODE[0], "return 30"), None),
        ("state_tracking", ROBOT, lines(*STATES, "#### b 6 east"), True),
        ("state_tracking", ROBOT, lines(*STATES, "#### c 6 east"), False),
        ("state_tracking", ROBOT, lines(STATES[0], STATES[2], "#### b 6 east"), False),
        ("state_tracking", ROBOT, lines("1 ahead 2: c 5 north", *STATES[1:], "#### b 6 east"), False),
        ("state_tracking", PROGRAM, lines(*STATES, "#### b 6 east"), None),
        (
            "exchange_words",
            AMOUNTS,
            lines("Jan Ann gives 3: 9 12", "Feb both swap: 12 9", "Mar Bob doubles: 12 18", "#### 12 18"),
            True,
        ),
        (
            "exchange_words",
            AMOUNTS,
            lines("Jan Ann gives 3: 9 12", "Feb Bob doubles: 9 24", "Mar both swap: 12 18", "#### 12 18"),
            False,
        ),
        (
            "deduction",
            RULES,
            lines("1 yes red makes wild: red big wild", "2 no tiny makes blue: red big wild", "#### red big wild"),
            True,
        ),
        (
            "deduction",
            RULES,
            lines("1 yes red makes wild: red big wild", "2 yes tiny makes blue: blue big wild", "#### blue big wild"),
            False,
        ),
        ("deduction", PAIRS, lines("1 second calm makes tiny: red tiny calm", "#### red tiny calm"), None),
        ("deduction_conflict", PAIRS, lines("1 second calm makes tiny: red tiny calm", "#### red tiny calm"), True),
        ("deduction_conflict", PAIRS, lines("1 first red makes tall: red tall calm", "#### red tall calm"), False),
        (
            "entailment_scene",
            SCENE,
            lines("1 Ann joins Bob: park park shed", "2 Cal leaves: park park away", "#### no park park away"),
            True,
        ),
        (
            "entailment_scene",
            SCENE,
            lines("1 Ann joins Bob: park park shed", "2 Cal leaves: park park away", "#### yes park park away"),
            False,
        ),
        ("entailment_times", TIMES, lines("Bob 20 after: 9:55", "Cal on the hour: 10:00", "#### yes 10:00"), True),
        ("entailment_times", TIMES, lines("Bob 20 after: 9:55", "Cal on the hour: 10:55", "#### no 10:55"), False),
        ("multihop_reading", PASSAGE, lines("Ann boss Bob: Oslo", "Bob friend Ann: Rome", "#### Oslo Rome"), True),
        ("multihop_reading", PASSAGE, lines("Ann boss Bob: Oslo", "Bob friend Cal: Bern", "#### Oslo Bern"), False),
    ],
)
def test_chains_worked_by_hand(name, question, response, verdict):
    assert SUITES[name].check_chain(question, response) is verdict


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_chain_with_one_changed_character_is_no_longer_valid(name, data):
    suite = SUITES[name]
    (example,) = suite.examples(1, data.draw(st.integers(0, 1000)))
    places = [i for i, character in enumerate(example.response) if character.isalnum()]
    place = data.draw(st.sampled_from(places))
    character = data.draw(st.sampled_from("0123456789abcdefgh"))
    changed = example.response[:place] + character + example.response[place + 1 :]
    same = changed == example.response
    assert suite.check_chain(example.question, changed) is same


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_gets_a_verdict(name, text):
    suite = SUITES[name]
    (example,) = suite.examples(1, 0)
    assert suite.check_chain(example.question, text) is False
    assert suite.check_chain(text, example.response) is None
