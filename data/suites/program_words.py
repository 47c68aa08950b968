"""Word problems whose rationale is a program: amounts told relative to one another, out of order.

Each line needs the one amount that follows from those already known, so a wrong turn spoils all later lines.
"""

import random
import re
from itertools import pairwise

from data.suites.base import Draw, Suite

NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim", "Kim", "Leo", "Max")
THINGS = ("Caps", "Cups", "Nuts", "Pens")
LARGEST = 300

_QUESTION = re.compile(r"[A-Z][a-z]+: (.+)\. ([A-Z][a-z]+) and ([A-Z][a-z]+) together\?")
_CLAUSE = re.compile(r"([A-Z][a-z]+) (?:(\d+)|(twice|triple) ([A-Z][a-z]+)|(\d) (over|under) ([A-Z][a-z]+))")
_FACTORS = {"twice": "*2", "triple": "*3"}
_SIGNS = {"over": "+", "under": "-"}


def variable(name: str) -> str:
    """The program's name for a person: the initial."""
    return name[0].lower()


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
    for known, person in pairwise(people):
        relation, amount = _relation(generator, amounts[-1])
        clauses.append(f"{person} {relation} {known}")
        amounts.append(amount)
    program = [_line(_CLAUSE.fullmatch(clause)) for clause in clauses]
    asked = [difficulty, generator.randrange(difficulty)]
    generator.shuffle(asked)
    generator.shuffle(clauses)
    first, second = (people[i] for i in asked)
    question = f"{generator.choice(THINGS)}: {', '.join(clauses)}. {first} and {second} together?"
    lines = ["def solution():", *program, f"return {variable(first)}+{variable(second)}"]
    return Draw(question, "\n ".join(lines), str(sum(amounts[i] for i in asked)))


def _line(clause: re.Match[str]) -> str:
    """The program line of a clause, without indentation."""
    person, amount, factor, scaled, number, sign, shifted = clause.groups()
    if amount:
        return f"{variable(person)}={amount}"
    if factor:
        return f"{variable(person)}={variable(scaled)}{_FACTORS[factor]}"
    return f"{variable(person)}={variable(shifted)}{_SIGNS[sign]}{number}"


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    clauses = [_CLAUSE.fullmatch(clause) for clause in match[1].split(", ")] if match else [None]
    if any(clause is None for clause in clauses):
        return None
    wanted = {_line(clause) for clause in clauses}
    head, *body = [line.replace(" ", "") for line in response.strip().split("\n")]
    if head != "defsolution():" or len(body) != len(wanted) + 1 or set(body[:-1]) != wanted:
        return False
    known: set[str] = set()
    for line in body[:-1]:
        used = line[2]
        if used.isalpha() and used not in known:
            return False
        known.add(line[0])
    pair = variable(match[2]), variable(match[3])
    return body[-1] in (f"return{pair[0]}+{pair[1]}", f"return{pair[1]}+{pair[0]}")


PROGRAM_WORDS = Suite(
    name="program_words",
    description="amounts told relative to one another, out of order; the rationale is a program, one amount a line",
    answer_kind="program",
    segmentation="code_lines",
    default_difficulty=4,
    difficulties=range(1, 13),
    chance=0.02,
    draw=_draw,
    valid_chain=_valid_chain,
)
