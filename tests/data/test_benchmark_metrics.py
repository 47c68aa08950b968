"""Figures of finished evaluations against values worked by hand, and grading again without a model."""

import subprocess
import sys

import pytest

from data.artifacts import read_rows, write_table
from data.benchmarks import metrics
from data.benchmarks.comparison import compare, comparison_lines
from data.benchmarks.metrics import regrade, scores
from data.benchmarks.score import score_json, score_lines
from data.errors import UserError
from data.statistics import bootstrap_mean, wilson
from flows.cli import main


def answer(item, sample, correct, extracted="5", *, subject="", stop_reason="eos", model="m", **other):
    return {
        "model": model,
        "task": "t",
        "benchmark": "gsm8k",
        "split": "test",
        "item_id": item,
        "sample": sample,
        "subject": subject,
        "question": "2+2?",
        "completion": f"#### {extracted}",
        "completion_tokens": 3,
        "extracted": extracted,
        "gold": "4",
        "answer_kind": "number",
        "correct": correct,
        "reason": "correct" if correct else "wrong",
        "stop_reason": stop_reason,
        **other,
    }


def test_one_answer_a_question():
    rows = [
        answer("a", 0, True, "4", subject="Algebra"),
        answer("b", 0, False, "5", subject="Algebra", stop_reason="length"),
        answer("c", 0, False, None, subject="Geometry", stop_reason="length"),
        answer("d", 0, True, "4.0", subject="Geometry"),
        answer("e", 0, True, "4", subject=None),
    ]
    (found,) = scores(rows)
    assert (found.model, found.task, found.benchmark, found.split) == ("m", "t", "gsm8k", "test")
    assert (found.questions, found.answers, found.samples) == (5, 5, 1)
    assert found.accuracy == wilson(3, 5)
    assert found.headline == ("accuracy", wilson(3, 5))
    assert (found.truncated, found.unanswered) == (0.4, 0.2)
    assert found.subjects == {
        "Algebra": metrics.Score(2, wilson(1, 2)),
        "Geometry": metrics.Score(2, wilson(1, 2)),
    }
    assert {k: estimate.mean for k, estimate in found.pass_at.items()} == {1: 0.6}
    assert {k: estimate.mean for k, estimate in found.maj_at.items()} == {1: 0.6}


def test_several_answers_a_question():
    rows = [
        *(answer("a", sample, False, text) for sample, text in enumerate(["5", "5.0", "6"])),
        answer("a", 3, True, "4"),
        answer("b", 0, True, "4"),
        answer("b", 1, True, "4.0"),  # right answers vote together, however written
        answer("b", 2, False, "5"),
        answer("b", 3, False, None),
    ]
    (found,) = scores(rows[::-1])  # the order of the rows does not matter
    assert (found.questions, found.answers, found.samples) == (2, 8, 4)
    assert found.accuracy == bootstrap_mean([0.5, 0.25])
    assert found.headline == ("avg@4", found.accuracy)
    assert found.accuracy.mean == pytest.approx((0.25 + 0.5) / 2)
    # pass@2 of 1 right in 4 is 1/2, of 2 right in 4 it is 1 - 1/6.
    assert {k: e.mean for k, e in found.pass_at.items()} == pytest.approx({1: 0.375, 2: (0.5 + 5 / 6) / 2, 4: 1.0})
    # Question a: "5" and "5.0" are one wrong number with two votes of four. Question b: right with two of three votes.
    assert {k: e.mean for k, e in found.maj_at.items()} == pytest.approx({1: 0.5, 2: 0.5, 4: 0.5})


def test_samples_of_an_interrupted_evaluation():
    rows = [answer("a", sample, True, "4") for sample in range(3)] + [answer("b", sample, False) for sample in range(6)]
    (found,) = scores(rows)
    assert (found.samples, sorted(found.pass_at)) == (3, [1, 2, 3])
    assert found.accuracy.mean == 0.5  # a question counts once, however many answers it has


def test_models_are_told_apart_and_keep_their_order():
    found = scores([answer("a", 0, True, model="new"), answer("a", 0, False, model="base")])
    assert [(one.model, one.accuracy.mean) for one in found] == [("new", 1.0), ("base", 0.0)]
    assert scores([]) == []


def test_wrong_words_vote_by_spelling_and_wrong_numbers_by_value():
    def ballot(text, correct=False):
        return metrics._ballot({"extracted": text, "correct": correct, "gold": "4"})

    assert ballot("1,000") == ballot("1000.00") != ballot("1001")
    assert ballot("It is  not possible") == ballot("it is not possible")
    assert ballot("Infinity") == "Infinity" and ballot("") is None and ballot(None) is None
    assert ballot("8/2", correct=True) == "4"


def test_regrade_finds_what_changed_and_leaves_the_file_alone(tmp_path):
    path, out = tmp_path / "evaluations.parquet", tmp_path / "again.parquet"
    rows = [
        answer("a", 0, True, "4"),
        answer("b", 0, False, "4.0"),  # a verdict of some older grader
        answer("c", 0, True, "9"),
        answer("d", 0, False, None, completion="I do not know"),
    ]
    write_table(path, "evaluations", rows)
    before = path.read_bytes()
    again = regrade(path, out)
    assert path.read_bytes() == before
    assert [row["item_id"] for row in again.changed] == ["b", "c"]
    assert [row["correct"] for row in again.rows] == [True, True, False, False]
    assert [bool(row["extracted"]) for row in again.rows] == [True, True, True, False]
    assert read_rows(out, "evaluations") == again.rows
    assert regrade(out).changed == []
    untouched = {"extracted", "correct", "reason"}
    for old, new in zip(rows, again.rows):
        assert {k: v for k, v in old.items() if k not in untouched} == {
            k: v for k, v in new.items() if k not in untouched
        }


def test_regrade_refuses_another_table(tmp_path):
    write_table(tmp_path / "metrics.parquet", "metrics", [])
    with pytest.raises(UserError, match="holds table 'metrics'"):
        regrade(tmp_path / "metrics.parquet")


def test_no_model_library_is_needed():
    imports = "import sys, data.benchmarks.metrics, data.suites"
    code = f"{imports}; print(*{{'torch', 'transformers', 'prefect'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_greedy_answers_stand_beside_the_samples():
    rows = [answer(item, sample, sample == 0, "4") for item in "ab" for sample in (0, 1)]
    rows += [answer("a", metrics.GREEDY, True, "4"), answer("b", metrics.GREEDY, False, stop_reason="length")]
    (found,) = scores(rows)
    assert (found.questions, found.answers, found.samples) == (2, 4, 2)
    assert found.accuracy.mean == 0.5 and found.greedy == wilson(1, 2)
    assert found.truncated == 0.0  # of the samples
    assert scores(rows[:4])[0].greedy is None
    assert scores(rows[4:])[0].accuracy == wilson(1, 2)  # greedy answers alone are the accuracy


def test_the_score_file_by_hand():
    rows = [answer("a", 0, True, "4", subject="S"), answer("b", 0, False, None, stop_reason="length")]
    [found] = score_json(rows, 0.95)
    one = wilson(1, 2)
    assert found["headline"] == "accuracy" and found["questions"] == found["answers"] == 2
    assert found["accuracy"] | {"bootstrap": None} == {
        "mean": 0.5, "low": one.low, "high": one.high, "interval": "wilson", "bootstrap": None,
    }  # fmt: skip
    assert found["accuracy"]["bootstrap"] == list(bootstrap_mean([1.0, 0.0])[1:])
    assert (found["truncated_share"], found["no_answer_share"]) == (0.5, 0.5)
    assert found["subjects"]["S"]["questions"] == 1 and found["pass@k"]["1"]["mean"] == 0.5
    [line, shares, subject] = score_lines([found])
    assert line == "m on gsm8k: accuracy 50.0 % [9.5, 90.5]; 2 questions"
    assert shares == "  cut off 50.0 %, no answer 50.0 %" and subject.startswith("  S: 100.0 %")


def test_two_models_are_compared_question_by_question(tmp_path):
    first, second = tmp_path / "first.parquet", tmp_path / "second"
    second.mkdir()
    right = {"old": "abcd", "new": "abcefgh"}
    for path, model in ((first, "new"), (second / "evaluations.parquet", "old")):
        write_table(path, "evaluations", [answer(i, 0, i in right[model], model=model) for i in "abcdefghij"])
    [found] = compare(first, second)  # a file, and a folder
    assert (found.models, found.questions, found.accuracies) == (("new", "old"), 10, (0.7, 0.4))
    assert (found.first_better, found.second_better) == (4, 1)
    differences = [0, 0, 0, -1, 1, 1, 1, 1, 0, 0]
    assert found.difference == bootstrap_mean(differences) and found.difference.mean == pytest.approx(0.3)
    text = "\n".join(comparison_lines([found]))
    assert "new against old, 10 questions: 70.0 % against 40.0 %" in text and "difference +30.0 points" in text
    write_table(first, "evaluations", [answer(i, 0, True, model="new") for i in "abcdefghi"])
    with pytest.raises(UserError, match=r"asked different questions of gsm8k \(1 are in one of them only\)"):
        compare(first, second)
    write_table(first, "evaluations", [answer("a", 0, True, benchmark="svamp")])
    with pytest.raises(UserError, match="share no benchmark"):
        compare(first, second)
    write_table(first, "evaluations", [answer("a", 0, True, model=model) for model in "xy"])
    with pytest.raises(UserError, match="several models"):
        compare(first, second)


def test_the_regrade_command_says_what_changed_without_a_model(tmp_path):
    path = tmp_path / "evaluations.parquet"
    write_table(
        path, "evaluations", [answer("a", 0, True, "4"), answer("b", 0, False, "4.0"), answer("c", 0, True, "9")]
    )
    arguments = ["regrade", str(tmp_path), "--out", str(tmp_path / "again.parquet")]
    code = "import sys; from flows.cli import main; code = main({0!r}); "
    code += "print(code, {{'torch', 'transformers', 'prefect'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0] == "3 answers graded again: 2 verdicts changed (1 to right, 1 to wrong); 2 were right, 2 are"
    assert "b sample 0: right now" in lines[1] and "c sample 0: wrong now" in lines[2]
    assert lines[-1] == "0 set()", done.stderr
    assert len(read_rows(tmp_path / "again.parquet", "evaluations")) == 3


@pytest.mark.parametrize("content", [None, b"", b"PAR1 half"])
def test_files_that_are_no_evaluation(content, tmp_path, capsys):
    path = tmp_path / "evaluations.parquet"
    if content is not None:
        path.write_bytes(content)
    for arguments in (["regrade", str(tmp_path)], ["compare", str(path), str(path)]):
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and "evaluat" in printed
