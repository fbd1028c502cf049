"""What changes logits, by slot, on the device: biases and bans of tokens, and tokens allowed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.specdecode.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS

MAX_BAD_WORD_TOKENS = 1024
"""Of all texts together that one request may not generate."""

MAX_END_TOKENS = 128
"""Tokens that must not end a request before `min_tokens`."""

MAX_BANS = 2 * MAX_BAD_WORDS + MAX_END_TOKENS
MAX_BAN_TOKENS = MAX_BAD_WORD_TOKENS + MAX_END_TOKENS

FOREVER = 2**31 - 1
"""A position that no token has."""


class Ban(NamedTuple):
    """The last of `tokens` is not drawn where the output ends with the others, at positions below
    `until`."""

    tokens: tuple[int, ...]
    until: int = FOREVER


class Biases:
    """A table of biased tokens and bans. Its parts are those of `Penalties` by the same names.

    bias_tokens: int32 `[slots + 1, MAX_LOGIT_BIAS]`, -1 = none.
    bias: float32 `[slots + 1, MAX_LOGIT_BIAS]`.
    ban_until, ban_end: int32 `[slots + 1, MAX_BANS]`.
    ban_tokens: int32 `[slots + 1, MAX_BAN_TOKENS]`.

    slots: requests that run at once. depth: of the staging buffers.
    """

    def __init__(self, slots: int, depth: int, device: torch.device) -> None:
        sizes = MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_BANS, MAX_BANS, MAX_BAN_TOKENS
        self._lines = torch.zeros((slots + 1, sum(sizes)), dtype=torch.int32, device=device)
        self.bias_tokens, bias, self.ban_until, self.ban_end, self.ban_tokens = self._lines.split(
            sizes, dim=1
        )
        self.bias = bias.view(torch.float32)
        self.bias_tokens.fill_(-1)
        self._begins = np.cumsum((1, *sizes))[:-1]  # behind the slot's number
        self._staging = Staging(slots, 1 + sum(sizes), depth, device, Waits())

    def admit(
        self, entries: Sequence[tuple[int, Mapping[int, float] | None, Sequence[Ban]]]
    ) -> None:
        """Slots, and the biases and bans that they have from now on, by one copy to the device."""
        index, packed = self._staging.take()
        for line, (slot, given, bans) in zip(packed, entries, strict=False):
            biased = given or {}
            line[0] = slot
            _, bias_tokens, bias, until, end, tokens = np.split(line, self._begins)
            bias_tokens[:] = -1
            bias_tokens[: len(biased)] = list(biased)
            bias.view(np.float32)[: len(biased)] = list(biased.values())
            until[:] = 0
            until[: len(bans)] = [ban.until for ban in bans]
            flat = [token for ban in bans for token in ban.tokens]
            end[:] = len(flat)
            end[: len(bans)] = np.cumsum([len(ban.tokens) for ban in bans], dtype=np.int32)
            tokens[: len(flat)] = flat
        lines = self._staging.upload(index, len(entries))[: len(entries)]
        self._lines.index_copy_(0, lines[:, 0].long(), lines[:, 1:])


class TokenSets:
    """A set of tokens of each slot, a bit per token of the vocabulary.

    bits: int32 `[slots + 1, ceil(vocabulary / 32)]`, as of `Penalties.allowed`.

    slots: requests that run at once. depth: of the staging buffers. full: of slots that have no set
    of their own: all tokens, else none.
    """

    def __init__(
        self, slots: int, vocabulary: int, depth: int, device: torch.device, full: bool
    ) -> None:
        words, self._rest = -(-vocabulary // 32), -1 if full else 0
        self.bits = torch.full((slots + 1, words), self._rest, dtype=torch.int32, device=device)
        self._staging = Staging(slots, 1 + words, depth, device, Waits())

    def admit(self, entries: Sequence[tuple[int, Sequence[int] | None]]) -> None:
        """Slots and their sets from now on (None: they have none), by one copy to the device."""
        index, packed = self._staging.take()
        for line, (slot, tokens) in zip(packed, entries, strict=False):
            line[0], line[1:] = slot, self._rest
            if tokens is not None:
                bits = np.zeros(32 * self.bits.shape[1], np.uint8)
                bits[list(tokens)] = 1
                line[1:] = np.packbits(bits, bitorder="little").view(np.int32)
        lines = self._staging.upload(index, len(entries))[: len(entries)]
        self.bits.index_copy_(0, lines[:, 0].long(), lines[:, 1:])
