"""The texts of a run's Prefect artifacts. Pure functions: `tasks/` hands them to Prefect.

Prefect's artifact pages load all data of all latest artifacts at once, so each text stays below `LIMIT`; its table
cells are plain text without rounding, so numbers come as strings with units; a picture may be left out by a page's
sanitizer, so each has a plain table beneath it.
"""

from data.report.content import Content, column_title
from data.report.html import data_uri
from data.report.lineage import mermaid
from data.report.markdown import (
    accuracy_table,
    curve_table,
    difference_table,
    files_text,
    importance_text,
    meta_action_text,
    rejected_text,
    sample_text,
    stage_table,
)
from data.report.plots import curve_picture, importance_picture
from data.report.text import count, interval, markdown_cell, percent

LIMIT = 100_000  # bytes of one artifact
PICTURE_LIMIT = 30_000  # bytes of one picture's data URI
PICTURE_DPI = 100
SAMPLE_LIMIT = 500  # characters of a completion


def accuracy_rows(content: Content) -> list[dict[str, str]]:
    """One row a model and task for a table artifact: every value a string with its unit."""
    columns = content.columns
    return [
        {
            "model": row.model,
            "task": column_title(row.column, columns),
            "accuracy": percent(row.accuracy),
            f"{100 * content.request.confidence:.3g} % interval": interval(row.low, row.high),
            "questions": count(row.n),
            "generated tokens": count(row.generated_tokens),
            "seeds": count(content.seeds[row.model]) if row.model in content.seeds else "",
            "cut at the limit": percent(row.truncated_share),
            "no answer read": percent(row.no_answer_share),
        }
        for row in content.summary
    ]


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _fitting(parts: list[str], closing: str) -> str:
    """As many of `parts` as stay below LIMIT with `closing`, which says what is missing."""
    text = _joined(parts)
    if len(text.encode()) <= LIMIT:
        return text
    kept: list[str] = []
    for part in parts:
        if len(_joined([*kept, part, closing]).encode()) > LIMIT:
            break
        kept.append(part)
    return _joined([*kept, closing])


def _curve_parts(content: Content, task: str) -> list[str]:
    table = curve_table(content, task)
    if not table:
        return []
    parts = [f"### {markdown_cell(task)}"]
    picture = curve_picture(content, task, PICTURE_DPI)
    uri = data_uri(picture.light) if picture else ""
    if uri and len(uri) <= PICTURE_LIMIT:
        parts.append(f"![{markdown_cell(picture.alt)}]({uri})")
    return ["\n\n".join(parts), table]


def report_markdown(content: Content) -> str:
    """The run's report for a Markdown artifact: verdict, accuracies, lineage, learning curves, success by stage.

    At most LIMIT bytes: what does not fit is left out from the end, and the text says so.
    """
    parts = [f"# {markdown_cell(content.request.run_name)}", f"**{markdown_cell(content.verdict)}**"]
    parts += [accuracy_table(content) if content.summary else "*No evaluation was made in this run.*"]
    parts += [difference_table(content), "## Lineage" if mermaid(content) else "", mermaid(content)]
    curves = [part for task in content.tasks for part in _curve_parts(content, task)]
    parts += ["## Learning curves", *(curves or ["*No expert was trained by reinforcement learning.*"])]
    stages = stage_table(content)
    parts += ["## Success by stage", stages] if stages else []
    return _fitting(parts, "*More is in report.html: this artifact is kept small.*")


def meta_actions_markdown(content: Content) -> str | None:
    """The meta-actions' figures and alarms for a Markdown artifact, at most LIMIT; None where there are none."""
    if not content.meta:
        return None
    title = f"# {markdown_cell(content.request.run_name)}: meta-actions"
    return _fitting([title, *meta_action_text(content).split("\n\n")], "*More is in report.html.*")


def samples_markdown(content: Content) -> str:
    """Rollout samples for a Markdown artifact, the revealed prefix apart from what the policy wrote; at most LIMIT."""
    if not content.samples:
        return "*No samples: this run kept no rollouts.*"
    return _fitting([sample_text(s, SAMPLE_LIMIT) for s in content.samples], "*More samples are in report.html.*")


def data_markdown(content: Content) -> str:
    """Rows read, accepted and rejected with reasons, and the run's files with their hashes; at most LIMIT."""
    name = markdown_cell(content.request.run_name)
    rejected = rejected_text(content) if content.ingested else "*Nothing was ingested in this run.*"
    parts = [f"# Data of {name}", rejected, "## Files", files_text(content)]
    return _fitting(parts, "*All files are in report.html: this artifact is kept small.*")


def ranks_markdown(content: Content) -> str | None:
    """Rank importance of the composition with its picture, at most LIMIT; None where nothing was composed."""
    if content.importance is None:
        return None
    parts = [f"# Ranks of {markdown_cell(content.request.run_name)}"]
    picture = importance_picture(content, PICTURE_DPI)
    uri = data_uri(picture.light) if picture else ""
    if uri and len(uri) <= PICTURE_LIMIT:
        parts.append(f"![{markdown_cell(picture.alt)}]({uri})")
    return _fitting([*parts, importance_text(content.importance)], "*More is in report.html.*")
