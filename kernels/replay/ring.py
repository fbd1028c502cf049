"""The ring of records: how many tokens it holds, and how many a state in memory may lack."""

from __future__ import annotations

MAX_TOKENS = 16
"""Most tokens of a row that the kernels take."""

SHORT_WINDOW, LONG_WINDOW = 15, 31
"""Longest windows, in tokens: a product of the kernels sums over 16 tokens or over 32, and a step
that writes folds one of its own besides the pending ones. There is none in between, because the
kernels tell the two from each other by the length of the ring."""


def default_window(num_speculative_tokens: int) -> int:
    """The short one has no room for a step of more than 8 tokens beside as many pending ones."""
    return SHORT_WINDOW if num_speculative_tokens <= 7 else LONG_WINDOW


def ring_length(num_speculative_tokens: int, window: int) -> int:
    """Tokens (L) of a slot's ring: those that may be pending before a step, and the step's own.

    A step stores its inputs while other programs of the same row still read the pending ones, so
    the two must not overlap.

    Raises:
        ValueError: a window that the kernels do not have.
    """
    if not 0 <= window <= SHORT_WINDOW and window != LONG_WINDOW:
        raise ValueError(f"window is {window}; it must be 0..{SHORT_WINDOW} or {LONG_WINDOW}")
    return max(window, num_speculative_tokens) + num_speculative_tokens + 1
