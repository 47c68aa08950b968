"""Procedural suites: tasks with worked demonstrations, made by seed, for runs without any download."""

from data.suites.arithmetic_words import ARITHMETIC_WORDS
from data.suites.base import Example, Suite
from data.suites.column_digits import BORROW_DIFFERENCES, CARRY_SUMS
from data.suites.deduction import DEDUCTION, DEDUCTION_CONFLICT
from data.suites.entailment_scene import ENTAILMENT_SCENE
from data.suites.entailment_times import ENTAILMENT_TIMES
from data.suites.exchange_words import EXCHANGE_WORDS
from data.suites.factor_pairs import FACTOR_PAIRS
from data.suites.inverse_chains import INVERSE_CHAINS
from data.suites.multihop_reading import MULTIHOP_READING
from data.suites.program_words import PROGRAM_WORDS
from data.suites.sign_totals import SIGN_TOTALS
from data.suites.state_tracking import STATE_TRACKING
from data.suites.subset_totals import SUBSET_TOTALS

CHECKED: tuple[Suite, ...] = (
    CARRY_SUMS,
    BORROW_DIFFERENCES,
    INVERSE_CHAINS,
    SUBSET_TOTALS,
    FACTOR_PAIRS,
    SIGN_TOTALS,
)
"""Suites whose answers are easier to check than to find, with mistakes and checks of their own."""

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        ARITHMETIC_WORDS,
        EXCHANGE_WORDS,
        PROGRAM_WORDS,
        DEDUCTION,
        DEDUCTION_CONFLICT,
        ENTAILMENT_SCENE,
        ENTAILMENT_TIMES,
        MULTIHOP_READING,
        STATE_TRACKING,
        *CHECKED,
    )
}

__all__ = ["SUITES", "Example", "Suite"]
