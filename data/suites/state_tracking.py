"""Tracked objects: a row of five letters through moves that do not commute, one state a line."""

import random
import re

from data.suites.base import Draw, Suite, chain_lines

LETTERS = "abcdefgh"
LENGTH = 5

_QUESTION = re.compile(r"Row ([a-h]{5}): (.+)\. Row now\?")


def move(row: str, step: str) -> str:
    """The row after one move: `swap x y`, `x first`, `x last` or `flip`. Raises ValueError for any other text."""
    match step.split(" "):
        case ["flip"]:
            return row[::-1]
        case ["swap", x, y]:
            return row.translate(str.maketrans(x + y, y + x))
        case [x, "first"]:
            return x + row.replace(x, "")
        case [x, "last"]:
            return row.replace(x, "") + x
    raise ValueError(f"{step!r} is no move")


def _random_move(generator: random.Random, row: str) -> str:
    """A move that changes the row."""
    while True:
        kind = generator.choice(("swap", "swap", "first", "last", "flip"))
        if kind == "swap":
            x, y = generator.sample(row, 2)
            step = f"swap {x} {y}"
        else:
            step = "flip" if kind == "flip" else f"{generator.choice(row)} {kind}"
        if move(row, step) != row:
            return step


def _draw(generator: random.Random, difficulty: int) -> Draw:
    row = start = "".join(generator.sample(LETTERS, LENGTH))
    moves, states = [], []
    for _ in range(difficulty):
        moves.append(_random_move(generator, row))
        row = move(row, moves[-1])
        states.append(row)
    return Draw(f"Row {start}: {', '.join(moves)}. Row now?", "\n".join(states), row)


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    row, wanted = match[1], []
    for step in match[2].split(", "):
        row = move(row, step)
        wanted.append(row)
    return chain_lines(response) == (wanted, row)


STATE_TRACKING = Suite(
    name="state_tracking",
    description="a row of letters through moves that do not commute, one state a line",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.02,
    draw=_draw,
    valid_chain=_valid_chain,
)
