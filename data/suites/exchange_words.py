"""Arithmetic word problems in prose, the second kind: two people's amounts, given, swapped, doubled and halved.

Each line repeats an event and holds both amounts after it, and both are asked for, so that a guess is right in under
1 % of the questions (measured).
"""

import random
import re

from data.suites.base import MONTHS, Draw, Suite, is_chain

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Ida")
THINGS = ("pens", "cups", "caps", "nuts")
LOW, HIGH = 2, 30
TRIED = 200
"""Events drawn in a row that cannot happen before the whole story is drawn again (our choice)."""

_QUESTION = re.compile(r"([A-Z][a-z]+) has (\d+) [a-z]+, ([A-Z][a-z]+) (\d+)\. (.+)\. How many each\?")

Amounts = tuple[int, int]


def apply(names: tuple[str, str], amounts: Amounts, event: str) -> Amounts | None:
    """The amounts after an event; None where it cannot happen: an odd half, too few, or an amount beyond the range.

    Raises ValueError for a text that is no event of these two people.
    """
    if event == "both swap":
        return amounts[1], amounts[0]
    who, verb, *number = event.split(" ")
    if (
        who not in names
        or verb not in ("gives", "buys", "doubles", "halves")
        or (verb in ("gives", "buys")) != bool(number)
    ):
        raise ValueError(f"{event!r} is no event of {names[0]} and {names[1]}")
    place = names.index(who)
    mine, other = amounts[place], amounts[1 - place]
    if verb == "doubles":
        mine *= 2
    elif verb == "halves":
        if mine % 2:
            return None
        mine //= 2
    else:
        n = int(number[0])
        mine, other = (mine - n, other + n) if verb == "gives" else (mine + n, other)
    if not all(LOW <= amount <= HIGH for amount in (mine, other)):
        return None
    return (mine, other) if place == 0 else (other, mine)


def _event(generator: random.Random, names: tuple[str, str], amounts: Amounts) -> tuple[str, Amounts] | None:
    """An event that can happen, and the amounts after it; None where hardly any can (both at the top)."""
    for _ in range(TRIED):
        verb = generator.choice(("gives", "gives", "buys", "doubles", "halves", "swap"))
        event = "both swap" if verb == "swap" else f"{generator.choice(names)} {verb}"
        if verb in ("gives", "buys"):
            event += f" {generator.randint(2, 9)}"
        after = apply(names, amounts, event)
        if after is not None and after != amounts:
            return event, after
    return None


def _steps(names: tuple[str, str], amounts: Amounts, events: list[str]) -> list[str] | None:
    lines = []
    for month, event in zip(MONTHS, events):
        amounts = apply(names, amounts, event)
        if amounts is None:
            return None
        lines.append(f"{month} {event}: {amounts[0]} {amounts[1]}")
    return lines


def _draw(generator: random.Random, difficulty: int) -> Draw:
    names = tuple(generator.sample(NAMES, 2))
    start = amounts = (generator.randint(5, 25), generator.randint(5, 25))
    events = []
    while len(events) < difficulty:
        found = _event(generator, names, amounts)
        if found is None:
            events, amounts = [], start
            continue
        events.append(found[0])
        amounts = found[1]
    dated = ", ".join(f"{month} {event}" for month, event in zip(MONTHS, events))
    question = f"{names[0]} has {start[0]} {generator.choice(THINGS)}, {names[1]} {start[1]}. {dated}. How many each?"
    return Draw(question, "\n".join(_steps(names, start, events)), f"{amounts[0]} {amounts[1]}")


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    names, start = (match[1], match[3]), (int(match[2]), int(match[4]))
    events = [event.partition(" ")[2] for event in match[5].split(", ")]
    wanted = _steps(names, start, events)
    return is_chain(response, wanted, wanted[-1].partition(": ")[2])


EXCHANGE_WORDS = Suite(
    name="exchange_words",
    description="word problems in prose: two people's amounts given, swapped, doubled and halved, one event a line",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw,
    valid_chain=_valid_chain,
)
