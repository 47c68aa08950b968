"""Rewards of meta-action traces: correct first, and nothing to be had by padding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data.meta_actions.grammar import MAX_BLOCKS, block, parse
from data.meta_actions.judging import first_and_last, judge, repeated_share, signature, useful_blocks
from data.meta_actions.reward import Member, diversity_terms, group_rewards, length_terms, overlong, wanted_blocks
from data.settings import LengthReward, MetaActionReward
from tests.data.meta_traces import FIXED, GOLD, attempt, critique, legal_traces, trace

MODES = ("explore", "shorten", "both", "off")


def member(text: str, tokens: int = 10, **more) -> Member:
    judged = judge(text, GOLD, "number")
    return Member(judged, float(judged.correct), tokens, 100, **more)


def total(parts: dict) -> float:
    return sum(value for value in parts.values())


def test_useful_blocks_by_hand():
    assert useful_blocks(judge(FIXED, GOLD, "number")) == [0, 1, 2]
    assert useful_blocks(judge(FIXED, GOLD, "number"), first=2) == [2]
    reason, wrong, right = block("reason", attempt(8)), block("refine", attempt(6)), block("refine", attempt(7))
    idle = trace(reason, critique(1), block("refine", attempt(8)), critique(1), right)
    assert useful_blocks(judge(idle, GOLD, "number")) == [0, 3, 4]
    back = trace(reason, critique(1), wrong, critique(1), block("refine", attempt(8)))
    assert useful_blocks(judge(back, GOLD, "number")) == [0, 1, 2]
    false_alarm = trace(block("reason", attempt(7)), critique(1), wrong, critique(1), right)
    assert useful_blocks(judge(false_alarm, GOLD, "number")) == [0]
    confirmed = trace(block("reason", attempt(7)), critique(None), block("reason", attempt(7)), critique(None))
    assert useful_blocks(judge(confirmed, GOLD, "number")) == [0, 1]
    assert signature(judge(FIXED, GOLD, "number")) == "reason critique_wrong refine"
    assert first_and_last(judge(FIXED, GOLD, "number")) == (False, True)


def test_overlong_by_hand():
    assert [overlong(n, 100, 0.2) for n in (0, 80, 90, 100)] == [0.0, 0.0, 0.5, 1.0]


def test_wanted_blocks_by_hand():
    assert [wanted_blocks(p, 8) for p in (1.0, 0.5, 0.0)] == [1, 5, 8]


def test_length_terms_by_hand():
    plain = member(trace(block("reason", attempt(7))))
    fixed, wrong = member(FIXED), member(trace(block("reason", attempt(8)), answer=8))
    settings_ = LengthReward(mode="both", start=0.2)
    # p = 0.25: n* = 1 + round(7 * 0.75) = 6, so 1 and 3 useful blocks are worth 1/6 and 3/6 of the weight.
    hard = length_terms([plain, fixed, wrong, wrong], 0.25, settings_, 8, 0.5)
    assert hard == pytest.approx([0.1 / 6, 0.05, 0, 0])
    assert length_terms([plain, fixed, wrong], 0.6, settings_, 8, 0.5) == [0, 0, 0]
    assert length_terms([plain, fixed, plain], 1.0, settings_, 8, 0.5) == pytest.approx([0.05, -0.05, 0.05])
    assert length_terms([plain, fixed], 1.0, settings_, 8, 0.1) == [0, 0]
    assert length_terms([plain, plain], 1.0, settings_, 8, 0.5) == [0, 0]
    restarted = member(FIXED, first=2)
    assert length_terms([restarted, wrong], 0.25, settings_, 8, 1.0)[0] == pytest.approx(0.1 / 6)


def test_diversity_terms_by_hand():
    plain, fixed = member(trace(block("reason", attempt(7)))), member(FIXED)
    wrong = member(trace(block("reason", attempt(8)), answer=8))
    assert diversity_terms([plain, plain, fixed, wrong], 0.06) == pytest.approx([0.04, 0.04, 0.06, 0])


def test_malformed_costs_and_a_cut_trace_is_not_malformed():
    broken = FIXED.replace("</critique>", "")
    cut = FIXED[: FIXED.index("</refine>")]
    parts = group_rewards(
        [member(broken), member(cut, 100, finished=False), member(cut)], 0.0, MetaActionReward(), 8, 0.5
    )
    assert [p["malformed"] for p in parts] == [-0.1, 0.0, -0.1]
    assert parts[1]["overlong"] == -0.5


def test_an_unreadable_gold_stays_unscorable():
    judged = judge(FIXED, "", "number")
    assert group_rewards([Member(judged, None, 1, 100)], 0.0, MetaActionReward(), 8, 0.5)[0]["outcome"] is None


GROUP = st.lists(st.tuples(legal_traces(), st.integers(0, 100)), min_size=2, max_size=5)


@settings(max_examples=120, deadline=None)
@given(GROUP, st.sampled_from(MODES), st.floats(0, 1), st.floats(0, 1))
def test_the_worst_correct_trace_outranks_the_best_wrong_one(group, mode, success, progress):
    chosen = MetaActionReward(length=LengthReward(mode=mode), diversity=0.05)
    members = [member(text, tokens) for text, tokens in group]
    members += [member(text.replace("<answer>", "", 1), tokens) for text, tokens in group]
    rewards = [total(p) for p in group_rewards(members, success, chosen, MAX_BLOCKS, progress)]
    right = [r for r, m in zip(rewards, members) if m.judged.correct]
    wrong = [r for r, m in zip(rewards, members) if not m.judged.correct]
    assert not right or min(right) > max(wrong)
    assert not right or min(right) >= chosen.lowest_correct - 1e-9


def padded(text: str, position: int, words: str) -> str:
    """`text` with `words` put in front of the body of a block."""
    b = parse(text).blocks[position]
    return f"{text[: b.body_start]}\n{words}{text[b.body_start :]}"


@settings(max_examples=120, deadline=None)
@given(GROUP, st.data(), st.sampled_from(MODES), st.floats(0, 1))
def test_padding_a_block_never_raises_the_reward(group, data, mode, success):
    chosen = MetaActionReward(length=LengthReward(mode=mode, start=0.0), diversity=0.05)
    index = data.draw(st.integers(0, len(group) - 1))
    text, tokens = group[index]
    position = data.draw(st.integers(0, len(parse(text).blocks) - 2)) if len(parse(text).blocks) > 1 else 0
    words = data.draw(st.sampled_from(["well, then", "so so so so so so", "as was said before"]))
    members = [member(*one) for one in group]
    changed = [*members]
    changed[index] = member(padded(text, position, words), tokens + len(words.split()))
    before = group_rewards(members, success, chosen, MAX_BLOCKS, 0.5)[index]
    assert total(group_rewards(changed, success, chosen, MAX_BLOCKS, 0.5)[index]) <= total(before) + 1e-12


def with_idle_pair(text: str, position: int) -> str | None:
    """`text` with a critique "wrong" and a refine that keeps the candidate, after an attempt; None where none is."""
    judged = judge(text, GOLD, "number")
    if position not in judged.attempts:
        return None
    b = judged.trace.blocks[position]
    pair = "\n" + critique(1) + "\n" + block("refine", b.body.strip())
    longer = text[: b.end] + pair + text[b.end :]
    return longer


@settings(max_examples=200, deadline=None)
@given(GROUP, st.data(), st.sampled_from(MODES), st.floats(0, 1))
def test_an_idle_critique_and_refine_never_raises_the_reward(group, data, mode, success):
    chosen = MetaActionReward(length=LengthReward(mode=mode, start=0.0), diversity=0.05)
    index = data.draw(st.integers(0, len(group) - 1))
    text, tokens = group[index]
    position = data.draw(st.integers(0, len(parse(text).blocks) - 1))
    longer = with_idle_pair(text, position)
    if longer is None:
        return
    members = [member(*one) for one in group]
    changed = [*members]
    changed[index] = member(longer, tokens + 12)
    before = total(group_rewards(members, success, chosen, MAX_BLOCKS, 0.5)[index])
    assert total(group_rewards(changed, success, chosen, MAX_BLOCKS, 0.5)[index]) <= before + 1e-12


def test_the_length_term_of_an_all_correct_group_is_bounded():
    members = [member(FIXED), member(trace(block("reason", attempt(7))))] * 3
    rewards = [total(p) for p in group_rewards(members, 1.0, MetaActionReward(), 8, 0.5)]
    mean = sum(rewards) / len(rewards)
    assert max(abs(r - mean) for r in rewards) <= 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"overlong": 0.97, "length": {"weight": 0.1}}, "a correct trace could be worth"),
        ({"length": {"hard": 0.9}}, "hard must be lower"),
        ({"malformed": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_break_the_order_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        MetaActionReward(**values)


def test_repeated_share_by_hand():
    assert repeated_share("a b a b a b".split(), 2) == pytest.approx(1 - 2 / 5)
    assert repeated_share(["a"], 2) == 0
