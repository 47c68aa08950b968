"""The procedural suites: deterministic, distinct, right, hard to guess, and chains that are judged step by step."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.segmentation import split_steps
from data.suites import SUITES, arithmetic_words, state_tracking
from data.suites.base import Draw

NAMES = sorted(SUITES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), difficulty=st.integers(1, 12))
def test_every_example_is_valid(name, seed, difficulty):
    suite = SUITES[name]
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
    assert list(suite.examples(30, 7, 3)) != list(suite.examples(30, 7, 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("difficulty", [1, 3])
def test_questions_are_distinct_and_exclusions_are_kept(name, difficulty):
    suite = SUITES[name]
    held_out = {example.question for example in suite.examples(500, 0, difficulty)}
    assert len(held_out) == 500
    drawn = [example.question for example in suite.examples(500, 0, difficulty, excluding=held_out)]
    assert len(set(drawn)) == 500 and not held_out & set(drawn)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_short_and_answers_are_hard_to_guess_at_the_default_difficulty(name):
    suite = SUITES[name]
    examples = list(suite.examples(4000, 11))
    assert max(len(example.question) for example in examples) <= 105
    assert max(len(example.response) for example in examples) <= 80
    commonest = Counter(example.answer for example in examples).most_common(1)[0][1] / len(examples)
    assert commonest < suite.chance + 0.01  # 4,000 draws of a chance of 1 to 2 %: two standard errors are under 0.5 %


def test_arithmetic_answers_are_uniform_at_every_difficulty():
    for difficulty in (1, 2, 3, 12):
        counts = Counter(example.answer for example in SUITES["arithmetic_words"].examples(9000, 3, difficulty))
        assert set(counts) == {str(value) for value in range(10, 100)}
        # 100 expected each, standard deviation 10: five of them.
        assert 50 < min(counts.values()) and max(counts.values()) < 150


def test_the_final_row_is_hard_to_guess_from_the_first_row():
    rearrangements: Counter[tuple[int, ...]] = Counter()
    for example in SUITES["state_tracking"].examples(8000, 5):
        start = example.question.split(" ")[1].rstrip(":")
        rearrangements[tuple(start.index(letter) for letter in example.answer)] += 1
    assert rearrangements.most_common(1)[0][1] / 8000 < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_difficulty_is_an_error(name):
    with pytest.raises(UserError, match=r"has no difficulty 0; choose one from 1 to 12"):
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
    "step, after", [("swap c b", "bacde"), ("d first", "dcabe"), ("a last", "cbdea"), ("flip", "edbac")]
)
def test_moves(step, after):
    assert state_tracking.move("cabde", step) == after


def test_moves_do_not_commute():
    assert state_tracking.move(state_tracking.move("abcde", "c first"), "flip") == "edbac"
    assert state_tracking.move(state_tracking.move("abcde", "flip"), "c first") == "cedba"


def test_an_unknown_move_is_an_error():
    with pytest.raises(ValueError, match="'jump' is no move"):
        state_tracking.move("abcde", "jump")


ARITHMETIC = "Ann has 14 pens, buys 7, loses 5, doubles them. How many now?"
PROGRAM = "Pens: Bob twice Cal, Ann 3 over Bob, Cal 9. Ann and Cal together?"
ROW = "Row cadbe: swap a d, b first, flip. Row now?"


@pytest.mark.parametrize(
    "name, question, response, verdict",
    [
        ("arithmetic_words", ARITHMETIC, "14+7=21\n21-5=16\n16*2=32\n#### 32", True),
        ("arithmetic_words", ARITHMETIC, "14 + 7 = 21\n21 - 5 = 16\n16 * 2 = 32\n#### 32\n", True),
        ("arithmetic_words", ARITHMETIC, "14+7=21\n21-5=17\n17*2=34\n#### 34", False),
        ("arithmetic_words", ARITHMETIC, "14-5=9\n9+7=16\n16*2=32\n#### 32", False),  # right answer, wrong order
        ("arithmetic_words", ARITHMETIC, "14+7=21\n16*2=32\n#### 32", False),  # a step left out
        ("arithmetic_words", ARITHMETIC, "14+7=21\n21-5=16\n16*2=32\n32+0=32\n#### 32", False),
        ("arithmetic_words", ARITHMETIC, "14+7=21\n21-5=16\n16*2=32\n#### 33", False),
        ("arithmetic_words", ARITHMETIC, "14+7=21\n21-5=16\n16*2=32", False),  # no answer
        ("arithmetic_words", ARITHMETIC, "", False),
        ("arithmetic_words", ROW, "acdbe\n#### acdbe", None),
        ("program_words", PROGRAM, "def solution():\n c=9\n b=c*2\n a=b+3\n return a+c", True),
        ("program_words", PROGRAM, "def solution():\n    c = 9\n    b = c * 2\n    a = b + 3\n    return c + a", True),
        ("program_words", PROGRAM, "def solution():\n b=c*2\n c=9\n a=b+3\n return a+c", False),  # used before known
        ("program_words", PROGRAM, "def solution():\n c=9\n b=c*2\n a=c+3\n return a+c", False),
        ("program_words", PROGRAM, "def solution():\n c=9\n b=c*2\n a=b+3\n return a+b", False),
        ("program_words", PROGRAM, "def solution():\n return 30", False),
        ("program_words", PROGRAM, "def solution():\n c=9\n c=9\n b=c*2\n a=b+3\n return a+c", False),
        ("program_words", PROGRAM, "", False),
        ("program_words", ARITHMETIC, "def solution():\n return 32", None),
        ("state_tracking", ROW, "cdabe\nbcdae\neadcb\n#### eadcb", True),
        ("state_tracking", ROW, "cdabe\nbcdae\neadcb\n#### eadbc", False),
        ("state_tracking", ROW, "cdabe\neadcb\n#### eadcb", False),
        ("state_tracking", ROW, "bcadb\nbcdae\neadcb\n#### eadcb", False),
        ("state_tracking", PROGRAM, "eadcb\n#### eadcb", None),
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
