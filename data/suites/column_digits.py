"""Sums and differences of long numbers, written from the left: whether a column carries is not known when its digit is
written. Checking goes from the right, one column at a time, and is easy.
"""

import random
import re

from data.suites.base import Check, Draw, Mistake, Suite, chain_valid, lines_and_answer

_QUESTION = re.compile(r"((?:\d )+)([+-])((?: \d)+)\?")
_LINE = re.compile(r"(\d) (\d): (\d)")


def digits(value: int, width: int) -> list[int]:
    """The digits of a number from the left, with zeros in front."""
    return [int(character) for character in str(value).zfill(width)]


def _lines(a: list[int], b: list[int], result: list[int]) -> list[str]:
    return [f"{x} {y}: {z}" for x, y, z in zip(a, b, result)]


def _number(found: list[int]) -> int:
    return int("".join(map(str, found)))


def _read(question: str) -> tuple[list[int], str, list[int]] | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    a, b = ([int(d) for d in part.split()] for part in (match[1], match[3]))
    return (a, match[2], b) if len(a) == len(b) else None


def _result(a: list[int], sign: str, b: list[int]) -> list[int]:
    value = _number(a) + (_number(b) if sign == "+" else -_number(b))
    return digits(value, len(a))


def _drawn(sign: str, generator: random.Random, difficulty: int) -> Draw:
    while True:
        a, b = ([generator.randint(0, 9) for _ in range(difficulty)] for _ in range(2))
        value = _number(a) + (_number(b) if sign == "+" else -_number(b))
        plain = [x + y if sign == "+" else x - y for x, y in zip(a, b)]
        if 0 <= value < 10**difficulty and a[0] and any(not 0 <= column <= 9 for column in plain):
            break
    result = digits(value, difficulty)
    question = f"{' '.join(map(str, a))} {sign} {' '.join(map(str, b))}?"
    return Draw(question, "\n".join(_lines(a, b, result)), " ".join(map(str, result)))


def draw_sum(generator: random.Random, difficulty: int) -> Draw:
    """A sum with at least one carry and as many digits as its terms."""
    return _drawn("+", generator, difficulty)


def draw_difference(generator: random.Random, difficulty: int) -> Draw:
    """A difference of at least 0 with at least one borrow."""
    return _drawn("-", generator, difficulty)


def _canonical(question: str) -> Draw | None:
    found = _read(question)
    if found is None:
        return None
    a, sign, b = found
    result = _result(a, sign, b)
    return Draw(question, "\n".join(_lines(a, b, result)), " ".join(map(str, result)))


def _mistake(generator: random.Random, question: str) -> Mistake:
    """A column whose carry or borrow was forgotten or invented, sometimes the one before it as well."""
    a, sign, b = _read(question)
    result = _result(a, sign, b)
    place = generator.randrange(len(result))
    wrong = list(result)
    for column in range(place, min(len(result), place + generator.choice((1, 1, 2)))):
        wrong[column] = (wrong[column] + generator.choice((-1, 1))) % 10
    return Mistake("\n".join(_lines(a, b, wrong)), " ".join(map(str, wrong)), place + 1)


def _check(question: str, response: str) -> Check | None:
    """Column by column from the right; the first that is wrong ends it."""
    found = _read(question)
    if found is None:
        return None
    a, sign, b = found
    lines, _ = lines_and_answer(response)
    matches = [_LINE.fullmatch(line) for line in lines]
    if len(matches) != len(a) or not all(matches):
        return None
    said, carry = [], 0
    for x, y, match in reversed(list(zip(a, b, matches))):
        value = x + y + carry if sign == "+" else x - y - carry
        total = f"{x} {sign} {y}" + (f" {sign} 1" if carry else "")
        if sign == "-" and value < 0:
            total += f" = {value + 10} from 1{x}"
        else:
            total += f" = {value}"
        right = (int(match[1]), int(match[2]), int(match[3])) == (x, y, value % 10)
        said.append(f"{total}, {match[3]} {'ok' if right else 'bad'}")
        carry = int(not 0 <= value <= 9)
        if not right:
            return Check("\n".join(said), False)
    return Check("\n".join(said), True)


def _suite(name: str, description: str, draw) -> Suite:
    return Suite(
        name=name,
        description=description,
        answer_kind="string",
        segmentation="lines",
        default_difficulty=5,
        difficulties=range(3, 13),
        chance=0.01,
        draw=draw,
        valid_chain=lambda question, response: chain_valid(_canonical(question), response),
        mistake=_mistake,
        check=_check,
    )


CARRY_SUMS = _suite(
    "carry_sums", "long sums written from the left: each digit needs the carries to its right", draw_sum
)
BORROW_DIFFERENCES = _suite(
    "borrow_differences", "long differences written from the left: each digit needs the borrows to its right",
    draw_difference,
)  # fmt: skip
