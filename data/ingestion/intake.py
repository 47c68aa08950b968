"""Takes rows one by one: accepted ones go to a spill file with their hashes, refused ones to rejected.parquet."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.artifacts import SCHEMAS, TableWriter
from data.ingestion.formats import Demonstration
from data.ingestion.hashes import HashSet, hash64, item_id, question_key
from data.ingestion.responses import Checked, check
from data.ingestion.rows import Refused, Row
from data.ingestion.sources import Stream

_BATCH = 1024
_RAW_CHARACTERS = 100_000

SPILL_SCHEMA = pa.schema(
    [field for field in SCHEMAS["demonstrations"] if field.name != "split"]
    + [("question_hash", pa.uint64()), ("item_hash", pa.uint64()), ("raw", pa.string())]
)
"""The spill file: the table demonstrations before splits; `raw` only where a limit may refuse rows later."""


class Intake:
    """Checks rows and counts what became of them. A context manager that owns the spill file."""

    def __init__(
        self,
        task: str,
        stream: Stream,
        answer_kind: str | None,
        spill: Path,
        rejected: TableWriter,
        overlap: Any | None,
        limit: int | None,
    ) -> None:
        self.task, self.stream, self.answer_kind = task, stream, answer_kind
        self.read = self.accepted = self.contaminated_kept = 0
        self.rejected: Counter[str] = Counter()
        self.first_refusal: tuple[int, str] = (0, "")
        self._overlap, self._keep_raw = overlap, limit is not None
        self._seen = HashSet()
        self._accepted_rows: list[tuple] = []
        self._rejected_rows: list[dict[str, Any]] = []
        self._rejected_characters = 0
        self._table = rejected
        self._file = pa.OSFile(str(spill), "wb")
        self._spill = pa.ipc.new_file(self._file, SPILL_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4"))

    def __enter__(self) -> "Intake":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        try:
            if kind is None:
                self._flush_accepted()
                self._flush_rejected()
        finally:
            self._spill.close()
            self._file.close()

    def take(self, row: Row) -> None:
        """Checks one row and files it."""
        self.read += 1
        try:
            if row.refused is not None:
                raise row.refused
            self._accept(row, self._checked(self.stream.parse(row.values)))
        except Refused as refused:
            self._refuse(row, refused)
        if len(self._accepted_rows) >= _BATCH:
            self._flush_accepted()
        if len(self._rejected_rows) >= _BATCH or self._rejected_characters >= _RAW_CHARACTERS * 100:
            self._flush_rejected()

    def _checked(self, found: Demonstration) -> Checked:
        if self.answer_kind is not None:
            found = found._replace(answer_kind=self.answer_kind)
        return check(found, self.stream.unit(found))

    def _accept(self, row: Row, found: Checked) -> None:
        key = question_key(found.question)
        question_hash = hash64(key)
        item_hash = hash64(key, found.rationale)
        if not self._seen.add(item_hash):
            raise Refused("duplicate", "the same question with the same rationale came before")
        if self._overlap is not None and (hit := self._overlap.find(found.question)) is not None:
            if self._overlap.remove:
                raise Refused("contaminated", hit)
            self.contaminated_kept += 1
        self.accepted += 1
        identity = item_id(found.question, found.response)
        raw = self._raw(row) if self._keep_raw else None
        self._accepted_rows.append((identity, *found, row.number, question_hash, item_hash, raw))

    def _refuse(self, row: Row, refused: Refused) -> None:
        self.rejected[refused.reason] += 1
        if not self.first_refusal[0]:
            self.first_refusal = (row.number, _printable(refused.message))
        raw = self._raw(row)
        self._rejected_characters += len(raw)
        self._rejected_rows.append(
            {
                "source": self.stream.name,
                "row_number": row.number,
                "reason": refused.reason,
                "message": _printable(refused.message),
                "raw": raw,
            }
        )

    def _raw(self, row: Row) -> str:
        raw = row.raw
        if raw is None:
            raw = json.dumps(row.values, ensure_ascii=False, default=str)
        return _printable(raw[:_RAW_CHARACTERS])

    def _flush_rejected(self) -> None:
        if self._rejected_rows:
            self._table.write(self._rejected_rows)
            self._rejected_rows.clear()
            self._rejected_characters = 0

    def _flush_accepted(self) -> None:
        if not self._accepted_rows:
            return
        n = len(self._accepted_rows)
        names = ("item_id", *Checked._fields, "row_number", "question_hash", "item_hash", "raw")
        columns = dict(zip(names, zip(*self._accepted_rows)))
        columns |= {"task": [self.task] * n, "source": [self.stream.name] * n}
        arrays = [pa.array(columns[field.name], field.type) for field in SPILL_SCHEMA]
        self._spill.write_batch(pa.record_batch(arrays, schema=SPILL_SCHEMA))
        self._accepted_rows.clear()


def _printable(text: str) -> str:
    """`text` with each byte that was not UTF-8 written as \\xNN, so that a table can hold it."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") if _escaped(text) else text


def _escaped(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
