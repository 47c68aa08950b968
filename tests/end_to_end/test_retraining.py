"""Scheduled retraining against a real server: only what is new, promoted only when better, one at a time."""

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from data import serving as store
from data import storage
from data.artifacts import read_rows
from flows.config import parse_overrides
from flows.retraining import serving_id

pytestmark = pytest.mark.prefect

SMALL = """
--model.hidden_size 32 --model.layers 2 --model.intermediate_size 64 --model.pretrain_steps 0 --splits.validation 8
--splits.test 12 --warmup.epochs 6 --warmup.max_steps 60 --warmup.batch_size 16 --warmup.learning_rate 1e-2
--rl.generated_tokens 300 --rl.prompts 4 --rl.samples 4 --rl.steps 1 --rl.max_new_tokens 12 --rl.rounds_per_task 4
--rl.validate_every 4 --evaluation.max_new_tokens 12 --compute.threads 1
""".split()


def write_demonstrations(path: Path, count: int, answer: int = 10) -> Path:
    """`count` demonstrations whose answer is always the same: learned in seconds, and unknown to an untrained base."""
    names, things = ("Ann", "Bob", "Dan", "Ida", "Jan"), ("caps", "cups", "nuts")
    rows = [
        {
            "question": f"{names[i % 5]} has {i // 5 + 2} {things[i % 3]}. Jan finds 3. How many now?",
            "rationale": f"Jan {answer} = {answer}",
            "answer": str(answer),
        }
        for i in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def command(serving: Path, demonstrations: Path) -> str:
    arguments = ["--serving", str(serving), "--demonstrations", str(demonstrations), "--task", "arithmetic", *SMALL]
    return shlex.join(["retrain", "--promotion-questions", "40", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("retraining")


@pytest.fixture(scope="module", autouse=True)
def second(server, folder):
    """A retraining whose predecessor was killed while it held the slot; the other tests run while it waits."""
    demonstrations = write_demonstrations(folder / "other.jsonl", 200)
    line = f"{server.bin}/ratchet {command(folder / 'other', demonstrations)}"
    first = server.start(f"{line} --rl.generated_tokens 10000000")  # it would hold the slot for long
    deadline = time.monotonic() + 120
    while not (folder / "other" / "intake").exists():
        assert time.monotonic() < deadline and first.poll() is None, server.logs()
        time.sleep(0.05)
    second = server.start(line)
    while "waiting for the concurrency limit" not in server.printed(second):
        assert time.monotonic() < deadline and second.poll() is None, server.logs()
        time.sleep(0.1)
    time.sleep(1.0)
    assert first.poll() is None and second.poll() is None
    assert "holding the concurrency limit" not in server.printed(second)
    os.kill(first.pid, signal.SIGKILL)
    return second


def test_the_first_candidate_is_promoted_over_the_base(server, folder):
    demonstrations = write_demonstrations(folder / "d.jsonl", 200)
    printed = server.ratchet(command(folder / "serving", demonstrations))
    assert "promoted: the 95 % interval" in printed and "serving: version 1" in printed
    served = store.current(str(folder / "serving"))
    assert served.version == 1 and served.ref.info["low"] > 0 and served.ref.info["compared_with"] is None
    assert (store.weights(served) / "adapter_model.safetensors").is_file()


def test_nothing_new_ends_at_once_in_the_schedules_own_deployment(server, folder):
    parameters = {
        "serving": str(folder / "serving"),
        "demonstrations": str(folder / "d.jsonl"),
        "task": "arithmetic",
        "promotion_questions": 40,
        "overrides": parse_overrides(SMALL),
    }
    server.run("retraining/nightly", parameters)
    runs = server.post("flow_runs/filter", {"flows": {"name": {"any_": ["retraining"]}}, "sort": "START_TIME_DESC"})
    states = [run["state"] for run in runs if run["state_name"] == "NothingNew"]
    assert len(states) == 1 and "nothing to train on: 0 new of 200 demonstrations (140 seen" in states[0]["message"]
    [deployment] = [d for d in server.post("deployments/filter", {}) if d["name"] == "nightly"]
    [schedule] = deployment["schedules"]
    assert schedule["schedule"]["timezone"] == "Europe/Berlin" and schedule["schedule"]["cron"] == "0 3 * * *"


def test_only_new_rows_train_and_what_is_no_better_is_refused(server, folder):
    demonstrations = write_demonstrations(folder / "d.jsonl", 230)
    before = storage.read_json(str(folder / "serving" / "current.json"))
    printed = server.ratchet(command(folder / "serving", demonstrations))
    assert "not promoted: the 95 % interval" in printed and "serving: version 1" in printed
    assert storage.read_json(str(folder / "serving" / "current.json")) == before
    new, _ = storage.find(str(folder / "serving" / "intake" / "new"))
    assert new.info == {"read": 230, "new": 30, "seen": 140, "held_out": 60}
    second = next(path for path in (folder / "serving" / "retrainings").iterdir() if path.name.startswith("0002-"))
    rows = {
        model: read_rows(
            second / "evaluation" / "promotion-all" / model / "arithmetic" / "evaluations.parquet", "evaluations"
        )
        for model in ("serving", "candidate")
    }
    asked = [[row["item_id"] for row in rows[model]] for model in rows]
    assert asked[0] == asked[1] and len(asked[0]) == 40
    trained = {
        row["question"] for row in read_rows(folder / "serving/intake/new/demonstrations.parquet", "demonstrations")
    }
    held_out = read_rows(folder / "serving" / "lineage" / "held_out" / "questions.parquet", "questions")
    by_split = {
        split: {row["question"] for row in held_out if row["split"] == split}
        for split in ("validation", "promotion", "test")
    }
    assert [len(questions) for questions in by_split.values()] == [8, 40, 12]
    assert len(set().union(trained, *by_split.values())) == len(trained) + 60  # pairwise disjoint


def test_decision_versions_and_event_are_shown(server, folder):
    identifier = serving_id(str(folder / "serving"))
    artifacts = server.artifacts()
    text = artifacts[f"{identifier}-decision"]["data"]
    assert text.startswith("# Not promoted") and "```mermaid" in text and "30 rows" in text and "warm start" in text
    [row] = json.loads(artifacts[f"{identifier}-versions"]["data"])
    assert row["version"] == "1" and row["serves"] == "yes" and row["than"] == "the base"

    def mine() -> set[str]:
        events = server.post("events/filter", {"filter": {"event": {"prefix": ["ratchet."]}}})["events"]
        return {event["event"] for event in events if event["resource"]["prefect.resource.id"].endswith(identifier)}

    wanted = {"ratchet.promotion.accepted", "ratchet.promotion.refused", "ratchet.retraining.empty"}
    deadline = time.monotonic() + 30  # the server stores events some time after they were sent
    while mine() != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    assert mine() == wanted


def test_versions_are_listed_and_rolled_back(server, folder):
    serving = str(folder / "serving")
    store.promote(serving, store.weights(store.current(serving)), "another", store.current(serving).ref.info)
    assert "* " in server.ratchet(f"serving --serving {serving}").splitlines()[1]
    assert server.ratchet(f"rollback --serving {serving}") == "version 1 serves (before: 2)\n"
    assert store.current(serving).version == 1


def test_the_second_waits_and_goes_on_when_the_first_has_died(server, second, folder):
    process, limit = second, f"ratchet-{serving_id(str(folder / 'other'))}"
    process.wait(timeout=150)
    printed = server.printed(process)
    assert process.returncode == 0, printed
    assert "serving: version 1" in printed
    [found] = [entry for entry in server.post("v2/concurrency_limits/filter", {}) if entry["name"] == limit]
    assert found["limit"] == 1 and found["active_slots"] == 0
