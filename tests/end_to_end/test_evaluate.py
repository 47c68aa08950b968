"""`ratchet evaluate` as its user meets it: on a model's folder, on an adapter, killed and continued."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from data.artifacts import read_rows
from data.progress import Silent
from flows.cli import main, parser
from flows.evaluate import evaluation_request
from models.benchmarking import evaluate_benchmarks
from tests.evaluated import adapter_folder, gsm8k_file, model_folder, theoremqa_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return gsm8k_file(tmp_path_factory.mktemp("file") / "test.jsonl")


def arguments(model, file, out, *more):
    return ["evaluate", str(model), "--benchmark", "gsm8k", "--file", str(file), "--out", str(out), *map(str, more)]


def in_process(model, file, out, *more):
    """What the command computes, in this process."""
    return evaluate_benchmarks(evaluation_request(parser().parse_args(arguments(model, file, out, *more))), Silent())


SAMPLED = ["--samples", 2, "--temperature", 1, "--max-new-tokens", 60, "--questions-per-part", 2, "--batch-size", 2]


def test_killed_and_continued_gives_the_same_files(model, file, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    in_process(model, file, whole, *SAMPLED)
    command = [sys.executable, "-m", "flows", *arguments(model, file, killed, *SAMPLED)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = killed / "unfinished" / "000001.parquet"
    until = time.monotonic() + 120
    while not part.is_file() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    children = _children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 20
    while any(_runs(child) for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert children and not any(_runs(child) for child in children)  # the computing process ends with its parent
    assert part.is_file() and not (killed / "score.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in (killed / "unfinished").glob("*.parquet")}
    assert 2 <= len(before) < 5, "killed too late to mean anything"

    score = in_process(model, file, killed, *SAMPLED)
    assert sorted(path.name for path in killed.iterdir()) == ["evaluations.parquet", "score.json"]
    for name in ("evaluations.parquet", "score.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    [figures] = score["scores"]
    assert (figures["questions"], figures["answers"], figures["headline"]) == (10, 20, "avg@2")
    assert set(figures["pass@k"]) == set(figures["maj@k"]) == {"1", "2"} and "greedy_accuracy" in figures
    rows = read_rows(killed / "evaluations.parquet", "evaluations")
    assert [row["sample"] for row in rows] == [-1, 0, 1] * 10


def _children(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry))
    return found


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_adapter_through_the_command(model, file, tmp_path, capsys):
    adapter = adapter_folder(tmp_path / "adapter", model)
    options = [
        "--max-new-tokens",
        8,
        "--limit",
        4,
        "--stop",
        "zz",
        "--prompt",
        "plain",
        "--template",
        "Q {question}\nA ",
    ]
    assert main(arguments(adapter, file, tmp_path / "out", *options)) == 0
    assert "adapter on gsm8k: accuracy" in capsys.readouterr().out
    score = json.loads((tmp_path / "out/score.json").read_text())
    made_from = score["made_from"]
    assert made_from["engine"]["adapter_hash"] and made_from["weights_sha256"] and made_from["base"]["sha256"]
    assert made_from["prompt"] == {"kind": "plain", "template": "Q {question}\nA "}
    assert made_from["evaluation"]["stop_strings"] == ["zz"] and made_from["evaluation"]["max_new_tokens"] == 8
    assert made_from["versions"]["torch"] and made_from["engine"]["name"] == "transformers"
    assert score["scores"][0]["questions"] == 4 and made_from["benchmarks"]["gsm8k"]["beyond_limit"] == 6
    base = in_process(model, file, tmp_path / "base", *options)
    assert base["made_from"]["engine"]["adapter_hash"] is None
    assert base["made_from"]["base"] == made_from["base"]
    answers = [read_rows(tmp_path / where / "evaluations.parquet", "evaluations") for where in ("out", "base")]
    assert [row["completion"] for row in answers[0]] != [row["completion"] for row in answers[1]]
    # The two files are a paired comparison; grading again finds nothing new.
    assert main(["compare", str(tmp_path / "out"), str(tmp_path / "base")]) == 0
    assert main(["regrade", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "paired bootstrap" in printed and "0 verdicts changed" in printed


def test_a_finished_one_is_kept_and_another_is_refused(model, file, tmp_path, capsys):
    out = tmp_path / "out"
    made = in_process(model, file, out, "--max-new-tokens", 4, "--limit", 2)
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    assert in_process(model, file, out, "--max-new-tokens", 4, "--limit", 2) == made
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()} == before
    with pytest.raises(ValueError, match=r"another evaluation.max_new_tokens; choose another folder with --out"):
        in_process(model, file, out, "--max-new-tokens", 5, "--limit", 2)
    assert {path.name for path in out.iterdir()} == set(before)


def test_several_benchmarks_and_picture_questions_by_name(model, file, tmp_path):
    pictures = theoremqa_file(tmp_path / "theoremqa.json")
    more = ["--benchmark", "theoremqa", "--file", pictures, "--max-new-tokens", 4, "--limit", 3]
    score = in_process(model, file, tmp_path / "out", *more)
    assert [(one["benchmark"], one["questions"]) for one in score["scores"]] == [("gsm8k", 3), ("theoremqa", 2)]
    assert set(score["scores"][1]["subjects"]) == {"X", "Y"}
    left_out = score["made_from"]["benchmarks"]["theoremqa"]["excluded"]
    assert left_out == {"picture": {"count": 1, "rows": [[3, "b/9"]]}}


def test_a_question_over_the_context_stops_before_any_answer(model, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "x" * 300, "answer": "#### 1"}) + "\n")
    with pytest.raises(ValueError, match=r"has 302 tokens, and 1 new ones .* the model's context is 256"):
        in_process(model, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
