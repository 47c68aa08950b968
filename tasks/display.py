"""What a person at the terminal sees while a run works: bars on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_SECONDS = 5.0


class Display:
    """Shows nothing: what a worker uses, whose log lines go to Prefect."""

    def start(self, subject: str) -> None:
        """Step `subject` begins."""

    def log(self, subject: str, message: str) -> None:
        """A log line of the step `subject`."""

    def progress(self, subject: str, done: float, total: float, text: str) -> None:
        """Step `subject` has done `done` of `total`."""

    def finish(self, subject: str, how: str) -> None:
        """Step `subject` has ended: done, cached or failed."""

    def close(self) -> None:
        """Nothing more will be shown."""


class PlainDisplay(Display):
    """One line an event, for pipes and log files; progress at most every `PLAIN_SECONDS`."""

    def __init__(self, stream: TextIO = sys.stdout):
        self._stream = stream
        self._last = time.monotonic()
        self._started: dict[str, float] = {}

    def _line(self, subject: str, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {subject}: {text}", file=self._stream, flush=True)

    def start(self, subject: str) -> None:
        self._started[subject] = time.monotonic()

    def log(self, subject: str, message: str) -> None:
        self._line(subject, message)

    def progress(self, subject: str, done: float, total: float, text: str) -> None:
        if time.monotonic() - self._last >= PLAIN_SECONDS:
            self._last = time.monotonic()
            self._line(subject, f"{100 * done / max(total, 1e-9):.0f} % {text}".rstrip())

    def finish(self, subject: str, how: str) -> None:
        seconds = time.monotonic() - self._started.pop(subject)
        self._line(subject, f"{how} ({seconds:.1f} s)")


class RichDisplay(Display):
    """A progress bar for the running step, finished steps above it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[text]}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._progress.start()

    def _bar(self, subject: str) -> TaskID:
        if subject not in self._bars:
            self._bars[subject] = self._progress.add_task(subject, total=1.0, text="")
        return self._bars[subject]

    def start(self, subject: str) -> None:
        self._bar(subject)

    def log(self, subject: str, message: str) -> None:
        self._console.print(f"[dim]{escape(subject)}:[/] {escape(message)}")

    def progress(self, subject: str, done: float, total: float, text: str) -> None:
        self._progress.update(self._bar(subject), completed=done, total=total, text=text)

    def finish(self, subject: str, how: str) -> None:
        bar = self._bar(subject)
        elapsed = next((task.elapsed or 0.0 for task in self._progress.tasks if task.id == bar), 0.0)
        mark = {"done": "[green]✓[/]", "already": "[cyan]↺[/]"}.get(how.split()[0].rstrip(","), "[red]✗[/]")
        self._console.print(f"{mark} {subject} [dim]{how}, {elapsed:.1f} s[/]")
        self._progress.remove_task(self._bars.pop(subject))

    def close(self) -> None:
        self._progress.stop()


_current = Display()


def current() -> Display:
    """The display of this process."""
    return _current


def use(display: Display) -> None:
    """Makes `display` the display of this process."""
    global _current
    _current = display


def for_terminal() -> Display:
    """Bars where standard output is a terminal, plain lines where it is not."""
    return RichDisplay() if sys.stdout.isatty() else PlainDisplay()


class StepLines:
    """The log lines and progress of one step that a command asks for, on the terminal."""

    def __init__(self, subject: str) -> None:
        self._subject, self._display = subject, for_terminal()
        self._display.start(subject)

    def log(self, message: str) -> None:
        """One line."""
        self._display.log(self._subject, message)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """How far it is."""
        self._display.progress(self._subject, done, total, text)

    def close(self) -> None:
        """Nothing more is shown."""
        self._display.close()
