"""One process at a time works on a run, or on a part of it, of a local root."""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager

from data import storage
from data.errors import UserError

POLL_SECONDS = 1.0


@contextmanager
def run_lock(root: str, name: str, part: str = "", *, wait: bool = False, log: Callable[[str], None] = print):
    """Holds the lock of a run, or of one `part` of it; the kernel frees it when its holder dies.

    Where another process holds it: waits for it (`log` says so once) or raises UserError. Raises UserError as well
    where the root cannot be written. An object store has no such locks; there steps are published whole, whoever is
    last.
    """
    if not storage.is_local(root):
        yield
        return
    import fcntl

    folder = storage.local_path(root) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / f".lock{part and '-' + part}", "a+")
    except OSError as error:
        raise UserError(f"root {root!r} cannot be written ({error.strerror}); choose another --root") from None
    what = f"run {name!r}" if not part else f"{part} of run {name!r}"
    with file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise UserError(
                        f"{what} is being worked on by another process; wait for it or choose another --name"
                    ) from None
                if not told:
                    log(f"{what} is being worked on by another process: waiting for it")
                    told = True
                time.sleep(POLL_SECONDS)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
