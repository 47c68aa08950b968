"""Errors that a user can mend."""

import errno
import re

_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this user may write (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}
_CODE = re.compile(r"(?:os error|\[?errno)[ :]*(\d+)", re.IGNORECASE)


class UserError(ValueError):
    """Bad input or settings: the message names the field or row, the reason and the remedy; never retried."""


def disk_problem(error: BaseException) -> str | None:
    """One line with the remedy where writing or reading failed for what the user must mend: a full disk, no permission.

    Libraries in C++ and Rust give the system's error number in their message only. None for any other error.
    """
    code = getattr(error, "errno", None)
    if code is None and (found := _CODE.search(str(error))):
        code = int(found[1])
    if isinstance(error, UserError) or code not in _DISK:
        return None
    name = getattr(error, "filename", None)
    where = f"{name}: " if name else ""
    full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free space" if full else "change its permissions"
    return f"{where}{_DISK[code]}; {remedy}, or choose another folder; the same command continues"
