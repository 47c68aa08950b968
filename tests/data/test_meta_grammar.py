"""The grammar of meta-action traces: legal and illegal texts, total and linear parsing, spans in tokens."""

import re
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.meta_actions.grammar import (
    ACTIONS,
    MAX_BLOCKS,
    answer_block,
    block,
    parse,
    render,
    token_spans,
    verdict,
)
from data.meta_actions.judging import judge
from tests.data.meta_traces import FIXED, PIECES, TAGS, attempt, critique, legal_traces, trace


def test_a_trace_by_hand():
    found = parse(FIXED)
    assert (found.status, found.code, found.tail) == ("ok", None, "")
    assert [b.action for b in found.blocks] == ["reason", "critique", "refine", "answer"]
    assert [b.correct for b in found.blocks] == [None, False, None, None] and found.blocks[1].wrong_step == 1
    assert found.states() == ["start", "reason", "critique_wrong", "refine"]
    assert found.answer == "\n\\boxed{7}\n"
    for b in found.blocks:
        assert FIXED[b.body_start : b.body_end] == b.body
        assert FIXED[b.start : b.end] == f"<{b.action}>{b.body}</{b.action}>"


@settings(max_examples=150, deadline=None)
@given(legal_traces())
def test_legal_traces_are_ok_and_render_to_themselves(text):
    found = parse(text)
    assert found.status == "ok", (found.code, text)
    assert render(found) == text


@settings(max_examples=60, deadline=None)
@given(legal_traces())
def test_every_deletion_duplication_and_nesting_of_one_tag_is_not_legal(text):
    for tag in re.finditer("|".join(map(re.escape, TAGS)), text):
        deleted = text[: tag.start()] + text[tag.end() :]
        doubled = text[: tag.end()] + text[tag.start() :]
        assert parse(deleted).status != "ok", deleted
        assert parse(doubled).status != "ok", doubled
    for b in parse(text).blocks:
        for inner in ("reason", "answer"):
            nested = text[: b.body_start] + block(inner, "a body of its own") + text[b.body_start :]
            assert parse(nested).status == "malformed", nested


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=40))
def test_the_parser_takes_any_text(text):
    found = parse(text)
    assert render(found) == text
    assert (found.code is None) == (found.status != "malformed")
    assert len(found.blocks) <= MAX_BLOCKS


@settings(max_examples=60, deadline=None)
@given(legal_traces(), st.data())
def test_every_beginning_of_a_legal_trace_is_truncated(text, data):
    cut = data.draw(st.integers(0, len(text) - 1))
    assert parse(text[:cut]).status == "truncated", text[:cut]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Let me see. " + FIXED, "text_outside"),
        (FIXED + "\nor 8", "text_after_answer"),
        (FIXED + answer_block("8"), "text_after_answer"),
        ("</reason>" + FIXED, "stray_tag"),
        (answer_block("7"), "illegal_transition"),
        (trace(block("critique", "no attempt yet\nVerdict: correct")), "illegal_transition"),
        (trace(block("reason", attempt(7)), block("refine", attempt(7))), "illegal_transition"),
        (trace(block("reason", attempt(7)), critique(None), critique(None)), "illegal_transition"),
        (trace(block("reason", attempt(7)), critique(1)), "illegal_transition"),
        (trace(block("reason", attempt(7)), critique(None), block("refine", attempt(7))), "illegal_transition"),
        (trace(block("reason", "abc")), "short_body"),
        (trace(block("reason", attempt(7)), block("critique", "looks well")), "no_verdict"),
        (trace(block("reason", attempt(7)), block("critique", "looks\nVerdict: wrong")), "no_verdict"),
        (trace(block("reason", attempt(7)), block("critique", "Verdict: correct")), "short_body"),
        (
            trace(block("reason", attempt(7)), block("critique", "Verdict: correct\nVerdict: wrong at step 1")),
            "several_verdicts",
        ),
        (block("reason", attempt(7)) + block("answer", "7"), "answer_not_boxed"),
        (block("reason", attempt(7)) + block("answer", "\\boxed{7} or \\boxed{8}"), "answer_not_boxed"),
        (block("reason", attempt(7)) + block("answer", "\\boxed{7}, I think"), "answer_not_boxed"),
        (block("reason", attempt(7)) + block("answer", "\\boxed{7}{8}"), "answer_not_boxed"),
        (block("reason", attempt(7)) + block("answer", "\\boxed{}"), "answer_not_boxed"),
        (trace(*[block("reason", attempt(7))] * 8), "too_many_blocks"),
        ("<reason>long enough</refine>", "mismatched_tag"),
        ("<reason>long enough<critique>", "nested_tag"),
    ],
)
def test_faults_have_a_code(text, code):
    found = parse(text)
    assert (found.status, found.code) == ("malformed", code)
    assert judge(text, "7", "number").correct is False


def test_at_most_so_many_blocks():
    seven = [block("reason", attempt(7))] * 7
    assert parse(trace(*seven)).status == "ok"
    assert parse(trace(*seven[:3]), max_blocks=3).code == "too_many_blocks"


def test_braces_within_a_box_are_kept():
    assert parse(block("reason", "one half") + answer_block("\\frac{1}{2}")).status == "ok"


@pytest.mark.parametrize(
    "blocks",
    [
        [block("reason", attempt(8)), critique(1, "It is \\boxed{7}, #### 7"), block("refine", attempt(8))],
        [block("reason", "\\boxed{7}\n#### 7 The answer is 7.")],
        [block("reason", attempt(8)), critique(None, "The answer is 7, \\boxed{7}")],
    ],
)
def test_only_the_answer_block_is_graded(blocks):
    assert judge(trace(*blocks, answer=8), "7", "number").correct is False
    assert judge(trace(*blocks, answer=7), "7", "number").correct is True
    assert judge("\n".join(blocks), "7", "number").correct is False


def test_verdicts_are_written_as_they_are_read():
    assert (verdict(None), verdict(3)) == ("Verdict: correct", "Verdict: wrong at step 3")


def test_spans_in_tokens():
    text = trace(block("reason", "abcd"))
    found = parse(text)
    offsets, start = [], 0
    for piece in re.findall(r"</?[a-z]+>|\n|[^\n<]", text):
        offsets.append((start, start + len(piece)))
        start += len(piece)
    spans = token_spans(found.blocks, offsets)
    for b, (first, end) in zip(found.blocks, spans):
        assert "".join(text[s:e] for s, e in offsets[first:end]) == text[b.start : b.end]
    # A token that holds the closing bracket and the newline after it belongs to the block.
    merged = [(0, 8), (8, 13), (13, 21), (21, 23), (23, len(text))]
    assert token_spans(found.blocks[:1], merged) == [(0, 4)]


def lines_run(text: str) -> int:
    """How many lines of the project's code run while `text` is parsed."""
    count = 0

    def tracer(frame, event, _):
        nonlocal count
        count += event == "line"
        return tracer

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        parse(text)
    finally:
        sys.settrace(old)
    return count


PATHOLOGICAL = {
    "tags": "<reason>" * 100,
    "nearly tags": "<reaso" * 100,
    "brackets": "<" * 1000,
    "spaces": " " * 1000,
    "body": "<reason>" + "x " * 1000,
    "verdicts": "<reason>abcd</reason><critique>" + "Verdict: correct\n" * 100,
    "braces": "<reason>abcd</reason><answer>\\boxed{" + "{}" * 500 + "}</answer>",
    "repeated": "<reason>abcd</reason>" * 100,
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_parsing_is_linear(name):
    text = PATHOLOGICAL[name]
    small, large = lines_run(text), lines_run(text.replace(text[40:80], text[40:80] * 50))
    assert large <= 200 + 60 * small  # work in Python: never the square
    began = time.perf_counter()
    parse(text * 400)  # up to a million characters: what regular expressions do is not counted above
    assert time.perf_counter() - began < 2.0


def test_the_actions_are_those_of_the_table():
    assert ACTIONS == ("reason", "critique", "refine", "answer")
