"""Opens a user's file, finds out what it is, and says so plainly when it is nothing that can be read."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import fsspec

from data.errors import UserError

HEAD_BYTES = 1 << 16

_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"ARROW1": "an Arrow file",
    b"\x80\x04": "a pickle, which is never read",
    b"\x80\x05": "a pickle, which is never read",
    b"%PDF": "a PDF file",
    b"SQLite format 3": "an SQLite database",
    b"\x89PNG": "a picture",
    b"\x7fELF": "a program",
}
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_READABLE = "give JSON lines, a JSON array, CSV or Parquet, plain or gzipped"


@dataclass
class Opened:
    """An open file: `binary` from its first byte (decompressed), its first bytes, and how far reading is."""

    path: str
    binary: BinaryIO
    head: bytes
    format: str
    """parquet, array, lines or csv"""
    size: int
    """Bytes on disk; 0 where unknown."""
    raw: BinaryIO
    """The file itself, as it lies on disk."""
    compressed: bool

    def position(self) -> int:
        """Bytes read so far, as they are on disk."""
        return self.raw.tell()


class _Stream(io.RawIOBase):
    """`file` again from its start: the bytes already read, then the rest. Also for streams that cannot seek."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._head, self._file = head, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if self._head:
            data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        else:
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_input(path: str) -> Iterator[Opened]:
    """Opens a local path or fsspec URL. Raises UserError for what is missing, a folder, empty or of no known format.

    A compressed file that breaks off raises UserError as well, wherever in reading that is seen.
    """
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
        if filesystem.isdir(inner):
            raise UserError(f"{path} is a folder; name one file in it, or use a source of kind 'datasets'")
        size = filesystem.size(inner) or 0
        raw = filesystem.open(inner, "rb")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; check source.path") from None
    except PermissionError:
        raise UserError(f"{path} may not be read; change its permissions") from None
    except (ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be opened ({error}); check source.path") from None
    with raw:
        try:
            yield _recognise(path, raw, size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged or incomplete gzip file ({error}); copy it again") from None


def _recognise(path: str, raw: BinaryIO, size: int) -> Opened:
    head = raw.read(HEAD_BYTES)
    binary: BinaryIO = io.BufferedReader(_Stream(head, raw), HEAD_BYTES)
    compressed = head.startswith(b"\x1f\x8b")
    if compressed:
        unpacked = gzip.GzipFile(fileobj=binary)
        head = unpacked.read(HEAD_BYTES)
        binary = io.BufferedReader(_Stream(head, unpacked), HEAD_BYTES)
    if not head.strip():
        raise UserError(f"{path} is empty; {_READABLE}")
    return Opened(path, binary, head, _format(path, head), size, raw, compressed)


def _format(path: str, head: bytes) -> str:
    if head.startswith(b"PAR1"):
        return "parquet"
    for mark, name in _OTHER_FORMATS.items():
        if head.startswith(mark):
            raise UserError(f"{path} is {name}; {_READABLE}")
    wide = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
    if wide is None and b"\x00" in head[:4]:
        wide = "UTF-16 or UTF-32" if head.replace(b"\x00", b"")[:1] in (b"[", b"{") else None
    if wide is not None:
        raise UserError(f"{path} is {wide}; save it as UTF-8 (iconv -f {wide.split()[0]} -t UTF-8)")
    control = sum(head.count(bytes([code])) for code in (0, 1, 2, 3, 4, 5, 6, 7, 8))
    if control * 100 > len(head):
        raise UserError(f"{path} is binary; {_READABLE}")
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return {b"[": "array", b"{": "lines"}.get(start, "csv")
