"""Ingestion: formats, responses, splits, limits, contamination, and that rows stream."""

import gzip
import json
import random

import pytest

from data.artifacts import file_hash
from data.errors import UserError
from data.grading import grade
from data.ingestion import ingest, readers
from data.ingestion.hashes import HashSet, question_key
from data.ingestion.opening import open_input
from data.ingestion.overlap import Overlap
from data.progress import Silent
from data.settings import BenchmarkSource, ColumnMapping, DatasetsSource, Splits, SuiteSource
from tests.data.ingested import FEW, gsm8k_rows, json_lines, run, tables

NONE = Splits(validation=1, promotion=0, test=0)


def _write(path, rows):
    path.write_text(json_lines(rows))
    return path


def _one(tmp_path, row, **settings):
    """The demonstration that a row becomes, or its refusal."""
    path = _write(
        tmp_path / "input.jsonl", [row, *settings.pop("others", [row | {next(iter(row)): "Another question?"}])]
    )
    run(path, tmp_path / "out", splits=NONE, **settings)
    demonstrations, rejected, _ = tables(tmp_path / "out")
    return next(row for row in demonstrations + rejected if row["row_number"] == 1)


# Each published layout: the row, then format, question, rationale, response, answer, kind.
LAYOUTS = {
    "gsm8k": (
        {"question": "Q?", "answer": "48/2 = <<48/2=24>>24.\n24*50=<<24*50=1200>>1200.\n#### 1,200"},
        ("Q?", "48/2 = <<48/2=24>>24.\n24*50=<<24*50=1200>>1200.", None, "1,200", "number"),
    ),
    "svamp": (
        {
            "question": "Q?",
            "answer_cot": "344 - 136 = 208.\n\nTherefore, the answer is <208>.",
            "answer_value": "208.0",
        },
        ("Q?", "344 - 136 = 208.\n\nTherefore, the answer is <208>.", None, "208.0", "number"),
    ),
    "svamp program": (
        {"question": "Q?", "answer_cot": 'def solution():\n    """Q?"""\n    return 2 * 4', "answer_value": "8.0"},
        ("Q?", 'def solution():\n    """Q?"""\n    return 2 * 4', None, "8.0", "program"),
    ),
    "aqua": (
        {"question": "Q?", "options": ["A)1", "B)2"], "rationale": "1+1=2.\nIt is the second.", "correct": "B"},
        ("Q?\nA)1\nB)2", "1+1=2.\nIt is the second.", "1+1=2.\nIt is the second.\n#### B", "B", "choice"),
    ),
    "math": (
        {"problem": "Q?", "solution": "We have $1+1$. It is $\\boxed{2}$.", "answer": "2", "subject": "Algebra"},
        ("Q?", "We have $1+1$. It is $\\boxed{2}$.", None, "2", "math"),
    ),
    "math without an answer column": (
        {"problem": "Q?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
        ("Q?", "It is $\\boxed{\\frac{1}{2}}$.", None, "\\frac{1}{2}", "math"),
    ),
    "instruction ###": (
        {"instruction": "Q?", "input": "", "output": 'A dog is an animal. So it is "yes". ### yes'},
        ("Q?", 'A dog is an animal. So it is "yes".', 'A dog is an animal. So it is "yes". ### yes', "yes", "label"),
    ),
    "instruction ####": (
        {"instruction": "Q?", "input": "Facts.", "output": 'It is "no".####disproved'},
        ("Q?\n\nFacts.", 'It is "no".', 'It is "no".####disproved', "disproved", "label"),
    ),
    "columns": (
        {"question": "Q?", "rationale": "3 times 4.", "answer": 12},
        ("Q?", "3 times 4.", "3 times 4.\n#### 12", "12", "number"),
    ),
    "columns, answer in another format": (
        {"question": "Q?", "rationale": "3 times 4, so \\boxed{12}", "answer": 12.0},
        ("Q?", "3 times 4, so \\boxed{12}", None, "12.0", "number"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_are_recognised(name, tmp_path):
    row, (question, rationale, response, answer, kind) = LAYOUTS[name]
    found = _one(tmp_path, row)
    if response is None:
        response = rationale if name not in ("gsm8k",) else row["answer"]
    assert {key: found[key] for key in ("question", "rationale", "response", "answer", "answer_kind")} == {
        "question": question,
        "rationale": rationale,
        "response": response,
        "answer": answer,
        "answer_kind": kind,
    }
    assert "".join(found["steps"]) == rationale
    assert grade(response, answer, kind).correct


def test_a_users_columns(tmp_path):
    row = {"prompt": "Q?", "cot": "3 times 4. The answer is 12.", "gold": "12", "extra": [1, {"a": None}]}
    found = _one(tmp_path, row, columns=ColumnMapping(question="prompt", rationale="cot", answer="gold"))
    assert (found["question"], found["response"], found["answer"]) == ("Q?", row["cot"], "12")
    found = _one(tmp_path, row, columns=ColumnMapping(question="prompt", rationale="cot", answer=None))
    assert (found["response"], found["answer"]) == (row["cot"], "12")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("So \\boxed{7}.", "7"),
        ("So it is.\n#### 7", "7"),
        ("Thus the answer is 7.", "7"),
        ("So it is seven.", "no_answer"),
        ("So \\boxed{7}. " + "But what about the others? " * 10, "answer_not_at_end"),
        ("So \\boxed{7}.\n\nNow for something else.", "answer_not_at_end"),
        ("#### 7\nand more", "answer_not_at_end"),
    ],
)
def test_an_answer_read_from_the_rationale_must_be_at_its_end(tmp_path, text, outcome):
    others = [{"question": f"{n}?", "rationale": "x\n#### 1"} for n in range(3)]
    mapping = ColumnMapping(answer=None)
    found = _one(tmp_path, {"question": "Q?", "rationale": text}, columns=mapping, others=others)
    assert outcome in (found.get("answer"), found.get("reason"))


def test_numbers_keep_the_digits_of_the_file(tmp_path):
    path = tmp_path / "input.jsonl"
    digits = ["1" * 40, "14.0", "0.1000", "1e2"]
    path.write_text("".join(f'{{"question": "{n}?", "rationale": "r", "answer": {d}}}\n' for n, d in enumerate(digits)))
    run(path, tmp_path / "out", splits=NONE)
    assert [row["answer"] for row in tables(tmp_path / "out")[0]] == digits


def test_the_final_answer_is_in_the_last_step_whatever_the_unit(tmp_path):
    text = "One two three four.\n\nTherefore, the answer is <4> .\n\n"
    row = {"question": "Q?", "answer_cot": text, "answer_value": "4"}
    for unit in ("lines", "sentences", "tokens", "whitespace"):
        steps = _one(tmp_path, row, segmentation=unit)["steps"]
        assert "".join(steps) == text
        assert "answer is <4>" in steps[-1] and len(steps) > 1
    boxed = {"problem": "Q?", "solution": "First $\\boxed{4}$ it is.\nSecond, it is $\\boxed{4}$.", "answer": "4"}
    assert len(_one(tmp_path, boxed)["steps"]) == 1


def test_programs_are_cut_at_code_lines_and_prose_by_its_format(tmp_path):
    program = {
        "question": "Q?",
        "answer_cot": "def solution():\n    a = (1 +\n         2)\n    return a",
        "answer_value": "3",
    }
    assert len(_one(tmp_path, program)["steps"]) == 3
    assert len(_one(tmp_path, program, segmentation="whitespace")["steps"]) > 3


def test_answer_kind_of_the_source_and_of_the_expert(tmp_path):
    row = {"question": "Q?", "rationale": "It is so.", "answer": "7"}
    assert _one(tmp_path, row)["answer_kind"] == "number"
    assert _one(tmp_path, row, answer_kind="string")["answer_kind"] == "string"


@pytest.mark.parametrize("name", ["snli", "gsm8k", "svamp"])
def test_the_path_does_not_decide_the_format(name, tmp_path):
    """R³'s code chose the data set by a part of the path: a folder named snli hijacked any file."""
    folder = tmp_path / name
    folder.mkdir()
    path = _write(folder / f"{name}.json", [{"question": f"{n}?", "rationale": "r", "answer": n} for n in range(4)])
    assert run(path, tmp_path / "out")["format"] == "columns"


def test_counts_add_up_and_refused_rows_keep_their_text(tmp_path):
    rows = gsm8k_rows(20)
    bad = {"question": "No answer?", "answer": "none — ü"}
    path = _write(tmp_path / "input.jsonl", [*rows[:10], bad, *rows[10:], rows[3]])
    counts = run(path, tmp_path / "out", splits=Splits(validation=3, promotion=2, test=4))
    demonstrations, rejected, questions = tables(tmp_path / "out")
    assert counts["read"] == 22 and counts["accepted"] == len(demonstrations) == 20
    assert counts["rejected_by_reason"] == {"duplicate": 1, "no_answer": 1} and counts["rejected"] == 2
    assert counts["splits"] == {"train": 11, "validation": 3, "promotion": 2, "test": 4}
    assert counts["questions"] == {"validation": 3, "promotion": 2, "test": 4}
    assert [(row["row_number"], json.loads(row["raw"])) for row in rejected] == [(11, bad), (22, rows[3])]
    assert [row["row_number"] for row in demonstrations] == [number for number in range(1, 22) if number != 11]
    held = {row["item_id"]: (row["question"], row["gold"], row["split"]) for row in questions}
    for row in demonstrations:
        expected = held.get(row["item_id"])
        assert (expected is None) == (row["split"] == "train")
        assert expected is None or expected == (row["question"], row["answer"], row["split"])
    assert len({row["item_id"] for row in demonstrations}) == 20


def test_same_request_same_files_and_splits_do_not_depend_on_order(tmp_path):
    rows = gsm8k_rows(60)
    path = _write(tmp_path / "input.jsonl", rows)
    splits = Splits(validation=10, promotion=5, test=10)
    run(path, tmp_path / "one", splits=splits)
    run(path, tmp_path / "two", splits=splits)
    for name in ("demonstrations", "rejected", "questions"):
        assert file_hash(tmp_path / f"one/{name}.parquet") == file_hash(tmp_path / f"two/{name}.parquet")
    random.Random(0).shuffle(rows)
    _write(path, rows)
    run(path, tmp_path / "two", splits=splits)

    def by_question(out):
        return {row["question"]: (row["split"], row["item_id"]) for row in tables(out)[0]}

    assert by_question(tmp_path / "one") == by_question(tmp_path / "two")


def test_repeats_of_a_question_are_on_one_side(tmp_path):
    """SVAMP repeats 210 of its questions, some in other case or spacing."""
    rows = []
    for row in gsm8k_rows(40):
        rows += [row, {"question": row["question"].upper() + " ", "answer": "Another way.\n" + row["answer"]}]
    path = _write(tmp_path / "input.jsonl", rows)
    counts = run(path, tmp_path / "out", splits=Splits(validation=8, promotion=4, test=8))
    demonstrations, _, questions = tables(tmp_path / "out")
    sides = {}
    for row in demonstrations:
        sides.setdefault(question_key(row["question"]), set()).add(row["split"])
    assert all(len(split) == 1 for split in sides.values())
    assert counts["splits"] == {"train": 40, "validation": 16, "promotion": 8, "test": 16}
    assert counts["questions"] == {"validation": 8, "promotion": 4, "test": 8}
    assert len({question_key(row["question"]) for row in questions}) == 20


def test_the_limit_is_chosen_by_content(tmp_path):
    rows = gsm8k_rows(50)
    chosen = []
    for order in (rows, rows[::-1], gsm8k_rows(10, start=20) + rows):
        path = _write(tmp_path / "input.jsonl", order)
        counts = run(path, tmp_path / "out", limit=12, splits=FEW)
        demonstrations, rejected, _ = tables(tmp_path / "out")
        assert counts["accepted"] == len(demonstrations) == 12
        assert counts["accepted"] + counts["rejected"] == counts["read"] == len(order)
        assert counts["rejected_by_reason"]["over_limit"] == 38
        over = [row for row in rejected if row["reason"] == "over_limit"]
        assert all(json.loads(row["raw"]) in rows for row in over)
        chosen.append({row["question"] for row in demonstrations})
    assert chosen[0] == chosen[1] == chosen[2]
    assert run(path, tmp_path / "out", limit=1000)["accepted"] == 50


def _benchmark(tmp_path, questions):
    path = tmp_path / "test.jsonl"
    path.write_text(json_lines([{"question": question, "answer": "Text.\n#### 7"} for question in questions]))
    return BenchmarkSource(name="gsm8k", path=str(path))


LONG = (
    "A farmer in the north has seven brown cows, twelve goats and a barn that is forty years old. How old is he then?"
)


@pytest.mark.parametrize(
    "planted",
    [
        LONG,
        LONG.upper().replace(",", " ;"),
        LONG.replace("seven", "nine"),
        f"Solve this riddle, and think about it for a while before you write. {LONG} Explain your steps at length.",
    ],
)
def test_a_planted_benchmark_question_is_found(tmp_path, planted):
    rows = gsm8k_rows(30)
    path = _write(tmp_path / "input.jsonl", [*rows, {"question": planted, "answer": "x\n#### 7"}])
    test = _benchmark(tmp_path, [LONG, "Something else?"])
    counts = run(path, tmp_path / "out", test=test, splits=Splits(validation=2, test=99))
    _, rejected, questions = tables(tmp_path / "out")
    assert counts["rejected_by_reason"] == {"contaminated": 1}
    assert (rejected[0]["row_number"], rejected[0]["reason"]) == (31, "contaminated")
    assert "gsm8k (item " in rejected[0]["message"]
    assert counts["questions"] == {"validation": 2, "test": 2} and "test" not in counts["splits"]
    assert {row["benchmark"] for row in questions if row["split"] == "test"} == {"gsm8k"}
    kept = run(path, tmp_path / "out", test=test.model_copy(update={"decontaminate": False}), splits=NONE)
    assert (kept["contaminated_kept"], kept["accepted"]) == (1, 31)


def test_the_whole_benchmark_counts_even_where_few_of_its_questions_are_asked(tmp_path):
    path = _write(tmp_path / "input.jsonl", [*gsm8k_rows(5), {"question": LONG, "answer": "x\n#### 7"}])
    test = _benchmark(tmp_path, [LONG, *(f"Short question number {number}?" for number in range(20))])
    counts = run(path, tmp_path / "out", test=test.model_copy(update={"limit": 1}), splits=NONE)
    assert counts["rejected_by_reason"] == {"contaminated": 1} and counts["questions"]["test"] == 1


def test_templates_and_short_questions_do_not_overlap():
    template = "A few players are playing a boardgame and the rules of the game are as follows: "
    benchmark = [{"question": f"{template}number {n} moves.", "item_id": str(n)} for n in range(30)]
    overlap = Overlap(benchmark, "b", True, 0.3)
    assert overlap.closest(f"{template}number 99 sleeps all day long.") == (0.0, "")
    assert overlap.closest(f"{template}number 7 moves.") == (1.0, "7")
    short = Overlap([{"question": "What is 2+3?", "item_id": "a"}], "b", True, 0.3)
    assert short.closest("What is 2+4?") == (0.0, "") and short.closest("what  is 2+3?") == (1.0, "a")


@pytest.mark.parametrize("suite", ["arithmetic_words", "program_words", "state_tracking"])
def test_a_suite_gives_its_training_demonstrations_and_the_held_out_ones(suite, tmp_path):
    counts = ingest(
        SuiteSource(suite=suite, demonstrations=20),
        "task",
        tmp_path,
        splits=Splits(validation=5, promotion=2, test=4),
        segmentation=None,
        answer_kind=None,
        test=None,
        report=Silent(),
    )
    assert counts["splits"] == {"train": 20, "validation": 5, "promotion": 2, "test": 4}
    demonstrations, rejected, questions = tables(tmp_path)
    assert len(questions) == 11 and rejected == []
    assert all(grade(row["response"], row["answer"], row["answer_kind"]).correct for row in demonstrations)
    assert all(row["response"].startswith("".join(row["steps"])) for row in demonstrations)


def test_an_unknown_suite_is_named(tmp_path):
    with pytest.raises(UserError, match=r"'chess'; the suites are .*state_tracking"):
        ingest(
            SuiteSource(suite="chess"),
            "task",
            tmp_path,
            splits=FEW,
            segmentation=None,
            answer_kind=None,
            test=None,
            report=Silent(),
        )


@pytest.fixture
def offline_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def _from_datasets(tmp_path, **source):
    (tmp_path / "out").mkdir(exist_ok=True)
    return ingest(
        DatasetsSource(**source),
        "task",
        tmp_path / "out",
        splits=FEW,
        segmentation=None,
        answer_kind=None,
        test=None,
        report=Silent(),
    )


def test_the_datasets_library_reads_a_local_folder(tmp_path, offline_datasets):
    folder = tmp_path / "folder"
    folder.mkdir()
    _write(folder / "train.jsonl", gsm8k_rows(6))
    counts = _from_datasets(tmp_path, name=str(folder))
    assert (counts["read"], counts["accepted"], counts["format"]) == (6, 6, "gsm8k")
    assert tables(tmp_path / "out")[0][0]["source"] == f"{folder}:train"


def test_the_datasets_library_reads_what_it_saved(tmp_path, offline_datasets):
    offline_datasets.Dataset.from_list(gsm8k_rows(6)).save_to_disk(tmp_path / "saved")
    assert _from_datasets(tmp_path, name=str(tmp_path / "saved"))["accepted"] == 6


@pytest.mark.parametrize("source", [{"name": "./nowhere/at/all"}, {"split": "verify"}, {"config": "odd"}])
def test_what_the_datasets_library_has_not_is_one_line(tmp_path, offline_datasets, source):
    folder = tmp_path / "folder"
    folder.mkdir()
    _write(folder / "train.jsonl", gsm8k_rows(6))
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        _from_datasets(tmp_path, **({"name": str(folder)} | source))
    assert "\n" not in str(caught.value) and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_an_array_is_the_same_whatever_the_chunk(tmp_path, monkeypatch, chunk):
    rows = [{"question": f'é {n} \\ "x" ]}}, [{{', "n": [n, {"a": None, "b": True}], "t": "日本"} for n in range(9)]
    path = tmp_path / "input.json"
    for indent in (None, 1):
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=indent is None))
        monkeypatch.setattr(readers, "_CHUNK", chunk)
        with open_input(str(path)) as opened:
            found = list(readers.read_rows(opened))
        assert [json.loads(row.raw) for row in found] == rows
        assert [row.number for row in found] == list(range(1, 10))


def test_row_numbers_are_line_numbers_and_elements(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\nnot JSON\n{"a": 3}\n')
    with open_input(str(path)) as opened:
        assert [row.number for row in readers.read_rows(opened)] == [1, 4, 5, 6]


def test_a_line_separator_of_unicode_ends_no_row(tmp_path):
    rows = [row | {"question": row["question"] + "\u2028\u0085and more"} for row in gsm8k_rows(4)]
    path = _write(tmp_path / "input.jsonl", rows)
    assert run(path, tmp_path / "out")["accepted"] == 4


def test_an_fsspec_url(tmp_path):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/ratchet/input.jsonl.gz", gzip.compress(json_lines(gsm8k_rows(4)).encode()))
    assert run("memory://ratchet/input.jsonl.gz", tmp_path / "out")["accepted"] == 4


def test_the_hash_set_is_a_set():
    generator = random.Random(0)
    numbers = [generator.getrandbits(64) | 1 for _ in range(5000)]
    numbers += numbers[:100] + [(value + (1 << 40)) % (1 << 64) for value in numbers[:100]]
    found, plain = HashSet(), set()
    for number in numbers:
        assert found.add(number) == (number not in plain)
        plain.add(number)
    assert len(found) == len(plain)
