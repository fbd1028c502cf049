"""What a request must not emit, from its parameters."""

from __future__ import annotations

import reprlib
from collections.abc import Collection

from tokenizers import Tokenizer

from hybrid_runtime.engine.tokenize import check_text, encoded
from hybrid_runtime.specdecode.logit_tables import (
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
    # A longer ban holds behind its first tokens only, but there it must leave something to draw.
    allowed, last = params.allowed_token_ids, {ban.tokens[-1] for ban in found}
    if allowed is not None and last.issuperset(allowed):
        raise ValueError(
            f"allowed_token_ids is {reprlib.repr(allowed)}; it must have a token that no text of "
            "bad_words ends with, and that min_tokens does not keep from being drawn"
        )
    if len(last) >= vocabulary:
        raise ValueError(
            f"bad_words end with {len(last)} tokens; they must leave one of the vocabulary"
        )
    return tuple(found)


def _words(
    words: Collection[str], tokenizer: Tokenizer | None, vocabulary: int
) -> list[tuple[int, ...]]:
    """Token ids of words, as a text begins with them and as they are inside it: tokenizers write a
    word with a space in front as another token."""
    if words and tokenizer is None:
        raise ValueError("bad_words is text; without a tokenizer it must be empty")
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        check_text("bad_words", word)
        assert tokenizer is not None
        space = "" if word[:1].isspace() else " "
        bare, spaced = (
            tuple(encoded("bad_words", text, tokenizer, special=False).ids)
            for text in (word, space + word)
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
