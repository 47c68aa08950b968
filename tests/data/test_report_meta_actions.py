"""The report of a run with meta-actions: figures, attempts at the test questions, alarms; without them no section."""

import json

from data.artifacts import write_table
from data.progress import Silent
from data.report.build import build
from data.report.meta_actions import alarm_rows, attempt_rows, matrix_rows, read_attempts, read_cells
from data.report.request import CellFiles, ReportRequest
from tests.data.meta_traces import FIXED, attempt, trace
from tests.data.report_files import evaluation


def cell(folder) -> CellFiles:
    """A cell of six rounds, in the last four of which an alarm rings."""
    rows = []
    for number in range(6):
        values = {
            "meta/share_reason": 0.5,
            "meta/boundary_entropy": 0.9 - 0.1 * number,
            "meta/accuracy_first": 0.3,
            "meta/accuracy_last": 0.4,
            "meta/choice_reason_critique": 0.75,
            "meta/choice_reason_answer": 0.25,
            "meta/choice_reason_reason": 0.0,
        }
        if number >= 2:
            values["meta/alarm_no_critique"] = 1.0
        shared = {"step": number, "round": number, "generated_tokens_so_far": 100 * (number + 1)}
        rows += [shared | {"name": name, "value": value} for name, value in values.items()]
    write_table(folder / "metrics.parquet", "metrics", rows)
    return CellFiles(task="sums", arm="metaact", seed=0, folder=folder, metrics=folder / "metrics.parquet")


def test_figures_by_hand(tmp_path):
    [found] = read_cells([cell(tmp_path)])
    assert found.series["boundary_entropy"][0] == (100.0, 0.9) and len(found.series["boundary_entropy"]) == 6
    assert abs(found.late["boundary_entropy"] - 0.45) < 1e-9  # rounds 4 and 5
    assert [(a.name, a.first_round, a.rounds) for a in found.alarms] == [("no_critique", 2, 4)]
    assert found.matrix() == [("start", {"reason": 1.0}), ("reason", {"reason": 0.0, "critique": 0.75, "answer": 0.25})]
    _, rows = matrix_rows(found)
    assert rows[1] == ("reason", "0 %", "75 %", "–", "25 %")
    assert "critiques die out" in alarm_rows([found])[1][0][4]


def test_attempts_are_read_from_traces_alone(tmp_path):
    plain = evaluation(tmp_path / "plain.parquet", "base", "sums", [True, False])
    gold = {"gold": "7", "completion": FIXED, "completion_tokens": 9}
    traces = evaluation(tmp_path / "traces.parquet", "metaact", "sums", [True, True, True], **gold)
    [found] = read_attempts([plain, traces])
    assert (found.first, found.last, found.wrong_to_right, found.right_to_wrong) == (0, 1, 1, 0)
    assert attempt_rows([found])[1] == [("metaact", "sums", "0.0 %", "100.0 %", "100.0 %", "0.0 %", "9.0")]


def test_the_report_shows_them(tmp_path):
    gold = {"gold": "7", "completion": trace(f"<reason>\n{attempt(7)}\n</reason>"), "completion_tokens": 9}
    answers = evaluation(tmp_path / "traces.parquet", "metaact", "sums", [True] * 3, **gold)
    request = ReportRequest(run_name="r", cells=(cell(tmp_path),), evaluations=(answers,))
    (tmp_path / "out").mkdir()
    build(request, tmp_path / "out", Silent())
    html = (tmp_path / "out" / "report.html").read_text()
    assert "First and last attempts at the test questions" in html and "no critique" in html
    assert "meta/share_critique below 0.05: critiques die out" in html
    assert (tmp_path / "out" / "sums-metaact-0-actions.png").stat().st_size > 10_000
    texts = json.loads((tmp_path / "out" / "artifacts.json").read_text())
    assert "Choices of sums, metaact" in texts["meta_actions"] and "no critique" in texts["meta_actions"]
    assert "Meta-actions" in (tmp_path / "out" / "report.md").read_text()


def test_without_meta_actions_there_is_no_section(tmp_path):
    answers = evaluation(tmp_path / "plain.parquet", "base", "sums", [True, False])
    (tmp_path / "out").mkdir()
    build(ReportRequest(run_name="r", evaluations=(answers,)), tmp_path / "out", Silent())
    assert "Meta-actions" not in (tmp_path / "out" / "report.html").read_text()
    assert json.loads((tmp_path / "out" / "artifacts.json").read_text())["meta_actions"] is None
