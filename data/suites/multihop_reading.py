"""Multi-hop reading: who is reached from somebody through a chain of relations in a passage, and where they live.

The answer is the homes of the last three people on the way (fewer in shorter chains), in order: with six people in the
passage a blind guess is right in under 1 % from three hops on. The relations do not commute.
"""

import random
import re

from data.suites.base import Draw, Suite, is_chain

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim", "Kim", "Leo")
CITIES = ("Rome", "Oslo", "Bern", "Kiev", "Lima", "Cairo", "Paris", "Tunis", "Delhi", "Quito", "Riga", "Nice")
RELATIONS = ("boss", "friend")
PEOPLE = 6
ASKED = 3
"""How many homes the answer holds."""

_QUESTION = re.compile(r"(.+)\. From (\w+): ([a-z, ]+)\. Homes\?")
_PERSON = re.compile(r"(\w+) in (\w+), boss (\w+), friend (\w+)")


def _steps(homes: dict[str, str], links: dict[tuple[str, str], str], first: str, hops: list[str]) -> list[str]:
    lines, person = [], first
    for hop in hops:
        other = links[person, hop]
        lines.append(f"{person} {hop} {other}: {homes[other]}")
        person = other
    return lines


def _answer(lines: list[str]) -> str:
    return " ".join(line.rpartition(" ")[2] for line in lines[-ASKED:])


def _draw(generator: random.Random, difficulty: int) -> Draw:
    people = generator.sample(NAMES, PEOPLE)
    homes = dict(zip(people, generator.sample(CITIES, PEOPLE)))
    links = {}
    for person in people:
        others = generator.sample([name for name in people if name != person], len(RELATIONS))
        links |= {(person, relation): other for relation, other in zip(RELATIONS, others)}
    first = generator.choice(people)
    hops = [generator.choice(RELATIONS) for _ in range(difficulty)]
    lines = _steps(homes, links, first, hops)
    passage = ". ".join(
        f"{person} in {homes[person]}, boss {links[person, 'boss']}, friend {links[person, 'friend']}"
        for person in people
    )
    return Draw(f"{passage}. From {first}: {', '.join(hops)}. Homes?", "\n".join(lines), _answer(lines))


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    found = [_PERSON.fullmatch(text) for text in match[1].split(". ")] if match else [None]
    if not all(found):
        return None
    homes = {person[1]: person[2] for person in found}
    links = {(person[1], relation): person[3 + i] for person in found for i, relation in enumerate(RELATIONS)}
    lines = _steps(homes, links, match[2], match[3].split(", "))
    return is_chain(response, lines, _answer(lines))


MULTIHOP_READING = Suite(
    name="multihop_reading",
    description="relations followed through a passage of six people; the homes of the last three on the way",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw,
    valid_chain=_valid_chain,
)
