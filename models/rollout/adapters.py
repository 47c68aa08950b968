"""Adapters as vLLM gets them: a name for each content, and a place that the server sees."""

import hashlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from data.artifacts import file_hash
from models.policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "ratchet"


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def adapter_name(weights: Path) -> str:
    """A name that only this process gives, and only to these bytes: nothing cached for it belongs to other weights."""
    content = hashlib.sha256(f"{file_hash(weights / ADAPTER_CONFIG)} {file_hash(weights / ADAPTER_WEIGHTS)}".encode())
    return f"{PREFIX}-{_host()}-{os.getpid()}-{content.hexdigest()[:16]}"


def is_left_over(name: str) -> bool:
    """Whether an adapter was loaded by this process, or by one of this machine that is gone."""
    prefix, _, rest = name.partition("-")
    host, _, rest = rest.partition("-")
    pid = rest.partition("-")[0]
    if prefix != PREFIX or host != _host() or not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # another user's process lives
    return False


def shared_place(weights: Path, folder: str | None, name: str | None) -> Path:
    """Where a server finds `weights`: their own place, or a copy in `folder`, put there in one rename."""
    if folder is None:
        return weights.resolve()
    place = Path(folder).absolute() / (
        name or f"{PREFIX}-{file_hash(next(iter(sorted(weights.glob('*.safetensors')))))}"
    )
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=place.parent))
        shutil.copytree(weights, part, dirs_exist_ok=True)
        part.chmod(0o755)
        try:
            part.rename(place)
        except OSError:
            shutil.rmtree(part)  # another process was faster
            if not place.is_dir():
                raise
    return place


def adapter_rank(weights: Path) -> int:
    """The largest rank in a PEFT adapter's configuration."""
    config = json.loads((weights / ADAPTER_CONFIG).read_text())
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])
