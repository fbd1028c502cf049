"""Strides of the tensors that kernels of recurrences read, in elements."""

from __future__ import annotations

from typing import NamedTuple


class HeadStrides(NamedTuple):
    """Of x [tokens, heads, P]; of B and C [tokens, groups, N]."""

    token: int
    head: int
    dim: int


class ChannelStrides(NamedTuple):
    """Of the convolution's x [tokens, channels]; of dt [tokens, heads]."""

    token: int
    channel: int


class ConvStateStrides(NamedTuple):
    """Of conv_states [blocks, positions, channels]."""

    block: int
    position: int
    channel: int


class StateStrides(NamedTuple):
    """Of states [blocks, heads, P, N]."""

    block: int
    head: int
    dim: int
    state: int
