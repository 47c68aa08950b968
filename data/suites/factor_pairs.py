"""Numbers taken apart into two factors: hard to find, checked by multiplying. One number a line."""

import random
import re

from data.suites.base import Check, Draw, Mistake, Suite, chain_valid, lines_and_answer

LOW, HIGH = 2, 19
_ALL = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1)]
FACTORS = {
    n: (a, b) for n, (a, b) in {a * b: (a, b) for a, b in _ALL}.items() if [x * y for x, y in _ALL].count(n) == 1
}
"""Number → its only two factors from LOW to HIGH."""
_NUMBERS = sorted(FACTORS)
_QUESTION = re.compile(r"Factors of ((?:\d+ )*\d+)\?")
_LINE = re.compile(r"(\d+) = (\d+) \* (\d+)")


def _draw(generator: random.Random, difficulty: int) -> Draw:
    numbers = [generator.choice(_NUMBERS) for _ in range(difficulty)]
    return _canonical(f"Factors of {' '.join(map(str, numbers))}?")


def _written(numbers: list[int], pairs: list[tuple[int, int]]) -> tuple[str, str]:
    return "\n".join(f"{n} = {a} * {b}" for n, (a, b) in zip(numbers, pairs)), " ".join(str(a) for a, _ in pairs)


def _read(question: str) -> list[int] | None:
    match = _QUESTION.fullmatch(question.strip())
    numbers = [int(n) for n in match[1].split()] if match else []
    return numbers if numbers and all(n in FACTORS for n in numbers) else None


def _canonical(question: str) -> Draw | None:
    numbers = _read(question)
    return None if numbers is None else Draw(question, *_written(numbers, [FACTORS[n] for n in numbers]))


def _mistake(generator: random.Random, question: str) -> Mistake:
    """A factor that is near the right one, beside a plausible other."""
    numbers = _read(question)
    pairs = [FACTORS[n] for n in numbers]
    place = generator.randrange(len(numbers))
    number, a = numbers[place], pairs[place][0]
    while True:
        c = a + generator.choice((-2, -1, 1, 2))
        d = max(c, round(number / c) + generator.choice((-1, 0, 0, 1))) if c >= LOW else 0
        if d and c * d != number:
            pairs[place] = (c, d)
            return Mistake(*_written(numbers, pairs), place + 1)


def _check(question: str, response: str) -> Check | None:
    """Every pair multiplied; the first that is wrong ends it."""
    numbers = _read(question)
    lines, answer = lines_and_answer(response)
    matches = [_LINE.fullmatch(line) for line in lines]
    if numbers is None or len(matches) != len(numbers) or not all(matches):
        return None
    said = []
    for number, match in zip(numbers, matches):
        a, b = int(match[2]), int(match[3])
        right = a * b == number == int(match[1])
        said.append(f"{a} * {b} = {a * b} for {number} {'ok' if right else 'bad'}")
        if not right:
            return Check("\n".join(said), False)
    return Check("\n".join(said), answer == " ".join(match[2] for match in matches))


FACTOR_PAIRS = Suite(
    name="factor_pairs",
    description="numbers taken apart into their two factors, checked by multiplying",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=3,
    difficulties=range(2, 9),
    chance=0.01,
    draw=_draw,
    valid_chain=lambda question, response: chain_valid(_canonical(question), response),
    mistake=_mistake,
    check=_check,
)
