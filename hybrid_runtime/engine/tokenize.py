"""Prompts as token ids, checked; where an instruction in front of them ends."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from hybrid_runtime.models.json_fields import one_line

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Tokens = NDArray[np.int32]
"""Checked token ids, `[n]`."""


def prompt_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """All prompts of a call; `ValueError` for what is one prompt or no list."""
    one = isinstance(prompts, str | bytes | bytearray | Mapping | Tensor)
    if one or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {_shown(prompts)}; it must be a list of prompts")
    return list(prompts)


def check_text(name: str, text: str) -> None:
    """`ValueError` for text with half a surrogate pair, as in names of undecodable files."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has {text[error.start]!r} at {error.start}; it must be text that UTF-8 can "
            "encode"
        ) from None


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int) -> Tokens:
    """Token ids of a prompt; `ValueError` if it is neither text nor token ids, empty, or holds what
    is no token of the vocabulary."""
    _check_kind("prompt", prompt)
    tokens = _encoding("prompt", prompt, tokenizer).ids if isinstance(prompt, str) else prompt
    if len(tokens) == 0:
        raise ValueError("prompt is empty; it must hold at least one token")
    return _checked("prompt", tokens, vocabulary)


def encode_rendered(
    text: str, tokenizer: Tokenizer | None, vocabulary: int
) -> tuple[Tokens, Encoding]:
    """Token ids of a text that holds its special tokens already, as a chat template's does, and
    where in it they are."""
    if tokenizer is None:
        raise ValueError("messages are text; without a tokenizer there is no chat")
    check_text("messages", text)
    encoding = encoded("messages", text, tokenizer, False)
    return _checked("prompt", encoding.ids, vocabulary), encoding


def encode_instructed(
    prompt: Prompt, instruction: Prompt, tokenizer: Tokenizer | None, vocabulary: int
) -> tuple[Tokens, int]:
    """Token ids of an instruction and a prompt, both text or both ids, and how many of them are the
    instruction's.

    Text is joined before it is encoded, as embedders were trained. A token that holds characters of
    both is the prompt's; tokens that the tokenizer puts in front (beginning of text) are the
    instruction's, if there is one, and those that it adds at the end are the prompt's.
    """
    _check_kind("prompt", prompt)
    _check_kind("instruction", instruction)
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must hold at least one token")
    if len(instruction) == 0:
        return encode(prompt, tokenizer, vocabulary), 0
    if not isinstance(prompt, str) and not isinstance(instruction, str):
        front = _checked("instruction", instruction, vocabulary)
        return np.concatenate([front, _checked("prompt", prompt, vocabulary)]), len(front)
    if not isinstance(prompt, str) or not isinstance(instruction, str):
        kinds = ["a str" if isinstance(p, str) else "token ids" for p in (instruction, prompt)]
        raise ValueError(
            f"instruction is {kinds[0]}; it must be {kinds[1]}, as the prompt that it precedes"
        )
    check_text("instruction", instruction)
    coded = _encoding("prompt", instruction + prompt, tokenizer)
    tokens = _checked("prompt", coded.ids, vocabulary)
    ends = enumerate(end for _, end in coded.offsets)
    first = next((i for i, end in ends if end > len(instruction)), None)
    if first is None:
        raise ValueError(f"prompt is {prompt!r}; it must give at least one token of its own")
    return tokens, first


def _check_kind(name: str, prompt: object) -> None:
    """Bytes are sequences of integers too, but never of token ids."""
    array = isinstance(prompt, np.ndarray) and prompt.ndim == 1
    sequence = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not array and (not sequence or isinstance(prompt, memoryview)):
        raise ValueError(f"{name} is {_shown(prompt)}; it must be text or a list of token ids")


def _shown(value: object) -> str:
    """A value in an error message; of what may be large, its kind."""
    if isinstance(value, Sized) or hasattr(value, "shape"):
        return f"a {type(value).__name__}"
    return repr(value)


def _encoding(name: str, text: str, tokenizer: Tokenizer | None) -> Encoding:
    if tokenizer is None:
        raise ValueError(f"{name} is a str; without a tokenizer it must be token ids")
    check_text(name, text)
    return encoded(name, text, tokenizer)


def encoded(name: str, text: str, tokenizer: Tokenizer, special: bool = True) -> Encoding:
    """`ValueError` for a text that the tokenizer cannot encode."""
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"{name} is not what the tokenizer can encode: {one_line(error)}"
        ) from error


def _checked(name: str, tokens: Sequence[int] | NDArray[Any], vocabulary: int) -> Tokens:
    ids = _integers(tokens)
    if ids is None or (ids.size and (ids.min() < 0 or ids.max() >= vocabulary)):
        wrong = next(token for token in tokens if not _is_token(token, vocabulary))
        raise ValueError(f"{name} holds token {wrong!r}; it must be in 0..{vocabulary - 1}")
    return ids.astype(np.int32)


def _integers(tokens: Sequence[int] | NDArray[Any]) -> NDArray[Any] | None:
    """As an array, if they are integers of 64 bits; without a Python loop, for they may be many."""
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu":
        return tokens
    kinds = list(map(type, tokens))
    if kinds.count(int) < len(kinds) and not all(map(_is_integer, set(kinds))):
        return None
    try:  # in half of the time that NumPy takes
        return np.frombuffer(struct.pack(f"{len(kinds)}q", *tokens), np.int64)
    except struct.error:
        return None


def _is_integer(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool


def _is_token(token: Any, vocabulary: int) -> bool:
    return _is_integer(type(token)) and 0 <= int(token) < vocabulary
