"""doctor, compare-runs, completion: what they say of a machine, of two runs, of the command line."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data import storage
from data.artifacts import write_table
from flows import doctor
from flows.cli import main, parser
from flows.completion import SHELLS, script, words

ROOT = Path(__file__).resolve().parents[2]


def evaluated(root, run, model, correct, **settings):
    """A run with one evaluated model: question i is answered correctly where correct[i]."""
    storage.write_json(str(root / run / "settings.json"), {"name": run, "seed": 0} | settings)
    url = str(root / run / "evaluation" / model / "t")
    with storage.staging(url) as folder:
        rows = [{"task": "t", "item_id": str(i), "sample": 0, "correct": right} for i, right in enumerate(correct)]
        write_table(folder / "evaluations.parquet", "evaluations", rows)
        storage.publish(folder, url, run)


def test_two_runs_are_compared_by_settings_and_by_question(tmp_path, capsys):
    evaluated(tmp_path, "a", "r3", [True] * 5 + [False] * 15, rl={"learning_rate": 1e-5, "steps": 2})
    evaluated(tmp_path, "b", "r3", [True] * 15 + [False] * 5, rl={"learning_rate": 3e-5, "steps": 2})
    evaluated(tmp_path, "b", "other", [True] * 3, rl={"learning_rate": 3e-5, "steps": 2})
    assert main(["compare-runs", "a", "b", "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rl.learning_rate" in printed and "3e-05" in printed and "rl.steps" not in printed
    [line] = [line for line in printed.splitlines() if "r3" in line]
    assert "25.0 %" in line and "75.0 %" in line and "+50.0 [" in line and "20 questions" in line
    evaluated(tmp_path, "c", "r3", [True] * 3)
    assert main(["compare-runs", "a", "c", "--root", str(tmp_path)]) == 0
    assert "other questions (3 in common)" in capsys.readouterr().out
    assert main(["compare-runs", "a", "none", "--root", str(tmp_path)]) == 2


def test_the_doctor_finds_what_is_wrong_and_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--root", str(tmp_path / "file" / "runs")]) == 1
    printed = capsys.readouterr().out
    assert "WRONG prefect server" in printed and "prefect server start --host 127.0.0.1" in printed
    assert "WRONG root" in printed and "choose another folder: --root" in printed
    assert "note  cpu" in printed and "note  prefect server" in printed
    for name in ("prefect", "torch", "transformers", "peft", "vllm", "gpu", "temporary files"):
        assert f" {name} " in printed


def test_a_healthy_machine_is_well(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    findings = doctor.examine(str(tmp_path / "runs"))
    assert [finding for finding in findings if finding.level == "wrong"] == []
    assert all(finding.remedy for finding in findings if finding.level != "ok")


def test_a_library_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=999", "prefect"])
    found = {finding.subject: finding for finding in doctor._libraries()}
    assert found["torch"].level == "wrong" and "wanted >=999" in found["torch"].found
    assert found["prefect"].level == "ok"


def test_completion_knows_every_command_and_option():
    table = words(parser())
    assert {"run", "retrain", "rollback", "doctor", "export"} <= set(table) and "--serving" in table["retrain"]
    for shell in SHELLS:
        text = script(parser(), shell)
        assert all(name in text for name in table) and "promotion-questions" in text


def test_bash_completes():
    code = f"""source <({sys.executable} -m flows completion bash)
COMP_WORDS=(ratchet roll); COMP_CWORD=1; _ratchet; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(ratchet rollback --t); COMP_CWORD=2; _ratchet; echo "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rollback", "--to"]


@pytest.mark.parametrize("arguments", [["rollback"], ["serving"], ["export", "{tmp}/out"]])
def test_commands_on_a_serving_folder_that_is_empty_are_one_line(arguments, tmp_path, capsys):
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main([*given, "--serving", str(tmp_path / "none")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("ratchet: ") and printed.err.count("\n") == 1 and not printed.out


def test_deployments_of_a_folder_that_is_gone_are_found(monkeypatch):
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "/nowhere/at/all"}}

    class Answer(io.BytesIO):
        pass

    answer = json.dumps([{"name": "tiny", "pull_steps": [step]}]).encode()
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda *_, **__: Answer(answer))
    [finding] = doctor._deployments("http://127.0.0.1:1/api")
    assert finding.level == "wrong" and "/nowhere/at/all, which is gone" in finding.found


def test_every_test_that_the_runbook_names_exists():
    text = (ROOT / "docs" / "operations.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", text)
    assert len(named) > 15 and len(re.findall(r"^\| \d+ ", text, re.MULTILINE)) == 22
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (path, test)
