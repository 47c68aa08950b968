"""Is the answer of a text the gold answer? The policy is written down in docs/grading.md."""

from data.grading.grader import KINDS, Grade, grade, warm

__all__ = ["KINDS", "Grade", "grade", "warm"]
