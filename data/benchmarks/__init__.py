"""Public benchmarks: their questions and golds from a file in the publisher's format, or by hub name."""

from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.settings import BenchmarkSource

if TYPE_CHECKING:
    from data.benchmarks.base import Questions


def questions(source: BenchmarkSource, task: str) -> list[dict[str, Any]]:
    """Rows of the table "questions" (split "test") of the benchmark that `source` names. See `load_questions`."""
    return load_questions(source, task).rows


def load_questions(source: BenchmarkSource, task: str) -> "Questions":
    """`questions` with the counts of rows read and excluded (`data.benchmarks.base.Questions`).

    Raises UserError for an unknown benchmark and for a file that cannot be used.
    """
    from data.benchmarks.base import load
    from data.benchmarks.entries import BENCHMARKS

    if source.name not in BENCHMARKS:
        raise UserError(f"benchmark {source.name!r} is unknown; the benchmarks are {', '.join(sorted(BENCHMARKS))}")
    return load(BENCHMARKS[source.name], source, task)


def __getattr__(name: str):
    """`BENCHMARKS` on first use: its imports need pyarrow, which the settings must not wait for."""
    if name == "BENCHMARKS":
        from data.benchmarks.entries import BENCHMARKS

        return BENCHMARKS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
