"""Ends what a killed `ratchet` leaves behind: `python -m flows.reaper OWNER`, waiting at the other end of a pipe.

Prefect's embedded server is a process that Prefect starts; it stops it at exit, but not when `ratchet` is killed with
SIGKILL. Everything started by a run carries its mark in the environment; when the pipe closes, what still carries it is
ended.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "RATCHET_OWNER"
GRACE_SECONDS = 3.0


_watchers: list[subprocess.Popen] = []
"""Kept for the life of the process: its end closes the pipe, and nothing before it may."""


def watch() -> None:
    """Marks the environment of this process's children and starts the reaper, which waits for this process's end."""
    owner = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[MARK] = owner
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.reaper", owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _watchers.append(process)


def marked(owner: str) -> list[int]:
    """Process ids that carry the mark of `owner`, this process apart."""
    wanted = f"{MARK}={owner}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                values = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # another user's process, or one that has just ended
            if wanted in values:
                found.append(int(folder.name))
    return found


def reap(owner: str) -> None:
    """Asks what carries the mark to end, and kills what has not after `GRACE_SECONDS`."""
    for number, wait in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 0.0)):
        for pid in marked(owner):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended in the meantime
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and marked(owner):
            time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1])
