"""The score file of a finished evaluation, and the lines that are printed of it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data.benchmarks.base import Questions
from data.benchmarks.metrics import Scores, scores
from data.statistics import Estimate


def score_json(rows: Sequence[Mapping[str, Any]], confidence: float, seed: int = 0) -> list[dict[str, Any]]:
    """The figures of each model and benchmark among rows of the table "evaluations" as JSON values.

    Shares are between 0 and 1; `confidence` is the intervals', `seed` the bootstrap's. Accuracy with one answer a
    question has Wilson's interval and a bootstrap one; everything over several answers a bootstrap over questions.
    """
    return [_score(found, confidence) for found in scores(rows, confidence, seed)]


def _score(found: Scores, confidence: float) -> dict[str, Any]:
    name, estimate = found.headline
    figures: dict[str, Any] = {
        "model": found.model,
        "benchmark": found.benchmark,
        "split": found.split,
        "questions": found.questions,
        "answers": found.answers,
        "confidence": confidence,
        "headline": name,
        name: _interval(estimate, "wilson" if found.samples == 1 else "bootstrap"),
    }
    if found.samples == 1:
        figures[name] |= {"bootstrap": [found.bootstrap.low, found.bootstrap.high]}
    if found.greedy is not None:
        figures["greedy_accuracy"] = _interval(found.greedy, "wilson")
    figures |= {
        "pass@k": {str(k): _interval(estimate, "bootstrap") for k, estimate in found.pass_at.items()},
        "maj@k": {str(k): _interval(estimate, "bootstrap") for k, estimate in found.maj_at.items()},
        "truncated_share": found.truncated,
        "no_answer_share": found.unanswered,
        "subjects": {
            subject: {"questions": score.questions, **_interval(score.accuracy)}
            for subject, score in found.subjects.items()
        },
    }
    return figures


def _interval(estimate: Estimate, method: str | None = None) -> dict[str, Any]:
    values = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
    return values | ({"interval": method} if method else {})


def counts_json(found: Questions) -> dict[str, Any]:
    """What became of a benchmark's rows: read, asked, beyond the limit, and each row that was left out, by name."""
    return {
        "read": found.read,
        "asked": len(found.rows),
        "beyond_limit": found.beyond_limit,
        "excluded": {
            reason: {
                "count": count,
                "rows": [[left.row, left.name] for left in found.left_out if left.reason == reason],
            }
            for reason, count in sorted(found.excluded.items())
        },
    }


def score_lines(figures: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line a model and benchmark, and one a measure where there are several answers a question."""
    lines = []
    for score in figures:
        parts = [f"{score['headline']} {_percent(score[score['headline']])}"]
        if "greedy_accuracy" in score:
            parts.insert(0, f"greedy accuracy {_percent(score['greedy_accuracy'])}")
        k = list(score["pass@k"])[-1]
        if k != "1":
            parts += [f"{measure}@{k} {_percent(score[measure + '@k'][k])}" for measure in ("pass", "maj")]
        lines.append(f"{score['model']} on {score['benchmark']}: {', '.join(parts)}; {score['questions']} questions")
        shares = f"cut off {100 * score['truncated_share']:.1f} %, no answer {100 * score['no_answer_share']:.1f} %"
        lines.append(f"  {shares}")
        lines += [f"  {name}: {_percent(found)}, {found['questions']}" for name, found in score["subjects"].items()]
    return lines


def _percent(found: Mapping[str, Any]) -> str:
    return f"{100 * found['mean']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
