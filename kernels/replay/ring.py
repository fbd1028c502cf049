"""The ring of records: how many tokens it holds, and how many may be pending.

These are rules of all recurrences, not of one. The layers of a model share the rows of a step, and
with them the ring's length and when a state is written, whatever their recurrences. And the reason
for the two sizes is the same in all of them: pending tokens are folded by matrix products.
"""

from __future__ import annotations

MAX_TOKENS = 16
"""Most tokens of a row that the kernels take."""

SHORT_RING_TOKENS, LONG_RING_TOKENS = 15, 31
"""Values of `ring_tokens`, the most tokens that may be pending: a product of the kernels sums over
16 tokens or over 32, and a step that writes folds one of its own besides the pending ones. There is
none in between, because the kernels know which of the two it is by the length of the ring."""


def default_ring_tokens(num_speculative_tokens: int) -> int:
    """15 tokens leave no room for a step of more than 8 beside as many pending ones."""
    return SHORT_RING_TOKENS if num_speculative_tokens <= 7 else LONG_RING_TOKENS


def ring_length(num_speculative_tokens: int, ring_tokens: int) -> int:
    """Tokens (L) of a slot's ring: those that may be pending before a step, and the step's own.

    A step stores its records while other programs of the same row still read the pending ones, so
    the two must not overlap.

    Raises:
        ValueError: ring_tokens that the kernels do not have.
    """
    if not 0 <= ring_tokens <= SHORT_RING_TOKENS and ring_tokens != LONG_RING_TOKENS:
        raise ValueError(
            f"ring_tokens is {ring_tokens}; it must be 0..{SHORT_RING_TOKENS} or {LONG_RING_TOKENS}"
        )
    return max(ring_tokens, num_speculative_tokens) + num_speculative_tokens + 1
