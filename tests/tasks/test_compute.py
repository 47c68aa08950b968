"""The computing process: answers, errors by kind, deadlines, no orphans."""

import os
import signal
import subprocess
import sys
import time

import pytest

from data.errors import UserError
from data.progress import Silent
from data.settings import Settings
from models.compute import error_kind
from tasks.compute import ROOT, Compute, MayPass, StepFailed


class Request(Settings):
    """What the steps of this file are asked."""

    what: str = ""
    path: str = ""


class Lines:
    """Remembers what a step reports."""

    def __init__(self):
        self.lines, self.done = [], []

    def log(self, message):
        self.lines.append(message)

    def progress(self, done, total, text=""):
        self.done.append((done, total, text))


STEPS = """
import os, subprocess, sys, time
from data.errors import UserError
from tests.tasks.test_compute import Request

def step(request: Request, report):
    print("noise on standard output")
    if request.what == "pid":
        report.log("working")
        report.progress(2, 2, "halves")
        return {"pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}
    if request.what == "user":
        raise UserError("row 3: no answer; add one")
    if request.what == "bug":
        raise KeyError("lost")
    if request.what == "passing":
        raise ConnectionError("refused")
    if request.what == "die":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if request.what == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(request.path, "w").write(str(child.pid))
        time.sleep(600)
"""


@pytest.fixture
def compute(tmp_path, monkeypatch):
    """A computing process whose `models.probe_steps` is the module above."""
    import models

    package = tmp_path / "probe"
    package.mkdir()
    (package / "sitecustomize.py").write_text(f"import models; models.__path__.append({str(tmp_path)!r})\n")
    (tmp_path / "probe_steps.py").write_text(STEPS)
    root = os.path.dirname(os.path.dirname(models.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), root]))
    process = Compute(threads=1)
    yield process
    process.close()


def call(compute, what, timeout=60.0, path="", report=None):
    return compute.call("models.probe_steps:step", Request(what=what, path=path), None, report or Lines(), timeout)


def gone(pid):
    for _ in range(100):
        try:
            state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_one_process_answers_all_requests_and_relays_lines(compute):
    report = Lines()
    first = call(compute, "pid", report=report)
    assert report.lines == ["working"] and report.done == [(2, 2, "halves")]
    assert first == call(compute, "pid") == {"pid": compute.pid, "threads": "1"}


def test_errors_come_back_by_kind_and_the_process_lives_on(compute):
    pid = call(compute, "pid")["pid"]
    with pytest.raises(UserError, match="row 3: no answer; add one"):
        call(compute, "user")
    with pytest.raises(StepFailed, match=r"KeyError: 'lost'[\s\S]*probe_steps"):
        call(compute, "bug")
    assert call(compute, "pid")["pid"] == pid
    with pytest.raises(MayPass, match="ConnectionError: refused"):
        call(compute, "passing")


def test_a_lost_process_may_pass_and_is_replaced(compute):
    pid = call(compute, "pid")["pid"]
    with pytest.raises(MayPass, match=r"ended with code -9.*last words"):
        call(compute, "die")
    assert call(compute, "pid")["pid"] != pid


def test_the_deadline_ends_the_process_and_what_it_started(compute, tmp_path):
    call(compute, "pid")
    started = time.monotonic()
    with pytest.raises(MayPass, match=r"still running after 1\.5 s"):
        call(compute, "grandchild", timeout=1.5, path=str(tmp_path / "pid"))
    assert time.monotonic() - started < 10
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_killed_parent_leaves_no_orphan(compute, tmp_path):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tests.tasks.test_compute import *; from tasks.compute import Compute\n"
            f"call(Compute(1), 'grandchild', path={str(tmp_path / 'pid')!r})",
        ]
    )
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(int((tmp_path / "pid").read_text()))


def test_only_step_functions_are_called(compute):
    with pytest.raises(UserError, match="no step function"):
        compute.call("os:system", Request(), None, Lines(), 60.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("x"), "user"),
        (TimeoutError(), "transient"),
        (ConnectionResetError(), "transient"),
        (MemoryError(), "transient"),
        (FileNotFoundError(), "bug"),
        (PermissionError(), "bug"),
        (ValueError(), "bug"),
    ],
)
def test_error_kinds(error, kind):
    assert error_kind(error) == kind


def test_another_python_computes_and_finds_the_packages(tmp_path, monkeypatch):
    """As for vLLM, which has an environment of its own: the packages come by PYTHONPATH."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {tmp_path}/path\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    compute = Compute(threads=1, python=str(python))
    try:
        with pytest.raises(UserError, match="no step function"):
            compute.call("flows.cli:main", Settings(), None, Silent(), 60)
    finally:
        compute.close()
    assert (tmp_path / "path").read_text().strip() == f"{ROOT}:/elsewhere"
