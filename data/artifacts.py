"""The tables between steps (their schemas), and the folders that hold them (their manifests).

A step's output is a folder. It exists when its `manifest.json` exists: the names, sizes and SHA-256 hashes of its
files, written last. Tables are Parquet (zstd) with a typed schema whose name and version travel in the file.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"

_STRING, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_IDS = pa.list_(pa.int32())

SCHEMAS: dict[str, pa.Schema] = {
    "demonstrations": pa.schema(
        [
            ("task", _STRING),
            ("item_id", _STRING),  # content hash of question and response
            ("question", _STRING),
            ("rationale", _STRING),  # "".join(steps)
            ("response", _STRING),  # what is learned: the rationale, and the answer marker if it lacks one
            ("answer", _STRING),
            ("answer_kind", _STRING),
            ("steps", pa.list_(_STRING)),
            ("source", _STRING),
            ("row_number", _INT),
            ("split", _STRING),  # train | validation | promotion | test
        ]
    ),
    "rejected": pa.schema(
        [("source", _STRING), ("row_number", _INT), ("reason", _STRING), ("message", _STRING), ("raw", _STRING)]
    ),
    "questions": pa.schema(
        [
            ("task", _STRING),
            ("benchmark", _STRING),
            ("item_id", _STRING),
            ("question", _STRING),
            ("gold", _STRING),
            ("answer_kind", _STRING),
            ("subject", _STRING),
            ("split", _STRING),  # validation | promotion | test
        ]
    ),
    "seen": pa.schema([("task", _STRING), ("item_id", _STRING)]),  # demonstrations that a retraining has used up
    "start_states": pa.schema(
        [
            ("item_id", _STRING),
            ("start_state_id", _STRING),
            ("task", _STRING),
            ("stage", _INT),  # i = 0 .. M-1; 0 starts from the question
            ("n_stages", _INT),
            ("revealed_steps", _INT),
            ("total_steps", _INT),
            ("question", _STRING),
            ("prefix", _STRING),  # prefix + remainder == response, byte for byte
            ("remainder", _STRING),
            ("answer", _STRING),
            ("answer_kind", _STRING),
        ]
    ),
    "rollouts": pa.schema(
        [
            ("item_id", _STRING),
            ("start_state_id", _STRING),
            ("stage", _INT),
            ("group", _INT),
            ("sample", _INT),
            ("prompt_ids", _IDS),  # question and revealed prefix
            ("prefix_length", _INT),  # how many of prompt_ids are the revealed prefix
            ("completion_ids", _IDS),
            ("sampling_logprobs", pa.list_(pa.float32())),
            ("reference_logprobs", pa.list_(pa.float32())),  # null unless a KL term is on
            ("stop_reason", _STRING),  # eos | stop_string | length | error
            ("completion", _STRING),  # text of the revealed prefix and the completion, as graded
            ("correct", _BOOL),
            ("parsed", _STRING),
            ("reason", _STRING),
            ("reward_parts", _STRING),  # JSON: name → value or null
            ("reward", _FLOAT),  # null: unscorable
            ("advantage", _FLOAT),
            ("policy_version", _INT),
            ("seed", pa.uint64()),
            ("trace", _STRING),  # meta-actions only, JSON: status, blocks, action log-probabilities at their boundaries
        ]
    ),
    "traces": pa.schema(
        [
            ("item_id", _STRING),
            ("kind", _STRING),  # plain | confirm | fix | two_fixes
            ("question", _STRING),
            ("text", _STRING),
            ("unlearned", _STRING),  # JSON: [start, end) characters of the text that carry no loss
            ("answer", _STRING),
            ("answer_kind", _STRING),
        ]
    ),
    "metrics": pa.schema(
        [("step", _INT), ("name", _STRING), ("value", _FLOAT), ("round", _INT), ("generated_tokens_so_far", _INT)]
    ),
    "evaluations": pa.schema(
        [
            ("model", _STRING),
            ("task", _STRING),
            ("benchmark", _STRING),
            ("split", _STRING),
            ("item_id", _STRING),
            ("sample", _INT),  # 0 .. k-1; -1: the greedy answer beside k samples
            ("subject", _STRING),
            ("question", _STRING),
            ("completion", _STRING),
            ("completion_tokens", _INT),
            ("extracted", _STRING),
            ("gold", _STRING),
            ("answer_kind", _STRING),
            ("correct", _BOOL),
            ("reason", _STRING),
            ("stop_reason", _STRING),
        ]
    ),
    "study_answers": pa.schema(
        [
            ("question", _INT),  # its place in the order of content hashes: the same question in every cell of a task
            ("correct", _BOOL),
            ("chain_valid", _BOOL),  # right with every step right; null: the task cannot judge chains
            ("completion_tokens", _INT),
            ("truncated", _BOOL),  # ended at the length limit
        ]
    ),
    "importance": pa.schema(
        [
            ("task", _STRING),
            ("module", _STRING),
            ("rank", _INT),
            ("source", _STRING),  # which expert's adapter the rank came from
            ("measure", _STRING),
            ("value", _FLOAT),  # gate gradients are signed: below 0, opening the rank lowers the loss
            ("gate", _FLOAT),
        ]
    ),
    "summary": pa.schema(
        [
            ("task", _STRING),
            ("benchmark", _STRING),
            ("model", _STRING),
            ("split", _STRING),
            ("n", _INT),  # questions
            ("answers", _INT),  # n × samples a question
            ("correct", _INT),  # answers
            ("accuracy", _FLOAT),  # mean over questions of the share of correct answers, 0 .. 1
            ("low", _FLOAT),  # confidence interval of the accuracy over questions
            ("high", _FLOAT),
            ("generated_tokens", _INT),  # sampled in the training of this model for this task; null: none known
            ("truncated_share", _FLOAT),  # answers that ended at the length limit
            ("no_answer_share", _FLOAT),  # answers without a readable final answer
        ]
    ),
}


def write_table(path: Path, name: str, rows: Sequence[dict[str, Any]] | pa.Table) -> int:
    """Writes `rows` as the Parquet table `name` and returns the number of rows. Missing columns become null.

    Raises KeyError for an unknown table and ValueError for a column that the schema does not have.
    """
    schema = SCHEMAS[name].with_metadata({"ratchet_table": name, "ratchet_schema_version": str(SCHEMA_VERSION)})
    if isinstance(rows, pa.Table):
        table = rows.select(schema.names).cast(schema)
    else:
        unknown = {key for row in rows for key in row} - set(schema.names)
        if unknown:
            raise ValueError(f"table {name!r} has no column {sorted(unknown)}; its columns are {schema.names}")
        table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(table, path, compression="zstd")
    return table.num_rows


def replace_table(path: Path, name: str, rows: Sequence[dict[str, Any]] | pa.Table) -> int:
    """`write_table` in one step: a reader, or a kill, meets the old file (or none) or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        count = write_table(part, name, rows)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


class TableWriter:
    """Writes the table `name` in pieces, for tables larger than memory. A context manager; `rows` counts them.

    `write` takes rows or a pa.Table with the schema's columns, as `write_table` does.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.schema = SCHEMAS[name].with_metadata(
            {"ratchet_table": name, "ratchet_schema_version": str(SCHEMA_VERSION)}
        )
        self.rows = 0
        self._writer = pq.ParquetWriter(path, self.schema, compression="zstd")

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def write(self, rows: Sequence[dict[str, Any]] | pa.Table) -> None:
        """Appends `rows`."""
        if isinstance(rows, pa.Table):
            table = rows.select(self.schema.names).cast(self.schema)
        else:
            table = pa.Table.from_pylist(list(rows), schema=self.schema)
        self._writer.write_table(table)
        self.rows += table.num_rows


def read_table(path: Path, name: str) -> pa.Table:
    """Reads the table `name`. Raises ValueError where the file holds another table or another schema version."""
    table = pq.read_table(path)
    metadata = table.schema.metadata or {}
    found = metadata.get(b"ratchet_table", b"?").decode(), metadata.get(b"ratchet_schema_version", b"?").decode()
    if found != (name, str(SCHEMA_VERSION)):
        raise ValueError(
            f"{path} holds table {found[0]!r} version {found[1]}, wanted {name!r} version {SCHEMA_VERSION}; "
            "make it again with this version of ratchet"
        )
    return table


def read_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """`read_table` as a list of dictionaries."""
    return read_table(path, name).to_pylist()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stable_hash(*parts: Any) -> str:
    """SHA-256 over the JSON of `parts`: the same for the same values in any process."""
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


def files_of(folder: Path) -> Iterable[Path]:
    """Every file below `folder` but its manifest, in a stable order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with the files of a folder, compared with its manifest; None where all hashes agree."""
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"] or file_hash(path) != entry["sha256"]:
            return f"{path} is not the file that was written (its hash differs)"
    return None
