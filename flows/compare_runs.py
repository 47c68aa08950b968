"""`ratchet compare-runs A B`: what two runs were told differently, and what came out differently."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data import storage
from data.artifacts import read_table
from data.errors import UserError
from data.statistics import paired_bootstrap
from flows.inspect import run_settings

IGNORED = ("name", "root", "compute")
"""Settings that do not change a number."""


def compare_runs(root: str, first: str, second: str) -> str:
    """Settings that differ, then for each task and model both accuracies and the paired difference with its interval.

    Raises UserError where a run does not exist, or none of both has answered a question.
    """
    settings = [dict(_flat(run_settings(root, name))) for name in (first, second)]
    lines = [f"{'setting':<44}{first:>20}{second:>20}"]
    for field in sorted(settings[0].keys() | settings[1].keys()):
        values = [side.get(field, "-") for side in settings]
        if values[0] != values[1] and field.split(".")[0] not in IGNORED:
            lines.append(f"{field:<44}{values[0][-19:]:>20}{values[1][-19:]:>20}")
    if len(lines) == 1:
        lines = ["the settings are the same"]
    answers = [_answers(root, name) for name in (first, second)]
    if not answers[0] and not answers[1]:
        raise UserError(f"neither {first} nor {second} has answered a question yet; `ratchet run` finishes them")
    lines += ["", f"{'task':<14}{'model':<14}{first[-9:]:>10}{second[-9:]:>10}  difference [95 % interval]"]
    for key in list(dict.fromkeys([*answers[0], *answers[1]])):
        lines.append(f"{key[0]:<14}{key[1]:<14}" + _difference(answers[0].get(key), answers[1].get(key)))
    return "\n".join(lines)


def _difference(first: dict[str, float] | None, second: dict[str, float] | None) -> str:
    shares = [f"{100 * sum(side.values()) / len(side):.1f} %" if side else "-" for side in (first, second)]
    text = f"{shares[0]:>10}{shares[1]:>10}"
    if not first or not second:
        return text
    common = sorted(first.keys() & second.keys())
    if len(common) < max(len(first), len(second)):
        return f"{text}  other questions ({len(common)} in common)"
    low_high = paired_bootstrap([second[item] for item in common], [first[item] for item in common])
    interval = f"[{100 * low_high.low:+.1f}, {100 * low_high.high:+.1f}]"
    return f"{text}  {100 * low_high.mean:+.1f} {interval} points, {len(common)} questions"


def _answers(root: str, name: str) -> dict[tuple[str, str], dict[str, float]]:
    """(task, model) → question → share of correct answers."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    place = storage.join(root, name, "evaluation")
    for model in storage.children(place):
        for task in storage.children(storage.join(place, model)):
            ref, _ = storage.find(storage.join(place, model, task))
            if ref is None:
                continue
            table = read_table(Path(storage.fetch(ref)) / "evaluations.parquet", "evaluations")
            counts: dict[str, list[bool]] = {}
            for row in table.select(["item_id", "correct"]).to_pylist():
                counts.setdefault(row["item_id"], []).append(row["correct"])
            found[task, model] = {item: sum(values) / len(values) for item, values in counts.items()}
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
