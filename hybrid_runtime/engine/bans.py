"""What a request must not emit, from its parameters."""

from __future__ import annotations

import reprlib
from collections.abc import Collection

from tokenizers import Tokenizer

from hybrid_runtime.engine.tokenize import check_text
from hybrid_runtime.specdecode.biases import (
    FOREVER,
    MAX_BAD_WORD_TOKENS,
    MAX_END_TOKENS,
    Ban,
)
from hybrid_runtime.specdecode.sampling import SamplingParams


def bans(
    params: SamplingParams,
    prompt: int,
    tokenizer: Tokenizer | None,
    eos: Collection[int],
    vocabulary: int,
) -> tuple[Ban, ...]:
    """Bans of a request whose prompt has so many tokens.

    eos: tokens that end a text. vocabulary: tokens. `ValueError` for words that no tokenizer is
    there for, too many tokens, or if none is left that can be drawn.
    """
    found = [Ban(word) for word in _words(params.bad_words, tokenizer, vocabulary)]
    if params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        known = sorted(token for token in ends if 0 <= token < vocabulary)
        if len(known) > MAX_END_TOKENS:
            raise ValueError(
                f"stop_token_ids has {len(params.stop_token_ids)} tokens; with min_tokens there "
                f"must be at most {MAX_END_TOKENS} that end a text"
            )
        until = min(prompt + params.min_tokens, FOREVER)
        found += [Ban((token,), until) for token in known]
    allowed = params.allowed_token_ids
    if allowed is not None and {(token,) for token in allowed} <= {ban.tokens for ban in found}:
        raise ValueError(
            f"allowed_token_ids is {reprlib.repr(allowed)}; it must have a token that neither "
            "bad_words nor min_tokens keep from being drawn"
        )
    return tuple(found)


def _words(
    words: Collection[str], tokenizer: Tokenizer | None, vocabulary: int
) -> list[tuple[int, ...]]:
    """Token ids of words, as a text begins with them and as they stand in it: tokenizers write a
    word with a space in front as another token."""
    if words and tokenizer is None:
        raise ValueError("bad_words is text; without a tokenizer it must be empty")
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        check_text("bad_words", word)
        assert tokenizer is not None
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids)
            for space in ("", " ")
        )
        if not bare:
            raise ValueError(f"bad_words has {word!r}; each must give at least one token")
        found.append(bare)
        # Where the space is a token of its own, the word alone is banned behind it already.
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    found = [tokens for tokens in found if max(tokens, default=vocabulary) < vocabulary]
    total = sum(map(len, found))
    if total > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words has {total} tokens, with a space in front and without; it must have at "
            f"most {MAX_BAD_WORD_TOKENS}"
        )
    return found
