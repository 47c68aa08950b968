"""Figures of a round's traces by name; docs/metrics.md explains each. Behaviour is counted over rollouts from roots."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data.meta_actions.grammar import ACTIONS, LEGAL
from data.meta_actions.judging import Judged, first_and_last, repeated_share, signature

HARD, EASY = 0.4, 0.8
"""Success rates up to which a problem counts as hard, and from which as easy."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout."""

    judged: Judged
    group: int
    restart: bool
    tokens: int
    first: int
    """Its first sampled block."""
    success: float
    """Success rate of its problem from the root."""
    malformed: bool
    entropies: tuple[float, ...]
    """Of the choices it made, as shares of their maximum."""
    text: str


def round_figures(records: Sequence[Record], max_blocks: int) -> dict[str, float]:
    """Every figure of a round that can be computed from its traces."""
    roots = [record for record in records if not record.restart]
    restarted = [record for record in records if record.restart]
    entropies = [e for record in records for e in record.entropies]
    values = {
        "boundary_entropy": _mean(entropies),
        "malformed_share": _mean(record.malformed for record in records),
        "restart_share": _mean(record.restart for record in records),
        "restart_accuracy": _mean(record.judged.correct for record in restarted),
        "zero_variance_root": _silent_share(roots),
        "zero_variance_restart": _silent_share(restarted),
    }
    values |= _actions(roots) | _revision(roots) | _verdicts(roots) | _shapes(roots, max_blocks)
    return {f"meta/{name}": value for name, value in values.items() if value is not None}


def _actions(records: Sequence[Record]) -> dict[str, float | None]:
    """The share of each action among the blocks, and the choices made in each state."""
    blocks: Counter[str] = Counter()
    choices: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for state, block in zip(record.judged.trace.states(), record.judged.trace.blocks):
            blocks[block.action] += 1
            choices[state][block.action] += 1
    found: dict[str, float | None] = {
        f"share_{action}": blocks[action] / blocks.total() if blocks else None for action in ACTIONS
    }
    for state, actions in LEGAL.items():
        for action in actions:
            if len(actions) > 1 and choices[state]:
                found[f"choice_{state}_{action}"] = choices[state][action] / choices[state].total()
    return found


def _revision(records: Sequence[Record]) -> dict[str, float | None]:
    """Right at the first and at the last attempt, and what changed between; shares of all rollouts."""
    pairs = [first_and_last(record.judged) for record in records]
    changed = []
    for record in records:
        attempts = record.judged.attempts
        if len(attempts) > 1:
            candidates = record.judged.candidates
            changed.append(candidates[attempts[0]] != candidates[attempts[-1]])
    return {
        "accuracy_first": _mean(first for first, _ in pairs),
        "accuracy_last": _mean(last for _, last in pairs),
        "wrong_to_right": _mean(last and not first for first, last in pairs),
        "right_to_wrong": _mean(first and not last for first, last in pairs),
        "changed_share": _mean(changed),
    }


def _verdicts(records: Sequence[Record]) -> dict[str, float | None]:
    """How true the verdicts are, and what refinements make of the true "wrong" ones."""
    said: dict[bool, list[bool]] = {True: [], False: []}
    refined = []
    for record in records:
        judged = record.judged
        for position, block in enumerate(judged.trace.blocks):
            if block.action == "critique":
                before = judged.candidate_before(position)
                if before is not None:
                    said[judged.right[before]].append(bool(block.correct))
            elif block.action == "refine" and judged.true_verdict(position - 1):
                refined.append(judged.right[position])
    true_positive, false_positive = _mean(said[True]), _mean(said[False])
    balanced = None
    if true_positive is not None and false_positive is not None:
        balanced = (true_positive + 1 - false_positive) / 2
    return {
        "verdict_correct_rate": _mean([*said[True], *said[False]]),
        "verdict_true_positive": true_positive,
        "verdict_false_positive": false_positive,
        "verdict_balanced_accuracy": balanced,
        "refine_success": _mean(refined),
    }


def _shapes(records: Sequence[Record], max_blocks: int) -> dict[str, float | None]:
    """How long traces are, by difficulty, and how much they are alike."""
    lengths = {"hard": [], "medium": [], "easy": []}
    for record in records:
        kind = "hard" if record.success <= HARD else "easy" if record.success >= EASY else "medium"
        lengths[kind].append(len(record.judged.trace.blocks))
    signatures = Counter(signature(record.judged) for record in records)
    total = signatures.total()
    blocks = sum(len(record.judged.trace.blocks) for record in records)
    return {
        "blocks_mean": _mean(n for found in lengths.values() for n in found),
        **{f"blocks_{kind}": _mean(found) for kind, found in lengths.items()},
        "tokens_per_block": sum(record.tokens for record in records) / blocks if blocks else None,
        "full_share": _mean(len(record.judged.trace.blocks) >= max_blocks for record in records),
        "signature_entropy": -sum(n / total * math.log(n / total) for n in signatures.values()) if total else None,
        "signature_top_share": max(signatures.values()) / total if total else None,
        "repeated_share": _mean(repeated_share(record.text.split()) for record in records),
    }


def _silent_share(records: Sequence[Record]) -> float | None:
    """Share of the groups whose members are all right or all wrong."""
    groups: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.judged.correct)
    return _mean(len(set(results)) == 1 for results in groups.values())


def _mean(values: Iterable[float]) -> float | None:
    found = [float(value) for value in values]
    return math.fsum(found) / len(found) if found else None
