"""Rule-based deduction: a thing of three properties, and rules that apply in turn to what it has become.

`deduction` has one rule a step; `deduction_conflict` has two that contradict one another, and a preference that says
which of them wins where both apply. The order matters, since a rule may need or destroy what another one made. The
whole description is asked for: 216 answers, none of which is right in 1 % of the questions.
"""

import random
import re
from collections.abc import Sequence

from data.suites.base import Draw, Suite, is_chain

PROPERTIES = (
    ("red", "blue", "green", "white", "black", "grey"),
    ("big", "small", "tall", "tiny", "long", "wide"),
    ("calm", "loud", "shy", "kind", "wild", "glum"),
)
"""Colour, size and mood; a description holds one value of each, in this order."""
NAMES = ("Rex", "Tom", "Zoe", "Pip", "Max", "Kit")
FIRES = 0.55
"""How often a rule's condition is drawn from what holds (our choice)."""

_WHERE = {value: place for place, values in enumerate(PROPERTIES) for value in values}
_QUESTION = re.compile(r"[A-Z][a-z]+ is (\w+) (\w+) (\w+)\. (.+)\. What now\?")
_RULE = re.compile(r"(\d+) (\w+) makes (\w+)")
_PAIR = re.compile(r"(\d+) (\w+) makes (\w+) but (\w+) makes (\w+)")
_PREFERENCES = ". Prefer "
ORDINALS = ("first", "second")

State = tuple[str, str, str]


def changed(state: State, value: str) -> State:
    """The description with one property replaced by `value`."""
    place = _WHERE[value]
    return (*state[:place], value, *state[place + 1 :])


def _other(generator: random.Random, place: int, *without: str) -> str:
    return generator.choice([value for value in PROPERTIES[place] if value not in without])


def _condition(generator: random.Random, state: State, place: int) -> str:
    """A value of the property `place`: the one that holds, in a share FIRES of the draws."""
    return state[place] if generator.random() < FIRES else _other(generator, place, state[place])


def apply(state: State, rules: Sequence[tuple[str, str]], preferred: int = 0) -> tuple[str, State]:
    """What a step of one rule or of two (condition, effect) does: which applied, and the description after it.

    One rule: `yes` or `no`; two: `first`, `second` or `none`, the preferred one where both conditions hold.
    """
    holds = [number for number, (condition, _) in enumerate(rules) if condition in state]
    if not holds:
        return ("no" if len(rules) == 1 else "none"), state
    number = preferred if preferred in holds else holds[0]
    return ("yes" if len(rules) == 1 else ORDINALS[number]), changed(state, rules[number][1])


def _steps(state: State, steps: Sequence[Sequence[tuple[str, str]]], preferred: Sequence[int]) -> list[str]:
    lines = []
    for number, (rules, wins) in enumerate(zip(steps, preferred), start=1):
        which, state = apply(state, rules, wins)
        applied = rules[ORDINALS.index(which) if which in ORDINALS else 0]
        said = which if which == "none" else f"{which} {applied[0]} makes {applied[1]}"
        lines.append(f"{number} {said}: {' '.join(state)}")
    return lines


def _rules(generator: random.Random, state: State, count: int) -> list[tuple[str, str]]:
    """`count` rules with conditions on other properties than their common effect's, and different effects."""
    target, *others = generator.sample(range(3), 3)
    first = _other(generator, target, state[target])
    effects = [first, _other(generator, target, state[target], first)][:count]
    return [(_condition(generator, state, place), effect) for place, effect in zip(others, effects)]


def _draw(generator: random.Random, difficulty: int, count: int) -> Draw:
    start = state = tuple(generator.choice(values) for values in PROPERTIES)
    steps, preferred = [], []
    for _ in range(difficulty):
        steps.append(_rules(generator, state, count))
        preferred.append(generator.randrange(count))
        _, state = apply(state, steps[-1], preferred[-1])
    said = ", ".join(
        f"{number} " + " but ".join(f"{condition} makes {effect}" for condition, effect in rules)
        for number, rules in enumerate(steps, start=1)
    )
    if count == 2:
        said += _PREFERENCES + ", ".join(f"{number} {ORDINALS[wins]}" for number, wins in enumerate(preferred, start=1))
    question = f"{generator.choice(NAMES)} is {' '.join(start)}. {said}. What now?"
    return Draw(question, "\n".join(_steps(start, steps, preferred)), " ".join(state))


def _draw_plain(generator: random.Random, difficulty: int) -> Draw:
    return _draw(generator, difficulty, 1)


def _draw_conflict(generator: random.Random, difficulty: int) -> Draw:
    return _draw(generator, difficulty, 2)


def _valid_chain(question: str, response: str, pattern: re.Pattern[str]) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    said, _, preferences = match[4].partition(_PREFERENCES)
    found = [pattern.fullmatch(text) for text in said.split(", ")]
    if not all(found) or bool(preferences) != (pattern is _PAIR):
        return None
    steps = [list(zip(rule.groups()[1::2], rule.groups()[2::2])) for rule in found]
    preferred = (
        [ORDINALS.index(text.split(" ")[1]) for text in preferences.split(", ")] if preferences else [0] * len(steps)
    )
    wanted = _steps(match.groups()[:3], steps, preferred)
    return is_chain(response, wanted, wanted[-1].partition(": ")[2])


def _valid_plain(question: str, response: str) -> bool | None:
    return _valid_chain(question, response, _RULE)


def _valid_conflict(question: str, response: str) -> bool | None:
    return _valid_chain(question, response, _PAIR)


DEDUCTION = Suite(
    name="deduction",
    description="rules applied in turn to a thing of three properties, without conflict",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw_plain,
    valid_chain=_valid_plain,
)
DEDUCTION_CONFLICT = Suite(
    name="deduction_conflict",
    description="rules in contradicting pairs, with preferences that say which wins",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw_conflict,
    valid_chain=_valid_conflict,
)
