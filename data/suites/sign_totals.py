"""Plus or minus in front of each number so that they make a total: one solution only, checked by adding up."""

import random
import re
from itertools import product

from data.suites.base import Check, Draw, Mistake, Suite, chain_valid, lines_and_answer

LOW, HIGH = 2, 15
_QUESTION = re.compile(r"Signs: ((?:\d+ )+)is (\d+)\?")


def _totals(numbers: list[int], signs: tuple[str, ...]) -> list[int]:
    totals, total = [], 0
    for number, sign in zip(numbers, signs):
        total += number if sign == "+" else -number
        totals.append(total)
    return totals


def _solutions(numbers: list[int], total: int) -> list[tuple[str, ...]]:
    """The signs that make the total; the first one is a plus, and no running total falls below 0."""
    found = []
    for rest in product("+-", repeat=len(numbers) - 1):
        totals = _totals(numbers, ("+", *rest))
        if totals[-1] == total and min(totals) >= 0:
            found.append(("+", *rest))
    return found


def _written(numbers: list[int], signs: tuple[str, ...]) -> tuple[str, str]:
    lines = [f"{sign} {n}: {total}" for sign, n, total in zip(signs, numbers, _totals(numbers, signs))]
    return "\n".join(lines), " ".join(f"{sign} {n}" for sign, n in zip(signs, numbers))


def _draw(generator: random.Random, difficulty: int) -> Draw:
    while True:
        numbers = [generator.randint(LOW, HIGH) for _ in range(difficulty)]
        signs = ("+", *(generator.choice("+-") for _ in numbers[1:]))
        totals = _totals(numbers, signs)
        if min(totals) >= 0 and "-" in signs and len(_solutions(numbers, totals[-1])) == 1:
            return Draw(f"Signs: {' '.join(map(str, numbers))} is {totals[-1]}?", *_written(numbers, signs))


def _read(question: str) -> tuple[list[int], int] | None:
    match = _QUESTION.fullmatch(question.strip())
    return None if match is None else ([int(n) for n in match[1].split()], int(match[2]))


def _canonical(question: str) -> Draw | None:
    found = _read(question)
    solutions = _solutions(*found) if found else []
    return Draw(question, *_written(found[0], solutions[0])) if len(solutions) == 1 else None


def _mistake(generator: random.Random, question: str) -> Mistake:
    """The other sign at one number, and any signs after it."""
    numbers, total = _read(question)
    right = _solutions(numbers, total)[0]
    while True:
        place = generator.randrange(1, len(numbers))
        other = "-" if right[place] == "+" else "+"
        signs = (*right[:place], other, *(generator.choice("+-") for _ in numbers[place + 1 :]))
        totals = _totals(numbers, signs)
        if min(totals) >= 0 and totals[-1] != total:
            return Mistake(*_written(numbers, signs), place + 1)


def _check(question: str, response: str) -> Check | None:
    """The signed numbers of the answer added up, beside the total that is asked for."""
    found = _read(question)
    lines, answer = lines_and_answer(response)
    signed = re.findall(r"([+-]) (\d+)", answer)
    if found is None or len(lines) != len(found[0]) or " ".join(f"{s} {n}" for s, n in signed) != answer:
        return None
    total, said = 0, []
    for sign, number in signed:
        after = total + int(number) if sign == "+" else total - int(number)
        said.append(f"{total} {sign} {number} = {after}")
        total = after
    held = total == found[1] and [int(n) for _, n in signed] == found[0]
    return Check("\n".join([*said[1:], f"{total} for {found[1]} {'ok' if held else 'bad'}"]), held)


SIGN_TOTALS = Suite(
    name="sign_totals",
    description="a sign in front of each number so that they make the total: early signs need the later numbers",
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
