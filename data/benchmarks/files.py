"""Rows of a benchmark file: a JSON array, JSON lines whatever the ending, CSV or Parquet, plain or gzipped."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from typing import Any

import fsspec

from data.errors import UserError

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


def file_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of the file at `path`, a local path or any fsspec URL; benchmarks fit into memory.

    Raises UserError for a file that is missing, a folder, empty, not UTF-8, or broken, and for a row that is no object.
    """
    content = _bytes(path)
    if content[:4] == _PARQUET:
        rows = _parquet(content, path)
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
        rows = _csv(text) if path.removesuffix(".gz").endswith(".csv") else _json(text, path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"row {number} of {path} is {type(row).__name__}, not an object with columns")
        yield number, row


def _bytes(path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; check the benchmark's path") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the file in it") from None
    if content[:2] == _GZIP:
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError) as error:
            raise UserError(f"{path} is a damaged gzip file ({error}); fetch it again") from None
    if not content.strip():
        raise UserError(f"{path} is empty; give the publisher's file")
    return content


def _json(text: str, path: str) -> Iterator[Any]:
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is no complete JSON array ({error}); fetch it again") from None
        return
    # Only "\n" ends a JSON line: U+2028 and its kind may stand inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"line {number} of {path} is not JSON ({error}); fetch the file again") from None


def _csv(text: str) -> Iterator[dict[str, Any]]:
    yield from csv.DictReader(io.StringIO(text, newline=""))


def _parquet(content: bytes, path: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(content))
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is a damaged Parquet file ({error}); fetch it again") from None
    yield from table.to_pylist()
