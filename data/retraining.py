"""The steps of a retraining that need no model: which demonstrations are new, and whether a candidate is promoted."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from data.artifacts import read_rows, read_table, write_table
from data.errors import UserError
from data.ingestion.hashes import question_key
from data.progress import Report
from data.requests import DecideRequest, HoldOutRequest, SelectRequest
from data.statistics import paired_bootstrap, wilson

DEMONSTRATIONS, QUESTIONS, SEEN = "demonstrations.parquet", "questions.parquet", "seen.parquet"


def hold_out(request: HoldOutRequest, out: Path, report: Report) -> dict:
    """Keeps the held-out questions of the first retraining for all later ones; returns their number by split.

    Were they chosen anew from a file that grows, a question could move from validation to promotion.
    """
    shutil.copy(request.questions, out / QUESTIONS)
    splits = [row["split"] for row in read_rows(out / QUESTIONS, "questions")]
    return {split: splits.count(split) for split in sorted(set(splits))}


def select_new(request: SelectRequest, out: Path, report: Report) -> dict:
    """The demonstrations that no retraining has seen and whose question is not held out, all for training.

    Writes demonstrations.parquet and questions.parquet (the held-out ones); returns the counts `new`, `seen`,
    `held_out` (demonstrations), which add up to `read`.
    """
    table = read_table(request.demonstrations, "demonstrations")
    held_out = {question_key(row["question"]) for row in read_rows(request.held_out, "questions")}
    seen = set()
    for path in request.seen:
        seen.update(read_table(path, "seen")["item_id"].to_pylist())
    asked = [question_key(question) in held_out for question in table["question"].to_pylist()]
    known = [item in seen for item in table["item_id"].to_pylist()]
    new = [not a and not k for a, k in zip(asked, known)]
    chosen = table.filter(pa.array(new, pa.bool_()))
    place = chosen.schema.get_field_index("split")
    chosen = chosen.set_column(place, "split", pa.array(["train"] * chosen.num_rows, pa.string()))
    write_table(out / DEMONSTRATIONS, "demonstrations", chosen)
    shutil.copy(request.held_out, out / QUESTIONS)
    counts = {"read": table.num_rows, "new": sum(new), "held_out": sum(asked)}
    counts["seen"] = counts["read"] - counts["new"] - counts["held_out"]
    report.log("{read} demonstrations: {new} new, {seen} seen before, {held_out} held out".format(**counts))
    return counts


def decide(request: DecideRequest, out: Path, report: Report) -> dict:
    """Whether the candidate is promoted: only where the paired interval of its advantage lies above 0.

    Both models have answered the same questions; the samples of a question are averaged, then questions are drawn with
    replacement (Efron's percentile bootstrap). Writes decision.json and seen.parquet (the demonstrations that this
    decision has used up) and returns the decision with its figures and reason. Raises UserError where the questions
    differ.
    """
    candidate, serving = _by_question(request.candidate), _by_question(request.serving)
    if candidate.keys() != serving.keys():
        raise UserError("the candidate and the serving model answered different questions; evaluate both again")
    items = sorted(candidate)
    estimate = paired_bootstrap(
        [candidate[item] for item in items], [serving[item] for item in items], request.confidence, seed=request.seed
    )
    promote = estimate.low > 0
    where = "lies above 0" if promote else "lies below 0" if estimate.high < 0 else "holds 0"
    interval = f"[{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}] points"
    decision = {
        "promote": promote,
        "compared_with": request.compared_with,
        "questions": len(items),
        "candidate": sum(candidate.values()) / len(items),
        "serving": sum(serving.values()) / len(items),
        "difference": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "confidence": request.confidence,
        "reason": f"the {100 * request.confidence:g} % interval of the difference, {interval}, {where}",
    }
    (out / "decision.json").write_text(json.dumps(decision, indent=1, sort_keys=True) + "\n")
    write_table(out / SEEN, "seen", _seen(request.demonstrations))
    report.log(("promoted: " if promote else "not promoted: ") + decision["reason"])
    return decision


def _by_question(path: Path) -> dict[str, float]:
    """Question → share of its answers that are correct."""
    table = read_table(path, "evaluations").select(["item_id", "correct"])
    table = table.set_column(1, "correct", pc.cast(table["correct"], pa.float64()))
    means = table.group_by("item_id").aggregate([("correct", "mean")])
    return dict(zip(means["item_id"].to_pylist(), means["correct_mean"].to_pylist()))


def _seen(demonstrations: Path) -> pa.Table:
    return read_table(demonstrations, "demonstrations").select(["task", "item_id"])


def shown_accuracy(share: float, questions: int, confidence: float) -> str:
    """An accuracy with Wilson's interval, for people."""
    estimate = wilson(round(share * questions), questions, confidence)
    return f"{100 * share:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
