"""The whole run as its user starts it: complete, continued after kill -9, and not done twice."""

import os
import signal
import sqlite3
import time

import pytest

from data import storage
from data.artifacts import read_rows
from flows.inspect import accuracy_table, show
from tests.documented import documented, general
from tests.end_to_end.mini import ARGUMENTS, hashes, ratchet

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """An undisturbed run: its folder and what it printed."""
    root = tmp_path_factory.mktemp("root")
    process = ratchet("run", "--root", str(root), *ARGUMENTS, home=home)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    return root, printed


def test_the_run_ends_with_its_table_and_report(finished):
    root, printed = finished
    assert "95 % interval" in printed and f"report: {root}/tiny/report/report.html" in printed
    html = (root / "tiny" / "report" / "report.html").read_text()
    assert "<script" not in html and "r3" in html and "one seed, not a comparison" in html
    rows = read_rows(root / "tiny" / "report" / "summary.parquet", "summary")
    models = {row["model"] for row in rows if row["split"] == "test"}
    assert models == {"base", "warmup", "plain_rl", "r3", "composed", "routed"}
    assert {row["n"] for row in rows if row["split"] == "test"} == {12}


def test_every_metric_that_is_written_is_explained_and_conversely(finished):
    """In all tables of the run; what warm-up, pre-training and composition write is their sections' list."""
    root, _ = finished
    written: dict[str, set[str]] = {}
    for path in sorted((root / "tiny").rglob("metrics.parquet")):
        places = {"base": "training", "warmup": "training", "loracoe": "composition"}
        kind = places.get(path.parent.name, "rounds")
        written.setdefault(kind, set()).update(general(row["name"]) for row in read_rows(path, "metrics"))
    assert set().union(*written.values()) <= documented()
    assert written["training"] == documented("Warm-up")
    assert written["composition"] == documented("Composition")


def test_accepted_and_rejected_are_what_was_read_and_the_splits_share_no_question(finished):
    root, _ = finished
    for task in ("arithmetic", "programs", "state"):
        folder = root / "tiny" / "demonstrations" / task
        info = storage.find(str(folder))[0].info
        accepted = read_rows(folder / "demonstrations.parquet", "demonstrations")
        rejected = read_rows(folder / "rejected.parquet", "rejected")
        assert len(accepted) + len(rejected) == info["read"]
        train = {row["question"] for row in accepted if row["split"] == "train"}
        held_out = {row["question"] for row in read_rows(folder / "questions.parquet", "questions")}
        assert len(train) == 24 and len(held_out) == 20 and not train & held_out


def test_start_states_reveal_what_the_formula_says(finished):
    root, _ = finished
    rows = read_rows(root / "tiny/experts/state/r3/start_states/start_states.parquet", "start_states")
    assert len(rows) == 24 * 5
    for row in rows:
        n, m, i = row["total_steps"], row["n_stages"], row["stage"]
        assert row["revealed_steps"] == min(n - 1, round(i * n / m))
    plain = read_rows(root / "tiny/experts/state/plain_rl/start_states/start_states.parquet", "start_states")
    assert {row["prefix"] for row in plain} == {""}


def test_the_arms_spend_the_same_budget(finished):
    root, _ = finished
    for task in ("arithmetic", "programs", "state"):
        for arm in ("plain_rl", "r3"):
            info = storage.find(str(root / "tiny/experts" / task / arm / "0/result"))[0].info
            assert 1500 <= info["generated_tokens"] < 1500 + 16 * 33


def test_show_and_the_table_read_the_folder(finished):
    root, _ = finished
    text = show(str(root), "tiny")
    assert "not made yet" not in text and "composed" in accuracy_table(str(root), "tiny")


@pytest.mark.parametrize("model", ["base", "warmup", "r3", "composed", "routed"])
def test_ask_answers_with_the_prefix_shown(finished, home, model):
    root, _ = finished
    question = "Ann has 52 caps. Jan finds 3. How many now?"
    process = ratchet("ask", "tiny", question, "--root", str(root), "--model", model, "--prefix", "Jan 52", home=home)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    assert f"{model} (arithmetic)" in printed and "[Jan 52]" in printed and "tokens, ended by" in printed


def test_the_same_command_does_nothing_again(finished, home):
    root, _ = finished
    before = hashes(root / "tiny")
    process = ratchet("run", "--root", str(root), *ARGUMENTS, home=home)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    steps = [line for line in printed.splitlines() if line.endswith("s)")]
    assert steps and all("already complete" in line for line in steps)
    assert hashes(root / "tiny") == before


@pytest.mark.parametrize("place", ["base", "experts/programs/warmup", "experts/state/r3/0/rounds/0001/rollouts"])
def test_killed_anywhere_the_same_command_ends_with_the_same_tables(finished, home, tmp_path, place):
    root, _ = finished
    process = ratchet("run", "--root", str(tmp_path), *ARGUMENTS, home=home)
    deadline = time.monotonic() + 300
    while not (tmp_path / "tiny" / place).exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)  # the pipe closes only when no process of the run is left
    done = len(list((tmp_path / "tiny").glob("*/*/manifest.json")))
    process = ratchet("run", "--root", str(tmp_path), *ARGUMENTS, home=home)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    assert hashes(tmp_path / "tiny") == hashes(root / "tiny")
    assert sum("already complete" in line for line in printed.splitlines()) >= done


def test_task_runs_are_recorded_under_names_that_say_their_subject(finished, home):
    with sqlite3.connect(home / "prefect.db") as database:
        names = {name for (name,) in database.execute("select name from task_run")}
        states = {name for (name,) in database.execute("select state_name from task_run")}
    assert {"ingest-state", "base-model", "warmup-programs", "rounds-state-r3-0-to-1", "compose"} <= names
    assert {"evaluate-composed-arithmetic", "report", "start-states-state-r3"} <= names
    assert "Cached" in states
