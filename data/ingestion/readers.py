"""Streams the rows of a file: nothing is kept of a row once it has been given out."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from data.errors import UserError
from data.ingestion.opening import Opened
from data.ingestion.rows import MAX_ROW_CHARACTERS, NotFinite, NumberText, Refused, Row

_CHUNK = 1 << 20
_LARGEST_ELEMENT = 16 * MAX_ROW_CHARACTERS
_BATCH = 1024
_SPACE = " \t\r\n"
_DELIMITERS = ",\t;|"

# Numbers keep their digits: neither 1e400, nor 14.0, nor a number of 40 digits may change on the way.
_DECODER = json.JSONDecoder(parse_int=NumberText, parse_float=NumberText, parse_constant=NotFinite)


def read_rows(opened: Opened) -> Iterator[Row]:
    """The rows of a file, in order. Raises UserError where the file as a whole cannot be read to its end."""
    if opened.format == "parquet":
        return _parquet(opened)
    # Bytes that are not UTF-8 become lone surrogates, by which their row is recognised and refused.
    if opened.format == "csv":
        text = io.TextIOWrapper(opened.binary, "utf-8-sig", "surrogateescape", newline="")
        return _csv(text, opened.path)
    text = io.TextIOWrapper(opened.binary, "utf-8-sig", "surrogateescape", newline=None)
    return _lines(text, opened.path) if opened.format == "lines" else _array(text, opened.path)


def _row(number: int, value: Any, raw: str) -> Row:
    if type(value) is dict:
        return Row(number, value, raw)
    return Row(number, None, raw, Refused("not_an_object", f"the row is JSON, but no object: {raw[:80]!r}"))


def _lines(text: io.TextIOWrapper, path: str) -> Iterator[Row]:
    """JSON lines; blank lines are no rows. Row numbers are line numbers."""
    number, first = 0, True
    while line := text.readline(MAX_ROW_CHARACTERS + 1):
        number += 1
        ended = line.endswith("\n")
        if not ended and len(line) > MAX_ROW_CHARACTERS:
            while (more := text.readline(_CHUNK)) and not more.endswith("\n"):
                pass
            yield Row(number, None, line[:1000], _too_large())
            continue
        line = line.strip(_SPACE)
        if not line:
            continue
        try:
            yield _row(number, _DECODER.decode(line), line)
        except (json.JSONDecodeError, RecursionError) as error:
            if first and line[-1] in "{[,:":
                raise UserError(
                    f"{path} is one JSON value over several lines; give a list of objects or one object a line"
                ) from None
            if not ended and not line.endswith("}"):
                raise UserError(f"{path} breaks off in the middle of row {number}; copy it again") from None
            yield Row(number, None, line, Refused("bad_json", f"the row is not JSON: {_why(error)}"))
        first = False


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _too_large() -> Refused:
    return Refused("row_too_large", f"the row has more than {MAX_ROW_CHARACTERS:,} characters; only its start is kept")


class _Window:
    """A moving window on a text stream."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.buffer = text.read(_CHUNK)
        self.at = 0
        self.ended = False

    def more(self) -> bool:
        """Drops what lies before `at` and reads on, each time twice as much; False at the end of the file."""
        rest = self.buffer[self.at :]
        added = self._text.read(max(_CHUNK, len(rest)))
        self.buffer, self.at, self.ended = rest + added, 0, not added
        return bool(added)

    def next_character(self) -> str:
        """The next visible character, at which `at` then is; empty at the end of the file."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""


def _array(text: io.TextIOWrapper, path: str) -> Iterator[Row]:
    """The elements of a JSON array, read as a stream. Row numbers are their places, from 1."""
    window = _Window(text)
    window.next_character()
    window.at += 1  # the opening bracket
    number = 0
    if window.next_character() == "]":
        window.at += 1
    else:
        separator = ","
        while separator == ",":
            number += 1
            value, raw = _element(window, path, number)
            if len(raw) > MAX_ROW_CHARACTERS:
                yield Row(number, None, raw[:1000], _too_large())
            else:
                yield _row(number, value, raw)
            separator = window.next_character()
            window.at += 1
        if not separator:
            raise UserError(f"{path} is half a JSON array: it breaks off after row {number}; copy it again")
        if separator != "]":
            raise UserError(f"{path}: {separator!r} follows row {number}, where ',' or ']' belongs; repair the file")
    if window.next_character():
        raise UserError(f"{path}: text follows the end of the JSON array of {number} rows; give one array")


def _element(window: _Window, path: str, number: int) -> tuple[Any, str]:
    if not window.next_character():
        raise UserError(f"{path} is half a JSON array: it breaks off before row {number}; copy it again")
    while True:
        try:
            value, end = _DECODER.raw_decode(window.buffer, window.at)
            complete = end < len(window.buffer) or window.ended
        except json.JSONDecodeError as error:
            complete = False
            if window.ended and not window.buffer.rstrip(_SPACE).endswith("]"):
                raise UserError(f"{path} is half a JSON array: it breaks off in row {number}; copy it again") from None
            if window.ended or len(window.buffer) - window.at > _LARGEST_ELEMENT:
                raise UserError(f"{path}: row {number} is not JSON ({error.msg}); repair the file") from None
        except RecursionError:
            raise UserError(f"{path}: row {number} is nested too deeply; remove it") from None
        if complete:
            raw, window.at = window.buffer[window.at : end], end
            return value, raw
        window.more()


class _Recorder:
    """Hands out lines and remembers those since the last row."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.first = text.readline(_LARGEST_ELEMENT)
        self.lines: list[str] = []

    def __iter__(self) -> Iterator[str]:
        line = self.first
        while line:
            self.lines.append(line)
            yield line
            line = self._text.readline(_LARGEST_ELEMENT)

    def take(self) -> str:
        """The text of the row that was just read."""
        text = "".join(self.lines).rstrip("\r\n")
        self.lines.clear()
        return text


def _csv(text: io.TextIOWrapper, path: str) -> Iterator[Row]:
    """Rows of a CSV file with a header. The delimiter is the one that occurs most often in the first line."""
    csv.field_size_limit(_LARGEST_ELEMENT)
    recorder = _Recorder(text)
    delimiter = max(_DELIMITERS, key=recorder.first.count)
    reader = csv.reader(recorder, delimiter=delimiter, strict=True)
    number = 0
    header: list[str] | None = None
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(f"{path}: a quote opened in row {number + 1} is never closed; repair it") from None
            number += 1
            yield Row(number, None, recorder.take()[:MAX_ROW_CHARACTERS], Refused("bad_csv", f"not CSV: {error}"))
            continue
        raw = recorder.take()
        if header is None:
            header = [name.strip() for name in fields]
            if len(set(header)) < len(header):
                raise UserError(f"{path}: two columns of the header have one name ({', '.join(header)}); rename one")
        elif fields:
            number += 1
            if len(raw) > MAX_ROW_CHARACTERS:
                yield Row(number, None, raw[:1000], _too_large())
            elif len(fields) != len(header):
                wrong = f"{len(fields)} fields where the header has {len(header)}"
                yield Row(number, None, raw, Refused("bad_csv", wrong))
            else:
                yield Row(number, dict(zip(header, fields)), raw)


def _parquet(opened: Opened) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Parquet is read from its end: a stream that cannot seek is taken whole.
        seekable = opened.raw.seekable() and not opened.compressed
        file = pq.ParquetFile(opened.raw if seekable else io.BytesIO(opened.binary.read()))
        batches = file.iter_batches(_BATCH)
        number = 0
        for batch in batches:
            for values in batch_rows(batch):
                number += 1
                yield Row(number, values)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, ConnectionError | TimeoutError):
            raise
        raise UserError(f"{opened.path} is a damaged Parquet file ({str(error)[:200]}); copy it again") from None


def batch_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow batch; text that is not UTF-8 comes with lone surrogates, by which it is refused."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        import pyarrow as pa

        columns = {}
        for name, column in zip(batch.schema.names, batch.columns):
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                values = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary()).to_pylist()
                columns[name] = [
                    value if value is None else value.decode("utf-8", "surrogateescape") for value in values
                ]
            else:
                columns[name] = column.to_pylist()
        return [dict(zip(columns, values)) for values in zip(*columns.values())]
