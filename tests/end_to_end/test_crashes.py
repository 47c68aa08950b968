"""SIGKILL of the computing process, the worker, the server at seeded moments; then the same command: the same tables.

RATCHET_SOAK=20 (`make soak`) draws twenty moments instead of three.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Server, readme_commands
from tests.end_to_end.mini import NAME, OVERRIDES, hashes

pytestmark = pytest.mark.prefect

MOMENTS = (
    "demonstrations/state",
    "base",
    "experts/arithmetic/warmup",
    "experts/arithmetic/r3/start_states",
    "experts/arithmetic/r3/0/rounds/0001/rollouts",
    "experts/state/r3/0/rounds/0000/update",
    "experts/state/r3/0/result",
    "loracoe",
    "evaluation/r3/state",
    "report",
)
"""The kill comes a drawn moment after this output of the run lies there: while a later one is made."""
TARGETS = ("computing process", "worker", "server")


def cases() -> list[tuple[int, str, str, float]]:
    """(seed, what is killed, after which output, how much later in seconds): all steps in ten, all targets in three."""
    drawn = []
    for seed in range(int(os.environ.get("RATCHET_SOAK", "3"))):
        generator = random.Random(seed)
        place = MOMENTS[(seed * 3 + 4) % len(MOMENTS)]
        drawn.append((seed, TARGETS[seed % 3], place, round(generator.uniform(0.0, 0.8), 2)))
    return drawn


@pytest.fixture(scope="module")
def crashing(clone, tmp_path_factory):
    """A server of its own, which may be killed."""
    server = Server(clone, tmp_path_factory.mktemp("crashing"))
    try:
        for command in readme_commands("A Prefect server")[:-2]:
            server.typed(command)
        yield server
    finally:
        server.close()


def processes(word: str, *wanted: str) -> list[int]:
    """Processes whose command holds `word` and whose environment holds each of `wanted`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # another user's, or just ended
            if word in command and all(text.encode() in environment for text in wanted):
                found.append(int(folder.name))
    return found


def start_server(server: Server):
    process = server.start(f"{server.bin}/prefect server start --host 127.0.0.1")
    server.typed(".venv/bin/ratchet setup")
    return process


def start_worker(server: Server):
    return server.start(f"{server.bin}/prefect worker start --pool ratchet")


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def begun(server) -> list[dict]:
    """Flow runs but for those that a schedule has planned for later."""
    return [run for run in server.post("flow_runs/filter", {}) if run["state_type"] != "SCHEDULED"]


@pytest.mark.parametrize(("seed", "target", "place", "later"), cases())
def test_killed_anywhere_the_same_command_ends_with_the_same_tables(
    crashing, one_process, tmp_path, seed, target, place, later
):
    server, parameters = crashing, {"name": NAME, "root": str(tmp_path), "overrides": OVERRIDES}
    worker = start_worker(server)
    before = len(begun(server))
    command = server.deployment_run("reasoning-pipeline/tiny", parameters)
    first = server.start(command)
    wait_for(lambda: (tmp_path / NAME / place).exists(), 200, f"{place} was not made\n{server.logs()}")
    time.sleep(later)
    if target == "computing process":
        for pid in processes("models.compute", f"PREFECT_HOME={server.home}"):
            os.kill(pid, signal.SIGKILL)
    elif target == "worker":
        server.kill(worker)
        worker = start_worker(server)
    else:
        [serving] = [p for name, p in server.processes.items() if "server-start" in name and p.poll() is None]
        server.kill(serving)
        time.sleep(1.0)
        start_server(server)
    server.run("reasoning-pipeline/tiny", parameters, timeout=300)
    assert hashes(tmp_path / NAME) == hashes(one_process)
    server.kill(first)
    server.kill(worker)
    runs = begun(server)
    assert len(runs) - before == 2  # nothing was started twice by itself
    assert not processes("models.compute", f"PREFECT_HOME={server.home}")


def test_cancelling_ends_the_computing_process_within_ten_seconds(crashing, tmp_path):
    server = crashing
    overrides = OVERRIDES | {"rl": OVERRIDES["rl"] | {"generated_tokens": 10_000_000}}
    worker = start_worker(server)
    command = server.deployment_run(
        "reasoning-pipeline/tiny", {"name": NAME, "root": str(tmp_path), "overrides": overrides}
    )
    server.start(command)
    rounds = tmp_path / NAME / "experts/arithmetic/r3/0/rounds/0001"
    wait_for(rounds.exists, 120, server.logs())
    mine = lambda: processes("models.compute", f"PREFECT_HOME={server.home}")  # noqa: E731
    assert mine()
    [run] = server.post("flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}})
    server.post(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    clicked = time.monotonic()
    wait_for(lambda: not mine(), 30, "the computing process survived the click by 30 s")
    assert time.monotonic() - clicked < 30
    wait_for(
        lambda: (
            server.post("flow_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})[0]["state_type"]
            == "CANCELLED"
        ),
        30,
        "never cancelled",
    )
    server.kill(worker)


def test_a_damaged_file_is_named_and_made_again(server, one_process):
    weights = one_process / "experts/arithmetic/warmup/weights/adapter_model.safetensors"
    expected = hashes(one_process)
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    server.run("reasoning-pipeline/tiny", {"name": NAME, "root": str(one_process.parent), "overrides": OVERRIDES})
    assert weights.read_bytes() == content and hashes(one_process) == expected
    logs = server.post("logs/filter", {"sort": "TIMESTAMP_DESC", "limit": 200})
    assert any(f"made again: {weights} is not the file that was written" in log["message"] for log in logs)


if "RATCHET_SOAK" in os.environ:  # it waits for the whole time limit

    def test_a_stopped_process_is_timed_out_and_its_task_goes_on_from_its_round(server, one_process, tmp_path):
        for place in ("demonstrations", "base", "experts/arithmetic/warmup"):  # only rounds are to be timed out
            shutil.copytree(one_process / place, tmp_path / NAME / place)
        overrides = OVERRIDES | {
            "compute": {"step_timeout_seconds": 20, "retries": 3, "threads": 1, "retry_delay_seconds": 0.1}
        }
        process = server.start(
            server.deployment_run(
                "reasoning-pipeline/tiny", {"name": NAME, "root": str(tmp_path), "overrides": overrides}
            )
        )
        wait_for((tmp_path / NAME / "experts/arithmetic/r3/0/rounds/0000/update").exists, 120, server.logs())
        for pid in processes("models.compute", f"PREFECT_HOME={server.home}"):
            os.kill(pid, signal.SIGSTOP)
        assert process.wait(timeout=200) == 0, server.printed(process)
        assert hashes(tmp_path / NAME) == hashes(one_process)
