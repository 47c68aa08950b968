"""What the blocks of a trace are worth: candidate answers and their correctness, true verdicts, useful blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from data.grading import grade
from data.meta_actions.grammar import MAX_BLOCKS, Block, Trace, parse


@dataclass(frozen=True, slots=True)
class Judged:
    """A trace beside its gold answer."""

    trace: Trace
    candidates: tuple[str | None, ...]
    """The answer that can be read from each reason and refine block; None for other blocks and where there is none."""
    right: tuple[bool, ...]
    """Whether that answer is the gold."""
    correct: bool
    """Whether the trace is legal, complete and its answer block holds the gold."""
    parsed: str | None
    """What the grader read from the answer block."""
    reason: str
    """The grader's reason, or why there was nothing to grade."""

    @property
    def attempts(self) -> list[int]:
        """Positions of the blocks with a candidate answer."""
        return [i for i, candidate in enumerate(self.candidates) if candidate is not None]

    def candidate_before(self, position: int) -> int | None:
        """Position of the last candidate in front of a block; None where there is none."""
        return next((i for i in range(position - 1, -1, -1) if self.candidates[i] is not None), None)

    def true_verdict(self, position: int) -> bool | None:
        """Whether a critique's verdict is what the gold says of the candidate before it; None without a candidate."""
        before = self.candidate_before(position)
        return None if before is None else self.trace.blocks[position].correct == self.right[before]


def judge(text: str, gold: str, kind: str, max_blocks: int = MAX_BLOCKS) -> Judged:
    """Parses a trace and grades its answer block, and nothing else, for the outcome.

    The candidates of reason and refine blocks are graded apart: they say whether verdicts are true and what a refine
    changed. A candidate is whatever the grader reads as the block's final answer.
    """
    trace = parse(text, max_blocks)
    found = [_candidate(block, gold, kind) for block in trace.blocks]
    candidates, right = tuple(c for c, _ in found), tuple(r for _, r in found)
    if trace.answer is None:
        return Judged(trace, candidates, right, False, None, trace.code or "truncated")
    verdict = grade(trace.answer, gold, kind)
    return Judged(trace, candidates, right, verdict.correct, verdict.parsed, verdict.reason)


def _candidate(block: Block, gold: str, kind: str) -> tuple[str | None, bool]:
    if block.action not in ("reason", "refine"):
        return None, False
    verdict = grade(block.body, gold, kind)
    return verdict.parsed, verdict.correct


def useful_blocks(judged: Judged, first: int = 0) -> list[int]:
    """Positions, from block `first` on, of the blocks that did something.

    The first attempt; a critique with a true verdict on a candidate that no earlier critique judged truly, where a
    verdict "wrong" counts only together with the refine that acts on it; a refine after a true "wrong" whose candidate
    was not there before. So neither an idle critique and refine, nor going back and forth between answers, adds
    anything (the notes count every true critique; that pays for repeating one).
    """
    blocks = judged.trace.blocks
    seen: set[str] = set()
    confirmed: set[str] = set()
    useful: set[int] = set()
    for position, block in enumerate(blocks):
        candidate = judged.candidates[position]
        if block.action == "critique" and block.correct and judged.true_verdict(position):
            before = judged.candidates[judged.candidate_before(position)]
            if before not in confirmed:
                confirmed.add(before)
                useful.add(position)
        elif block.action == "refine" and candidate is not None and candidate not in seen:
            if judged.true_verdict(position - 1):
                useful |= {position - 1, position}
        elif block.action == "reason" and candidate is not None and not seen:
            useful.add(position)
        if candidate is not None:
            seen.add(candidate)
    return sorted(position for position in useful if position >= first)


def signature(judged: Judged, first: int = 0) -> str:
    """The useful actions of a trace from block `first` on, with verdicts: what group diversity and metrics compare."""
    letters = []
    for position in useful_blocks(judged, first):
        block = judged.trace.blocks[position]
        letters.append(block.state if block.action == "critique" else block.action)
    return " ".join(letters)


def first_and_last(judged: Judged) -> tuple[bool, bool]:
    """Whether the first candidate and the answer of the trace are right (False where there is none)."""
    attempts = judged.attempts
    return (judged.right[attempts[0]] if attempts else False), judged.correct


def repeated_share(words: Sequence[str], n: int = 40) -> float:
    """Share of the n-grams of a text that occurred in it before; 0 for a text shorter than n words."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
