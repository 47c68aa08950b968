"""Procedural suites: tasks with worked demonstrations, made by seed, for runs without any download."""

from data.suites.arithmetic_words import ARITHMETIC_WORDS
from data.suites.base import Example, Suite
from data.suites.program_words import PROGRAM_WORDS
from data.suites.state_tracking import STATE_TRACKING

SUITES: dict[str, Suite] = {suite.name: suite for suite in (ARITHMETIC_WORDS, PROGRAM_WORDS, STATE_TRACKING)}

__all__ = ["SUITES", "Example", "Suite"]
