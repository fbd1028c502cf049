"""Texts of a `World`'s requests: their words, where they are kept, and the keys of beginnings."""

from __future__ import annotations

from hashlib import sha256

from hybrid_runtime.engine.request import Request


def word(token: int) -> str:
    """Text of a token; no text has that of another token in it."""
    return f"<{token}>"


def kept_tokens(request: Request) -> int:
    """Prompt and output, as far as all of their text is in front of a stop string that begins among
    the tokens that came last; else all."""
    shown, last = "", request.times[-1][1]
    kept = 0
    for count, token in enumerate(request.output, 1):
        shown += " " * bool(shown) + word(token)
        if len(shown) <= len(request.text):
            kept = count
    cut = len(request.output) - kept
    return request.length - (cut if cut < last else 0)


def common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def key_at(request: Request, position: int, kv_block: int) -> bytes:
    """The key of the first `position` tokens in the prefix cache; full blocks must be hashed."""
    full, tail = divmod(position, kv_block)
    key = request.hashes[full - 1] if full else sha256(request.tenant.encode()).digest()
    last = request.tokens[position - tail : position]
    return sha256(key + last.tobytes()).digest() if tail else key
