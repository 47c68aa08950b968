"""The serving model: a reader sees a complete version at every moment, whatever happens to the writer."""

import os
import uuid
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import serving, storage
from data.errors import UserError


def weights(folder: Path, value: int) -> Path:
    """Two files that belong together: a reader that gets them from two models is caught."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text(f"{value}")
    return folder


def read(url: str) -> int | None:
    """What a server does: the model that the current version holds."""
    served = serving.current(url)
    if served is None:
        return None
    folder = serving.weights(served)
    values = {(folder / name).read_text() for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert len(values) == 1, values
    return int(values.pop())


class Killed(BaseException):
    """The writer's process is gone."""


class Watch:
    """Lets a reader look before and after every operation of the writer, and kills the writer at a chosen one."""

    def __init__(self, url: str, kill_at: int | None):
        self.url, self.kill_at, self.count = url, kill_at, 0
        self.reading = False
        self.seen: list[int | None] = []

    def wrap(self, function):
        def watched(*arguments, **named):
            if self.reading:
                return function(*arguments, **named)
            self.look()
            if self.kill_at is not None and self.count >= self.kill_at:
                raise Killed
            self.count += 1
            result = function(*arguments, **named)
            self.look()
            return result

        return watched

    def look(self) -> None:
        self.reading = True
        try:
            self.seen.append(read(self.url))
        finally:
            self.reading = False


def watched(url, patch, kill_at=None) -> Watch:
    """Every way in which the store changes, watched."""
    watch = Watch(url, kill_at)
    if storage.is_local(url):
        for name in ("rename", "replace"):
            patch.setattr(os, name, watch.wrap(getattr(os, name)))
    else:
        filesystem = fsspec.core.url_to_fs(url)[0]
        for name in ("put_file", "pipe_file", "rm_file"):
            patch.setattr(filesystem, name, watch.wrap(getattr(filesystem, name)))
    return watch


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["promote", "rollback"]), st.one_of(st.none(), st.integers(0, 4))), max_size=5
)


@pytest.mark.parametrize("kind", ["local", "memory"])
@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS)
def test_a_reader_never_sees_a_half_written_model(kind, actions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    url = str(folder / "s") if kind == "local" else f"memory://{uuid.uuid4().hex}/s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_CACHE", str(folder / "cache"))
        allowed: set[int | None] = {None}
        for number, (action, kill_at) in enumerate(actions):
            before = read(url)
            allowed.add(number)
            made = weights(folder / f"w{number}", number)
            with pytest.MonkeyPatch.context() as inner:
                watch = watched(url, inner, kill_at)
                try:
                    if action == "promote":
                        serving.promote(url, made, f"key{number}", {})
                    else:
                        serving.rollback(url)
                except (Killed, UserError):
                    pass  # killed, or nothing to roll back to
            after = read(url)
            assert set(watch.seen) <= {before, after}  # the old model or the new one, nothing between
            assert after in allowed
            if action == "promote" and kill_at is None:
                assert after == number


def test_an_interrupted_promotion_is_taken_up_and_versions_are_kept(tmp_path, monkeypatch):
    url = str(tmp_path / "s")
    for number in (1, 2):
        serving.promote(url, weights(tmp_path / f"w{number}", number), f"key{number}", {"n": number})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "point", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            serving.promote(url, weights(tmp_path / "w3", 3), "key3", {})
    assert read(url) == 2
    assert serving.promote(url, tmp_path / "w3", "key3", {}).version == 3
    assert serving.numbers(url) == [1, 2, 3] and read(url) == 3
    assert serving.rollback(url)[1].version == 2 and read(url) == 2
    assert serving.rollback(url, to=3) == (2, serving.version(url, 3))
    # after a rollback the next promotion is a new version: none is overwritten
    serving.rollback(url, to=1)
    assert serving.promote(url, weights(tmp_path / "w4", 4), "key4", {}).version == 4


def test_a_damaged_version_is_named_and_refused(tmp_path):
    url = str(tmp_path / "s")
    serving.promote(url, weights(tmp_path / "w", 1), "key", {})
    (tmp_path / "s/versions/0001/weights/adapter_model.safetensors").write_text("2")
    with pytest.raises(UserError, match=r"version 1 of .*adapter_model.safetensors is not the file that was written"):
        serving.current(url)
    with pytest.raises(UserError, match="has no complete version before 1"):
        serving.rollback(url)
