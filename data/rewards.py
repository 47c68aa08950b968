"""The outcome reward of completions, and the user's own reward functions with TRL's contract."""

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

from data.errors import UserError
from data.grading import Grade, grade
from data.settings import RewardSettings

UNREADABLE_GOLD = "bad_gold"
LARGEST_REWARD = 1e6
"""Largest size of a user's reward (our choice): float32 tells steps of 0.1 apart and squares of it still add up."""
_PARTIAL_KINDS = frozenset({"number", "math", "program"})


@dataclass(frozen=True)
class Scored:
    """One completion's reward.

    `reward` is the sum of `parts`, None where it is unscorable (left out of the group's baseline); `parts` are named
    "outcome" and by the user's functions; `correct`, `parsed` and `reason` are the grader's.
    """

    reward: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    correct: bool = False
    parsed: str | None = None
    reason: str = ""


def load_function(path: str) -> Callable:
    """The reward function at an import path `package.module:function`; UserError where it cannot be had."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"reward function {path!r}: write it as package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"reward function {path!r}: cannot import {module_name} ({error}); is it on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise UserError(
            f"reward function {path!r}: importing {module_name} raised {type(error).__name__}: {error}; mend the module"
        ) from error
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UserError(f"reward function {path!r}: {module_name} has no callable {name}")
    return function


_load_once = lru_cache(maxsize=None)(load_function)


def _outcome(result: Grade, kind: str, partial: float) -> float | None:
    """The published rule: partial rewards are for mathematical answers; labels and choices are strictly 0 or 1."""
    if result.reason == UNREADABLE_GOLD:
        return None
    if result.correct:
        return 1.0
    return partial if kind in _PARTIAL_KINDS and result.reason == "wrong" and result.parsed is not None else 0.0


def _values(path: str, prompts: list, completions: list, columns: dict[str, list]) -> list:
    """What a user's function gives for all completions: as many values. Raises what may pass (OSError) as it is."""
    function = _load_once(path)
    columns = {"prompts": prompts, "completions": completions, **columns}
    given = {name: list(column) for name, column in columns.items()}  # copies: what is graded cannot be changed
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise UserError(
            f"reward function {path!r} cannot be called with {', '.join(given)} by name ({error}): "
            "name those that it reads and end its parameters with **columns"
        ) from error
    except ValueError:
        pass  # a function of a C library, which does not say what it takes
    try:
        values = function(**given)
        if inspect.isgenerator(values):
            values = list(values)  # its code runs only here
    except (UserError, OSError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"reward function {path!r} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}): "
            "mend it, or let it return None for what it cannot score"
        ) from error
    if inspect.isawaitable(values):
        if inspect.iscoroutine(values):
            values.close()
        raise UserError(f"reward function {path!r} is asynchronous: give a plain function")
    if values is None or isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__"):
        raise UserError(
            f"reward function {path!r} gave {type(values).__name__}: return a list with one value for each completion"
        )
    values = list(values)
    if len(values) != len(completions):
        raise UserError(
            f"reward function {path!r} gave {len(values)} values for {len(completions)} completions: one each"
        )
    return values


def _call(path: str, prompts: list, completions: list, columns: dict[str, list]) -> list[float | None]:
    """One user function over all completions, its result checked: numbers up to `LARGEST_REWARD`, or None."""
    checked = []
    for row, value in enumerate(_values(path, prompts, completions, columns)):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward function {path!r}, row {row}: {value!r} is neither a number nor None") from error
        if number is not None and not math.isfinite(number):
            raise UserError(
                f"reward function {path!r}, row {row}: {number} is not finite; return None where unscorable"
            )
        if number is not None and abs(number) > LARGEST_REWARD:
            raise UserError(
                f"reward function {path!r}, row {row}: {number} is beyond ±{LARGEST_REWARD:g}, where float32 no longer "
                "tells rewards apart; scale it, or return None where unscorable"
            )
        checked.append(number)
    return checked


def difficulty_weight(kind: str, revealed_steps: int, total_steps: int) -> float:
    """Weight of a reward by how far from the answer its rollout started (R³'s ablation).

    `none` 1; `linear` the share of steps that are not revealed; `square` its square. From the question it is 1.
    """
    if kind == "none":
        return 1.0
    return ((total_steps - revealed_steps) / total_steps) ** (2 if kind == "square" else 1)


def score(
    prompts: list,
    completions: list[str],
    columns: dict[str, list],
    settings: RewardSettings,
    graded: list[str] | None = None,
) -> list[Scored]:
    """Rewards of completions, all lists of one length B. `graded` are the texts to grade; None: the completions.

    `columns` holds at least `answer` and `answer_kind`; every column is handed to the user's functions by name. The
    outcome is 1 for a correct answer, `settings.partial` for a finite, readable but wrong one, else 0; None where the
    gold itself is unreadable. A part of None adds nothing; all parts None: the completion is unscorable.
    """
    for name in ("answer", "answer_kind"):
        if name not in columns:
            raise UserError(f"rewards need the column {name!r}: add it to the demonstrations")
    for name, values in [("prompts", prompts), *columns.items()]:
        if len(values) != len(completions):
            raise UserError(f"column {name!r} has {len(values)} rows for {len(completions)} completions: give one each")
    grades = [
        grade(text, gold, kind)
        for text, gold, kind in zip(
            completions if graded is None else graded, columns["answer"], columns["answer_kind"], strict=True
        )
    ]
    user = {path: _call(path, prompts, completions, columns) for path in settings.functions}
    scored = []
    for row, result in enumerate(grades):
        parts = {"outcome": _outcome(result, columns["answer_kind"][row], settings.partial)} | {
            path: values[row] for path, values in user.items()
        }
        present = [value for value in parts.values() if value is not None]
        reward = math.fsum(present) if present else None
        scored.append(Scored(reward, parts, result.correct, result.parsed, result.reason))
    return scored
