"""Pruning of published folders, and what lies below a URL."""

import json

import pytest

from data import storage


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    """A published output with three files, in a local folder and in fsspec's memory file system."""
    place = str(tmp_path / "round") if request.param == "local" else f"memory://{tmp_path.name}/round"
    with storage.staging(place) as folder:
        (folder / "weights").mkdir()
        (folder / "weights/a.bin").write_bytes(b"a")
        (folder / "state").mkdir()
        (folder / "state/b.bin").write_bytes(b"b")
        (folder / "metrics.parquet").write_bytes(b"m")
        storage.publish(folder, place, "key", {"rows": 3})
    return place


def names(url: str) -> set[str]:
    return set(storage.read_json(storage.join(url, "manifest.json"))["files"])


def test_pruning_keeps_what_is_named(url, monkeypatch, tmp_path):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    storage.prune(url, ["metrics.parquet", "weights/"])
    ref, reason = storage.find(url, "key")
    assert reason == "complete"
    assert ref.info == {"rows": 3, "pruned": True}
    assert names(url) == {"metrics.parquet", "weights/a.bin"}
    storage.prune(url, ["metrics.parquet"])
    folder = storage.fetch(url)
    assert sorted(path.name for path in folder.rglob("*") if path.name != storage.ORIGIN) in (
        ["manifest.json", "metrics.parquet"],
        ["metrics.parquet"],
    )
    before = storage.find(url, "key")
    storage.prune(url, ["metrics.parquet"])
    assert storage.find(url, "key") == before


def test_an_interrupted_pruning_is_finished_by_the_next(tmp_path):
    place = tmp_path / "round"
    with storage.staging(str(place)) as folder:
        (folder / "metrics.parquet").write_bytes(b"m")
        (folder / "weights.bin").write_bytes(b"w")
        storage.publish(folder, str(place), "key")
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["files"]["weights.bin"]
    manifest["info"]["pruned"] = True
    (place / "manifest.json").write_text(json.dumps(manifest))
    storage.prune(str(place), ["metrics.parquet"])
    assert sorted(path.name for path in place.iterdir()) == ["manifest.json", "metrics.parquet"]


def test_nothing_published_nothing_pruned(tmp_path):
    storage.prune(str(tmp_path / "nothing"), [])
    assert storage.children(str(tmp_path / "nothing")) == []
    assert storage.children("memory://nothing/at/all") == []


def test_children(url):
    assert storage.children(url) == ["state", "weights"]
