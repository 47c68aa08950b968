"""Bad input through the commands: one clear line with the remedy, exit code 2, nothing half-written."""

import os
import resource
import subprocess
import sys

import pytest

from data.errors import disk_problem
from flows.cli import main
from tests.data.test_ingestion_bad_input import CASES, GOOD
from tests.evaluated import gsm8k_file, model_folder

FILES = {name: case for name, case in CASES.items() if case.error is not None}


def flat(prefix, value):
    """A nested setting as the command line's arguments."""
    if isinstance(value, dict):
        return [argument for name, inner in value.items() for argument in flat(f"{prefix}.{name}", inner)]
    return [prefix, str(value)]


def run_arguments(root, path, settings):
    expert = "--experts.arithmetic"
    arguments = ["run", "--root", str(root), "--experts.programs", "null", "--experts.state", "null"]
    arguments += ["--composition.enabled", "false", f"{expert}.source.kind", "file", f"{expert}.source.path", str(path)]
    splits = settings.pop("splits", None)
    values = splits.model_dump() if splits else {"validation": 1, "test": 1}
    arguments += flat("--splits", values)
    for name, value in settings.items():
        if name == "test":
            arguments += flat(f"{expert}.test", value.model_dump(exclude_none=True))
        elif name == "columns":
            arguments += flat(f"{expert}.source.columns", value) if value else [f"{expert}.source.columns", "{}"]
        elif name == "answer_kind":
            arguments += [f"{expert}.answer_kind", value]
        else:
            arguments += [f"{expert}.source.{name}", str(value)]
    return arguments


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_stops_the_command(name, tmp_path, capsys):
    case = FILES[name]
    path, root = tmp_path / case.name, tmp_path / "runs"
    if case.content is not None:
        path.write_bytes(case.content)
    assert main(run_arguments(root, path, dict(case.settings))) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("ratchet: ") and printed.count("\n") == 1 and len(printed) < 600, printed
    expected = "does not exist" if name == "missing" else case.error
    assert expected in printed or (name == "unknown benchmark" and "there is no benchmark" in printed), printed
    assert not root.exists()


def test_a_folder_instead_of_a_file_and_an_unknown_kind(tmp_path, capsys):
    good = tmp_path / "good.jsonl"
    good.write_bytes(GOOD)
    for path, settings, fragment in (
        (tmp_path, {}, "is a folder; name a file in it"),
        (good, {"answer_kind": "essay"}, "answer_kind"),
    ):
        assert main(run_arguments(tmp_path / "runs", path, settings)) == 2
        printed = capsys.readouterr().err
        assert fragment in printed and printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("root", ["/proc/runs", "{file}/runs", "{file}"])
def test_a_root_that_cannot_be_written(root, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    good = tmp_path / "good.jsonl"
    good.write_bytes(GOOD)
    assert main(run_arguments(root.format(file=file), good, {})) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "another folder with --root" in printed or "choose a folder with --root" in printed


EVALUATE = {
    # arguments after `evaluate`, and what the one line says
    "no such folder": (["./nothing"], "there is no folder ./nothing"),
    "a file": (["{file}"], "is a file; name the folder of a model"),
    "an empty folder": (["{empty}"], "holds neither config.json (a model) nor adapter_config.json (an adapter)"),
    "no such run": (["ghost:task"], "there is no run 'ghost'"),
    "adapter without its base": (["{orphan}"], "the base model /gone"),
    "adapter with half a configuration": (["{half}"], "adapter_config.json cannot be read"),
    "unknown benchmark": (["{empty}", "--benchmark", "gsm9k"], "benchmark 'gsm9k' is unknown"),
    "no file": (["{model}", "--benchmark", "svamp"], "--benchmark svamp has no --file"),
    "missing file": (["{model}", "--file", "{file}.x"], "there is no file"),
    "empty file": (["{model}", "--file", "{file}"], "is empty"),
    "folder for a file": (["{model}", "--file", "{empty}"], "is a folder; name the file in it"),
    "half a JSON": (["{model}", "--file", "{broken}"], "is no complete JSON array"),
    "another layout": (["{model}", "--file", "{other}"], "has no column 'question'"),
    "samples without a temperature": (["{model}", "--samples", "4"], "greedy answers are all the same"),
    "negative temperature": (["{model}", "--temperature", "-1"], "temperature"),
    "no tokens": (["{model}", "--max-new-tokens", "0"], "max_new_tokens"),
    "template without a question": (["{model}", "--prompt", "plain", "--template", "Q:"], "holds no {{question}}"),
    "system prompt in a plain prompt": (
        ["{model}", "--prompt", "plain", "--system", "S"],
        "--system needs --prompt chat",
    ),
    "template of no kind": (["{model}", "--template", "{{question}}"], "need --prompt chat or --prompt plain"),
    "unwritable folder": (["{model}", "--out", "/proc/out"], "choose another folder with --out"),
    "file for a folder": (["{model}", "--out", "{file}"], "is a file; name a folder"),
    "folder with other files": (["{model}", "--out", "{orphan}"], "holds other files"),
    "limit of nothing": (["{model}", "--limit", "0"], "--limit is 0; give 1 or more"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    for name in ("empty", "orphan", "half"):
        (folder / name).mkdir()
    (folder / "file").write_text("")
    (folder / "orphan/adapter_config.json").write_text('{"base_model_name_or_path": "/gone/base"}')
    (folder / "half/adapter_config.json").write_text('{"base_model')
    (folder / "broken").write_text('[{"question": "a", "answer": "b #### 1"}, {"que')
    (folder / "other").write_text('{"prompt": "a"}\n')
    names = {name: folder / name for name in ("empty", "orphan", "half", "file", "broken", "other")}
    return names | {"model": model_folder(folder / "model"), "good": gsm8k_file(folder / "good.jsonl")}


@pytest.mark.parametrize("name", EVALUATE)
def test_evaluate_says_what_is_wrong_before_it_starts(name, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, fragment = EVALUATE[name]
    arguments = [argument.format(**places) for argument in given]
    arguments += [] if "--benchmark" in arguments else ["--benchmark", "gsm8k"]
    if "--file" not in arguments and name not in ("no file", "unknown benchmark"):
        arguments += ["--file", str(places["good"])]
    if name == "unknown benchmark":
        arguments += ["--file", str(places["good"])]
    assert main(["evaluate", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("ratchet: ") and printed.count("\n") == 1, printed
    assert fragment.format(**places) in printed
    assert list(tmp_path.iterdir()) == []


COMMAND = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from flows.cli import main
sys.exit(main({arguments!r}))
"""


def command(arguments, limit=resource.RLIM_INFINITY, **environment):
    """The command in a process of its own that may write files of at most `limit` bytes: a full disk to it."""
    code = COMMAND.format(limit=limit, arguments=[str(argument) for argument in arguments])
    env = os.environ | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=env)


def test_a_disk_that_fills_up_during_an_evaluation(places, tmp_path):
    arguments = [
        "evaluate",
        places["model"],
        "--benchmark",
        "gsm8k",
        "--file",
        places["good"],
        "--out",
        tmp_path / "out",
    ]
    arguments += ["--max-new-tokens", 200, "--questions-per-part", 5, "--threads", 1]
    # The trial write is done by then: the limit holds for what the computing process writes.
    full = command([*arguments], limit=(1 << 16) - 1)
    assert full.returncode == 2 and full.stderr.count("\n") == 1, full.stderr
    assert "the disk is full; free space there or choose another folder with --out" in full.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more, fragment", [(["no-such/model"], "cannot be read"), (["{model}", "--context", "32"], "")]
)
def test_unknown_model_and_a_context_too_short(more, fragment, places, tmp_path):
    arguments = [argument.format(**places) for argument in more]
    arguments += ["--benchmark", "gsm8k", "--file", places["good"], "--out", tmp_path / "out", "--threads", 1]
    done = command(["evaluate", *arguments], HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert (fragment or "1 new ones are asked for, but the model's context is 32") in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_a_full_disk_is_known_by():
    class Foreign(Exception):
        pass

    assert "the disk is full; free space" in disk_problem(OSError(28, "No space left on device", "/a/b"))
    assert disk_problem(Foreign('I/O error: Os { code: 28, message: "No space left" } (os error 28)'))
    assert disk_problem(OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"))
    assert "read-only" in disk_problem(OSError(30, "Read-only file system"))
    assert disk_problem(OSError(5, "Input/output error")) is None and disk_problem(ValueError("28")) is None
    assert disk_problem(FileNotFoundError(2, "no")) is None
