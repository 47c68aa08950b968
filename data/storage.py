"""Folders of a run at any fsspec URL: published whole, found by key and hash, fetched to local disk.

A step writes into a local staging folder; `publish` puts it at its place with the manifest last, so a reader sees a
complete folder or none. Locally that is one rename; on an object store the manifest is the last object written.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from data.artifacts import MANIFEST, SCHEMA_VERSION, damage, file_hash, files_of, stable_hash
from data.errors import UserError

ORIGIN = ".origin.json"
"""In a folder of the cache: what it is a copy of."""


@dataclass(frozen=True)
class ArtifactRef:
    """A published folder: where it is, the hash over its manifest's file hashes, the key it was made for."""

    url: str
    sha256: str
    key: str
    info: dict[str, Any]


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> Path:
    """The path of a local URL."""
    return Path(url.split("://", 1)[-1])


def absolute(url: str) -> str:
    """`url` as it is known from every folder: a local path made absolute, any other URL as it is."""
    return str(local_path(url).expanduser().absolute()) if is_local(url) else url


def join(url: str, *parts: str) -> str:
    """`url` with `parts` appended, whatever the scheme."""
    return "/".join([url.rstrip("/"), *parts])


def _filesystem(url: str):
    return fsspec.core.url_to_fs(url)


def read_json(url: str) -> Any | None:
    """The JSON at `url`; None where nothing is there. Raises ValueError where it is not JSON."""
    filesystem, path = _filesystem(url)
    try:
        return json.loads(filesystem.cat_file(path))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{url} is not JSON ({error}); delete it to have it made again") from None


def write_json(url: str, value: Any) -> None:
    """Writes `value` as JSON in one step: a reader sees the old file or the new one."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if is_local(url):
        path = local_path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    else:
        filesystem, path = _filesystem(url)
        filesystem.pipe_file(path, text.encode())


@contextmanager
def staging(url: str) -> Iterator[Path]:
    """An empty local folder to write an output into; removed at the end unless `publish` took it.

    For a local `url` it lies beside the final place, so that publishing is a rename.
    """
    if is_local(url):
        final = local_path(url)
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.part-", dir=final.parent))
    else:
        folder = Path(tempfile.mkdtemp(prefix="ratchet-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, url: str, key: str, info: dict[str, Any] | None = None) -> ArtifactRef:
    """Puts the files of the staging `folder` at `url`, manifest last, and returns the reference.

    `key` says what the output was made from (see `tasks.steps`); `info` is anything small worth knowing (row counts).
    What was at `url` before is replaced.
    """
    files = {}
    for path in files_of(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"sha256": file_hash(path), "bytes": path.stat().st_size}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "info": info or {},
        "files": files,
        "sha256": stable_hash({name: entry["sha256"] for name, entry in files.items()}),
    }
    if is_local(url):
        write_json(str(folder / MANIFEST), manifest)
        final = local_path(url)
        if final.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent))
            os.rename(final, old / final.name)
            os.rename(folder, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(folder, final)
    else:
        filesystem, path = _filesystem(url)
        if filesystem.exists(f"{path}/{MANIFEST}"):
            filesystem.rm_file(f"{path}/{MANIFEST}")
        for name in files:
            filesystem.put_file(str(folder / name), f"{path}/{name}")
        write_json(join(url, MANIFEST), manifest)
    return ArtifactRef(url, manifest["sha256"], key, manifest["info"])


def find(url: str, key: str | None = None) -> tuple[ArtifactRef | None, str]:
    """The complete output at `url` made for `key` (any key where None), and why there is none.

    The hashes of local files are compared with the manifest; on an object store `fetch` compares them.
    """
    try:
        manifest = read_json(join(url, MANIFEST))
    except ValueError as error:
        return None, str(error)
    if manifest is None:
        return None, "not made yet"
    if manifest.get("schema_version") != SCHEMA_VERSION:
        return None, f"{url} was written with schema version {manifest.get('schema_version')}, not {SCHEMA_VERSION}"
    if key is not None and manifest["key"] != key:
        return None, f"{url} was made from other settings or inputs"
    if is_local(url):
        reason = damage(local_path(url), manifest)
        if reason:
            return None, reason
    return ArtifactRef(url, manifest["sha256"], manifest["key"], manifest["info"]), "complete"


def fetch(ref: ArtifactRef | str) -> Path:
    """A local folder with the files of a published output: the place itself, or a copy kept by content hash.

    Raises FileNotFoundError where nothing is published and OSError where a downloaded file is not what was written.
    """
    url = ref if isinstance(ref, str) else ref.url
    if is_local(url):
        return local_path(url)
    manifest = read_json(join(url, MANIFEST))
    if manifest is None:
        raise FileNotFoundError(f"{url} has no {MANIFEST}: the step that makes it has not finished")
    cache = Path(os.environ.get("RATCHET_CACHE", Path.home() / ".cache" / "ratchet")) / "artifacts" / manifest["sha256"]
    if cache.is_dir() and damage(cache, manifest) is None:
        write_json(str(cache / ORIGIN), {"url": url, "sha256": manifest["sha256"]})
        return cache
    filesystem, path = _filesystem(url)
    cache.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".part-", dir=cache.parent))
    try:
        for name in manifest["files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(f"{path}/{name}", str(folder / name))
        reason = damage(folder, manifest)
        if reason:
            raise OSError(f"{url}: {reason}; delete its {MANIFEST} to have the step done again")
        write_json(str(folder / ORIGIN), {"url": url, "sha256": manifest["sha256"]})
        shutil.rmtree(cache, ignore_errors=True)
        os.rename(folder, cache)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cache


def origin(folder: Path) -> tuple[str, str] | None:
    """(URL, content hash) of the published output that a folder of `fetch`'s cache is a copy of; None for any other."""
    found = read_json(str(folder / ORIGIN))
    return (found["url"], found["sha256"]) if found else None


def children(url: str) -> list[str]:
    """Names of the folders below `url`, sorted; none where nothing is there."""
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache(path)
    try:
        entries = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        return []
    return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")


def prune(url: str, keep: Sequence[str]) -> None:
    """Drops every file of a published output but those in `keep` (names, or folders ending in "/").

    The manifest is written first, with `pruned` in its info: an interruption leaves files that belong to nothing, which
    the next call removes. Does nothing where nothing is published.
    """
    manifest = read_json(join(url, MANIFEST))
    if manifest is None:
        return
    kept = {
        name: entry
        for name, entry in manifest["files"].items()
        if any(name == wanted or (wanted.endswith("/") and name.startswith(wanted)) for wanted in keep)
    }
    if kept != manifest["files"] or not manifest["info"].get("pruned"):
        manifest |= {
            "files": kept,
            "info": manifest["info"] | {"pruned": True},
            "sha256": stable_hash({name: entry["sha256"] for name, entry in kept.items()}),
        }
        write_json(join(url, MANIFEST), manifest)
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache(path)
    for found in filesystem.find(path):
        if found[len(path) :].lstrip("/") not in {*kept, MANIFEST}:
            filesystem.rm_file(found)
    if is_local(url):
        for folder in sorted((entry for entry in local_path(url).rglob("*") if entry.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()


def fingerprint(path: str) -> str:
    """What the content of a user's file is known by: its hash, or what an object store says of it.

    Raises UserError where there is no file.
    """
    if is_local(path):
        file = local_path(path)
        if file.is_dir():
            raise UserError(f"{path} is a folder; name a file in it")
        if not file.is_file():
            raise UserError(f"{path} does not exist (looked in {Path.cwd()}); name an existing file")
        return file_hash(file)
    filesystem, inner = _filesystem(path)
    try:
        return str(filesystem.ukey(inner))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name an existing object") from None
