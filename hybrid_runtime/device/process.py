"""What belongs to the process that made it: it is not pickled, not copied, not used in a fork."""

from __future__ import annotations

import os
from typing import NoReturn

_home: int | None = None
"""Process that has an engine; a forked child inherits the number, not the process."""


class OneProcess:
    """Cannot be pickled or copied, so it cannot be an argument of a process either.

    NumPy arrays look at memory of its tensors. Pickling would move that memory to where other
    processes see it, and leave the arrays on what has been freed.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; make it in the process that uses "
            "it, a child process for instance"
        )


def enter_process() -> None:
    """Make this process the one that has engines.

    Raises:
        RuntimeError: it was forked from a process that has one. PyTorch's threads do not survive a
            fork, and its first operation on several threads would wait for them for ever.
    """
    global _home
    here = os.getpid()
    if _home is None:
        _home = here
    elif _home != here:
        raise RuntimeError(
            f"process {here} was forked from process {_home}, which has an engine; PyTorch's "
            "threads do not survive a fork; start it with multiprocessing.get_context('spawn') and "
            "make the engine in it"
        )
