"""Log-probabilities in the forms of OpenAI's two endpoints, and vLLM's of a prompt."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hybrid_runtime.engine import TokenLogprobs

LEAST = -9999.0
"""Sent for minus infinity, which JSON does not have; OpenAI does the same."""

Spell = Callable[[int], str]
"""The text of one token."""


def of_completion(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], spell: Spell, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion. The likeliest tokens are keyed by their text; of several with the
    same text the likeliest stays.

    tokens: ids.
    entries: one for each of them; None = unknown, as for a prompt's first token.
    spell: the text of one token.
    offset: characters of the tokens before these.
    """
    spell = cache(spell)  # the same few thousand tokens come again and again
    texts = [spell(token) for token in tokens]
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    for text, each in zip(texts, entries, strict=True):
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
        "token_logprobs": [None if each is None else _finite(each.logprob) for each in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def of_chat(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs], spell: Spell
) -> dict[str, Any]:
    """`logprobs` of a chat completion."""
    content = [
        _entry(spell(token), each.logprob)
        | {"top_logprobs": [_entry(spell(likely), logprob) for likely, logprob in each.top]}
        for token, each in zip(tokens, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_prompt(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], most: int, spell: Spell
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: for each token, by id, its own and those of the `most`
    likeliest. The rank of a token that is not among these is null."""
    spell = cache(spell)
    return [
        None if each is None else _ranked(token, each._replace(top=each.top[:most]), spell)
        for token, each in zip(tokens, entries, strict=False)
    ]


def _ranked(token: int, entries: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    ranked: list[tuple[int, float, int | None]] = [(token, entries.logprob, None)]
    ranked += [(likely, logprob, rank) for rank, (likely, logprob) in enumerate(entries.top, 1)]
    return {
        str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spell(id)}
        for id, logprob, rank in ranked
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
