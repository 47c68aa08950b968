"""Two processes through `accelerate launch`: failures by rank, nothing left behind, free ports of the loopback."""

import os
import signal
import subprocess
import sys
import time

import pytest

from data.errors import UserError
from flows.launch import SHIPPED
from models.requests import Launch
from tasks.compute import Compute, MayPass, StepFailed, command, loopback
from tests.tasks.test_compute import Lines, Request, gone

LAUNCH = Launch(config=SHIPPED / "ddp.yaml", processes=2)
STEPS = """
import os, time
from data.errors import UserError
from models.world import collective, world
from tests.tasks.test_compute import Request

@collective
def step(request: Request, out, report):
    here = world()
    pids = here.gather(os.getpid())
    if request.path:
        open(request.path, "w").write(" ".join(map(str, pids)))
    if here.rank == 1 and request.what == "user":
        raise UserError("row 3: no answer; add one")
    if here.rank == 1 and request.what == "bug":
        raise KeyError("lost")
    if here.rank == 1 and request.what == "die":
        os.kill(os.getpid(), 9)
    if request.what == "hang":
        time.sleep(600)
    return {"pids": here.gather(os.getpid()), "sum": sum(here.gather(here.rank + 1))}
"""


@pytest.fixture
def compute(tmp_path, monkeypatch):
    """Two computing processes whose `models.probe_steps` is the module above."""
    probe(tmp_path, monkeypatch)
    process = Compute(1, launch=LAUNCH)
    yield process
    process.close()


def probe(folder, monkeypatch) -> None:
    import models

    package = folder / "probe"
    package.mkdir()
    (package / "sitecustomize.py").write_text(f"import models; models.__path__.append({str(folder)!r})\n")
    (folder / "probe_steps.py").write_text(STEPS)
    root = os.path.dirname(os.path.dirname(models.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), root]))


def call(compute, what="", path="", timeout=120.0):
    return compute.call("models.probe_steps:step", Request(what=what, path=str(path)), path.parent, Lines(), timeout)


def test_both_ranks_answer_again_and_again_and_an_error_has_its_rank(compute, tmp_path):
    first, second = call(compute, path=tmp_path / "a"), call(compute, path=tmp_path / "b")
    assert first == second
    assert first["sum"] == 3
    assert len(set(first["pids"])) == 2
    with pytest.raises(StepFailed, match=r"process 1 of 2: 'lost'(.|\n)*KeyError"):
        call(compute, "bug", tmp_path / "pids")
    assert all(gone(pid) for pid in first["pids"])


def test_a_user_error_and_a_killed_rank(compute, tmp_path):
    with pytest.raises(UserError, match=r"^row 3: no answer; add one$"):
        call(compute, "user", tmp_path / "pids")
    with pytest.raises(MayPass, match=r"ended with code(.|\n)*rank +: 1(.|\n)*exitcode +: -9"):
        call(compute, "die", tmp_path / "pids")
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_the_deadline_and_a_killed_parent_leave_no_rank_behind(compute, tmp_path):
    call(compute, path=tmp_path / "pids")
    with pytest.raises(MayPass, match="still running"):
        call(compute, "hang", tmp_path / "pids", timeout=2)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    (tmp_path / "pids").unlink()
    text = (
        "from pathlib import Path\nfrom tests.tasks.test_compute_processes import *\n"
        f"call(Compute(1, launch=LAUNCH), 'hang', Path({str(tmp_path / 'pids')!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", text])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((tmp_path / "pids").exists() and (tmp_path / "pids").read_text()):
        time.sleep(0.1)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_the_command_by_machines():
    assert command(None)[1:] == ["-m", "models.compute"]
    one = command(LAUNCH)
    assert one[1:3] == ["-m", "accelerate.commands.launch"]
    assert one[one.index("--num_processes") + 1] == "2"
    assert one[one.index("--main_process_ip") + 1] == "127.0.0.1"
    assert one[one.index("--main_process_port") + 1] == "0"
    several = command(LAUNCH.model_copy(update={"machines": 2}))
    assert "--main_process_ip" not in several
    assert set(loopback().values()) <= {"lo", "lo0"}
