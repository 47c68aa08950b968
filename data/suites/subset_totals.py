"""Which of some numbers make a total: take or skip, one number a line. One solution only; the check is one addition."""

import random
import re
from itertools import product

from data.suites.base import Check, Draw, Mistake, Suite, chain_valid, lines_and_answer

LOW, HIGH = 2, 19
_QUESTION = re.compile(r"((?:\d+ )+)make (\d+)\?")
_LINE = re.compile(r"(take|skip) (\d+): (\d+)")


def _solutions(numbers: list[int], total: int) -> list[tuple[bool, ...]]:
    return [
        taken
        for taken in product((True, False), repeat=len(numbers))
        if sum(n for n, yes in zip(numbers, taken) if yes) == total
    ]


def _written(numbers: list[int], taken: tuple[bool, ...]) -> tuple[str, str]:
    """The lines of a choice with running totals, and its answer."""
    lines, total = [], 0
    for number, yes in zip(numbers, taken):
        total += number if yes else 0
        lines.append(f"{'take' if yes else 'skip'} {number}: {total}")
    return "\n".join(lines), " ".join(str(n) for n, yes in zip(numbers, taken) if yes)


def _draw(generator: random.Random, difficulty: int) -> Draw:
    while True:
        numbers = generator.sample(range(LOW, HIGH + 1), difficulty)
        taken = tuple(generator.random() < 0.5 for _ in numbers)
        total = sum(n for n, yes in zip(numbers, taken) if yes)
        if 1 < sum(taken) < difficulty and len(_solutions(numbers, total)) == 1:
            return Draw(f"{' '.join(map(str, numbers))} make {total}?", *_written(numbers, taken))


def _read(question: str) -> tuple[list[int], int] | None:
    match = _QUESTION.fullmatch(question.strip())
    return None if match is None else ([int(n) for n in match[1].split()], int(match[2]))


def _canonical(question: str) -> Draw | None:
    found = _read(question)
    solutions = _solutions(*found) if found else []
    return Draw(question, *_written(found[0], solutions[0])) if len(solutions) == 1 else None


def _mistake(generator: random.Random, question: str) -> Mistake:
    """Another choice from one number on: what follows it is drawn at random."""
    numbers, total = _read(question)
    right = _solutions(numbers, total)[0]
    while True:
        place = generator.randrange(len(numbers))
        rest = tuple(generator.random() < 0.5 for _ in numbers[place + 1 :])
        taken = (*right[:place], not right[place], *rest)
        if any(taken):
            return Mistake(*_written(numbers, taken), place + 1)


def _check(question: str, response: str) -> Check | None:
    """The numbers of the answer added up, beside the total that is asked for."""
    found = _read(question)
    lines, answer = lines_and_answer(response)
    if found is None or not re.fullmatch(r"\d+(?: \d+)*", answer) or len(lines) != len(found[0]):
        return None
    chosen, said, total = [int(n) for n in answer.split()], [], 0
    for number in chosen:
        if total:
            said.append(f"{total} + {number} = {total + number}")
        total += number
    held = total == found[1] and _known(chosen, found[0])
    return Check("\n".join([*said, f"{total} for {found[1]} {'ok' if held else 'bad'}"]), held)


def _known(chosen: list[int], numbers: list[int]) -> bool:
    """Whether the chosen numbers are given ones, each once and in their order."""
    return [n for n in numbers if n in chosen] == chosen


SUBSET_TOTALS = Suite(
    name="subset_totals",
    description="which of the numbers make the total: a search in which early choices need the later ones",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(3, 9),
    chance=0.01,
    draw=_draw,
    valid_chain=lambda question, response: chain_valid(_canonical(question), response),
    mistake=_mistake,
    check=_check,
)
