"""Bad input and its outcome: one plain line with the remedy and nothing half-written, or a refused row with its reason.

The table has the file's bytes, what else is set, and the expectation: a fragment of the error, or the reasons of the
refused rows in order.
"""

import gzip
import io
import json
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from data.errors import UserError
from data.settings import BenchmarkSource, FileSource, Source, Splits
from tests.data.ingested import FEW, gsm8k_rows, json_lines, run, tables

GOOD = json_lines(gsm8k_rows(4)).encode()
ROWS = gsm8k_rows(4)
PAIRS = [(row["question"], row["answer"]) for row in ROWS]
ARRAY = json.dumps(ROWS).encode()


def _with(**changed) -> bytes:
    """Four good rows and one that `changed` spoils; None removes a column."""
    row = {key: value for key, value in (gsm8k_rows(1, start=50)[0] | changed).items() if value is not Ellipsis}
    return GOOD + json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _columns(**changed) -> bytes:
    """A file for format `columns`: four good rows and one spoiled."""
    good = [{"question": f"{n}+{n}?", "rationale": f"Twice {n} it is.", "answer": str(2 * n)} for n in range(4)]
    spoiled = {"question": "9+9?", "rationale": "Twice 9.", "answer": "18"} | changed
    return "\n".join(json.dumps(row) for row in [*good, spoiled]).encode() + b"\n"


def _parquet(**columns) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


class Case(NamedTuple):
    """A bad file and what comes of it."""

    content: bytes | None
    error: str | None = None
    reasons: tuple[str, ...] = ()
    settings: dict = {}
    name: str = "input.dat"


CASES = {
    # Files that cannot be used: one line, nothing written.
    "missing": Case(None, "there is no file"),
    "empty": Case(b"", "is empty"),
    "blank": Case(b" \n\n\t\n", "is empty"),
    "empty gzip": Case(gzip.compress(b""), "is empty"),
    "empty array": Case(b"[]", "holds no rows"),
    "header only": Case(b"question,rationale,answer\n", "holds no rows"),
    "half an array": Case(ARRAY[:-30], "half a JSON array: it breaks off in row 4"),
    "array without end": Case(ARRAY[:-1], "half a JSON array: it breaks off after row 4"),
    "array after comma": Case(ARRAY[:-1] + b",", "breaks off before row 5"),
    "array with two commas": Case(ARRAY.replace(b"}, {", b"}, , {", 1), "row 2 is not JSON"),
    "array without comma": Case(ARRAY.replace(b"}, {", b"} {", 1), "'{' follows row 1"),
    "text after the array": Case(ARRAY + b"[]", "text follows the end"),
    "half a JSON line": Case(GOOD[:-20], "breaks off in the middle of row 4"),
    "one object over lines": Case(json.dumps({"data": ROWS}, indent=1).encode(), "one JSON value over several lines"),
    "one object on a line": Case(
        json.dumps({"data": ROWS}).encode(), "in no format known here; its columns are 'data'"
    ),
    "half a gzip": Case(gzip.compress(GOOD * 50)[:-30], "damaged or incomplete gzip"),
    "damaged gzip": Case(gzip.compress(GOOD)[:12] + b"\x00" * 40, "damaged or incomplete gzip"),
    "half a Parquet": Case(_parquet(question=["a?"], answer=["b"])[:-9], "damaged Parquet"),
    "zip": Case(b"PK\x03\x04" + GOOD, "a zip archive"),
    "pickle": Case(b"\x80\x04\x95" + GOOD, "a pickle"),
    "binary": Case(bytes(range(256)) * 8, "is binary"),
    "UTF-16 with mark": Case(GOOD.decode().encode("utf-16"), "is UTF-16; save it as UTF-8"),
    "UTF-16 without mark": Case(GOOD.decode().encode("utf-16-le"), "save it as UTF-8"),
    "plain text": Case(b"Once upon a time\nthere was a file\n", "in no format known here"),
    "open quote": Case(b'question,rationale,answer\n"1?,a,1\n2?,b,2\n', "a quote opened in row 1 is never closed"),
    "two columns of one name": Case(b"question,answer,answer\n1?,a,1\n", "two columns of the header have one name"),
    "wrong mapping": Case(
        GOOD,
        "has no column 'gold'",
        settings={"columns": {"question": "question", "rationale": "answer", "answer": "gold"}},
    ),
    "mapping and another format": Case(GOOD, "leave one of them out", settings={"format": "gsm8k", "columns": {}}),
    "wrong format": Case(GOOD, "has no column 'answer_cot' (format svamp)", settings={"format": "svamp"}),
    "unknown columns": Case(b'{"prompt": "1?", "completion": "a"}\n', "set source.format to 'columns'"),
    "benchmark without rationales": Case(
        b'[{"question": "1?", "answer_value": "1"}]', "no rationales; its columns are 'answer_value', 'question'"
    ),
    "no accepted row": Case(
        json_lines([{"question": f"{n}?", "answer": "none"} for n in range(3)]).encode(),
        "none of 3 rows was accepted (no_answer 3); row 1: the text has no answer after ### or ####",
    ),
    "kind that cannot grade the golds": Case(
        _columns(), "none of 5 rows was accepted (gold_ungradable 5)", settings={"answer_kind": "choice"}
    ),
    "too few questions": Case(
        GOOD, "4 distinct questions were accepted, but 7", settings={"splits": Splits(validation=5, test=2)}
    ),
    "limit under the splits": Case(GOOD, "2 distinct questions were accepted, but 2", settings={"limit": 2}),
    "unknown benchmark": Case(GOOD, "benchmark 'gsm9k' is unknown", settings={"test": BenchmarkSource(name="gsm9k")}),
    # Rows that are refused while the others are used.
    "not JSON in the middle": Case(
        GOOD + b'{"question": }\n' + json_lines(gsm8k_rows(1, 9)).encode(), reasons=("bad_json",)
    ),
    "nested too deeply": Case(GOOD + b'{"question": ' + b"[" * 100_000 + b"\n", reasons=("bad_json",)),
    "no object": Case(GOOD + b'[1, 2]\n"text"\n7\nnull\n', reasons=("not_an_object",) * 4),
    "row without a column": Case(_with(answer=Ellipsis), reasons=("no_answer",)),
    "null question": Case(_with(question=None), reasons=("no_question",)),
    "empty question": Case(_with(question=" \n"), reasons=("no_question",)),
    "question is a number": Case(_with(question=7), reasons=("not_text",)),
    "question is a list": Case(_with(question=["a", "b"]), reasons=("not_text",)),
    "answer is nested": Case(_with(answer={"text": "#### 7"}), reasons=("not_text",)),
    "empty answer after the marker": Case(_with(answer="Some text.\n#### "), reasons=("no_answer",)),
    "text after the answer": Case(_with(answer="Text.\n#### 7\nNow the next one."), reasons=("answer_not_at_end",)),
    "marker without a rationale": Case(_with(answer="#### 7"), reasons=("empty_rationale",)),
    "gold is no number": Case(_with(answer="Text.\n#### seven or so"), reasons=("gold_ungradable",)),
    "NUL": Case(_with(question="a\x00b?"), reasons=("control_characters",)),
    "half a surrogate pair": Case(GOOD + b'{"question": "a\\ud800?", "answer": "x\\n#### 1"}\n', reasons=("not_utf8",)),
    "Latin-1 row": Case(
        GOOD + '{"question": "Zo\xeb?", "answer": "x\\n#### 1"}\n'.encode("latin-1"), reasons=("not_utf8",)
    ),
    "Latin-1 in an array": Case(
        ARRAY[:-1] + ', {"question": "Zo\xeb?", "answer": "x\\n#### 1"}]'.encode("latin-1"), reasons=("not_utf8",)
    ),
    "duplicate": Case(GOOD + GOOD[: GOOD.index(b"\n") + 1].replace(b"Ada has", b"ADA  has"), reasons=("duplicate",)),
    "huge line": Case(
        _with(answer="x" * 1_100_000 + "\n#### 7") + GOOD, reasons=("row_too_large",) + ("duplicate",) * 4
    ),
    "NaN answer": Case(_columns(answer=float("nan")), reasons=("no_answer",)),
    "infinite answer": Case(_columns(answer=float("inf")), reasons=("no_answer",)),
    "null rationale": Case(_columns(rationale=None), reasons=("empty_rationale",)),
    "rationale states another answer": Case(_columns(rationale="The answer is 17."), reasons=("answer_mismatch",)),
    "CSV with a short row": Case(b"question,rationale,answer\n1?,a,1\n2?,b,2\n3?,c,3\n4?,d\n", reasons=("bad_csv",)),
    "CSV with bad quotes": Case(b'question,rationale,answer\n1?,a,1\n2?,b,2\n"3"?,c,3\n4?,d,4\n', reasons=("bad_csv",)),
    "Parquet with nulls and lists": Case(
        _parquet(
            question=["1?", "2?", "3?", None], rationale=["a", "b", "c", "d"], answer=[1.0, 2.0, 3.0, float("nan")]
        ),
        reasons=("no_question",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, tmp_path):
    case = CASES[name]
    path, out = tmp_path / case.name, tmp_path / "out"
    if case.content is not None:
        path.write_bytes(case.content)
    settings = dict(case.settings)
    if case.error is not None:
        with pytest.raises(UserError) as caught:
            run(path, out, **settings)
        message = str(caught.value)
        assert case.error in message and "\n" not in message and len(message) < 500, message
        if "test" not in settings:
            assert str(path) in message
        assert list(out.iterdir()) == []
    else:
        counts = run(path, out, **settings)
        demonstrations, rejected, _ = tables(out)
        assert tuple(row["reason"] for row in rejected) == case.reasons
        assert counts["accepted"] == len(demonstrations) > 0 and counts["rejected"] == len(rejected)
        assert counts["accepted"] + counts["rejected"] == counts["read"]
        assert all(row["message"] and row["raw"] and row["row_number"] >= 1 for row in rejected)
        assert sorted(file.name for file in out.iterdir()) == [
            "demonstrations.parquet",
            "questions.parquet",
            "rejected.parquet",
        ]


def test_the_table_has_forty_cases():
    assert len(CASES) >= 40


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match="is a folder; name one file in it"):
        run(tmp_path, tmp_path / "out")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    import fsspec.implementations.local as local

    path = tmp_path / "input.jsonl"
    path.write_bytes(GOOD)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local.LocalFileSystem, "_open", refuse)
    with pytest.raises(UserError, match="may not be read; change its permissions"):
        run(path, tmp_path / "out")


def test_a_lost_connection_is_no_user_error(tmp_path, monkeypatch):
    """What can pass is for a retry, not for the user."""
    import fsspec.implementations.local as local

    path = tmp_path / "input.jsonl"
    path.write_bytes(GOOD)

    def lose(*args, **kwargs):
        raise ConnectionResetError("connection reset")

    monkeypatch.setattr(local.LocalFileSystem, "_open", lose)
    with pytest.raises(ConnectionError):
        run(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "bad", [{"kind": "fax"}, {"path": "a", "answer_kind": "essay"}, {"path": "a", "format": "xml"}, {}]
)
def test_bad_settings_never_reach_a_file(bad):
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python({"kind": "file"} | bad)


# Files that look bad and are not.
FINE = {
    "BOM": b"\xef\xbb\xbf" + GOOD,
    "CR LF": GOOD.replace(b"\n", b"\r\n"),
    "CR only": GOOD.replace(b"\n", b"\r"),
    "blank lines and no last newline": GOOD.replace(b"\n", b"\n\n  \n").rstrip(),
    "array": ARRAY,
    "array with BOM and indentation": b"\xef\xbb\xbf" + json.dumps(ROWS, indent=4).encode(),
    "gzip": gzip.compress(GOOD),
    "gzip in two members": gzip.compress(GOOD[:200]) + gzip.compress(GOOD[200:]),
    "gzipped array": gzip.compress(ARRAY),
    "Parquet": _parquet(question=[row["question"] for row in ROWS], answer=[row["answer"] for row in ROWS]),
    "gzipped Parquet": gzip.compress(
        _parquet(question=[row["question"] for row in ROWS], answer=[row["answer"] for row in ROWS])
    ),
    "CSV": ("question,answer\n" + "".join(f'"{q}","{a}"\n' for q, a in PAIRS)).encode(),
    "CSV with CR": ("question,answer\r" + "".join(f'"{q}","{a}"\r' for q, a in PAIRS)).encode(),
    "TSV with BOM": (
        "\ufeffquestion\tanswer\n" + "".join(f'{r["question"]}\t"{r["answer"]}"\n' for r in ROWS)
    ).encode(),
}


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_the_content_decides_not_the_ending(name, ending, tmp_path):
    path = tmp_path / f"input.{ending}"
    path.write_bytes(FINE[name])
    counts = run(path, tmp_path / "out", splits=FEW)
    demonstrations, rejected, _ = tables(tmp_path / "out")
    assert (counts["read"], counts["accepted"], counts["format"], rejected) == (4, 4, "gsm8k", [])
    assert [row["question"] for row in demonstrations] == [row["question"] for row in ROWS]
    assert [row["response"] for row in demonstrations] == [row["answer"] for row in ROWS]


@pytest.mark.parametrize("content", [ARRAY, json.dumps(ROWS[:2], indent=2).encode()])
def test_an_array_may_break_off_anywhere(content, tmp_path):
    """At no byte is half a file taken for a whole one, or for a file with a bad row."""
    path = tmp_path / "input.json"
    for size in range(2, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="half a JSON array"):
            run(path, tmp_path / "out")


def test_source_settings_of_the_table_are_valid():
    for case in CASES.values():
        FileSource(path="x", **{key: value for key, value in case.settings.items() if key not in ("splits", "test")})
