"""Word problems whose rationale is a program: amounts told relative to one another.

Each line needs an amount of an earlier one, so a wrong line spoils those that build on it.
"""

import random
import re

from data.suites.base import Draw, Suite

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim", "Kim", "Leo", "Max")
THINGS = ("Caps", "Cups", "Nuts", "Pens")
LARGEST = 300

_QUESTION = re.compile(r"[A-Z][a-z]+: (.+)\. ([A-Z][a-z]+) and ([A-Z][a-z]+) together\?")
_CLAUSE = re.compile(r"([A-Z][a-z]+) (?:(\d+)|(twice|triple) ([A-Z][a-z]+)|(\d) (over|under) ([A-Z][a-z]+))")
_FACTORS = {"twice": "* 2", "triple": "* 3"}
_SIGNS = {"over": "+", "under": "-"}


def _relation(generator: random.Random, value: int) -> tuple[str, int]:
    """A relation to a known amount, as words before the other's name, and the amount that it gives."""
    while True:
        kind = generator.choice(("twice", "triple", "over", "over", "under", "under"))
        number = generator.randint(2, 9)
        after = {"twice": 2 * value, "triple": 3 * value, "over": value + number, "under": value - number}[kind]
        if 2 <= after <= LARGEST:
            return (kind if kind in _FACTORS else f"{number} {kind}"), after


def _draw(generator: random.Random, difficulty: int) -> Draw:
    people = generator.sample(NAMES, difficulty + 1)
    amounts = [generator.randint(5, 30)]
    clauses = [f"{people[0]} {amounts[0]}"]
    for person in people[1:]:
        known = generator.randrange(len(amounts))
        relation, amount = _relation(generator, amounts[known])
        clauses.append(f"{person} {relation} {people[known]}")
        amounts.append(amount)
    program = [_line(_CLAUSE.fullmatch(clause)) for clause in clauses]
    asked = [difficulty, generator.randrange(difficulty)]
    generator.shuffle(asked)
    first, second = (people[i] for i in asked)
    question = f"{generator.choice(THINGS)}: {', '.join(clauses)}. {first} and {second} together?"
    lines = ["def solution():", *program, f"return {first} + {second}"]
    return Draw(question, "\n ".join(lines), str(sum(amounts[i] for i in asked)))


def _line(clause: re.Match[str]) -> str:
    """The program line of a clause, without indentation."""
    person, amount, factor, scaled, number, sign, shifted = clause.groups()
    if amount:
        return f"{person} = {amount}"
    if factor:
        return f"{person} = {scaled} {_FACTORS[factor]}"
    return f"{person} = {shifted} {_SIGNS[sign]} {number}"


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    clauses = [_CLAUSE.fullmatch(clause) for clause in match[1].split(", ")] if match else [None]
    if any(clause is None for clause in clauses):
        return None
    wanted = {_line(clause).replace(" ", "") for clause in clauses}
    head, *body = [line.replace(" ", "") for line in response.strip().split("\n")]
    if head != "defsolution():" or len(body) != len(wanted) + 1 or set(body[:-1]) != wanted:
        return False
    known: set[str] = set()
    for line in body[:-1]:
        person, _, amount = line.partition("=")
        used = re.match(r"[A-Za-z]+", amount)
        if used and used[0] not in known:
            return False
        known.add(person)
    return body[-1] in (f"return{match[2]}+{match[3]}", f"return{match[3]}+{match[2]}")


PROGRAM_WORDS = Suite(
    name="program_words",
    description="amounts told relative to one another; the rationale is a program, one amount a line",
    answer_kind="program",
    segmentation="code_lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.02,
    draw=_draw,
    valid_chain=_valid_chain,
)
