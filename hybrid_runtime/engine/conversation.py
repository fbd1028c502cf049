"""A conversation as a prompt, and where in it others may go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from hybrid_runtime.engine.chat import ChatTemplate, Message, rendered
from hybrid_runtime.engine.tokenize import Tokens, encode_rendered

_HEAD_ROLES = ("system", "developer")


class Conversation(NamedTuple):
    """tokens: of all messages, up to where the assistant's answer begins. checkpoints_at: behind
    the messages that many conversations may begin with (of the roles system and developer), and
    behind the last user message: what an assistant has said since then a template may write in
    another way later, such as without its thinking."""

    tokens: Tokens
    checkpoints_at: tuple[int, ...]


def conversation(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    tokenizer: Tokenizer | None,
    vocabulary: int,
) -> Conversation:
    """Raises `ValueError` for what is no conversation, or what the template refuses."""
    text = rendered(template, messages, tools, options)
    assert template is not None
    tokens, encoding = encode_rendered(text, tokenizer, vocabulary)
    roles = [message["role"] for message in messages]
    head = next((n for n, role in enumerate(roles) if role not in _HEAD_ROLES), len(roles))
    last = max((n + 1 for n, role in enumerate(roles) if role == "user"), default=0)
    places = set()
    for count in {head, last} - {0}:
        try:
            part = template.render(messages[:count], tools, options, generation_prompt=False)
        except ValueError:  # a template may want more messages than these
            continue
        places.add(_tokens_of(encoding, len(text), common_prefix(text, part)))
    return Conversation(tokens, tuple(sorted(places - {0})))


def common_prefix(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    if one.startswith(other):
        return len(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _tokens_of(encoding: Encoding, length: int, characters: int) -> int:
    """Leading tokens of a text of `length` that have nothing but its first `characters`."""
    for at in range(characters, length):  # some characters are in no token
        token: int | None = encoding.char_to_token(at)
        if token is not None:
            return token
    return len(encoding)
