"""The formats that instruct models answer in are read; taking an answer back, or listing options, is not rewarded."""

import pytest

from data.grading import grade

READ = [
    ("18", "number", "The answer is:\n\n18"),
    ("18", "number", "The final answer is:\n\n**18**"),
    ("18", "number", "The answer is \\[18\\]"),
    ("18", "number", "The answer is\n\\[\n18\n\\]"),
    ("18", "number", "The answer is:\n\n$$\n18\n$$"),
    ("18", "number", "### Answer\n18"),
    ("18", "number", "## Final Answer\n\n18 dollars"),
    ("18", "number", "**Answer**\n18"),
    ("18", "number", "\\boxed{18}\n\n### Explanation\nNine and nine were added."),
    ("18", "number", "It is not hard to see that the answer is \\boxed{18}"),
    ("18", "number", "It is not 17 but \\boxed{18}"),
    ("18", "number", "Not counting May, the answer is \\boxed{18}."),
    ("18", "number", "\\boxed{17} is wrong. Let me add them again: it is \\boxed{18}"),
    ("18", "number", "[THINK]17[/THINK]#### 18"),
    ("18", "number", "As shown above, she pays a total of $18."),
    ("18", "number", "The square has an area of 18 square feet."),
    ("18", "number", "She sold it for $18."),
    ("18", "number", "He beat her by 18 points."),
    ("\\frac12", "math", "The sum of the two roots is $\\frac12$."),
    ("(3,4)", "math", "The answer is the point $(3,4)$."),
    ("\\frac12", "math", "The answer is:\n\n\\[\n\\frac{1}{2}\n\\]"),
    ("\\frac12", "math", "### Final Answer\n$\\frac12$"),
    ("\\frac12", "math", "\\boxed{\\frac12}\n\n### Verification\nIt holds."),
    ("\\text{Monday}", "math", "### Answer\nMonday"),
    ("p - q", "math", "The sum is \\(p - q\\)."),
    ("9", "math", "**9**"),
    ("5", "math", "\\boxed{\\textbf{5}}"),
    ("5", "math", "\\boxed{\\underline{5}}"),
    ("E", "choice", "### Answer\n(E) 12"),
    ("E", "choice", "The correct option is:\n\nE) 12"),
    ("E", "choice", "(E) A man walks"),
    ("B", "choice", "\\boxed{B}. The others are incorrect."),
    ("neutral", "label", "### Answer\nneutral"),
    ("10 cm", "float", "10.1"),
]

REFUSED = [
    ("18", "number", "[THINK]#### 18"),
    ("18", "number", "<think type='x'>#### 18"),
    ("18", "number", "◁think▷#### 18"),
    ("18", "number", "<scratchpad>#### 18"),
    ("18", "number", "The answer is below 18."),
    ("18", "number", "The answer is up to 18."),
    ("18", "number", "The total exceeds $18."),
    ("18", "number", "It is divisible by 18."),
    ("18", "number", "She has a multiple of 18."),
    ("18", "number", "The answer is the square of 18."),
    ("18", "number", "The answer is log 18."),
    ("18", "number", "The answer differs from 18."),
    ("18", "number", "It is anything but 18."),
    ("18", "number", "It is false that it is 18."),
    ("18", "number", "It is impossible to get 18."),
    ("18", "number", "I doubt it is 18."),
    ("18", "number", "She has no 18."),
    ("\\frac12", "math", "The answer is less than $\\frac12$."),
    ("\\frac12", "math", "The area exceeds $\\frac12$."),
    ("\\frac12", "math", "The answer is twice $\\frac12$."),
    ("\\frac12", "math", "The answer is the reciprocal of \\(\\frac12\\)."),
    ("18", "number", "\\boxed{18} is wrong."),
    ("18", "number", "\\boxed{18}, which is incorrect."),
    ("18", "number", "\\boxed{18}. I take that back."),
    ("18", "number", "#### 18\nThis is wrong, I retract it."),
    ("18", "number", "<answer>18</answer> is not right."),
    ("18", "number", "The answer is not \\boxed{18}"),
    ("18", "number", "It cannot be \\boxed{18}."),
    ("18", "number", "x \\neq \\boxed{18}"),
    ("18", "number", "The answer is never 18."),
    ("18", "number", "The answer is 18. No, seventeen."),
    ("18", "number", "The answer is 18. Wait, no."),
    ("18", "number", "The answer is 18. Hmm, that's wrong."),
    ("18", "number", "The answer is 18-ish"),
    ("18", "number", "\u2460\u2467"),
    ("18", "number", "The answer is:\n\n17\n18"),
    ("18", "number", "The answer is:\n\n18\n17"),
    ("18", "number", "The answer is \\[17\\]\\[18\\]"),
    ("18", "number", "The answer is \\[18\\]\\[17\\]"),
    ("18", "number", "The answer is:\n\n$$17$$ $$18$$"),
    ("18", "number", "### Answer\n17 or 18"),
    ("18", "number", "### Answer\nNot 18."),
    ("18", "number", "### Answer\n17\n### Answer\n18"),
    ("18", "number", "### Answer\n18\n### Answer\n17"),
    ("\\frac12", "math", "The answer is:\n\\[\\frac12\\]\n\\[\\frac13\\]"),
    ("\\frac12", "math", "It is not \\boxed{\\frac12}"),
    ("1", "math", "\\boxed{0^0}"),
    ("2", "math", "\\boxed{1+0^0}"),
    ("x", "math", "\\boxed{x\\cdot0^0}"),
    ("45", "math", "\\boxed{4\\textbf{5}}"),
    ("E", "choice", "E, A"),
    ("E", "choice", "\\boxed{E,A}"),
    ("E", "choice", "#### E\n#### A"),
    ("E", "choice", "(E) and A"),
    ("E", "choice", "The answer is E, A"),
    ("A", "choice", "The answer is:\n\nA) 1\nB) 2"),
    ("yes", "label", "### Answer\nno\n### Answer\nyes"),
    ("10 cm", "float", "10.1 m"),
]


@pytest.mark.parametrize(("gold", "kind", "text"), READ)
def test_formats_of_instruct_models_are_read(gold: str, kind: str, text: str) -> None:
    assert grade(text, gold, kind).reason == "correct"


@pytest.mark.parametrize(("gold", "kind", "text"), REFUSED)
def test_what_is_taken_back_or_listed_is_refused(gold: str, kind: str, text: str) -> None:
    result = grade(text, gold, kind)
    assert not result.correct, result


@pytest.mark.parametrize("marked", ["\\boxed{%s} is wrong.", "It is not \\boxed{%s}"])
def test_the_reason_says_that_an_answer_was_taken_back(marked: str) -> None:
    assert grade(marked % "18", "18").reason == "taken_back"
