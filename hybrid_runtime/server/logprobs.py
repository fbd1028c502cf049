"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybrid_runtime.engine import TokenLogprobs

LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for; OpenAI does the same."""

Spell = Callable[[int], str]
"""The text of one token."""


def of_completion(
    tokens: Sequence[int], told: Sequence[TokenLogprobs], spell: Spell, offset: int
) -> dict[str, Any]:
    """As completions have them. offset: characters of the tokens before these. The likeliest tokens
    are keyed by their text; of several with the same text the likeliest stays."""
    texts = [spell(token) for token in tokens]
    offsets, top = [], []
    for text, each in zip(texts, told, strict=True):
        offsets.append(offset)
        offset += len(text)
        likely: dict[str, float] = {}
        for token, logprob in each.top:
            likely.setdefault(spell(token), _finite(logprob))
        top.append({text: _finite(each.logprob)} | likely)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(each.logprob) for each in told],
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


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
