"""README's commands for a Prefect server: server, work pool, deploy, worker, deployment run, artifacts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flows.config import parse_overrides
from tests.end_to_end.mini import ARGUMENTS, environment

pytestmark = pytest.mark.prefect
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(api: str, path: str, body: dict) -> list:
    """The answer of the server's API."""
    request = urllib.request.Request(
        f"{api}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def server(tmp_path):
    """A server with its own database: (API's URL, environment of a command that uses it)."""
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    own = environment(tmp_path / "home") | {"PREFECT_API_URL": api, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    log = open(tmp_path / "server.log", "w")
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        env=own,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(f"{api}/health", timeout=5)
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
    yield api, own
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def prefect(own, *arguments, timeout=120):
    """Runs a prefect command from the checkout and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        env=own,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_deployment_run_ends_completed_and_leaves_its_artifacts(server, tmp_path):
    api, own = server
    prefect(own, "work-pool", "create", "ratchet", "--type", "process")
    prefect(own, "--no-prompt", "deploy", "--all")
    worker = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", "ratchet"],
        env=own,
        cwd=tmp_path,  # a worker may be started anywhere
        stdout=open(tmp_path / "worker.log", "w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        overrides = json.dumps(parse_overrides(ARGUMENTS))
        printed = prefect(
            own,
            *("deployment", "run", "reasoning-pipeline/tiny", "--watch"),
            *("--param", f"root={tmp_path / 'root'}", "--param", f"overrides={overrides}"),
            timeout=500,
        )
        assert "Completed" in printed
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert (tmp_path / "root" / "tiny-deployed" / "report" / "report.html").is_file()
    artifacts = {item["key"]: item for item in post(api, "artifacts/latest/filter", {"limit": 200})}
    assert artifacts["tiny-deployed-accuracy"]["type"] == "table"
    assert "data:image/png;base64," in artifacts["tiny-deployed-report"]["data"]
    assert "```mermaid" in artifacts["tiny-deployed-report"]["data"]
    assert artifacts["tiny-deployed-samples"]["type"] == "markdown"
    assert artifacts["warm-up-programs"]["type"] == "progress" and artifacts["warm-up-programs"]["data"] == 100
    names = {run["name"] for run in post(api, "task_runs/filter", {"limit": 200})}
    assert {"ingest-state", "rounds-state-r3-0-to-1", "evaluate-composed-programs", "report"} <= names
