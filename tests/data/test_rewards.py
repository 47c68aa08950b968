"""Rewards: the outcome, its partial part, and users' functions with TRL's contract."""

import json
import math
import sys
from pathlib import Path

import pytest

from data import rewards
from data.errors import UserError
from data.grading.file import grade_file
from data.rewards import score
from data.settings import RewardSettings

PROMPTS = ["p"] * 4
COMPLETIONS = ["#### 5", "#### 6", "nothing", "#### 5"]
COLUMNS = {"answer": ["5", "5", "5", "about"], "answer_kind": ["number"] * 4}


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "user_rewards_of_the_test"
    (tmp_path / f"{name}.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [len(text) / 10 for text in completions]\n"
        "def some(completions, answer, **columns):\n"
        "    return [None if 'nothing' in text else 0.5 for text in completions]\n"
        "def none(completions, **columns):\n"
        "    return [None] * len(completions)\n"
        "def infinite(completions, **columns):\n"
        "    return [float('inf')] * len(completions)\n"
        "def short(completions, **columns):\n"
        "    return [1.0]\n"
        "async def later(completions, **columns):\n"
        "    return [1.0] * len(completions)\n"
        "def words(completions, **columns):\n"
        "    return ['high'] * len(completions)\n"
        "def huge(completions, **columns):\n"
        "    return [-1e39] * len(completions)\n"
        "def nothing(completions, **columns):\n"
        "    pass\n"
        "def digits(completions, **columns):\n"
        "    return '1234'\n"
        "def by_row(completions, **columns):\n"
        "    return {row: 1.0 for row in range(len(completions))}\n"
        "def narrow(completions):\n"
        "    return [1.0] * len(completions)\n"
        "def broken(completions, **columns):\n"
        "    return [1 / 0]\n"
        "def away(completions, **columns):\n"
        "    raise ConnectionError('the judge is away')\n"
        "largest = second = lambda completions, **columns: [1e6] * len(completions)\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards._load_once.cache_clear()
    yield name
    sys.modules.pop(name, None)
    rewards._load_once.cache_clear()


def test_outcome_is_one_or_nothing_and_none_for_an_unreadable_gold() -> None:
    scored = score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings())
    assert [one.reward for one in scored] == [1.0, 0.0, 0.0, None]
    assert [one.correct for one in scored] == [True, False, False, False]
    assert [one.parsed for one in scored] == ["5", "6", None, None]
    assert scored[3].reason == "bad_gold"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### 6", 0.2),
        ("#### nan", 0.0),
        ("#### inf", 0.0),
        ("#### 1_000", 0.0),
        ("6 or 7", 0.0),
        ("", 0.0),
        ("#### 5", 1.0),
    ],
)
def test_partial_reward_is_for_finite_readable_answers_only(text: str, reward: float) -> None:
    columns = {"answer": ["5"], "answer_kind": ["number"]}
    assert score(["p"], [text], columns, RewardSettings(partial=0.2))[0].reward == reward


def test_partial_reward_of_programs_needs_a_finite_number() -> None:
    columns = {"answer": ["5"] * 3, "answer_kind": ["program"] * 3}
    texts = [f"def solution():\n    return {value}" for value in ("6", "float('inf')", "True")]
    assert [one.reward for one in score(["p"] * 3, texts, columns, RewardSettings(partial=0.1))] == [0.1, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(r"\frac12", 0.1), (r"\infty", 0.0), ("banana", 0.0), ("", 0.0), (r"\frac{1}{2", 0.0), ("(1,2)", 0.1)],
)
def test_partial_reward_of_mathematical_answers(answer: str, reward: float) -> None:
    columns = {"answer": ["5"], "answer_kind": ["math"]}
    assert score(["p"], [f"\\boxed{{{answer}}}"], columns, RewardSettings(partial=0.1))[0].reward == reward


def test_partial_reward_does_not_apply_to_labels_and_choices() -> None:
    columns = {"answer": ["yes", "B"], "answer_kind": ["label", "choice"]}
    scored = score(["p"] * 2, ["### no", "(C)"], columns, RewardSettings(partial=0.2))
    assert [one.reward for one in scored] == [0.0, 0.0]  # R³: strictly 0 or 1 outside mathematics


def test_user_functions_add_and_none_is_left_out(user_module: str) -> None:
    settings = RewardSettings(functions=(f"{user_module}:length", f"{user_module}:some"))
    scored = score(PROMPTS, COMPLETIONS, COLUMNS, settings)
    assert scored[0].parts == {"outcome": 1.0, f"{user_module}:length": 0.6, f"{user_module}:some": 0.5}
    assert math.isclose(scored[0].reward, 2.1)
    assert math.isclose(scored[2].reward, 0.7) and scored[2].parts[f"{user_module}:some"] is None
    assert math.isclose(scored[3].reward, 1.1) and scored[3].parts["outcome"] is None


def test_all_parts_none_is_unscorable(user_module: str) -> None:
    scored = score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings(functions=(f"{user_module}:none",)))
    assert scored[3].reward is None and scored[0].reward == 1.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:infinite", "not finite"),
        ("{}:short", "1 values for 4"),
        ("{}:later", "asynchronous"),
        ("{}:words", "neither a number"),
        ("{}:missing", "no callable"),
        ("{}:huge", "float32"),
        ("{}:nothing", "gave NoneType"),
        ("{}:digits", "gave str"),
        ("{}:by_row", "gave dict"),
        ("{}:narrow", "columns"),
        ("{}:broken", r"ZeroDivisionError.*user_rewards_of_the_test.py, line \d+"),
        ("{}", "package.module:function"),
        ("no_such_module_here:f", "cannot import"),
        ("{}_broken:f", "importing .* raised SyntaxError"),
    ],
)
def test_bad_user_functions_are_named(user_module: str, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings(functions=(path.format(user_module),)))


def test_the_largest_rewards_add_up_and_a_lost_connection_is_no_fault_of_the_function(user_module: str) -> None:
    functions = (f"{user_module}:largest", f"{user_module}:second")
    assert score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings(functions=functions))[1].reward == 2e6
    with pytest.raises(ConnectionError, match="away"):
        score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings(functions=(f"{user_module}:away",)))


def test_a_function_cannot_change_what_is_graded(user_module: str, tmp_path: Path) -> None:
    with (tmp_path / f"{user_module}.py").open("a") as module:
        module.write(
            "def greedy(prompts, completions, answer, **columns):\n"
            "    completions[:] = answer[:] = prompts[:] = ['5'] * len(completions)\n"
            "    return [0.0] * len(completions)\n"
            "def fails_late(completions, **columns):\n"
            "    yield columns['level']\n"
        )
    prompts, completions, columns = list(PROMPTS), list(COMPLETIONS), {name: list(c) for name, c in COLUMNS.items()}
    functions = (f"{user_module}:greedy", f"{user_module}:length")
    scored = score(prompts, completions, columns, RewardSettings(functions=functions))
    assert (prompts, completions, columns) == (PROMPTS, COMPLETIONS, COLUMNS)
    assert [one.parts[functions[1]] for one in scored] == [0.6, 0.6, 0.7, 0.6]
    with pytest.raises(UserError, match=f"raised KeyError: 'level' .*{user_module}.py, line"):
        score(PROMPTS, COMPLETIONS, COLUMNS, RewardSettings(functions=(f"{user_module}:fails_late",)))


def test_columns_of_other_lengths_are_named() -> None:
    with pytest.raises(UserError, match="answer_kind"):
        score(PROMPTS, COMPLETIONS, {"answer": ["5"] * 4}, RewardSettings())
    with pytest.raises(UserError, match="'answer' has 3 rows"):
        score(PROMPTS, COMPLETIONS, COLUMNS | {"answer": ["5"] * 3}, RewardSettings())


ROWS = [
    {"prediction": "#### 5", "gold": "5", "kind": "number"},
    {"prediction": r"\boxed{\frac12}", "gold": "0.5", "kind": "math"},
    {"prediction": "(C)", "gold": "B", "kind": "choice"},
]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "parquet"])
def test_a_file_is_graded_and_read_back(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture) -> None:
    first, second, third = (tmp_path / f"{name}.{ending}" for name in ("in", "out", "again"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    grade_file(tmp_path / "rows.jsonl", first)
    summary = grade_file(first, second)
    assert grade_file(second, third) == summary
    assert (summary["rows"], summary["correct"]) == (3, 2)
    assert summary["kinds"]["choice"] == {"rows": 1, "correct": 0}
    assert "2 of 3 correct (66.7 %)" in capsys.readouterr().out
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".part")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "not an object"),
        ("a.jsonl", '{"prediction": "5"}', "column 'gold'"),
        ("a.jsonl", '{"prediction": "5", "gold": "5", "kind": "essay"}', "kind 'essay'"),
        ("a.jsonl", '{"prediction": ["5"], "gold": "5"}', "prediction is list"),
        ("a.jsonl", "", "no rows"),
        ("a.csv", "prediction,gold\n", "no rows"),
        ("a.csv", "answer,gold\n5,5\n", "column 'prediction'"),
        ("a.txt", "x", "ending"),
        ("a.parquet", "x", "not a Parquet file"),
    ],
)
def test_files_that_cannot_be_graded(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        grade_file(tmp_path / name)


def test_missing_file_and_bad_encoding(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no file"):
        grade_file(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"prediction,gold\n\xff,5\n")
    with pytest.raises(UserError, match="not UTF-8"):
        grade_file(tmp_path / "b.csv")
