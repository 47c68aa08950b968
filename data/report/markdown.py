"""report.md: the Markdown twin of the page, beside its *.png files."""

from collections.abc import Sequence

from data.report.composition import SHOWN_SHARES, Importance, concentration_note, overlap_note, source_rows
from data.report.content import Content, column_title
from data.report.lineage import mermaid
from data.report.meta_actions import alarm_rows, attempt_rows, figure_rows, matrix_rows
from data.report.plots import Picture
from data.report.text import (
    NONE,
    count,
    cut,
    cut_start,
    flatten,
    interval,
    markdown_block,
    markdown_cell,
    markdown_table,
    percent,
    plural,
    point_interval,
    points,
    redacted,
    size,
)
from data.report.training import Curve, Sample, checkpoint_rows, sample_facts, sample_verdict

QUESTION_LIMIT, PREFIX_LIMIT, COMPLETION_LIMIT, CELL_LIMIT = 800, 800, 1200, 200  # characters
CURVE_ROWS = 6


def accuracy_table(content: Content) -> str:
    """Models × tasks, each cell the accuracy and its interval."""
    columns = content.columns
    rows = []
    for model in content.models:
        cells = [content.cell(model, column) for column in columns]
        label = f"{markdown_cell(model)}{' (one seed)' if content.seeds.get(model) == 1 else ''}"
        shown = [f"**{percent(c.accuracy)}** ({interval(c.low, c.high)})" if c else NONE for c in cells]
        rows.append((label, *shown, count(content.spent(model))))
    header = ("model", *(markdown_cell(column_title(column, columns)) for column in columns), "generated tokens")
    return markdown_table(header, rows, range(1, len(header)))


def difference_table(content: Content) -> str:
    """The paired differences of the verdict; an empty string where nothing is compared."""
    if not content.differences:
        return ""
    first = content.differences[0]
    rows = [
        (
            markdown_cell(column_title((d.task, d.benchmark, d.split), content.columns)),
            points(d.mean),
            point_interval(d.low, d.high),
            count(d.n),
        )
        for d in content.differences
    ]
    level = f"{100 * content.request.confidence:.3g} %"
    header = (
        "task",
        f"{markdown_cell(first.model)} minus {markdown_cell(first.reference)}",
        f"{level} interval (paired)",
        "questions",
    )
    return markdown_table(header, rows, (1, 2, 3))


def thinned(curve: Curve, n: int = CURVE_ROWS) -> list[tuple[float, float]]:
    """At most `n` points of a curve, evenly over it, the first and the last among them."""
    points_ = curve.points
    if len(points_) <= n:
        return list(points_)
    return [points_[round(i * (len(points_) - 1) / (n - 1))] for i in range(n)]


def curve_table(content: Content, task: str) -> str:
    """The validation accuracies of one task as a plain table; an empty string where there are none."""
    rows = [
        (markdown_cell(curve.arm), str(curve.seed), count(round(x)), percent(y))
        for curve in content.training.validation
        if curve.task == task
        for x, y in thinned(curve)
    ]
    return markdown_table(("arm", "seed", "generated tokens", "validation accuracy"), rows, (1, 2, 3)) if rows else ""


def checkpoint_table(content: Content) -> str:
    """The checkpoints that validation chose; an empty string where there are none."""
    if not content.training.checkpoints:
        return ""
    header, rows = checkpoint_rows(content.training)
    table = markdown_table(header, [[*map(markdown_cell, row)] for row in rows], range(1, len(header)))
    return f"Checkpoints chosen on validation, with their validation accuracies:\n\n{table}"


def stage_table(content: Content) -> str:
    """Sampled accuracy by stage, early and late; an empty string where there are no stages."""
    rows = [
        (
            markdown_cell(f"{cell.task}, {cell.arm}"),
            str(stage),
            percent(cell.early.get(stage)),
            percent(cell.late.get(stage)),
        )
        for cell in content.training.stages
        for stage in sorted({*cell.early, *cell.late})
    ]
    return markdown_table(("expert", "stage", "early", "late"), rows, (1, 2, 3)) if rows else ""


def meta_action_text(content: Content) -> str:
    """Test attempts, alarms, late figures and choices of meta-actions as tables; empty where there are none."""
    tables = [("Attempts at the test questions", attempt_rows(content.attempts), range(2, 7))]
    tables.append(("Alarms", alarm_rows(content.meta), (2, 3)))
    tables.append(("Figures late in training", figure_rows(content.meta), range(1, len(content.meta) + 1)))
    tables += [(f"Choices of {cell.title}, late in training", matrix_rows(cell), range(1, 5)) for cell in content.meta]
    parts = []
    for title, (header, rows), numbers in tables if content.meta else ():
        cells = [[*map(markdown_cell, row)] for row in rows]
        table = markdown_table([*map(markdown_cell, header)], cells, numbers) if rows else "None."
        parts += [f"**{markdown_cell(title)}**", table]
    return "\n\n".join(parts)


def sample_text(sample: Sample, limit: int = COMPLETION_LIMIT) -> str:
    """One rollout: what was revealed and what the policy wrote, each in a block that it cannot leave."""
    head = markdown_cell(f"{sample.task}, {sample.arm}: {sample_verdict(sample)}")
    parts = [f"#### {head}", markdown_cell(", ".join(sample_facts(sample))) + "."]
    parts += ["**Question**", markdown_block(cut(sample.question, min(limit, QUESTION_LIMIT)))]
    if sample.prefix:
        parts += [
            "**Revealed from the demonstration**",
            markdown_block(cut_start(sample.prefix, min(limit, PREFIX_LIMIT))),
        ]
    parts += ["**Written by the policy**", markdown_block(cut(sample.completion, limit))]
    return "\n\n".join(parts)


def importance_text(importance: Importance) -> str:
    """Concentration and overlap as tables."""
    shares = [
        (markdown_cell(t.task), *(percent(t.within(share)) for share in SHOWN_SHARES), count(t.on))
        for t in importance.tasks
    ]
    header = ("task", *(f"top {100 * share:.3g} %" for share in SHOWN_SHARES), "ranks gated on")
    names = [task.task for task in importance.tasks]
    sources, origins = source_rows(importance)
    overlap = [(markdown_cell(a), *(f"{importance.overlap[a, b]:.2f}" for b in names)) for a in names]
    return "\n\n".join(
        [
            markdown_cell(concentration_note(importance)),
            markdown_table(header, shares, range(1, len(header))),
            "Share of the task's importance in the ranks that came from each expert:",
            markdown_table(
                ("task", *map(markdown_cell, sources)),
                [[*map(markdown_cell, row)] for row in origins],
                range(1, len(sources) + 1),
            ),
            markdown_cell(overlap_note(importance)),
            markdown_table(("task", *map(markdown_cell, names)), overlap, range(1, len(names) + 1)),
        ]
    )


def rejected_text(content: Content) -> str:
    """Rows read, accepted and rejected, and the rejected ones by reason."""
    counts = [
        (
            markdown_cell(task.task),
            count(sum(task.accepted.values()) + task.rejected),
            count(sum(task.accepted.values())),
            count(task.rejected),
            markdown_cell(", ".join(f"{split} {count(n)}" for split, n in task.accepted.items())),
            markdown_cell(", ".join(f"{split} {count(n)}" for split, n in task.questions.items())),
        )
        for task in content.ingested
    ]
    header = ("task", "read", "accepted", "rejected", "accepted by split", "questions")
    parts = [markdown_table(header, counts, (1, 2, 3))]
    rows = [
        (markdown_cell(r.task), markdown_cell(r.reason), count(r.rows), markdown_cell(cut(r.message, CELL_LIMIT)))
        for r in content.rejections
    ]
    parts.append(
        markdown_table(("task", "reason", "rows", "for example"), rows, (2,)) if rows else "No row was rejected."
    )
    return "\n\n".join(parts)


def _picture_lines(pictures: Sequence[Picture], section: str) -> str:
    return "\n".join(f"![{markdown_cell(p.alt)}]({p.name}.png)" for p in pictures if p.section == section)


def _settings(content: Content) -> str:
    rows = [
        (markdown_cell(name), markdown_cell(cut(value, CELL_LIMIT)))
        for name, value in redacted(flatten(content.request.settings))
    ]
    if not rows:
        return "*The settings are not part of this report.*"
    table = markdown_table(("setting", "value"), rows)
    return f"<details><summary>{plural(len(rows), 'setting')}</summary>\n\n{table}\n\n</details>"


def files_text(content: Content) -> str:
    """The files that the report was made from, with rows, sizes and hashes."""
    rows = [
        (markdown_cell(entry.name), count(entry.rows), size(entry.n_bytes), f"`{entry.sha256}`")
        for entry in content.files
    ]
    if not rows:
        return "*This report was made from no files.*"
    return markdown_table(("file", "rows", "size", "SHA-256"), rows, (1, 2))


def _sections(content: Content, pictures: Sequence[Picture]) -> list[tuple[str, list[str]]]:
    curves = [curve_table(content, task) for task in content.tasks]
    return [
        (
            "Accuracy",
            [
                _picture_lines(pictures, "accuracy"),
                accuracy_table(content) if content.summary else "*No evaluation was made in this run.*",
                difference_table(content),
            ],
        ),
        ("Lineage", [mermaid(content) or "*Nothing was made in this run.*"]),
        (
            "Learning curves",
            [
                _picture_lines(pictures, "curves"),
                *(f"**{markdown_cell(task)}**\n\n{table}" for task, table in zip(content.tasks, curves) if table),
                checkpoint_table(content),
            ]
            if any(curves) or content.training.reward
            else ["*No learning curves: this run trained no expert by reinforcement learning.*"],
        ),
        (
            "Success by stage",
            [
                _picture_lines(pictures, "stages"),
                stage_table(content) or "*No success by stage: there are no rollouts by stage in the metrics.*",
            ],
        ),
        *(
            [("Meta-actions", [_picture_lines(pictures, "meta_actions"), meta_action_text(content)])]
            if content.meta
            else []
        ),
        ("Samples", [*map(sample_text, content.samples)] or ["*No samples: this run kept no rollouts.*"]),
        (
            "Rank importance",
            [
                _picture_lines(pictures, "importance"),
                importance_text(content.importance) if content.importance else "*No composition was made in this run.*",
            ],
        ),
        (
            "Rows read and rejected",
            [rejected_text(content) if content.ingested else "*No ingestion is part of this report.*"],
        ),
        ("Settings", [_settings(content)]),
        ("Files", [files_text(content)]),
    ]


def render(content: Content, pictures: Sequence[Picture]) -> str:
    """The whole report. Text from outside stands in blocks it cannot leave, or escaped in a cell."""
    parts = [f"# {markdown_cell(content.request.run_name)}", f"**{markdown_cell(content.verdict)}**"]
    for title, texts in _sections(content, pictures):
        parts += [f"## {title}", *filter(None, texts)]
    versions = content.request.versions
    said = ", ".join(f"{markdown_cell(name)} {markdown_cell(versions[name])}" for name in sorted(versions))
    return "\n\n".join([*parts, "---", said or "Library versions not recorded."]) + "\n"
