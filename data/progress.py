"""How a long step tells how far it is, without knowing who listens."""

from typing import Protocol


class Report(Protocol):
    """Takes a step's log lines and progress."""

    def log(self, message: str) -> None:
        """One line for the log."""

    def progress(self, done: float, total: float, text: str = "") -> None:
        """`done` of `total` units are finished; `text` says what they are."""


class Silent:
    """Listens to nothing."""

    def log(self, message: str) -> None:
        """Drops the line."""

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Drops the progress."""
