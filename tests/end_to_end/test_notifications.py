"""A failed run and a refused promotion reach a webhook; its URL, like every secret, is shown nowhere."""

import http.server
import json
import subprocess
import threading
import time

import pytest

from flows.automations import BLOCK, DEAD, FAILED, REFUSED
from tests.end_to_end.conftest import free_port

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def received():
    """(port, bodies posted to it) of a webhook on loopback."""
    bodies: list[dict] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Nothing."""

    port = free_port()
    hook = http.server.HTTPServer(("127.0.0.1", port), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    yield port, bodies
    hook.shutdown()


def test_a_failed_run_and_a_refused_promotion_are_told(server, received):
    port, bodies = received
    url = f"http://127.0.0.1:{port}/planted-webhook-4712"
    first = server.ratchet(f"setup --webhook {url}")
    again = server.ratchet(f"setup --webhook {url}")
    for name in (DEAD, FAILED, REFUSED):
        assert f"automation {name!r}" in first and f"automation {name!r}: renewed" in again
    assert sorted(entry["name"] for entry in server.post("automations/filter", {})) == sorted((DEAD, FAILED, REFUSED))
    with pytest.raises(AssertionError):
        server.run("evaluation/run", {"name": "no-such-run", "root": str(server.home)})
    event = {
        "event": "ratchet.promotion.refused",
        "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "resource": {"prefect.resource.id": "ratchet.serving.s-1", "prefect.resource.name": "s"},
        "payload": {"reason": "the interval holds 0"},
        "id": "11111111-2222-4333-8444-555555555555",
    }
    server.send("events", [event])
    deadline = time.monotonic() + 60
    while {body["event"] for body in bodies} < {"prefect.flow-run.Failed", "ratchet.promotion.refused"}:
        assert time.monotonic() < deadline, bodies
        time.sleep(0.5)
    [refused] = [body for body in bodies if body["event"] == "ratchet.promotion.refused"]
    assert refused == {"event": "ratchet.promotion.refused", "run": "s", "message": "the interval holds 0"}
    [block] = [b for b in server.post("block_documents/filter", {}) if b["name"] == BLOCK]
    assert "planted" not in json.dumps(block)


def test_no_secret_stands_in_database_logs_or_artifacts(server, received):
    secret = server.environment["AWS_SECRET_ACCESS_KEY"]
    for planted in (secret, "planted-webhook-4712"):
        found = subprocess.run(
            ["grep", "-rlaF", planted, str(server.home), str(server.folder)], capture_output=True, text=True
        ).stdout.split()
        assert not found, found
        shown = json.dumps([server.post("artifacts/filter", {}), server.post("logs/filter", {"limit": 200})])
        assert planted not in shown


def test_dead_runs_are_noticed_by_an_automation_that_waits_for_four_heartbeats(server):
    [dead] = [entry for entry in server.post("automations/filter", {}) if entry["name"] == DEAD]
    frequency = 30  # PREFECT_FLOWS_HEARTBEAT_FREQUENCY of prefect.yaml and flows/environment.py
    assert dead["enabled"] and dead["trigger"]["within"] == 4 * frequency
    assert dead["trigger"]["after"] == ["prefect.flow-run.heartbeat"] and dead["trigger"]["posture"] == "Proactive"
    assert dead["actions"][0]["state"] == "CRASHED"
