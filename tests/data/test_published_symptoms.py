"""What the published code of R³ got wrong (section 8 of its note), as the behaviour that is right."""

import json

import pytest

from data.artifacts import read_rows
from data.grading import grade
from data.ingestion import ingest
from data.progress import Silent
from data.prompts import prompt_text
from data.segmentation import split_steps
from data.settings import FileSource, MixedCurriculum, PlainPrompt, RewardSettings, Splits
from data.start_states import build
from tests.data.ingested import gsm8k_rows, json_lines, run, tables

SPLIT_APART = [
    # A demonstration whose fifths were decoded apart, and what their joint must not look like: symptom 1.
    ("It costs 80 cents and 10 text messages a day. Therefore, the weekly bill is $5.60.", ("8", "0 cents")),
    ("There are 1,152 arcade tokens and 3.5 potatoes in 10:30 lots.", ("ar", "cade")),
    ("He paid $1,000,000.50 for -12.5% of x_10 items!", ("$1,000", ",000.50")),
]


@pytest.mark.parametrize(("text", "broken"), SPLIT_APART)
@pytest.mark.parametrize("unit", ["tokens", "whitespace", "lines", "sentences"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6, 9, 40])
def test_no_cut_is_inside_a_word_or_number_for_any_number_of_stages(text, broken, unit, stages, tmp_path):
    rows = [{"question": f"{n}?", "answer": f"{text}\n#### {n}"} for n in range(4)]
    path = tmp_path / "input.jsonl"
    path.write_text(json_lines(rows))
    run(path, tmp_path / "out", segmentation=unit)
    build(tmp_path / "out/demonstrations.parquet", MixedCurriculum(n_stages=stages), tmp_path, Silent())
    states = read_rows(tmp_path / "start_states.parquet", "start_states")
    assert {row["stage"] for row in states} == set(range(stages))
    for row in states:
        number = row["answer"]
        assert row["prefix"] + row["remainder"] == f"{text}\n#### {number}"  # byte for byte
        assert not (row["prefix"].endswith(broken[0]) and row["remainder"].startswith(broken[1]))
        assert not (row["prefix"][-1:].isalnum() and row["remainder"][:1].isalnum())
        assert "####" not in row["prefix"]  # the answer is never revealed


def test_a_question_alone_is_prompted_as_in_evaluation(tmp_path):
    """Symptom 2: the newline stays, and a start at the question has the evaluation's prompt, byte for byte."""
    path = tmp_path / "input.jsonl"
    path.write_text(json_lines(gsm8k_rows(4)))
    run(path, tmp_path / "out", segmentation="lines")
    build(tmp_path / "out/demonstrations.parquet", MixedCurriculum(), tmp_path, Silent())
    demonstrations, _, questions = tables(tmp_path / "out")
    states = read_rows(tmp_path / "start_states.parquet", "start_states")
    prompt = PlainPrompt(template="### Instruction:\n{question}\n\n### Response:")
    first = {row["question"] for row in states if row["stage"] == 0}
    assert all(row["prefix"] == "" for row in states if row["stage"] == 0)
    for question in [*first, *(row["question"] for row in questions)]:
        assert prompt_text(question, prompt) == f"### Instruction:\n{question}\n\n### Response:"
    assert any(row["prefix"].endswith("\n") for row in states)
    assert all("".join(row["steps"]) == row["rationale"] for row in demonstrations)


def test_demonstrations_end_in_an_answer_that_the_grader_of_rl_reads(tmp_path):
    """Symptom 4: `the answer is <x>.` was taught and `####` was graded, so that no rollout earned anything."""
    rows = [
        {"question": f"{n}?", "answer_cot": f"It is {n}.\n\nTherefore, the answer is <{n}>.", "answer_value": f"{n}.0"}
        for n in range(4)
    ]
    path = tmp_path / "input.json"
    path.write_text(json.dumps(rows))
    run(path, tmp_path / "out")
    for row in tables(tmp_path / "out")[0]:
        assert grade(row["response"], row["answer"], row["answer_kind"]).correct


def test_the_folder_of_a_file_does_not_say_what_it_is(tmp_path):
    """Symptom 5: the published code took the data set from a part of the path."""
    for name in ("snli", "boardgame", "svamp"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mnli.json").write_text(json_lines(gsm8k_rows(4)))
        assert run(folder / "mnli.json", tmp_path / "out")["format"] == "gsm8k"


@pytest.mark.parametrize("n_steps", [1, 2])
def test_demonstrations_of_one_and_two_steps_for_any_number_of_stages(n_steps, tmp_path):
    """Oracle (e): no stage reveals the last step, so one step gives the question M times."""
    answer = "".join(f"Step {k} is done.\n" for k in range(n_steps))
    rows = [{"question": f"{n}?", "answer": f"{answer}#### {n}"} for n in range(5)]
    path = tmp_path / "input.jsonl"
    path.write_text(json_lines(rows))
    source = FileSource(path=str(path))
    ingest(
        source, "t", tmp_path, splits=Splits(validation=1, test=0), segmentation="lines", answer_kind=None, test=None,
        report=Silent(),
    )  # fmt: skip
    for stages in (1, 2, 3, 5, 6, 12):
        build(tmp_path / "demonstrations.parquet", MixedCurriculum(n_stages=stages), tmp_path, Silent())
        revealed = [row["revealed_steps"] for row in read_rows(tmp_path / "start_states.parquet", "start_states")]
        assert len(revealed) == 4 * stages and max(revealed) <= n_steps - 1
        expected = [min(n_steps - 1, round(stage * n_steps / stages)) for stage in range(stages)]
        assert revealed[:stages] == expected


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("#### 1,152", "1152", True),  # symptom 10: commas of the prediction
        ("#### $18", "18", True),
        ("#### 18.", "18", True),
        ("#### nan", "18", False),  # symptom 11: what float() takes
        ("#### inf", "18", False),
        ("#### 1_000", "1000", False),
        ("#### 1,152", "1,152", True),
    ],
)
def test_numbers_that_the_published_reader_got_wrong(text, gold, right):
    assert grade(text, gold, "number").correct is right


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("    a = 3\n\n    b = 4\n\n    return a + b", True),  # symptom 14: cut at the first blank line
        ("    return 7\n\nThe answer is seven.", True),
        ("    return True", False),
        ("    return 7\n\ndef solution():\n    return 8", False),
    ],
)
def test_programs_that_the_published_runner_got_wrong(body, right):
    assert grade(f"def solution():\n{body}\n", "7", "program").correct is right
    assert grade(f"def solution():\n{body}\n", "1", "program").correct is False


def test_partial_reward_is_a_setting_of_each_data_set():
    """Symptoms 3 and 11: 0.2 was hard-coded; published are 0.1 (SVAMP) and 0.2 (GSM8K), and off is the default."""
    assert RewardSettings().partial == 0 and RewardSettings(partial=0.1).partial == 0.1
    assert split_steps("One step without an end", "sentences") == ["One step without an end"]
