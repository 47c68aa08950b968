"""Steps: whole, byte for byte, and never cut inside a word or a number."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.segmentation import TOKEN_STEPS, split_steps

UNITS = ("lines", "sentences", "code_lines", "tokens", "whitespace")
_NUMBER = re.compile(r"\d+(?:[.,/:]\d+)+")

_words = st.sampled_from(
    ["weekly", "arcade", "potatoes", "80", "1,152", "3.5", "$18", "5 %", "1/2", "<<48/2=24>>24", "Dr.", "U.S.", 
     "end.", "Therefore,", "ok?", "\\frac{1}{2}", "naïve", "東京", "2 1/2", "10 000", "def f(a,", '"""doc', "[1,", "]",
     "#### 7"]
)  # fmt: skip
_texts = st.lists(
    st.tuples(_words, st.sampled_from([" ", "  ", "\n", "\n\n", " \n  ", "\t", "\r\n", ". "])), max_size=60
).map(lambda parts: "".join(word + gap for word, gap in parts))


def _cuts(text: str, unit: str) -> list[int]:
    cuts, position = [], 0
    for step in split_steps(text, unit)[:-1]:
        position += len(step)
        cuts.append(position)
    return cuts


def _whole(text: str, unit: str) -> None:
    steps = split_steps(text, unit)
    assert "".join(steps) == text
    assert all(steps)
    if text.strip():
        assert all(step.strip() for step in steps)
    inside = {place for number in _NUMBER.finditer(text) for place in range(number.start() + 1, number.end())}
    for cut in _cuts(text, unit):
        before, after = text[cut - 1], text[cut]
        assert before.isspace() or after.isspace() or before in "。！？", (text[cut - 5 : cut], text[cut : cut + 5])
        assert cut not in inside
        assert not (before.isdigit() and text[cut:].lstrip(" ")[:1].isdigit())


@pytest.mark.parametrize("unit", UNITS)
@settings(max_examples=60, deadline=None)
@given(st.one_of(_texts, st.text(max_size=200)))
@example("")
@example(" \n\t ")
@example("x" * 500)
@example(" " * 500)
@example("\n\nfirst line\n\n\nsecond line\n\n")
def test_steps_are_whole(unit, text):
    _whole(text, unit)


def test_lines_keep_their_newline_and_blank_lines_stay_with_the_line_before():
    assert split_steps("a b\nc\n\nd", "lines") == ["a b\n", "c\n\n", "d"]
    assert split_steps("\n\na\n", "lines") == ["\n\na\n"]


def test_code_lines_are_logical_lines():
    lines = [
        "def solution():\n",
        '    """one\n    two"""\n',
        "    x = [1,\n         2]  # [\n",
        '    s = "#("\n\n',
        "    return x[0] + \\\n        1\n",
    ]
    assert split_steps("".join(lines), "code_lines") == lines


def test_sentences_of_boardgameqa_kind():
    text = (
        'We know the cow has 3.5 pounds, so we can conclude "the cow winks". We know Mr. Fox agrees (Rule3). '
        'So the statement "it winks" is proved and the answer is "yes". #### proved'
    )
    assert [step.strip()[:12] for step in split_steps(text, "sentences")] == [
        "We know the ",
        "We know Mr. ",
        "So the state",
    ]


def test_sentences_do_not_end_at_abbreviations_initials_or_list_numbers():
    text = "J. Smith has approx. 5 cats.\n1. He buys No. 7 at 5 p.m. today.\n2. He sells it! Done? yes"
    assert [step.strip() for step in split_steps(text, "sentences")] == [
        "J. Smith has approx. 5 cats.",
        "1. He buys No. 7 at 5 p.m. today.",
        "2. He sells it!",
        "Done? yes",
    ]


@pytest.mark.parametrize(
    "text", ["10 000 cats", "2 1/2 cups", "5 % off", "$ 5 off", "it costs 1,152.50 now", "10\u00a0000 cats", "weekly"]
)
def test_numbers_and_words_stay_whole(text):
    for unit in ("tokens", "whitespace"):
        for cut in _cuts(text, unit):
            assert not re.search(r"[\d$]\s*$", text[:cut]) or not re.match(r"\s*[\d%]", text[cut:])
    assert split_steps("weekly", "tokens") == ["weekly"]


def test_whitespace_is_one_step_a_word_with_its_space_before_it():
    assert split_steps("the answer is\n\n7 .", "whitespace") == ["the", " answer", " is\n\n", "7", " ."]


def test_tokens_are_uniform_shares():
    """Where k of 20 steps are revealed, about k/20 of the text is: within two words."""
    text = " ".join(f"word{number} costs {number * 37} dollars and" for number in range(60))
    steps = split_steps(text, "tokens")
    assert len(steps) == TOKEN_STEPS
    for stage in range(1, 5):
        revealed = len("".join(steps[: 4 * stage]))
        assert abs(revealed / len(text) - stage / 5) < 12 / len(text) + 0.02
    assert split_steps("a short text", "tokens") == ["a", " short", " text"]


def test_unknown_unit_is_named():
    with pytest.raises(ValueError, match=r"'paragraphs'.*lines, sentences"):
        split_steps("a", "paragraphs")


@pytest.mark.benchmark_files
@pytest.mark.parametrize("unit", UNITS)
def test_real_rationales_are_whole(benchmark_files, unit):
    texts = [
        row["answer_cot"] for row in json.loads((benchmark_files / "svamp/train_rationales.json").read_text())[:400]
    ]
    texts += [
        row["answer_cot"] for row in json.loads((benchmark_files / "gsm8k/train_programs.json").read_text())[:200]
    ]
    for name in ("snli/train.json", "mnli/train.json", "boardgameqa/train.json"):
        texts += [row["output"] for row in json.loads((benchmark_files / name).read_text())[:100]]
    for name, column in (
        ("gsm8k/train.jsonl", "answer"),
        ("math500/test.jsonl", "solution"),
        ("aqua/dev.json", "rationale"),
    ):
        lines = (benchmark_files / name).read_text().split("\n")[:200]
        texts += [json.loads(line)[column] for line in lines if line.strip()]
    for text in texts:
        steps = split_steps(text, unit)
        assert "".join(steps) == text
        for cut in _cuts(text, unit):
            assert not (text[cut - 1].isalnum() and text[cut].isalnum()), text[cut - 20 : cut + 20]
