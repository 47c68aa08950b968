"""Published folders: whole or not there, found by key and hash, local or not."""

import json

import pytest

from data import storage
from data.artifacts import SCHEMAS, read_rows, read_table, write_table
from data.errors import UserError


def roots(tmp_path):
    return [str(tmp_path / "runs"), f"memory://{tmp_path.name}"]


@pytest.fixture(params=[0, 1], ids=["local", "object-store"])
def root(request, tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    return roots(tmp_path)[request.param]


def make(url, key, text="hello"):
    with storage.staging(url) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(text)
        return storage.publish(folder, url, key, {"rows": 3})


def test_publish_find_fetch(root):
    url = storage.join(root, "run", "step")
    assert storage.find(url) == (None, "not made yet")
    made = make(url, "k1")
    assert storage.find(url, "k1") == (made, "complete")
    assert made.info == {"rows": 3}
    assert (storage.fetch(made) / "sub" / "a.txt").read_text() == "hello"
    assert storage.find(url, "k2")[1].endswith("other settings or inputs")


def test_publishing_again_replaces_and_leaves_nothing_behind(root, tmp_path):
    url = storage.join(root, "run", "step")
    first = make(url, "k1")
    second = make(url, "k2", "other")
    assert first.sha256 != second.sha256
    assert (storage.fetch(second) / "sub" / "a.txt").read_text() == "other"
    if storage.is_local(url):
        assert [path.name for path in storage.local_path(url).parent.iterdir()] == ["step"]


def test_the_hash_depends_on_names_and_content_only(tmp_path):
    assert make(str(tmp_path / "a"), "k1").sha256 == make(str(tmp_path / "b"), "k2").sha256
    assert make(str(tmp_path / "c"), "k1", "x").sha256 != make(str(tmp_path / "d"), "k1", "y").sha256


def test_a_failed_step_leaves_nothing(tmp_path):
    url = str(tmp_path / "runs" / "step")
    with pytest.raises(RuntimeError), storage.staging(url) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("harm", ["delete", "flip", "truncate", "manifest"])
def test_damage_is_noticed_and_named(tmp_path, harm):
    url = str(tmp_path / "step")
    make(url, "k")
    path = tmp_path / "step" / "sub" / "a.txt"
    if harm == "delete":
        path.unlink()
    elif harm == "flip":
        path.write_text("hellp")
    elif harm == "truncate":
        path.write_text("")
    else:
        (tmp_path / "step" / "manifest.json").write_text('{"key": ')
    found, reason = storage.find(url, "k")
    assert found is None
    assert ("manifest.json is not JSON" if harm == "manifest" else "a.txt") in reason


def test_a_damaged_download_is_refused(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/step"
    ref = make(url, "k")
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/step/sub/a.txt", b"other")
    with pytest.raises(OSError, match=r"a\.txt is not the file that was written"):
        storage.fetch(ref)


def test_json_is_replaced_whole(root):
    url = storage.join(root, "x.json")
    assert storage.read_json(url) is None
    storage.write_json(url, {"a": 1})
    storage.write_json(url, {"a": "ä"})
    assert storage.read_json(url) == {"a": "ä"}


def test_fingerprints_follow_content(tmp_path):
    path = tmp_path / "f"
    path.write_text("a")
    one = storage.fingerprint(str(path))
    path.write_text("b")
    assert storage.fingerprint(str(path)) != one
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            storage.fingerprint(str(wrong))


def test_tables_keep_their_name_version_and_types(tmp_path):
    path = tmp_path / "m.parquet"
    rows = [{"step": 1, "name": "reward", "value": 0.5, "round": 0, "generated_tokens_so_far": 7}]
    assert write_table(path, "metrics", rows) == 1
    assert read_rows(path, "metrics") == rows
    assert write_table(path, "metrics", read_table(path, "metrics")) == 1
    with pytest.raises(ValueError, match="wanted 'rollouts'"):
        read_table(path, "rollouts")
    with pytest.raises(ValueError, match="no column"):
        write_table(path, "metrics", [{"nam": 1}])
    with pytest.raises(KeyError):
        write_table(path, "no such table", [])


def test_every_schema_round_trips_empty(tmp_path):
    for name in SCHEMAS:
        write_table(tmp_path / "t.parquet", name, [])
        assert read_rows(tmp_path / "t.parquet", name) == []


def test_manifests_hold_hashes_of_every_file(tmp_path):
    make(str(tmp_path / "step"), "k")
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"sub/a.txt"}
    assert manifest["files"]["sub/a.txt"]["bytes"] == 5
