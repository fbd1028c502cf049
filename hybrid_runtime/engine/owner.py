"""One thread at a time: what keeps an engine from being broken by a second one."""

from __future__ import annotations

import threading


class Owner:
    """The thread that uses an engine: the first one that does, until it ends or hands over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Take the engine for this thread. Raises `RuntimeError`, naming both threads, if another
        one has it."""
        mine = threading.current_thread()
        if self._thread is mine:
            return
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError(
                    f"thread {mine.name!r} uses an engine that belongs to thread "
                    f"{self._thread.name!r}; an engine must be used by one thread, and an "
                    "AsyncEngine serves many callers"
                )
            self._thread = mine

    def hand_over(self, thread: threading.Thread | None = None) -> None:
        """Let `thread` have it, or whichever comes next; errors as of `check`."""
        self.check()
        self._thread = thread
