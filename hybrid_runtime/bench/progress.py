"""How far a benchmark is, on standard error: a bar on a terminal, elsewhere a line per run."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """Loads, each of several runs. runs: of all loads together."""

    def __init__(self, runs: int) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=runs)
        self._load, self._left, self._start = "", 0, time.perf_counter()

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, load: str, runs: int) -> None:
        """A load begins: its name, and how many runs it has."""
        self._load, self._left, self._start = load, runs, time.perf_counter()
        self._bar.update(self._task, description=load)

    def ran(self, run: str) -> None:
        """A run of it has ended."""
        self._left -= 1
        self._bar.advance(self._task)
        if self._bar.disable:
            self.say(f"{run}, {self._left} left")

    def end(self, outcome: str) -> None:
        """It is over; runs that it did not get to count as done."""
        self._bar.advance(self._task, self._left)
        self._left = 0
        self.say(outcome)

    def say(self, text: str) -> None:
        """A line about the load."""
        seconds = time.perf_counter() - self._start
        self._console.print(f"{self._load}: {text}, {seconds:.1f} s", markup=False)
