"""Finds demonstrations whose question overlaps with a benchmark question in 8-grams of words."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

N = 8
"""Words in a row that two questions must share."""

_WORD = re.compile(r"\w+")


SHARE = 0.5
"""Share of a demonstration's 8-grams in benchmark questions from which it counts as contaminated (our choice)."""


class Overlap:
    """The 8-grams of benchmark questions. `remove`: whether demonstrations that overlap are refused."""

    def __init__(self, questions: Sequence[dict[str, Any]], benchmark: str, remove: bool) -> None:
        self.remove = remove
        self._benchmark = benchmark
        self._ids: dict[tuple[str, ...], str] = {}
        template = max(10, len(questions) // 100)
        counts = Counter(gram for row in questions for gram in set(_grams(row["question"])))
        for row in questions:
            for gram in _grams(row["question"]):
                if counts[gram] <= template:
                    self._ids.setdefault(gram, row["item_id"])

    def share(self, question: str) -> tuple[float, str]:
        """(share of the question's 8-grams that are in the benchmark, item_id of the one that has most of them)."""
        grams = _grams(question)
        if self._ids.keys().isdisjoint(grams):
            return 0.0, ""
        hits = [self._ids[gram] for gram in grams if gram in self._ids]
        return len(hits) / len(grams), Counter(hits).most_common(1)[0][0]

    def find(self, question: str) -> str | None:
        """What the question overlaps with, in words; None where it does not."""
        share, item = self.share(question)
        if share < SHARE:
            return None
        return f"{share:.0%} of its 8-grams are in {self._benchmark} (item {item})"


def _grams(question: str) -> list[tuple[str, ...]]:
    words = _WORD.findall(question.casefold())
    if len(words) < N:
        return [tuple(words)]
    return list(zip(*(words[start:] for start in range(N))))
