"""Entailment over times told relative to one another; does the hypothesis about the last of them hold?

The verdict is yes, no, or unknown for somebody the text does not tell of. Labels alone could be guessed, so the answer
is the verdict with the last time: a guess is right in about 1 % of the questions. "On the hour" goes to the next full
hour, so the order of the relations matters.
"""

import random
import re

from data.suites.base import Draw, Suite, is_chain

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim", "Kim", "Leo", "Max")
FIRST, LAST = 6 * 60, 22 * 60
"""Minutes of the day between which everybody comes; all times are quarters of an hour."""
UNKNOWN_SHARE = 0.15
"""How often the hypothesis is about somebody the text does not tell of (our choice)."""

_QUESTION = re.compile(r"(\w+) at (\d+:\d\d), (.+)\. Is (\w+) (before|after) (\d+:\d\d)\?")
_RELATION = re.compile(r"(\w+) (?:(\d+) (before|after)|on the hour)")


def written(minutes: int) -> str:
    """Minutes of the day as a clock shows them: `9:05`."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def read(text: str) -> int:
    """Minutes of the day of a clock time."""
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)


def apply(minutes: int, relation: str) -> int:
    """The time that stands in `20 after`, `15 before` or `on the hour` to `minutes`."""
    if relation == "on the hour":
        return (minutes // 60 + 1) * 60
    number, direction = relation.split(" ")
    return minutes + (int(number) if direction == "after" else -int(number))


def _relation(generator: random.Random, minutes: int) -> str:
    while True:
        kind = generator.choice(("after", "after", "before", "before", "on the hour"))
        relation = kind if kind == "on the hour" else f"{15 * generator.randint(1, 3)} {kind}"
        if FIRST <= apply(minutes, relation) < LAST:
            return relation


def verdict(minutes: int, known: bool, direction: str, limit: int) -> str:
    """Whether somebody who comes at `minutes` comes before or after `limit`; unknown where nothing is told."""
    if not known:
        return "unknown"
    return "yes" if (minutes < limit) == (direction == "before") else "no"


def _draw(generator: random.Random, difficulty: int) -> Draw:
    people = generator.sample(NAMES, difficulty + 1)
    start = minutes = generator.randrange(FIRST, LAST, 15)
    relations, lines = [], []
    for person in people[1:]:
        relation = _relation(generator, minutes)
        minutes = apply(minutes, relation)
        relations.append(f"{person} {relation}")
        lines.append(f"{person} {relation}: {written(minutes)}")
    untold = [name for name in NAMES if name not in people]
    known = not untold or generator.random() >= UNKNOWN_SHARE
    direction = generator.choice(("before", "after"))
    limit = minutes + generator.choice((-1, 1)) * 15 * generator.randint(1, 4)
    asked = people[-1] if known else generator.choice(untold)
    question = f"{people[0]} at {written(start)}, {', '.join(relations)}. Is {asked} {direction} {written(limit)}?"
    return Draw(question, "\n".join(lines), f"{verdict(minutes, known, direction, limit)} {written(minutes)}")


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    found = [_RELATION.fullmatch(text) for text in match[3].split(", ")] if match else [None]
    if not all(found):
        return None
    minutes, lines = read(match[2]), []
    for relation in found:
        person, said = relation[1], relation[0].partition(" ")[2]
        minutes = apply(minutes, said)
        lines.append(f"{person} {said}: {written(minutes)}")
    judged = verdict(minutes, match[4] == person, match[5], read(match[6]))
    return is_chain(response, lines, f"{judged} {written(minutes)}")


ENTAILMENT_TIMES = Suite(
    name="entailment_times",
    description="times told relative to one another; the verdict on a hypothesis, with the last time",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw,
    valid_chain=_valid_chain,
)
