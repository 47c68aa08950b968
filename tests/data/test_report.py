"""The report: its figures against hand-worked ones, and what stands in its files."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data import storage
from data.artifacts import file_hash, read_rows, write_table
from data.progress import Silent
from data.report import artifacts
from data.report.build import build
from data.report.composition import expected_jaccard, jaccard, read_importance, source_rows
from data.report.content import Content, collect, column_title, list_files
from data.report.lineage import edges, mermaid
from data.report.request import CellFiles, ReportRequest
from data.report.summary import Difference, caveats, verdict
from data.report.text import (
    cut,
    cut_start,
    flatten,
    html_text,
    markdown_block,
    markdown_cell,
    point_interval,
    points,
    redacted,
)
from data.report.training import by_stage, choose, read_training, samples_of, smoothed
from tests.data import report_files as made

VOID = {"meta", "img", "br", "source", "link"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ReportRequest:
    return made.whole_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def content(run) -> Content:
    return collect(run)


@pytest.fixture(scope="module")
def written(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report")
    build(run, out, Silent())
    return out


class Tags(HTMLParser):
    """Collects the tags of a page, their attributes, its text, and whether every element is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_request_imports_nothing_slow():
    slow = ("torch", "prefect", "pyarrow", "matplotlib", "numpy")
    code = f"import sys, data.report.request; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_summary_of_ten_answers(tmp_path):
    path = made.evaluation(tmp_path / "e.parquet", "r3", "words", [True] * 8 + [False] * 2)
    (row,) = collect(ReportRequest(run_name="x", evaluations=(path,))).summary
    assert (row.n, row.answers, row.correct, row.accuracy) == (10, 10, 8, 0.8)
    # Wilson, z = 1.96: (0.8 + 0.192073 ± 0.313744) / 1.384146
    assert row.low == pytest.approx(0.4902, abs=1e-4) and row.high == pytest.approx(0.9433, abs=1e-4)
    assert (row.truncated_share, row.no_answer_share, row.generated_tokens) == (0.2, 0.2, None)


def test_several_answers_to_a_question_are_one_draw(tmp_path):
    rows = []
    for sample in range(4):
        path = made.evaluation(tmp_path / f"{sample}.parquet", "r3", "words", [True, False, sample == 0], sample=sample)
        rows += read_rows(path, "evaluations")
    write_table(tmp_path / "e.parquet", "evaluations", rows)
    (row,) = collect(ReportRequest(run_name="x", evaluations=(tmp_path / "e.parquet",))).summary
    assert (row.n, row.answers, row.correct) == (3, 12, 5)
    assert row.accuracy == pytest.approx((1 + 0 + 0.25) / 3)
    assert 0 <= row.low <= row.accuracy <= row.high <= 1


def difference(task: str, mean: float, low: float, high: float) -> Difference:
    return Difference(task, "held-out", "test", "r3", "plain_rl", 100, mean, low, high)


def test_verdict_counts_honestly():
    found = [difference("a", 0.1, 0.02, 0.2), difference("b", 0.05, -0.1, 0.2), difference("c", -0.1, -0.3, -0.01)]
    text = verdict(("r3", "plain_rl"), found, ["one seed, not a comparison"], 0.95)
    assert text == (
        "r3 is above plain_rl on 2 of 3 tasks, below on 1 (the 95 % interval of the difference excludes zero on "
        "1 above and 1 below); one seed, not a comparison."
    )
    assert verdict(("r3", "plain_rl"), found[1:2] * 2, [], 0.95) == (
        "r3 is above plain_rl on 2 of 2 tasks (the 95 % interval of the difference includes zero on every one)."
    )
    assert verdict(("r3", "plain_rl"), found[:1], [], 0.9) == (
        "r3 is above plain_rl on a by 10.0 points (90 % interval +2.0 to +20.0 points excludes zero)."
    )
    level = [difference("a", 0.0, -0.1, 0.1)]
    assert verdict(("r3", "plain_rl"), level, [], 0.95).startswith("r3 is level with plain_rl on a (95 %")
    assert verdict(None, [], [], 0.95).startswith("Nothing is compared")


def test_caveats_name_seeds_and_unequal_tokens():
    seeds, tokens = {"plain_rl": 3, "r3": 3}, {("plain_rl", "a"): 100, ("r3", "a"): 105}
    assert caveats(("r3", "plain_rl"), ["a"], seeds, tokens) == ["3 seeds"]
    assert caveats(("r3", "plain_rl"), ["a"], {"plain_rl": 1, "r3": 3}, tokens)[0] == "one seed, not a comparison"
    assert caveats(("r3", "plain_rl"), ["a"], seeds, tokens | {("r3", "a"): 150})[1] == "unequal generated tokens"
    assert "not known" in caveats(("r3", "plain_rl"), ["a"], seeds, {})[1]
    assert caveats(("warmup", "base"), ["a"], {}, {}) == ["one seed, not a comparison"]


def test_stage_success_early_and_late():
    cell = CellFiles(task="a", arm="r3", seed=0, folder=Path("."))
    rows = [
        {"name": f"accuracy/stage_{stage}", "value": 0.1 * number + stage, "round": number}
        for number in range(6)
        for stage in (0, 1)
        if not (stage == 1 and number == 5)
    ]
    rows.append({"name": "accuracy/stage_0", "value": None, "round": 6})
    found = by_stage(rows, cell)
    assert found.rounds == 2
    assert found.early == pytest.approx({0: 0.05, 1: 1.05})
    assert found.late == pytest.approx({0: 0.45, 1: 1.4})
    counts = [{"name": "rollouts/stage_0", "value": float(1 + 2 * (n % 2)), "round": n} for n in range(6)]
    assert by_stage([*rows, *counts], cell).early == pytest.approx({0: 0.075, 1: 1.05})  # (1 · 0.0 + 3 · 0.1) / 4
    assert by_stage([{"name": "reward", "value": 1.0, "round": 0}], cell) is None


def test_running_mean_keeps_ends_and_length():
    points = [(float(i), float(i % 2)) for i in range(24)]  # window 3
    assert smoothed(points)[0] == (0.0, 0.5)
    assert smoothed(points)[2] == (2.0, pytest.approx(2 / 3))
    assert len(smoothed(points)) == 24
    assert smoothed([(1.0, 5.0)]) == ((1.0, 5.0),)


def test_generated_tokens_come_from_the_metrics(tmp_path):
    cells = [made.cell(tmp_path / str(seed), "words", "r3", seed, rounds=10 + seed) for seed in (0, 1)]
    training = read_training(cells)
    assert training.tokens == {("r3", "words"): round((10 + 11) / 2 * 3340)}
    assert [curve.seed for curve in training.validation] == [0, 1]
    chosen = training.checkpoints[0]
    assert (chosen.result.round, chosen.result.rounds, chosen.result.validation_accuracy) == (9, 10, 0.5)
    assert chosen.point == training.validation[0].points[-1] and training.validation[0].points[0][0] == 0


def test_the_prefix_is_what_the_policy_was_given(tmp_path):
    """The policy's prefix ends at a token boundary: the rest of the step is its own, right or wrong."""
    cell = made.cell(tmp_path / "c", "words", "r3", rounds=3)
    samples = samples_of(cell, cell.start_states)
    assert [(s.stage, s.correct) for s in samples] == [(3, True), (2, True), (0, True), (0, False)]
    assert samples[0].prefix == "".join(made.STEPS[:3]) and samples[0].completion == made.STEPS[3]
    assert samples[2].prefix == ""
    rows = read_rows(cell.rollouts, "rollouts")
    for row in rows:
        row["completion"] = "".join(made.STEPS[: row["stage"]])[:-2] + "!"
    write_table(tmp_path / "early.parquet", "rollouts", rows)
    cut_early = samples_of(cell.model_copy(update={"rollouts": tmp_path / "early.parquet"}), cell.start_states)[0]
    assert cut_early.prefix == "".join(made.STEPS[:3])[:-2] and cut_early.completion == "!"
    unknown = samples_of(cell, None)[0]
    assert unknown.prefix == "" and "not there" in unknown.question


def test_samples_are_of_different_groups():
    rows = [{"stage": 0, "group": 0, "sample": i, "correct": i < 2} for i in range(4)]
    assert choose(rows) == [rows[0]]
    assert choose([*rows, {"stage": None, "group": 1, "sample": 0, "correct": None}])[1]["group"] == 1
    assert choose([]) == []


def test_importance_shares_and_overlap(tmp_path):
    values = {"a": [5.0, 3.0, -1.0, 1.0], "b": [0.0, 6.0, 2.0, 2.0]}
    rows = [
        {"task": t, "module": "m", "rank": i, "source": "ab"[i // 2], "measure": "g", "value": v, "gate": float(i == 1)}
        for t, found in values.items()
        for i, v in enumerate(found)
    ]
    write_table(tmp_path / "i.parquet", "importance", [*rows, rows[0] | {"measure": "other", "value": 99.0}])
    found = read_importance(tmp_path / "i.parquet")
    assert (found.measure, found.n_ranks, found.top) == ("g", 4, 1)
    a, b = found.tasks
    assert a.cumulative == pytest.approx((0.5, 0.8, 0.9, 1.0)) and b.cumulative == pytest.approx((0.6, 0.8, 1.0, 1.0))
    assert a.by_source == pytest.approx({"a": 0.8, "b": 0.2}) and a.on == 1
    assert a.within(0.5) == pytest.approx(0.8)
    assert source_rows(found) == (["a", "b"], [["a", "80.0 %", "20.0 %"], ["b", "60.0 %", "40.0 %"]])
    assert found.overlap == {("a", "a"): 1.0, ("a", "b"): 0.0, ("b", "a"): 0.0, ("b", "b"): 1.0}
    assert jaccard({1, 2, 3}, {2, 3, 4}) == 0.5 and jaccard(set(), set()) == 1.0
    assert expected_jaccard(10, 100) == pytest.approx(10 / 190)


def test_rows_and_rejections(content):
    task = content.ingested[0]
    assert task.accepted == {"train": 80, "validation": 20} and task.questions == {"validation": 20}
    assert task.rejected == 3 and task.start_states == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [(r.reason, r.rows) for r in content.rejections[:2]] == [("no_answer", 2), ("duplicate", 1)]
    assert content.rejections[0].message == "row 4: 'answer' is empty"


def test_files_are_listed_with_rows_and_hashes(run, content):
    entry = next(e for e in content.files if e.name == "demonstrations/words/demonstrations.parquet")
    path = run.ingestion[0].folder / "demonstrations.parquet"
    assert (entry.rows, entry.n_bytes, entry.sha256) == (100, path.stat().st_size, file_hash(path))
    assert not any(entry.name.startswith("/") for entry in content.files)


def test_order_and_titles(content):
    assert content.models == ("base", "warmup", "plain_rl", "r3", "composed")
    assert [column[0] for column in content.columns] == ["words", "programs", "tracking"]
    columns = [("a", "x", "test"), ("a", "y", "test"), ("b", "z", "test"), ("b", "z", "promotion")]
    titles = [column_title(column, columns) for column in columns]
    assert titles == ["a (x, test)", "a (y, test)", "b (test)", "b (promotion)"]


def test_lineage_follows_the_composed_arm(content):
    keys = {"demonstrations", "start_states", "warmup", "arm0", "arm1", "composed", "evaluation"}
    found = edges(content, keys)
    assert ("arm1", "composed") in found and ("arm0", "composed") not in found
    assert mermaid(content).count("-->") == len(found)


def test_report_files(run, written, content):
    assert {path.name for path in written.glob("*.png")} == {
        "accuracy.png",
        "importance.png",
        *(
            f"{task}-{kind}.png"
            for task in made.TASKS
            for kind in ("validation", "reward", "stages", "stage-curves")  # nothing says how much was revealed
        ),
    }
    for path in written.glob("*.png"):
        assert Image.open(path).size[0] >= 900
    rows = read_rows(written / "summary.parquet", "summary")
    assert len(rows) == 15
    row = next(row for row in rows if row["model"] == "composed" and row["task"] == "words")
    assert row["generated_tokens"] == 200_400
    assert rows[3]["generated_tokens"] == 60 * 3340
    text = (written / "report.md").read_text()
    assert all(f"]({path.name})" in text for path in written.glob("*.png"))
    assert content.verdict.endswith("one seed, not a comparison.")


def test_page_is_self_contained(written):
    text = (written / "report.html").read_text()
    page = Tags(text)
    assert not page.open and "script" not in page.tags and "link" not in page.tags
    sources = [value for name, value in page.attributes if name in ("src", "srcset", "href")]
    assert sources and all(value.startswith(("data:image/png;base64,", "#")) for value in sources)
    assert "prefers-color-scheme: dark" in text and "url(" not in text
    assert "user:secret" not in text and "://…@127.0.0.1:8000" in text
    assert "secret" not in (written / "report.md").read_text()
    assert text.count("<mark>") == 6  # two samples of each r3 expert start inside a demonstration


def test_the_same_request_gives_the_same_files(tmp_path):
    request = ReportRequest(
        run_name="x",
        evaluations=(made.evaluation(tmp_path / "e.parquet", "r3", "words", [True, False]),),
        cells=(made.cell(tmp_path / "c", "words", "r3", rounds=6),),
    )
    hashes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        build(request, tmp_path / name, Silent())
        hashes.append({path.name: file_hash(path) for path in (tmp_path / name).iterdir()})
    assert hashes[0] == hashes[1] and len(hashes[0]) == 9


def test_an_empty_run_says_what_is_missing(tmp_path):
    result = build(ReportRequest(run_name="nothing"), tmp_path, Silent())
    assert result["summary_rows"] == result["pictures"] == result["samples"] == 0
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        for part in ("No evaluation", "No learning curves", "No success by stage", "No samples", "No composition",
                     "No ingestion", "settings are not part", "no files", "Nothing is compared"):  # fmt: skip
            assert part in text, (name, part)
    assert read_rows(tmp_path / "summary.parquet", "summary") == []


def test_a_named_table_that_is_missing_or_another_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        collect(ReportRequest(run_name="x", evaluations=(tmp_path / "none.parquet",)))
    other = made.start_states(tmp_path / "s.parquet", "words", 2)
    with pytest.raises(ValueError, match="wanted 'evaluations'"):
        collect(ReportRequest(run_name="x", evaluations=(other,)))


EVIL = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\n```\n# Title\n| a | b |\u202e\x00 "


def outside_blocks(text: str) -> str:
    """The lines of a Markdown text that stand in no fenced block."""
    lines, fence = [], None
    for line in text.split("\n"):
        ticks = line[: len(line) - len(line.lstrip("`"))]
        if fence is None and len(ticks) >= 3:
            fence = ticks
        elif fence is None:
            lines.append(line)
        elif line.strip("`") == "" and len(ticks) >= len(fence):
            fence = None
    assert fence is None
    return "\n".join(lines)


def test_model_output_is_only_text(tmp_path):
    cell = made.cell(tmp_path / "c", "words", "r3", rounds=3)
    path = made.rollouts(tmp_path / "r.parquet", "words", 4, written=EVIL + "x" * 50_000)
    rows = read_rows(cell.start_states, "start_states")
    write_table(tmp_path / "s.parquet", "start_states", [row | {"question": EVIL, "answer": EVIL} for row in rows])
    request = ReportRequest(
        run_name=EVIL,
        settings={EVIL: EVIL},
        versions={EVIL: EVIL},
        evaluations=(made.evaluation(tmp_path / "e.parquet", EVIL, "words", [True]),),
        cells=(cell.model_copy(update={"rollouts": path, "start_states": tmp_path / "s.parquet"}),),
    )
    out = tmp_path / "out"
    out.mkdir()
    build(request, out, Silent())
    text = (out / "report.html").read_text()
    page = Tags(text)
    assert not page.open and "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in "".join(page.text)  # shown, not run
    assert "\x00" not in text and "\u202e" not in text
    assert len(text) < 400_000
    outside = outside_blocks((out / "report.md").read_text())
    assert "script" in outside and "<script>" not in outside and "\n# Title" not in outside


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("`~<>&|*_[]\\#ab \n\x00\u202e")), max_size=60))
def test_text_stays_text(text):
    assert not set("<>\"'\x00\u202e") & set(html_text(text).replace("&#x27;", ""))
    cell = markdown_cell(text)
    assert "\n" not in cell and "<" not in cell
    assert cell.replace("\\\\", "").count("|") == cell.replace("\\\\", "").count("\\|")
    opening, *inside, closing = markdown_block(text).split("\n")
    assert opening.removesuffix("text") == closing
    assert not any(line.strip().startswith(closing) for line in inside)


@given(st.text(max_size=50), st.integers(1, 60))
def test_cut_keeps_the_right_end(text, limit):
    assert cut(text, limit).startswith(text[:limit]) and cut_start(text, limit).endswith(text[-limit:])
    assert (cut(text, limit) == text) == (len(text) <= limit)


def test_differences_have_a_sign_unless_they_are_none():
    assert [points(value) for value in (0.035, -0.2, 0.0, -0.0001)] == [
        "+3.5 points", "-20.0 points", "0.0 points", "0.0 points",
    ]  # fmt: skip
    assert point_interval(-0.0, 0.015) == "0.0 to +1.5 points"


def test_settings_become_dotted_rows():
    rows = flatten({"a": {"b": 1, "c": [1, 2]}, "d": [{"e": "x"}], "f": {}, "g": None})
    assert rows == [("a.b", "1"), ("a.c", "[1, 2]"), ("d.0.e", "x"), ("f", "{}"), ("g", "null")]
    assert redacted([("u", "s3://key:word@host/x")]) == [("u", "s3://…@host/x")]


def test_artifact_rows_are_strings_with_units(content):
    rows = artifacts.accuracy_rows(content)
    assert len(rows) == 15 and all(isinstance(value, str) for row in rows for value in row.values())
    row = next(row for row in rows if row["model"] == "r3" and row["task"] == "words")
    assert row["accuracy"].endswith(" %") and row["generated tokens"] == "200,400" and row["seeds"] == "1"


def test_artifacts_stay_small(content, monkeypatch):
    text = artifacts.report_markdown(content)
    uris = [part.split(")")[0] for part in text.split("](")[1:]]
    assert len(uris) == 3 and all(uri.startswith("data:image/png;base64,") for uri in uris)
    assert max(map(len, uris)) <= artifacts.PICTURE_LIMIT and len(text.encode()) <= artifacts.LIMIT
    assert text.count("| arm | seed |") == 3 and "```mermaid" in text
    monkeypatch.setattr(artifacts, "LIMIT", 20_000)
    small = artifacts.report_markdown(content)
    assert len(small.encode()) <= 20_000 and small.endswith("this artifact is kept small.*")
    assert "```mermaid" in small and "## Success by stage" not in small


def test_sample_artifact_separates_the_prefix(content):
    text = artifacts.samples_markdown(content)
    assert "**Revealed from the demonstration**\n\n```text\n" + "".join(made.STEPS[:3]) in text
    assert len(text.encode()) <= artifacts.LIMIT
    assert "no rollouts" in artifacts.samples_markdown(collect(ReportRequest(run_name="x")))


def test_files_on_an_object_store_are_named_by_their_place_in_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    evaluations = []
    for task in ("a", "b"):
        url = f"memory://{tmp_path.name}/run/evaluation/r3/{task}"
        with storage.staging(url) as folder:
            write_table(folder / "evaluations.parquet", "evaluations", [{"task": task, "item_id": "1"}])
            evaluations.append(storage.fetch(storage.publish(folder, url, task)) / "evaluations.parquet")
    files = list_files(ReportRequest(run_name="run", evaluations=tuple(evaluations)))
    assert [entry.name for entry in files] == ["a/evaluations.parquet", "b/evaluations.parquet"]
