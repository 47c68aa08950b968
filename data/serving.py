"""The serving model: versions that never change, and one pointer to the current one.

    serving/versions/0003/   weights/ and what is known of them, published whole (data.storage)
    serving/current.json     which version serves: replaced in one write, locally and on an object store

A reader follows the pointer to a complete version or finds none; it never sees a model in the making.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import storage
from data.errors import UserError
from data.storage import ArtifactRef

POINTER = "current.json"
WEIGHTS = "weights"


@dataclass(frozen=True)
class Served:
    """One version of the serving model."""

    version: int
    ref: ArtifactRef


def place(serving: str, version: int) -> str:
    """Where a version lies."""
    return storage.join(serving, "versions", f"{version:04d}")


def numbers(serving: str) -> list[int]:
    """The versions that have been begun, in order, complete or not."""
    return sorted(int(name) for name in storage.children(storage.join(serving, "versions")) if name.isdigit())


def version(serving: str, number: int) -> Served:
    """A complete version. Raises UserError where it is missing or damaged."""
    found, reason = storage.find(place(serving, number))
    if found is None:
        raise UserError(f"version {number} of {serving}: {reason}; `ratchet rollback --to N` chooses another")
    return Served(number, found)


def versions(serving: str) -> list[Served]:
    """All complete versions, oldest first."""
    found = [(number, storage.find(place(serving, number))[0]) for number in numbers(serving)]
    return [Served(number, ref) for number, ref in found if ref is not None]


def current(serving: str) -> Served | None:
    """The version that serves; None before the first promotion. Raises UserError where it is missing or damaged."""
    pointer = storage.read_json(storage.join(serving, POINTER))
    if pointer is None:
        return None
    served = version(serving, pointer["version"])
    if served.ref.sha256 != pointer["sha256"]:
        raise UserError(
            f"version {served.version} of {serving} is not the one that was promoted (its hash differs); "
            "`ratchet rollback --to N` chooses another"
        )
    return served


def weights(served: Served) -> Path:
    """A local folder with a version's weights: an ordinary PEFT adapter, or full weights."""
    return storage.fetch(served.ref) / WEIGHTS


def promote(serving: str, folder: Path, key: str, info: dict[str, Any]) -> Served:
    """Makes the weights in `folder` the next version and points to it. `key` says what they were made from.

    A version of the same key that was published before an interruption is taken up, not made twice.
    """
    for served in versions(serving):
        if served.ref.key == key:
            break
    else:
        number = max(numbers(serving), default=0) + 1
        url = place(serving, number)
        with storage.staging(url) as staging:
            shutil.copytree(folder, staging / WEIGHTS)
            served = Served(number, storage.publish(staging, url, key, info | {"version": number}))
    point(serving, served)
    return served


def point(serving: str, served: Served) -> None:
    """Makes a version the current one, in one write."""
    storage.write_json(storage.join(serving, POINTER), {"version": served.version, "sha256": served.ref.sha256})


def rollback(serving: str, to: int | None = None) -> tuple[int | None, Served]:
    """Points back to version `to`, or to the complete version before the current one: (former, now current).

    Raises UserError where there is none.
    """
    pointer = storage.read_json(storage.join(serving, POINTER))
    former = pointer["version"] if pointer else None
    if to is not None:
        served = version(serving, to)
    else:
        before = [found for found in versions(serving) if former is None or found.version < former]
        if not before:
            raise UserError(f"{serving} has no complete version before {former}; name one with --to")
        served = before[-1]
    point(serving, served)
    return former, served
