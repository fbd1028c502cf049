"""One thread at a time: what keeps an engine from being broken by a second one."""

from __future__ import annotations

import threading

from hybrid_runtime.device.process import enter_process


class EngineClosed(RuntimeError):
    """The engine takes no more requests, or has ended one that ran."""


class Owner:
    """The thread that uses an engine: the first one that does, until it ends or hands over.

    closed: no thread may use it any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.closed = False

    def check(self) -> None:
        """Take the engine for this thread. Raises `RuntimeError`, naming both threads, if another
        one has it or this process is a fork of the engine's, `EngineClosed` after `close`."""
        enter_process()
        if self.closed:
            raise EngineClosed("the engine is closed")
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

    def close(self) -> None:
        """Refuse all threads from now on."""
        self.closed = True
