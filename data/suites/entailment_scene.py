"""Entailment over a scene that changes: three people move and follow one another; does the hypothesis hold at the end?

The verdict is yes, no or unknown, as in natural language inference. Three labels could be guessed in a third of the
questions, so the answer is the verdict with where each person is: a guess is right in under 1 %. Who only joins others
depends on where they are by then, so the order of events matters.
"""

import random
import re

from data.suites.base import Draw, Suite, is_chain

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay")
PLACES = ("hall", "park", "shed", "yard", "barn", "cave", "lake", "farm", "shop", "dock")
AWAY = "away"
"""Where somebody is who left: nobody knows."""

_QUESTION = re.compile(r"(\w+) in (\w+), (\w+) in (\w+), (\w+) in (\w+)\. (.+)\. Is (\w+) in (\w+)\?")

Places = dict[str, str]


def apply(places: Places, event: str) -> Places:
    """Where everyone is after `A to hall`, `A joins B`, `A leaves` or `A swaps B`.

    Raises ValueError for other texts.
    """
    who, verb, *rest = event.split(" ")
    if verb == "leaves" and not rest:
        return places | {who: AWAY}
    if verb == "to" and len(rest) == 1:
        return places | {who: rest[0]}
    if verb in ("joins", "swaps") and len(rest) == 1 and rest[0] in places:
        moved = {who: places[rest[0]]}
        return places | moved | ({rest[0]: places[who]} if verb == "swaps" else {})
    raise ValueError(f"{event!r} is no event of this scene")


def verdict(places: Places, who: str, place: str) -> str:
    """Whether the scene entails that `who` is in `place`: yes, no, or unknown for somebody who left."""
    if places[who] == AWAY:
        return "unknown"
    return "yes" if places[who] == place else "no"


def _event(generator: random.Random, places: Places) -> str:
    while True:
        who, other = generator.sample(sorted(places), 2)
        kind = generator.choices(("to", "joins", "swaps", "leaves"), (4, 3, 3, 1))[0]
        event = {
            "to": f"{who} to {generator.choice(PLACES)}",
            "joins": f"{who} joins {other}",
            "swaps": f"{who} swaps {other}",
            "leaves": f"{who} leaves",
        }[kind]
        if apply(places, event) != places:
            return event


def _steps(places: Places, events: list[str]) -> tuple[list[str], Places]:
    lines = []
    for number, event in enumerate(events, start=1):
        places = apply(places, event)
        lines.append(f"{number} {event}: {' '.join(places.values())}")
    return lines, places


def _draw(generator: random.Random, difficulty: int) -> Draw:
    start = places = dict(zip(generator.sample(NAMES, 3), generator.sample(PLACES, 3)))
    events: list[str] = []
    for _ in range(difficulty):
        events.append(_event(generator, places))
        places = apply(places, events[-1])
    who = generator.choice(list(places))
    there = places[who] != AWAY and generator.random() < 0.5
    place = places[who] if there else generator.choice([p for p in PLACES if p != places[who]])
    lines, _ = _steps(start, events)
    said = ", ".join(f"{number} {event}" for number, event in enumerate(events, start=1))
    scene = ", ".join(f"{name} in {where}" for name, where in start.items())
    answer = f"{verdict(places, who, place)} {' '.join(places.values())}"
    return Draw(f"{scene}. {said}. Is {who} in {place}?", "\n".join(lines), answer)


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    groups = match.groups()
    events = [event.partition(" ")[2] for event in groups[6].split(", ")]
    lines, places = _steps(dict(zip(groups[0:6:2], groups[1:6:2])), events)
    return is_chain(response, lines, f"{verdict(places, groups[7], groups[8])} {' '.join(places.values())}")


ENTAILMENT_SCENE = Suite(
    name="entailment_scene",
    description="three people move and follow one another; the verdict on a hypothesis, with where everyone is",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw,
    valid_chain=_valid_chain,
)
