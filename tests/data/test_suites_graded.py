"""The suites' own responses under the grader that pays the reward."""

import pytest

from data.grading import grade
from data.suites import SUITES

NAMES = sorted(SUITES)


@pytest.mark.parametrize("name", NAMES)
def test_every_response_grades_itself_and_no_other_answer(name):
    for example, other in zip(SUITES[name].examples(20, 1), SUITES[name].examples(20, 2)):
        verdict = grade(example.response, example.answer, kind=example.answer_kind)
        assert verdict.correct, (example, verdict)
        if other.answer != example.answer:
            assert not grade(other.response, example.answer, kind=example.answer_kind).correct
