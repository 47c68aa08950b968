"""Finds demonstrations whose question overlaps with a benchmark question in 8-grams of words."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from data.ingestion.hashes import question_key

N = 8
"""Words in a row."""

_WORD = re.compile(r"\w+")


class Overlap:
    """The 8-grams of benchmark questions, for finding demonstrations that repeat one.

    Two questions overlap by |A ∩ B| / min(|A|, |B|) of their sets of 8-grams (words without case and punctuation), so
    a benchmark question inside a longer text counts in full. 8-grams of more than 10 questions and of more than 1 % of
    them are the benchmark's template and do not count. A text of under 8 words is one gram.
    """

    def __init__(self, questions: Sequence[dict[str, Any]], benchmark: str, remove: bool, threshold: float) -> None:
        self.remove = remove
        self._benchmark, self._threshold = benchmark, threshold
        self._items = [row["item_id"] for row in questions]
        self._exact = {question_key(row["question"]): row["item_id"] for row in questions}
        self._sizes: list[int] = []
        holders: dict[tuple[str, ...], list[int]] = {}
        for index, row in enumerate(questions):
            grams = set(_grams(row["question"]))
            self._sizes.append(len(grams))
            for gram in grams:
                holders.setdefault(gram, []).append(index)
        template = max(10, len(questions) // 100)
        self._holders = {gram: found for gram, found in holders.items() if len(found) <= template}

    def closest(self, question: str) -> tuple[float, str]:
        """(overlap with the benchmark question that has most of it, that question's item_id); (0.0, "") without any."""
        same = self._exact.get(question_key(question))
        if same is not None:
            return 1.0, same
        grams = _grams(question)
        if self._holders.keys().isdisjoint(grams):
            return 0.0, ""
        distinct = set(grams)
        shared = Counter(index for gram in distinct for index in self._holders.get(gram, ()))
        overlap, index = max((n / min(len(distinct), self._sizes[index]), -index) for index, n in shared.items())
        return overlap, self._items[-index]

    def find(self, question: str) -> str | None:
        """What the question overlaps with, in words; None below the threshold."""
        overlap, item = self.closest(question)
        if overlap < self._threshold:
            return None
        return f"the question shares {overlap:.0%} of its 8-grams with {self._benchmark} (item {item})"


def _grams(question: str) -> list[tuple[str, ...]]:
    words = _WORD.findall(question.casefold())
    if len(words) < N:
        return [tuple(words)]
    return list(zip(*(words[start:] for start in range(N))))
