"""The report step: the run's tables in, report.html, report.md, their pictures and summary.parquet out."""

import json
from dataclasses import asdict
from pathlib import Path

from data.artifacts import write_table
from data.progress import Report
from data.report import artifacts, html, markdown
from data.report.content import collect
from data.report.plots import pictures
from data.report.request import ReportRequest


def build(request: ReportRequest, out: Path, report: Report) -> dict:
    """Writes `report.html`, `report.md`, `*.png`, `summary.parquet`, `artifacts.json` (the texts for Prefect's pages).

    Returns the verdict and counts. The same request gives the same files. Raises FileNotFoundError for a table that
    the request names and that is not there, ValueError for one of another kind or schema version.
    """
    content = collect(request)
    report.progress(1, 3, "tables read")
    drawn = pictures(content)
    for picture in drawn:
        (out / f"{picture.name}.png").write_bytes(picture.light)
    report.progress(2, 3, "pictures drawn")
    (out / "report.html").write_text(html.render(content, drawn), encoding="utf-8")
    (out / "report.md").write_text(markdown.render(content, drawn), encoding="utf-8")
    write_table(out / "summary.parquet", "summary", [asdict(row) for row in content.summary])
    texts = {
        "accuracy": artifacts.accuracy_rows(content),
        "report": artifacts.report_markdown(content),
        "samples": artifacts.samples_markdown(content),
        "data": artifacts.data_markdown(content),
        "ranks": artifacts.ranks_markdown(content),
        "meta_actions": artifacts.meta_actions_markdown(content),
    }
    (out / "artifacts.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    report.progress(3, 3, "report written")
    report.log(content.verdict)
    return {
        "verdict": content.verdict,
        "summary_rows": len(content.summary),
        "pictures": len(drawn),
        "samples": len(content.samples),
        "html_bytes": (out / "report.html").stat().st_size,
    }
