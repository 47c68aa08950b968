"""A robot on a board of eight by eight squares: moves and turns, which do not commute, one state a line.

All 256 states are about equally frequent answers. Who knows only the first state can do better: the commonest way from
it to the last is right in 6 % of the questions of three steps, 4 % of five, 1 % of twelve (measured).
"""

import random
import re

from data.suites.base import MARKER, Draw, Suite, chain_lines

COLUMNS = "abcdefgh"
SIZE = len(COLUMNS)
HEADINGS = ("north", "east", "south", "west")
"""In the order of right turns; rows are numbered from 1 in the south."""
TURNS = {"right": 1, "around": 2, "left": 3}
"""Each turn in quarter turns to the right."""
LONGEST = 3

State = tuple[int, int, int]
"""Column and row from 0, and the index of the heading."""

_STATE = r"([a-h]) ([1-8]) (north|east|south|west)"
_QUESTION = re.compile(rf"Robot at {_STATE}: (.+)\. Where now\?")


def move(state: State, step: str) -> State | None:
    """The state after one step, `ahead 2`, `back 1`, `left`, `right` or `around`; None where it leaves the board.

    Raises ValueError for any other text.
    """
    column, row, heading = state
    if step in TURNS:
        return column, row, (heading + TURNS[step]) % 4
    match = re.fullmatch(r"(ahead|back) ([1-9])", step)
    if match is None:
        raise ValueError(f"{step!r} is no step of the robot")
    distance = int(match[2]) if match[1] == "ahead" else -int(match[2])
    column += distance * (0, 1, 0, -1)[heading]
    row += distance * (1, 0, -1, 0)[heading]
    return (column, row, heading) if 0 <= column < SIZE and 0 <= row < SIZE else None


def written(state: State) -> str:
    """A state as text: `c 4 north`."""
    column, row, heading = state
    return f"{COLUMNS[column]} {row + 1} {HEADINGS[heading]}"


def _read(column: str, row: str, heading: str) -> State:
    return COLUMNS.index(column), int(row) - 1, HEADINGS.index(heading)


def _random_step(generator: random.Random, state: State) -> str:
    """A step that stays on the board."""
    while True:
        kind = generator.choice(("ahead", "ahead", "back", *TURNS))
        step = kind if kind in TURNS else f"{kind} {generator.randint(1, LONGEST)}"
        if move(state, step) is not None:
            return step


def _lines(state: State, steps: list[str]) -> list[str] | None:
    """One line a step; None where the robot leaves the board."""
    lines = []
    for number, step in enumerate(steps, start=1):
        after = move(state, step)
        if after is None:
            return None
        state = after
        lines.append(f"{number} {step}: {written(state)}")
    return lines


def _draw(generator: random.Random, difficulty: int) -> Draw:
    state = start = (generator.randrange(SIZE), generator.randrange(SIZE), generator.randrange(4))
    steps = []
    for _ in range(difficulty):
        steps.append(_random_step(generator, state))
        state = move(state, steps[-1])
    numbered = ", ".join(f"{number} {step}" for number, step in enumerate(steps, start=1))
    question = f"Robot at {written(start)}: {numbered}. Where now?"
    return Draw(question, "\n".join(_lines(start, steps)), written(state))


def _valid_chain(question: str, response: str) -> bool | None:
    match = _QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    numbers, steps = zip(*(step.split(" ", 1) for step in match[4].split(", ")))
    if numbers != tuple(map(str, range(1, len(steps) + 1))):
        return None
    wanted = _lines(_read(*match.groups()[:3]), list(steps))
    answer = wanted[-1].partition(": ")[2]
    return chain_lines(response) == chain_lines("\n".join([*wanted, MARKER + answer]))


STATE_TRACKING = Suite(
    name="state_tracking",
    description="a robot on a board through moves and turns that do not commute, one state a line",
    answer_kind="string",
    segmentation="lines",
    default_difficulty=5,
    difficulties=range(1, 13),
    chance=0.01,
    draw=_draw,
    valid_chain=_valid_chain,
)
