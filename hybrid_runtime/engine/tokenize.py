"""Prompts as token ids, checked; where an instruction in front of them ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

Prompt = str | Sequence[int]


def prompt_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """All prompts of a call; `ValueError` for what is one prompt or no list."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise ValueError(f"prompts is a {kind}; it must be a list of prompts")
    return list(prompts)


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """Token ids of a prompt; `ValueError` if it is empty, or no token of the vocabulary."""
    tokens = _encoding(prompt, tokenizer).ids if isinstance(prompt, str) else prompt
    if len(tokens) == 0:
        raise ValueError("prompt is empty; it must hold at least one token")
    return _checked("prompt", tokens, vocabulary)


def encode_rendered(text: str, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """Token ids of a text that holds its special tokens already, as a chat template's does."""
    if tokenizer is None:
        raise ValueError("messages are text; without a tokenizer there is no chat")
    return _checked("prompt", tokenizer.encode(text, add_special_tokens=False).ids, vocabulary)


def encode_instructed(
    prompt: Prompt, instruction: Prompt, tokenizer: Tokenizer | None, vocabulary: int
) -> tuple[list[int], int]:
    """Token ids of an instruction and a prompt, both text or both ids, and how many of them are the
    instruction's.

    Text is joined before it is encoded, as embedders were trained. A token that holds characters of
    both is the prompt's; tokens that the tokenizer puts in front (beginning of text) are the
    instruction's, if there is one, and those that it adds at the end are the prompt's.
    """
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must hold at least one token")
    if len(instruction) == 0:
        return encode(prompt, tokenizer, vocabulary), 0
    if not isinstance(prompt, str) and not isinstance(instruction, str):
        front = _checked("instruction", instruction, vocabulary)
        return front + _checked("prompt", prompt, vocabulary), len(front)
    if not isinstance(prompt, str) or not isinstance(instruction, str):
        kinds = ["a str" if isinstance(p, str) else "token ids" for p in (instruction, prompt)]
        raise ValueError(
            f"instruction is {kinds[0]}; it must be {kinds[1]}, as the prompt that it precedes"
        )
    coded = _encoding(instruction + prompt, tokenizer)
    tokens = _checked("prompt", coded.ids, vocabulary)
    ends = enumerate(end for _, end in coded.offsets)
    first = next((i for i, end in ends if end > len(instruction)), None)
    if first is None:
        raise ValueError(f"prompt is {prompt!r}; it must give at least one token of its own")
    return tokens, first


def _encoding(text: str, tokenizer: Tokenizer | None) -> Encoding:
    if tokenizer is None:
        raise ValueError("prompt is a str; without a tokenizer it must be token ids")
    return tokenizer.encode(text)


def _checked(name: str, tokens: Sequence[int], vocabulary: int) -> list[int]:
    for token in tokens:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise ValueError(f"{name} holds token {token!r}; it must be in 0..{vocabulary - 1}")
    return [int(t) for t in tokens]
