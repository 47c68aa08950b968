"""What a procedural suite is: worked demonstrations drawn by seed, with difficulty as a parameter."""

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from data.errors import UserError
from data.settings import AnswerKind, Segmentation

TRIES = 2000
"""Draws in a row that may repeat a question before a suite counts as exhausted (our choice)."""

MARKER = "#### "

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
"""Names for up to twelve steps in their order."""


@dataclass(frozen=True)
class Example:
    """A question with a worked demonstration; `response` is `rationale` and the answer marker, or the program."""

    question: str
    rationale: str
    response: str
    answer: str
    answer_kind: AnswerKind
    subject: str
    """Suite and difficulty, as `state_tracking/5`."""


@dataclass(frozen=True)
class Draw:
    """What a suite's generator returns: the text of one example without its book-keeping."""

    question: str
    rationale: str
    answer: str


@dataclass(frozen=True)
class Mistake:
    """A wrong attempt at a question, worked on consistently after its first wrong step."""

    rationale: str
    answer: str
    step: int
    """The first wrong step, from 1."""


@dataclass(frozen=True)
class Check:
    """A local check of an attempt, written without knowing the answer."""

    text: str
    """The check in words and numbers, a line or a few."""
    holds: bool


@dataclass(frozen=True)
class Suite:
    """A procedural task. All are our own design; the difficulty of each counts its reasoning steps.

    `draw(random, difficulty)` makes one example; `valid_chain(question, response)` judges a written rationale.
    """

    name: str
    description: str
    answer_kind: AnswerKind
    segmentation: Segmentation
    default_difficulty: int
    difficulties: range
    chance: float
    """Upper bound on the accuracy of always giving the most frequent answer, at the default difficulty."""
    draw: Callable[[random.Random, int], Draw]
    valid_chain: Callable[[str, str], bool | None]
    mistake: Callable[[random.Random, str], Mistake] | None = None
    """Draws a wrong attempt at a question of the suite; None: the suite has no errors of its own."""
    check: Callable[[str, str], Check | None] | None = None
    """Checks an attempt (rationale with or without its answer) at a question by what is easier than solving it; gives
    None for a text that is no attempt. None: the suite has no such check."""

    def examples(
        self, n: int, seed: int, difficulty: int | None = None, excluding: Collection[str] = frozenset()
    ) -> Iterator[Example]:
        """`n` examples with distinct questions, none of them in `excluding`; the same arguments give the same examples.

        Different seeds may give the same question: pass the questions that must not come again as `excluding`.
        Raises UserError for a difficulty that the suite does not have, or when it runs out of new questions.
        """
        level = self.default_difficulty if difficulty is None else difficulty
        if level not in self.difficulties:
            raise UserError(
                f"suite {self.name!r} has no difficulty {level}; "
                f"choose one from {self.difficulties.start} to {self.difficulties.stop - 1}"
            )
        return self._drawn(n, random.Random(f"{self.name}/{level}/{seed}"), level, frozenset(excluding))

    def _drawn(self, n: int, generator: random.Random, level: int, excluding: frozenset[str]) -> Iterator[Example]:
        seen: set[str] = set()
        for _ in range(n):
            for _ in range(TRIES):
                drawn = self.draw(generator, level)
                if drawn.question not in seen and drawn.question not in excluding:
                    break
            else:
                raise UserError(
                    f"suite {self.name!r} ran out of new questions at difficulty {level} after {len(seen)} of {n} "
                    f"({len(excluding)} excluded); ask for fewer or raise the difficulty"
                )
            seen.add(drawn.question)
            program = self.answer_kind == "program"
            yield Example(
                question=drawn.question,
                rationale=drawn.rationale,
                response=drawn.rationale if program else f"{drawn.rationale}\n{MARKER}{drawn.answer}",
                answer=drawn.answer,
                answer_kind=self.answer_kind,
                subject=f"{self.name}/{level}",
            )

    def check_chain(self, question: str, response: str) -> bool | None:
        """Whether `response` derives the answer of `question` with every step present, in order and right.

        None where `question` is not one of this suite's. Spaces do not count; a step too many or too few does.
        """
        return self.valid_chain(question, response)


def chain_lines(response: str) -> tuple[list[str], str] | None:
    """The step lines of `response` without spaces, and its final answer; None where the answer marker is not last."""
    lines = [line.replace(" ", "") for line in response.strip().split("\n")]
    marker = MARKER.strip()
    if not lines[-1].startswith(marker):
        return None
    return lines[:-1], lines[-1][len(marker) :]


def is_chain(response: str, steps: list[str], answer: str) -> bool:
    """Whether `response` holds exactly `steps`, one a line and in order, then the marker and `answer`."""
    return chain_lines(response) == chain_lines("\n".join([*steps, MARKER + answer]))


def lines_and_answer(response: str) -> tuple[list[str], str]:
    """The step lines of an attempt, and its final answer; "" where it has none."""
    body, _, answer = response.strip().partition(f"\n{MARKER}")
    return body.split("\n"), answer.strip()


def chain_valid(canonical: Draw | None, response: str) -> bool | None:
    """Whether a response is the only right chain, spaces aside; None where there is none (another suite's question)."""
    if canonical is None:
        return None
    return chain_lines(response) == chain_lines(f"{canonical.rationale}\n{MARKER}{canonical.answer}")
