"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hybrid_runtime.engine import TokenLogprobs

LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for; OpenAI does the same."""

Spell = Callable[[int], str]
"""The text of one token."""


def of_completion(
    tokens: Sequence[int], told: Sequence[TokenLogprobs | None], spell: Spell, offset: int
) -> dict[str, Any]:
    """As completions have them; None is a token of which nothing is known, a prompt's first.
    offset: characters of the tokens before these. The likeliest tokens are keyed by their text; of
    several with the same text the likeliest stays."""
    spell = cache(spell)  # the same few thousand tokens come again and again
    texts = [spell(token) for token in tokens]
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    for text, each in zip(texts, told, strict=True):
        offsets.append(offset)
        offset += len(text)
        if each is None:
            top.append(None)
            continue
        likely: dict[str, float] = {}
        for token, logprob in each.top:
            likely.setdefault(spell(token), _finite(logprob))
        top.append({text: _finite(each.logprob)} | likely)
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else _finite(each.logprob) for each in told],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def of_chat(tokens: Sequence[int], told: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """As chat completions have them."""
    content = [
        _entry(spell(token), each.logprob)
        | {"top_logprobs": [_entry(spell(likely), logprob) for likely, logprob in each.top]}
        for token, each in zip(tokens, told, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_prompt(
    tokens: Sequence[int], told: Sequence[TokenLogprobs | None], most: int, spell: Spell
) -> list[dict[str, Any] | None]:
    """As vLLM has a prompt's: per token, by id, its own and at most so many of the likeliest. The
    rank of a token that is not one of those is not known."""
    spell = cache(spell)
    return [
        None if each is None else _ranked(token, each._replace(top=each.top[:most]), spell)
        for token, each in zip(tokens, told, strict=False)
    ]


def _ranked(token: int, told: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    ranked: list[tuple[int, float, int | None]] = [(token, told.logprob, None)]
    ranked += [(likely, logprob, rank) for rank, (likely, logprob) in enumerate(told.top, 1)]
    return {
        str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spell(id)}
        for id, logprob, rank in ranked
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
