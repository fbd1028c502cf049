"""Work that takes long: a bar while it runs, a line in the log when it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(shown: bool, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar while the body runs: how many are done, of how many. shown: False = none,
    True = where standard error is a terminal."""
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log how long the body took."""
    start = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - start)
