"""A run on an object store whose experts are trained by two workers: the same tables as a run in one process."""

import json
import time
from pathlib import Path

import fsspec
import pytest

from tests.end_to_end.mini import NAME, OVERRIDES, hashes

pytestmark = [pytest.mark.prefect, pytest.mark.s3]


@pytest.fixture(scope="module")
def bucket(server):
    """An S3 API on loopback with one bucket: its fsspec file system."""
    moto = server.start(f"{server.bin}/moto_server -H 127.0.0.1 -p {server.s3_port}")
    environment = server.environment
    filesystem = fsspec.filesystem(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            filesystem.mkdir("ratchet")
            break
        except OSError:
            assert time.monotonic() < deadline and moto.poll() is None, server.printed(moto)
            time.sleep(0.5)
    yield filesystem
    server.kill(moto)


@pytest.fixture(scope="module")
def fanned_out(server, bucket, tmp_path_factory):
    """The same on the object store, the experts taken by two workers with caches of their own."""
    folder = tmp_path_factory.mktemp("workers")
    workers = [
        server.start(
            f"{server.bin}/prefect worker start --pool ratchet-experts --limit 1 --name {name}",
            RATCHET_CACHE=str(folder / name),
        )
        for name in ("first", "second")
    ]
    parameters = {"name": NAME, "root": "s3://ratchet/runs", "fan_out": "deployment_runs", "overrides": OVERRIDES}
    server.run("reasoning-pipeline/tiny", parameters)
    for worker in workers:
        server.kill(worker)
    copy = folder / "copy"
    bucket.get(f"ratchet/runs/{NAME}", str(copy), recursive=True)
    assert all((folder / name / "artifacts").is_dir() for name in ("first", "second"))  # each has taken an expert
    return copy


def test_the_tables_are_those_of_one_process(fanned_out, one_process):
    expected, found = hashes(one_process), hashes(fanned_out)
    assert found.keys() == expected.keys() and len(found) > 50
    texts = {name for name in found if name.endswith((".json", ".md"))}  # an adapter names its base by where it lies
    assert [name for name in found if name not in texts and found[name] != expected[name]] == []


def test_an_adapter_names_its_base_by_url_and_hash_and_no_path_of_a_machine(fanned_out):
    config = json.loads((fanned_out / "experts/state/warmup/weights/adapter_config.json").read_text())
    manifest = json.loads((fanned_out / "base" / "manifest.json").read_text())
    expected = f"s3://ratchet/runs/{NAME}/base/model#sha256={manifest['sha256']}"
    assert config["base_model_name_or_path"] == expected
    card = (fanned_out / "loracoe/exported/state/README.md").read_text()
    assert expected in card and str(Path(fanned_out).parent) not in card


def test_experts_are_subflow_runs_of_the_run(server, fanned_out):
    runs = server.post("flow_runs/filter", {"flows": {"name": {"any_": ["expert-training"]}}})
    assert {run["name"] for run in runs} == {f"{NAME}-{task}" for task in ("arithmetic", "state")}
    assert all(run["state_type"] == "COMPLETED" and run["parent_task_run_id"] for run in runs)
