"""Warm-up traces: spliced from demonstrations and wrong attempts, filtered, masked and counted."""

import random
from collections import Counter

import pytest

from data.meta_actions.grammar import parse
from data.meta_actions.judging import judge
from data.meta_actions.synthesis import (
    Demonstration,
    Refused,
    Wrong,
    choose_kind,
    continues,
    corrupt_step,
    corrupted,
    data_card,
    write,
)
from data.settings import TraceMix, TraceSynthesis

DEMONSTRATION = Demonstration("i", "3 + 4 + 5?", ("3 + 4 = 7\n", "7 + 5 = 12\n"), "#### 12", "12", "number")
WRONG = Wrong(("3 + 4 = 7\n", "7 + 5 = 13\n"), "#### 13", 2, "7 + 5 = 12\n#### 12")
FIRST = Wrong(("3 + 4 = 8\n", "8 + 5 = 13\n"), "#### 13", 1, DEMONSTRATION.response)
SETTINGS = TraceSynthesis(longest_critique=9)


def test_a_fix_by_hand():
    example = write("fix", DEMONSTRATION, [WRONG], False, SETTINGS)
    assert example.text == (
        "<reason>\n3 + 4 = 7\n7 + 5 = 13\n#### 13\n</reason>\n"
        "<critique>\nStep 2 does not hold: 7 + 5 = 13\nVerdict: wrong at step 2\n</critique>\n"
        "<refine>\n7 + 5 = 12\n#### 12\n</refine>\n"
        "<answer>\n\\boxed{12}\n</answer>"
    )
    assert [example.text[s:e] for s, e in example.unlearned] == ["7 + 5 = 13"]


@pytest.mark.parametrize(
    ("wrong_content", "masked"),
    [("mask_decision", ["3 + 4 = 8"]), ("mask_all", ["3 + 4 = 8\n8 + 5 = 13\n#### 13"]), ("learn", [])],
)
def test_what_of_a_wrong_attempt_carries_no_loss(wrong_content, masked):
    settings = TraceSynthesis(longest_critique=9, wrong_content=wrong_content)
    example = write("fix", DEMONSTRATION, [FIRST], False, settings)
    assert [example.text[s:e] for s, e in example.unlearned] == masked


def test_the_other_kinds():
    plain = write("plain", DEMONSTRATION, [], False, SETTINGS)
    assert [b.action for b in parse(plain.text).blocks] == ["reason", "answer"] and plain.unlearned == ()
    confirm = parse(write("confirm", DEMONSTRATION, [], False, SETTINGS).text).blocks
    assert [b.action for b in confirm] == ["reason", "critique", "answer"] and confirm[1].correct
    again = Wrong(("3 + 4 = 7\n", "7 + 5 = 11\n"), "#### 11", 2, "7 + 5 = 12\n#### 12")
    assert continues(FIRST, again) and not continues(WRONG, FIRST)
    two = write("two_fixes", DEMONSTRATION, [FIRST, again], True, SETTINGS)
    blocks = parse(two.text).blocks
    assert [b.action for b in blocks] == ["reason", "critique", "refine", "critique", "refine", "critique", "answer"]
    assert [b.wrong_step for b in blocks if b.action == "critique"] == [1, 2, None]
    assert blocks[2].body == "\n3 + 4 = 7\n7 + 5 = 11\n#### 11\n" and blocks[4].body == "\n7 + 5 = 12\n#### 12\n"
    assert [two.text[s:e] for s, e in two.unlearned] == ["3 + 4 = 8", "7 + 5 = 11"]


def test_filters_refuse_by_name():
    cases = {
        "leak_answer": Wrong(("3 + 4 = 12\n",), "#### 13", 1, DEMONSTRATION.response),
        "tag_in_text": Wrong(("3 <answer> 4\n",), "#### 13", 1, DEMONSTRATION.response),
        "leak_words": Wrong(("the gold is 4\n",), "#### 13", 1, DEMONSTRATION.response),
        "verdict_not_true": Wrong(("3 + 4 = 7\n", "7 + 5 = 13\n"), "#### 12", 2, "7 + 5 = 12\n#### 12"),
        "not_legal: short_body": Wrong(("3 + 4 = 8\n",), "#### 13", 1, "12"),
    }
    for name, wrong in cases.items():
        with pytest.raises(Refused, match=name):
            write("fix", DEMONSTRATION, [wrong], False, SETTINGS)
    with pytest.raises(Refused, match="critique_too_long"):
        write("fix", DEMONSTRATION, [WRONG], False, TraceSynthesis(longest_critique=0.1))


def test_spoilt_steps_differ_in_one_place():
    generator = random.Random(0)
    for _ in range(50):
        spoilt = corrupt_step(generator, "Jan 12 + 5 = 17\n")
        assert spoilt != "Jan 12 + 5 = 17\n" and spoilt.endswith("\n")
        assert sum(a != b for a, b in zip(spoilt.split(), "Jan 12 + 5 = 17".split())) == 1
    assert corrupt_step(generator, "nothing here") is None


def test_corrupted_attempts_are_wrong_and_know_their_place():
    generator = random.Random(1)
    written = 0
    for _ in range(60):
        wrong = corrupted(generator, DEMONSTRATION, ["12", "5", "9"], None)
        try:
            example = write("fix", DEMONSTRATION, [wrong], True, SETTINGS)
        except Refused as reason:  # the spoilt step still says the answer
            assert str(reason) == "leak_answer"
            continue
        written += 1
        judged = judge(example.text, "12", "number")
        assert judged.correct and not judged.right[0] and judged.right[2]
        assert wrong.steps[: wrong.bad_step - 1] == DEMONSTRATION.steps[: wrong.bad_step - 1]
        assert wrong.steps[wrong.bad_step - 1] != DEMONSTRATION.steps[wrong.bad_step - 1]
    assert written > 30
    assert corrupted(generator, DEMONSTRATION, ["12"], None) is None


def test_the_mix_has_as_many_verdicts_of_either_kind():
    generator = random.Random(2)
    settings = TraceSynthesis(longest_critique=9)
    examples = []
    for _ in range(2000):
        kind = choose_kind(generator, settings)
        again = Wrong(("3 + 4 = 7\n", "7 + 5 = 11\n"), "#### 11", 2, "7 + 5 = 12\n#### 12")
        wrongs = {"fix": [WRONG], "two_fixes": [FIRST, again]}.get(kind, [])
        examples.append(write(kind, DEMONSTRATION, wrongs, generator.random() < settings.confirm_refined, settings))
    card = data_card(examples, Counter({"leak_words": 3}), settings)
    assert card["traces"] == 2000 == sum(card["kinds"].values()) and card["refused"] == {"leak_words": 3}
    share = card["verdicts"]["correct"] / sum(card["verdicts"].values())
    assert 0.45 <= share <= 0.55
    assert card["kinds"]["fix"] / 2000 == pytest.approx(0.35, abs=0.04)


def test_a_mix_adds_up():
    with pytest.raises(ValueError, match="must add up to 1"):
        TraceMix(plain=0.9)
