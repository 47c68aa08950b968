"""Benchmarks: each layout read from made-up rows, broken files refused in one line, the published files in full."""

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.artifacts import read_rows, write_table
from data.benchmarks import BENCHMARKS, load_questions, questions
from data.benchmarks.base import Benchmark, Hub
from data.benchmarks.entries import after_marker, with_options
from data.benchmarks.files import file_rows
from data.errors import UserError
from data.grading import grade
from data.settings import BenchmarkSource

OPTIONS = "OPTIONS:\n- yes\n- it is not possible to tell\n- no"

# name, a row of the file, question, gold, kind, subject
ROWS = [
    (
        "gsm8k",
        {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4\n#### 1,004"},
        "Two and two?",
        "1,004",
        "number",
        "",
    ),
    (
        "svamp",
        {"item_id": "s_1", "question": "two and two ?", "answer_value": "4.0"},
        "two and two ?",
        "4.0",
        "number",
        "",
    ),
    (
        "svamp",
        {"Body": "There are 2 cats", "Question": "How many cats?", "Answer": "2.0", "Type": "Addition"},
        "There are 2 cats. How many cats?",
        "2.0",
        "number",
        "Addition",
    ),
    (
        "math500",
        {"problem": "$x^2=4$, $x>0$?", "solution": "$\\boxed{2}$", "answer": "2", "subject": "Algebra", "level": 1},
        "$x^2=4$, $x>0$?",
        "2",
        "math",
        "Algebra",
    ),
    (
        "aqua",
        {"question": "Two and two?", "options": ["A)3", "B)4"], "rationale": "4", "correct": "B"},
        "Two and two?\nA)3\nB)4",
        "B",
        "choice",
        "",
    ),
    ("mathqa", {"question": "two ?\na ) 3 , b ) 4", "answer_value": "b"}, "two ?\na ) 3 , b ) 4", "b", "choice", ""),
    (
        "mathqa",
        {"question": "two ?\n['a ) 3', 'b ) 4 m']", "answer_value": "b"},
        "two ?\na ) 3 , b ) 4 m",
        "b",
        "choice",
        "",
    ),
    (
        "mathqa",
        {"Problem": "two ?", "options": "a ) 3 , b ) 4", "correct": "b", "category": "gain"},
        "two ?\na ) 3 , b ) 4",
        "b",
        "choice",
        "gain",
    ),
    ("theoremqa", {"Question": "Q?", "Answer": 7, "Answer_type": "integer", "Picture": None}, "Q?", "7", "number", ""),
    (
        "theoremqa",
        {"Question": "Q?", "Answer": [0.5, -1.0], "Answer_type": "list of float", "Picture": None, "field": "Math"},
        "Q?",
        "[0.5, -1.0]",
        "math",
        "Math",
    ),
    (
        "theoremqa",
        {"Question": "Q?", "Answer": True, "Answer_type": "bool", "Picture": None},
        "Q?",
        "True",
        "label",
        "",
    ),
    (
        "theoremqa",
        {"Question": "Q?", "Answer": "True", "Answer_type": "bool", "Picture": None},
        "Q?",
        "True",
        "label",
        "",
    ),
    (
        "theoremqa",
        {"Question": "Q?", "Answer": "(c)", "Answer_type": "option", "Picture": None},
        "Q?",
        "(c)",
        "choice",
        "",
    ),
    ("aime24", {"id": 60, "problem": "Find $n$.", "answer": "025"}, "Find $n$.", "025", "number", ""),
    (
        "boardgameqa",
        {"instruction": "Does the cat win?", "input": "", "output": "So it is proved.####proved"},
        "Does the cat win?",
        "proved",
        "label",
        "",
    ),
    (
        "boardgameqa",
        {"example": "Does the cat win?", "label": "unknown", "config": "depth2"},
        "Does the cat win?",
        "unknown",
        "label",
        "depth2",
    ),
    (
        "snli",
        {
            "instruction": f'If "A.", does this mean that "B."?\n\n{OPTIONS}',
            "output": "No. ### it is not possible to tell",
        },
        f'If "A.", does this mean that "B."?\n\n{OPTIONS}',
        "it is not possible to tell",
        "label",
        "",
    ),
    (
        "mnli",
        {"premise": "A.", "hypothesis": "B.", "label": 2},
        f"Premise: A.\n\nHypothesis: B.\n\nDoes the premise entail the hypothesis?\n\n{OPTIONS}",
        "no",
        "label",
        "",
    ),
]


def written(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name, row, question, gold, kind, subject", ROWS)
def test_a_row_of_each_layout(tmp_path, name, row, question, gold, kind, subject):
    source = BenchmarkSource(name=name, path=written(tmp_path / "rows.json", [row]))
    (found,) = questions(source, "some_task")
    assert found == {
        "task": "some_task",
        "benchmark": name,
        "item_id": found["item_id"],
        "question": question,
        "gold": gold,
        "answer_kind": kind,
        "subject": subject,
        "split": "test",
    }
    assert len(found["item_id"]) == 16
    write_table(tmp_path / "questions.parquet", "questions", [found])
    assert read_rows(tmp_path / "questions.parquet", "questions") == [found]


def test_every_benchmark_has_a_row_above():
    assert {row[0] for row in ROWS} == set(BENCHMARKS)
    assert [name for name, benchmark in BENCHMARKS.items() if benchmark.metric == "avg@k"] == ["aime24"]


def test_pictures_and_unlabelled_pairs_are_left_out_and_counted(tmp_path):
    rows = [
        {"Question": f"Q{i}?", "Answer": i, "Answer_type": "integer", "Picture": "images/a.png" if i % 3 == 0 else None}
        for i in range(10)
    ]
    found = load_questions(BenchmarkSource(name="theoremqa", path=written(tmp_path / "t.json", rows)), "t")
    assert (found.read, len(found.rows), found.excluded) == (10, 6, Counter(picture=4))
    pairs = [{"premise": "A.", "hypothesis": f"B{i}.", "label": label} for i, label in enumerate([0, -1, 1])]
    found = load_questions(BenchmarkSource(name="snli", path=written(tmp_path / "s.json", pairs)), "t")
    assert (found.read, len(found.rows), found.excluded) == (3, 2, Counter(no_label=1))


GSM8K_ROWS = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1\n#### {i + 1}"} for i in range(40)]


def as_csv(rows):
    return "question,answer\r\n" + "".join('"{question}","{answer}"\r\n'.format(**row) for row in rows)


def as_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("rows.jsonl", "\n".join(json.dumps(row) for row in GSM8K_ROWS).encode()),
        ("rows.json", "\r\n".join(json.dumps(row) for row in GSM8K_ROWS).encode() + b"\r\n\r\n"),
        ("rows.json", b"\xef\xbb\xbf" + json.dumps(GSM8K_ROWS, indent=1).encode()),
        ("rows.txt", json.dumps(GSM8K_ROWS).encode()),
        ("rows.jsonl.gz", gzip.compress("\n".join(json.dumps(row) for row in GSM8K_ROWS).encode())),
        ("rows.csv", as_csv(GSM8K_ROWS).encode()),
        ("rows.csv.gz", gzip.compress(as_csv(GSM8K_ROWS).encode())),
        ("rows.parquet", None),
    ],
)
def test_every_file_format_gives_the_same_questions(tmp_path, name, content):
    path = tmp_path / name
    if content is None:
        as_parquet(path, GSM8K_ROWS)
    else:
        path.write_bytes(content)
    found = questions(BenchmarkSource(name="gsm8k", path=str(path)), "t")
    assert [(row["question"], row["gold"]) for row in found] == [
        (row["question"], str(i + 1)) for i, row in enumerate(GSM8K_ROWS)
    ]


def test_a_line_separator_inside_a_string_does_not_end_a_json_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a\u2028b", "answer": "#### 1"}\n', encoding="utf-8")
    assert [row["question"] for _, row in file_rows(str(path))] == ["a\u2028b"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("gsm8k", b"", "is empty"),
        ("gsm8k", b" \n\n", "is empty"),
        ("gsm8k", b"[]", "no usable question among its 0 rows"),
        ("gsm8k", b'[{"question": "a"', "is no complete JSON array"),
        ("gsm8k", b'{"question": "a", "answer": "#### 1"}\n{"quest', "line 2 of .* is not JSON"),
        ("gsm8k", b'"text"\n', "row 1 of .* is str, not an object"),
        ("gsm8k", b'[{"problem": "a", "answer": "#### 1"}]', r"row 1 of .* has no column 'question', its columns are"),
        ("gsm8k", b'[{"question": "a", "answer": "4"}]', "row 1 of .* cannot be read .no answer after"),
        ("gsm8k", b'[{"question": " ", "answer": "#### 4"}]', "row 1 of .* has an empty question"),
        ("gsm8k", b'[{"question": "\xff", "answer": "#### 4"}]', "is not UTF-8 .byte 15."),
        ("gsm8k", b"\x1f\x8b\x08\x00abc", "is a damaged gzip file"),
        ("gsm8k", b"PAR1abc", "is a damaged Parquet file"),
        ("svamp", b'[{"question": "a", "answer_value": ""}]', "has an empty gold"),
        ("aqua", b'[{"question": "a", "options": null, "correct": "A"}]', "cannot be read"),
        ("snli", b'[{"premise": "a", "hypothesis": "b", "label": 7}]', "cannot be read"),
    ],
)
def test_unusable_files_are_one_line_errors(tmp_path, name, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        questions(BenchmarkSource(name=name, path=str(path)), "t")
    assert "\n" not in str(error.value)


def test_missing_files_folders_and_names(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        questions(BenchmarkSource(name="gsm8k", path=str(tmp_path / "no.json")), "t")
    with pytest.raises(UserError, match="is a folder"):
        questions(BenchmarkSource(name="gsm8k", path=str(tmp_path)), "t")
    with pytest.raises(UserError, match="benchmark 'gsm9k' is unknown; the benchmarks are aime24, aqua"):
        questions(BenchmarkSource(name="gsm9k"), "t")


def test_the_limit_chooses_by_content(tmp_path):
    forward = written(tmp_path / "forward.json", GSM8K_ROWS)
    backward = written(tmp_path / "backward.json", GSM8K_ROWS[::-1])
    found = load_questions(BenchmarkSource(name="gsm8k", path=forward, limit=10), "t")
    assert (len(found.rows), found.read, found.beyond_limit) == (10, 40, 30)
    other = questions(BenchmarkSource(name="gsm8k", path=backward, limit=10), "t")
    assert [row["item_id"] for row in found.rows] == [row["item_id"] for row in other[::-1]]
    smaller = questions(BenchmarkSource(name="gsm8k", path=forward, limit=5), "t")
    assert {row["item_id"] for row in smaller} < {row["item_id"] for row in found.rows}


def test_repeated_questions_keep_ids_of_their_own(tmp_path):
    found = questions(BenchmarkSource(name="gsm8k", path=written(tmp_path / "rows.json", GSM8K_ROWS[:2] * 2)), "t")
    assert len({row["item_id"] for row in found}) == 4


def test_the_hub_is_asked_when_no_path_is_given(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append((name, config, split, revision))
        return iter(GSM8K_ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(questions(BenchmarkSource(name="gsm8k"), "t")) == 40
    assert asked == [("openai/gsm8k", "main", "test", None)]


def test_a_hub_without_the_data_set_is_a_one_line_error(monkeypatch):
    import datasets

    def load_dataset(*arguments, **named):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"cannot be loaded.*give the path of a file"):
        questions(BenchmarkSource(name="gsm8k"), "t")


def test_a_new_benchmark_is_one_entry(tmp_path, monkeypatch):
    from data.benchmarks import entries

    mine = Benchmark("mine", Hub("me/mine"), lambda row: row["q"], lambda row: row["a"], answer_kind="number")
    monkeypatch.setitem(entries.BENCHMARKS, "mine", mine)
    path = written(tmp_path / "mine.json", [{"q": "1+1?", "a": "2"}])
    assert [row["gold"] for row in questions(BenchmarkSource(name="mine", path=path), "t")] == ["2"]


def test_markers_and_options():
    assert after_marker("no ### yes ####  proved \n") == "proved"
    assert with_options(" Which? ", ["A)1 ", "B)2"]) == "Which?\nA)1\nB)2"
    with pytest.raises(ValueError):
        after_marker("the end ###")


FILES = [
    ("gsm8k", "gsm8k/test.jsonl", 1319, 0, {"number": 1319}),
    ("gsm8k", "gsm8k/train.jsonl", 7473, 0, {"number": 7473}),
    ("svamp", "svamp/test.json", 1000, 0, {"number": 1000}),
    ("svamp", "svamp/train_rationales.json", 3076, 0, {"number": 3076}),
    ("math500", "math500/test.jsonl", 500, 0, {"math": 500}),
    ("aqua", "aqua/dev.json", 254, 0, {"choice": 254}),
    ("aqua", "aqua/test.json", 254, 0, {"choice": 254}),
    ("mathqa", "mathqa/test.json", 1605, 0, {"choice": 1605}),
    (
        "theoremqa",
        "theoremqa/test.json",
        747,
        53,
        {"number": 200, "float": 360, "label": 112, "math": 59, "choice": 16},
    ),
    ("aime24", "aime24/test.jsonl", 30, 0, {"number": 30}),
    ("boardgameqa", "boardgameqa/train.json", 500, 0, {"label": 500}),
    ("boardgameqa", "boardgameqa/test.json", 800, 0, {"label": 800}),
    ("snli", "snli/train.json", 300, 0, {"label": 300}),
    ("snli", "snli/test.json", 125, 0, {"label": 125}),
    ("mnli", "mnli/train.json", 300, 0, {"label": 300}),
    ("mnli", "mnli/test.json", 130, 0, {"label": 130}),
]


@pytest.mark.benchmark_files
@pytest.mark.parametrize("name, file, usable, excluded, kinds", FILES)
def test_every_published_row_loads_and_its_gold_grades_itself(benchmark_files, name, file, usable, excluded, kinds):
    found = load_questions(BenchmarkSource(name=name, path=str(benchmark_files / file)), name)
    assert (len(found.rows), found.excluded.total()) == (usable, excluded)
    assert found.read == usable + excluded and set(found.excluded) <= {"picture"}
    assert Counter(row["answer_kind"] for row in found.rows) == kinds
    assert len({row["item_id"] for row in found.rows}) == usable
    wrong = []
    for row in found.rows:
        form = "\\boxed{%s}" if row["answer_kind"] == "math" else "#### %s"
        verdict = grade("Some steps.\n" + form % row["gold"], row["gold"], kind=row["answer_kind"])
        if not verdict.correct:
            wrong.append((row["gold"], row["answer_kind"], verdict.reason))
    assert wrong == []


@pytest.mark.benchmark_files
def test_options_of_the_published_files_are_in_the_question(benchmark_files):
    for name, letters, form in (("aqua", "ABCDE", "\n{})"), ("mathqa", "abcde", "{} ) ")):
        for row in questions(BenchmarkSource(name=name, path=str(benchmark_files / name / "test.json")), "t"):
            places = [row["question"].rindex(form.format(letter)) for letter in letters]
            assert places == sorted(places) and row["gold"] in letters
