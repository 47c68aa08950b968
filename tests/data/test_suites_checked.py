"""The suites with mistakes and checks of their own: a check finds every mistake and passes every right attempt."""

import random

import pytest

from data.suites import CHECKED, SUITES
from data.suites.factor_pairs import FACTORS

NAMES = [suite.name for suite in CHECKED]


@pytest.mark.parametrize("name", NAMES)
def test_checks_and_mistakes_agree_with_the_solutions(name):
    suite = SUITES[name]
    generator = random.Random(3)
    for difficulty in suite.difficulties[:3]:
        for example in suite.examples(60, 4, difficulty):
            check = suite.check(example.question, example.response)
            assert check.holds and check.text and "bad" not in check.text
            mistake = suite.mistake(generator, example.question)
            attempt = f"{mistake.rationale}\n#### {mistake.answer}"
            assert mistake.answer != example.answer
            found = suite.check(example.question, attempt)
            assert not found.holds and found.text.endswith("bad")
            right, wrong = example.rationale.split("\n"), mistake.rationale.split("\n")
            assert len(right) == len(wrong) == difficulty
            assert right[: mistake.step - 1] == wrong[: mistake.step - 1]
            assert right[mistake.step - 1] != wrong[mistake.step - 1]
            assert suite.check_chain(example.question, attempt) is False


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_attempt_is_not_checked(name):
    suite = SUITES[name]
    example = next(suite.examples(1, 0))
    assert suite.check(example.question, "I do not know") is None
    assert suite.check("What?", example.response) is None
    assert suite.check_chain("What?", example.response) is None


def test_by_hand():
    sums, differences = SUITES["carry_sums"], SUITES["borrow_differences"]
    assert sums.check_chain("4 7 2 + 3 8 5?", "4 3: 8\n7 8: 5\n2 5: 7\n#### 8 5 7")
    assert sums.check("4 7 2 + 3 8 5?", "4 3: 7\n7 8: 5\n2 5: 7\n#### 7 5 7").text == (
        "2 + 5 = 7, 7 ok\n7 + 8 = 15, 5 ok\n4 + 3 + 1 = 8, 7 bad"
    )
    assert differences.check("5 1 2 - 2 3 4?", "5 2: 2\n1 3: 7\n2 4: 8\n#### 2 7 8").text == (
        "2 - 4 = 8 from 12, 8 ok\n1 - 3 - 1 = 7 from 11, 7 ok\n5 - 2 - 1 = 2, 2 ok"
    )
    chains = SUITES["inverse_chains"]
    assert chains.check_chain("x + 3, * 2, - 4 gives 18. x?", "18 + 4 = 22\n22 / 2 = 11\n11 - 3 = 8\n#### 8")
    assert chains.check("x + 3, * 2 gives 22. x?", "22 / 2 = 12\n12 - 3 = 9\n#### 9").text == (
        "9 + 3 = 12\n12 * 2 = 24\n24 for 22 bad"
    )
    totals = SUITES["subset_totals"]
    assert totals.check_chain("5 9 4 make 9?", "skip 5: 0\ntake 9: 9\nskip 4: 9\n#### 9") is None  # 5 + 4 as well
    assert totals.check("13 4 9 make 17?", "take 13: 13\nskip 4: 13\ntake 9: 22\n#### 13 9").text == (
        "13 + 9 = 22\n22 for 17 bad"
    )
    assert not totals.check("13 4 9 make 17?", "take 13: 13\ntake 4: 17\nskip 9: 17\n#### 8 9").holds
    assert FACTORS[35] == (5, 7) and 12 not in FACTORS
    factors = SUITES["factor_pairs"]
    assert factors.check("Factors of 35 91?", "35 = 5 * 7\n91 = 7 * 12\n#### 5 7").text == (
        "5 * 7 = 35 for 35 ok\n7 * 12 = 84 for 91 bad"
    )
    signs = SUITES["sign_totals"]
    assert signs.check_chain("Signs: 9 4 7 is 6?", "+ 9: 9\n+ 4: 13\n- 7: 6\n#### + 9 + 4 - 7")
    assert signs.check("Signs: 9 4 7 is 6?", "+ 9: 9\n- 4: 5\n+ 7: 12\n#### + 9 - 4 + 7").text == (
        "9 - 4 = 5\n5 + 7 = 12\n12 for 6 bad"
    )
