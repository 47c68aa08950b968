"""Two finished evaluations of the same questions, compared question by question."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.benchmarks.metrics import GREEDY, evaluation_rows
from data.errors import UserError
from data.statistics import Estimate, paired_bootstrap

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Two models on one benchmark; shares between 0 and 1."""

    benchmark: str
    split: str
    answers: str
    """"greedy" (the greedy answers beside samples) or "all" (every other answer; a question's mean counts)."""
    models: tuple[str, str]
    questions: int
    accuracies: tuple[float, float]
    difference: Estimate
    """First minus second, with its paired bootstrap interval over questions."""
    first_better: int
    """Questions on which the first has the larger share of right answers."""
    second_better: int


def compare(first: Path, second: Path, confidence: float = 0.95, seed: int = 0) -> list[Comparison]:
    """The benchmarks that both files ("evaluations" tables) hold, each compared on the same questions.

    Raises UserError for a file with several models, for two without a common benchmark, and where the questions or
    golds of a benchmark differ: a paired comparison needs the same ones.
    """
    sides = [_sides(path) for path in (first, second)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        names = [sorted({f"{benchmark} ({split})" for benchmark, split, _ in side}) for side in sides]
        raise UserError(
            f"{first} and {second} share no benchmark ({', '.join(names[0])} against {', '.join(names[1])}); "
            "evaluate both models on the same one"
        )
    return [_compare(key, sides[0][key], sides[1][key], (first, second), confidence, seed) for key in common]


def _sides(path: Path) -> dict[tuple[str, str, str], list[Row]]:
    rows = evaluation_rows(path)
    models = sorted({row["model"] for row in rows})
    if len(models) > 1:
        raise UserError(f"{path} holds answers of several models ({', '.join(models)}); give a file for each")
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["benchmark"], row["split"], "greedy" if row["sample"] == GREEDY else "all"].append(row)
    return groups


def _compare(
    key: tuple[str, str, str],
    first: Sequence[Row],
    second: Sequence[Row],
    paths: tuple[Path, Path],
    confidence: float,
    seed: int,
) -> Comparison:
    shares = [_shares(first), _shares(second)]
    if shares[0].keys() != shares[1].keys():
        missing = len(shares[0].keys() ^ shares[1].keys())
        raise UserError(
            f"{paths[0]} and {paths[1]} asked different questions of {key[0]} ({missing} are in one of them only); "
            "evaluate both with the same file and --limit"
        )
    items = sorted(shares[0])
    pairs = [(shares[0][item], shares[1][item]) for item in items]
    firsts, seconds = zip(*pairs)
    return Comparison(
        *key,
        models=(first[0]["model"], second[0]["model"]),
        questions=len(items),
        accuracies=(sum(firsts) / len(items), sum(seconds) / len(items)),
        difference=paired_bootstrap(firsts, seconds, confidence, seed=seed),
        first_better=sum(one > other for one, other in pairs),
        second_better=sum(one < other for one, other in pairs),
    )


def _shares(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(question, gold) → share of right answers."""
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in rows:
        verdicts[row["item_id"], row["gold"]].append(bool(row["correct"]))
    return {item: sum(found) / len(found) for item, found in verdicts.items()}


def comparison_lines(found: Sequence[Comparison]) -> list[str]:
    """Two lines a comparison: accuracies, then the difference and who won how many questions."""
    lines = []
    for one in found:
        what = f"{one.benchmark} ({one.split}{', greedy answers' if one.answers == 'greedy' else ''})"
        accuracies = f"{100 * one.accuracies[0]:.1f} % against {100 * one.accuracies[1]:.1f} %"
        lines.append(f"{what}: {one.models[0]} against {one.models[1]}, {one.questions} questions: {accuracies}")
        low, high = 100 * one.difference.low, 100 * one.difference.high
        certain = "" if one.difference.low > 0 or one.difference.high < 0 else "; the interval holds 0"
        lines.append(
            f"  difference {100 * one.difference.mean:+.1f} points [{low:+.1f}, {high:+.1f}] (paired bootstrap)"
            f"{certain}; better on {one.first_better}, worse on {one.second_better}"
        )
    return lines
