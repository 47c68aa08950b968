"""The number that a chain of operations was applied to: solved backwards, checked by substitution."""

import random
import re

from data.suites.base import Check, Draw, Mistake, Suite, chain_valid, lines_and_answer

LOW, HIGH, LARGEST = 10, 59, 199
_QUESTION = re.compile(r"x((?: [+*-] \d+,?)+) gives (\d+)\. x\?")
_STEP = re.compile(r"([+*-]) (\d+)")
INVERSE = {"+": "-", "-": "+", "*": "/"}


def apply(value: int, operator: str, operand: int) -> int:
    """The value after one operation; a division that leaves a rest is rounded down."""
    if operator == "+":
        return value + operand
    if operator == "-":
        return value - operand
    return value * operand if operator == "*" else value // operand


def _draw(generator: random.Random, difficulty: int) -> Draw:
    x = generator.randint(LOW, HIGH)
    while True:
        value, steps = x, []
        while len(steps) < difficulty:
            operator = generator.choice("++--*")
            operand = generator.randint(2, 3) if operator == "*" else generator.randint(2, 15)
            after = apply(value, operator, operand)
            if 2 <= after <= LARGEST:
                value = after
                steps.append((operator, operand))
        chain = ", ".join(f"{operator} {operand}" for operator, operand in steps)
        return _canonical(f"x {chain} gives {value}. x?")


def _read(question: str) -> tuple[list[tuple[str, int]], int] | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    return [(operator, int(operand)) for operator, operand in _STEP.findall(match[1])], int(match[2])


def _backwards(steps: list[tuple[str, int]], value: int) -> tuple[list[str], int]:
    lines = []
    for operator, operand in reversed(steps):
        after = apply(value, INVERSE[operator], operand)
        lines.append(f"{value} {INVERSE[operator]} {operand} = {after}")
        value = after
    return lines, value


def _canonical(question: str) -> Draw | None:
    found = _read(question)
    if found is None:
        return None
    lines, x = _backwards(*found)
    return Draw(question, "\n".join(lines), str(x))


def _mistake(generator: random.Random, question: str) -> Mistake:
    """One wrong result, or an operation not inverted, with which the rest goes on."""
    steps, value = _read(question)
    while True:
        lines, _ = _backwards(steps, value)
        place = generator.randrange(len(steps))
        operator, operand = steps[len(steps) - 1 - place]
        before = int(lines[place].split(" ")[0])
        if operator != "*" and generator.random() < 0.5:
            used, after = operator, apply(before, operator, operand)
        else:
            used = INVERSE[operator]
            after = apply(before, used, operand) + generator.choice((-10, -2, -1, 1, 2, 10))
        rest, x = _backwards(steps[: len(steps) - 1 - place], after)
        if 0 < after <= LARGEST and x > 0 and str(x) != _canonical(question).answer:
            return Mistake(
                "\n".join([*lines[:place], f"{before} {used} {operand} = {after}", *rest]), str(x), place + 1
            )


def _check(question: str, response: str) -> Check | None:
    """The answer put through the chain, and its end beside the one that is asked for."""
    found = _read(question)
    _, answer = lines_and_answer(response)
    if found is None or not answer.isdigit():
        return None
    steps, wanted = found
    value, said = int(answer), []
    for operator, operand in steps:
        after = apply(value, operator, operand)
        said.append(f"{value} {operator} {operand} = {after}")
        value = after
    return Check("\n".join([*said, f"{value} for {wanted} {'ok' if value == wanted else 'bad'}"]), value == wanted)


INVERSE_CHAINS = Suite(
    name="inverse_chains",
    description="an equation in one unknown: the operations are undone from the last, checked by substitution",
    answer_kind="number",
    segmentation="lines",
    default_difficulty=4,
    difficulties=range(1, 13),
    chance=1 / (HIGH - LOW + 1),
    draw=_draw,
    valid_chain=lambda question, response: chain_valid(_canonical(question), response),
    mistake=_mistake,
    check=_check,
)
