"""The command line as its user meets it."""

import subprocess
import sys
import time

import pytest

from flows.cli import main

PROBE = """
import sys, time
started = time.process_time()  # of this process alone: the machine may be busy with other tests
from flows.cli import main
code = main({arguments!r})
loaded = [name for name in ("torch", "prefect", "transformers", "pandas") if name in sys.modules]
print(code, loaded, time.process_time() - started)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--rl.learning_rat", "1"],
        ["run", "--preset", "none-such"],
        ["run", "--rl.prompts", "many"],
        ["run", "--rl.temperature", "-1"],
        ["run", "--experts.arithmetic.source.suite", "nothing"],
    ],
)
def test_a_wrong_setting_stops_before_torch_and_prefect_in_under_a_second(arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=arguments)], capture_output=True, text=True, check=True
    )
    code, loaded, seconds = done.stdout.strip().replace("[]", "none").split()
    assert (code, loaded) == ("2", "none")
    assert float(seconds) < 1.0
    assert done.stderr.startswith("ratchet: ") and done.stderr.count("\n") == 1


def test_python_dash_m_flows_is_the_same_command():
    started = time.process_time()  # of this process alone: the machine may be busy with other tests
    done = subprocess.run([sys.executable, "-m", "flows", "presets"], capture_output=True, text=True, check=True)
    assert "tiny" in done.stdout and "llama2-7b" in done.stdout
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["show", "no-such-run", "--root", "{tmp}"], "there is no run 'no-such-run'"),
        (["ask", "no-such-run", "What?", "--root", "{tmp}"], "there is no run 'no-such-run'"),
        (["presets", "--verbose"], "'--verbose': there is no such argument"),
        (["run", "--root", "{tmp}/file"], "is a file; choose a folder"),
        (["run", "--experts.state.source.kind", "file", "--experts.state.source.path", "{tmp}"], "is a folder"),
        (["run", "--experts.state.source.kind", "file", "--experts.state.source.path", "{tmp}/x"], "does not exist"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(arguments, fragment, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert fragment in printed and printed.count("\n") == 1


def test_plan_starts_nothing(tmp_path, capsys):
    assert main(["plan", "--root", str(tmp_path / "runs"), "--rl.generated_tokens", "1000"]) == 0
    assert not (tmp_path / "runs").exists()
    assert "generated tokens" in capsys.readouterr().out
