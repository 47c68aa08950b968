"""Arithmetic word problems in prose: one quantity through the events of several months, each line its month's sum.

Drawn backwards from the answer, so that the answer is uniform over 10 to 59 whatever the difficulty.
"""

import random
import re

from data.suites.base import MARKER, MONTHS, Draw, Suite, chain_lines

LOW, HIGH = 10, 59
NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Ida")
THINGS = ("pens", "cups", "caps", "nuts")
VERBS = {"+": ("buys", "finds", "gets"), "-": ("drops", "loses", "sells")}
SCALES = {"doubles them": ("*", 2), "halves them": ("/", 2)}
SCALE_SHARE = 0.35
"""How often an event doubles or halves where it can (our choice)."""

_QUESTION = re.compile(r"[A-Z][a-z]+ has (\d+) [a-z]+\. (.+)\. How many now\?")
_EVENT = {verb: operator for operator, verbs in VERBS.items() for verb in verbs}


def apply(value: int, operator: str, operand: int) -> int:
    """The quantity after one event."""
    if operator == "+":
        return value + operand
    if operator == "-":
        return value - operand
    return value * operand if operator == "*" else value // operand


def _step_back(generator: random.Random, value: int) -> tuple[int, str]:
    """A quantity and an event that leads from it to `value`."""
    scales = []
    if value % 2 == 0 and value // 2 >= LOW:
        scales.append((value // 2, "doubles them"))
    if value * 2 <= HIGH:
        scales.append((value * 2, "halves them"))
    if scales and generator.random() < SCALE_SHARE:
        return generator.choice(scales)
    while True:
        operator = generator.choice("+-")
        operand = generator.randint(2, 6)
        before = value - operand if operator == "+" else value + operand
        if LOW <= before <= HIGH:
            return before, f"{generator.choice(VERBS[operator])} {operand}"


def _draw(generator: random.Random, difficulty: int) -> Draw:
    answer = generator.randint(LOW, HIGH)
    while True:
        value, events = answer, []
        for _ in range(difficulty):
            value, event = _step_back(generator, value)
            events.append(event)
        events.reverse()
        # A doubling or halving after the first event makes the order matter. No second event of two can be one where
        # the answer is odd and above half of HIGH.
        if difficulty < 3 or any(event in SCALES for event in events[1:]):
            break
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    dated = ", ".join(f"{month} {event}" for month, event in zip(MONTHS, events))
    question = f"{name} has {value} {thing}. {dated}. How many now?"
    return Draw(question, "\n".join(_steps(value, events)), str(answer))


def _steps(value: int, events: list[str]) -> list[str]:
    steps = []
    for month, event in zip(MONTHS, events):
        if event in SCALES:
            operator, operand = SCALES[event]
        else:
            verb, number = event.split(" ")
            operator, operand = _EVENT[verb], int(number)
        after = apply(value, operator, operand)
        steps.append(f"{month} {value} {operator} {operand} = {after}")
        value = after
    return steps


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    dated = [event.partition(" ") for event in match[2].split(", ")]
    if [month for month, _, _ in dated] != list(MONTHS[: len(dated)]):
        return None
    wanted = _steps(int(match[1]), [event for _, _, event in dated])
    return chain_lines(response) == chain_lines("\n".join([*wanted, MARKER + wanted[-1].rpartition(" ")[2]]))


ARITHMETIC_WORDS = Suite(
    name="arithmetic_words",
    description="word problems in prose: one quantity through several events, one calculation a line",
    answer_kind="number",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=1 / (HIGH - LOW + 1),
    draw=_draw,
    valid_chain=_valid_chain,
)
