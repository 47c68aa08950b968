"""The figures of a study, by hand."""

import json

import numpy as np
import pytest

from data.artifacts import write_table
from data.errors import UserError
from data.report.study import write_results
from data.statistics import paired_bootstrap_seeds, paired_bootstrap_tasks
from data.study import CellRecord, Comparison, StudyShape, cell_name, equal_cpu, figures, read_cells

SHAPE = StudyShape(
    name="small",
    title="A small study",
    scope="Two tasks.",
    tasks=("sums", "rules"),
    arms=("rl", "r3"),
    seeds=(1, 2),
    comparisons=(Comparison(name="r3_minus_rl", first="r3", second="rl", bar=4.1, interval_above=0.0),),
)


def write_cell(folder, task, arm, seed, correct, **info):
    rows = [
        {"question": n, "correct": bool(c), "chain_valid": bool(c), "completion_tokens": 3, "truncated": False}
        for n, c in enumerate(correct)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cell_name(task, arm, seed)}.parquet"
    write_table(path, "study_answers", rows)
    record = {"generated_tokens": 100, "processed_tokens": 300, "cpu_seconds": 2.0, "tuned": {"learning_rate": 1e-3}}
    path.with_suffix(".json").write_text(json.dumps(record | info))


@pytest.fixture
def folder(tmp_path):
    for task in SHAPE.tasks:
        for seed in SHAPE.seeds:
            write_cell(tmp_path / "small", task, "rl", seed, [1, 0, 0, 0], curve=[[0, 0.0, 0.1], [50, 1.0, 0.2]])
            right = [1, 1, 1, 0] if task == "sums" else [1, 0, 0, seed == 1]
            write_cell(tmp_path / "small", task, "r3", seed, right, curve=[[0, 0.0, 0.1], [50, 3.0, 0.9]])
    return tmp_path


def test_differences_are_paired_means_over_tasks_in_points(folder):
    found = figures(read_cells(folder / "small", SHAPE), SHAPE, "abc")
    assert found["missing"] == [] and found["cells"] == 8 and found["commit"] == "abc" and found["seeds"] == [1, 2]
    value = found["differences"]["r3_minus_rl"]
    assert value["tasks"]["sums"]["mean"] == 50.0  # two of four questions in both seeds
    assert value["tasks"]["rules"]["mean"] == 12.5  # one of four in one of two seeds
    assert value["mean"] == 31.25 == value["valid"]["mean"]
    assert value["low"] <= 31.25 <= value["high"] and value["bar"] == 4.1
    assert value["met"] is (value["low"] > 0)
    assert found["mean"]["rl"]["accuracy"]["mean"] == 25.0
    assert found["tasks"]["sums"]["r3"]["processed_tokens"] == 300
    assert figures(read_cells(folder / "small", SHAPE), SHAPE, "abc") == found


def test_equal_cpu_compares_the_best_so_far_where_both_have_spent_as_much(folder):
    cells = read_cells(folder / "small", SHAPE)
    found = equal_cpu(cells, SHAPE, SHAPE.comparisons[0])
    # at 1 s plain RL is at 0.2, R³ still at its warm-up
    assert found == {"first": 10.0, "second": 20.0, "difference": -10.0, "cpu_seconds": 1.0, "pairs": 4}


def test_an_unfinished_study_has_no_difference_and_says_what_is_missing(folder):
    (folder / "small" / "sums--r3--2.parquet").unlink()
    found = write_results(SHAPE, folder, None)
    assert found["missing"] == ["sums/r3/2"]
    assert found["differences"]["r3_minus_rl"] is None and found["tasks"]["sums"]["r3"]["accuracy"] is None
    assert "Not finished: 7 of 8 cells" in (folder / "small.md").read_text()
    (folder / "small" / "sums--rl--1.json").unlink()
    with pytest.raises(UserError, match="run the cell again"):
        read_cells(folder / "small", SHAPE)


def test_the_text_holds_verdict_costs_and_the_authors_notes(folder):
    (folder / "small.notes.md").write_text("Nothing failed.\n")
    write_results(SHAPE, folder, "abc")
    text = (folder / "small.md").read_text()
    for wanted in (
        "+31.2 [",
        "cleared",
        "-10.0 (1 s)",
        "## What did not work\n\nNothing failed.",
        "small/validation.png",
    ):
        assert wanted in text, wanted
    assert (folder / "small" / "validation.png").stat().st_size > 1000


def test_arms_that_started_from_different_warmups_are_named(folder):
    write_cell(folder / "small", "sums", "rl", 1, [1, 0, 0, 0], warmup_sha256="a")
    write_cell(folder / "small", "sums", "r3", 1, [1, 0, 0, 0], warmup_sha256="a")
    assert write_results(SHAPE, folder, None)["mixed_warmups"] == []
    write_cell(folder / "small", "sums", "r3", 1, [1, 0, 0, 0], warmup_sha256="b")
    assert write_results(SHAPE, folder, None)["mixed_warmups"] == ["sums/1"]
    assert "different warm-ups: sums/1" in (folder / "small.md").read_text()


def test_questions_that_differ_in_number_are_refused(folder):
    write_cell(folder / "small", "sums", "r3", 2, [1, 1])
    with pytest.raises(UserError, match="different numbers of questions"):
        figures(read_cells(folder / "small", SHAPE), SHAPE, None)


def test_the_mean_over_tasks_has_the_interval_of_one_task_and_narrows_with_more():
    generator = np.random.default_rng(0)
    one = generator.integers(-1, 2, size=(3, 200)).astype(float)
    alone = paired_bootstrap_tasks([one])
    assert alone == paired_bootstrap_seeds(one, np.zeros_like(one))
    several = paired_bootstrap_tasks([generator.permuted(one, axis=1) for _ in range(8)])
    assert several.mean == pytest.approx(alone.mean)
    # 8 independent tasks: the width falls by about sqrt(8), 2.8
    assert 2.0 < (alone.high - alone.low) / (several.high - several.low) < 4.0
    with pytest.raises(ValueError, match="at least one task"):
        paired_bootstrap_tasks([])


def test_a_measure_that_cannot_be_judged_is_left_out(folder):
    cells = read_cells(folder / "small", SHAPE)
    key = ("rules", "r3", 1)
    cells[key] = CellRecord(cells[key].columns | {"valid": None}, cells[key].info)
    found = figures(cells, SHAPE, None)
    assert "valid" not in found["differences"]["r3_minus_rl"]
    assert found["mean"]["r3"]["valid"] is None and found["mean"]["r3"]["accuracy"] is not None


def test_revealed_share_and_stages_over_time_are_drawn():
    from data.report.plots import LIGHT, revealed_plot, stage_curves_plot
    from data.report.training import Curve

    curves = [Curve("sums", arm, 0, ((0.0, 0.5), (100.0, 0.2))) for arm in ("rl", "r3")]
    axes = revealed_plot(curves, ("rl", "r3"), LIGHT, "x").axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.5, 0.2]] * 2
    axes = stage_curves_plot({0: curves, 2: curves[:1], 4: curves[1:]}, ("rl", "r3"), LIGHT, "x").axes[0]
    assert sum(len(line.get_xdata()) == 2 for line in axes.lines) == 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["stage 0", "stage 2", "stage 4", "rl", "r3"]
