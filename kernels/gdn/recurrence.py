"""Gated DeltaNet as a `Recurrence`."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from hybrid_runtime.kernels.conv.spec import ConvLayout, conv_state_spec
from hybrid_runtime.kernels.gdn.flush import replay_flush
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.recurrence import CheckpointSpec, Recurrence, TensorSpec
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable

MatrixLayout = Literal["VK", "KV"]
"""How blocks hold a matrix: `[Hv, V, K]`, as vLLM's, or `[Hv, K, V]`."""


def gdn(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    dtype: torch.dtype = torch.float32,
    matrix_dtype: torch.dtype = torch.float32,
    conv_layout: ConvLayout = "SD",
    matrix_layout: MatrixLayout = "VK",
    channel_decay: bool = False,
) -> Recurrence:
    """Of a layer with these sizes, whose convolution runs over q, k and v.

    The records are `Records`, and no parameter is needed to fold them.

    Args:
        heads: of values (Hv), with a state each.
        key_heads: of keys and queries (Hk).
        key_dim: K.
        value_dim: V.
        conv_width: inputs of one output of the convolution.
        dtype: of the activations, the conv_state and the records of k: float32, bfloat16 or
            float16.
        matrix_dtype: of the matrix, likewise.
        conv_layout: how blocks hold a conv_state, see `ConvLayout`.
        matrix_layout: and a matrix, see `MatrixLayout`.
        channel_decay: a decay per channel of the key (KDA), which the references alone have.

    Raises:
        ValueError: `heads` is no multiple of `key_heads`, or another argument has no such value.
    """
    if heads % key_heads:
        raise ValueError(f"heads is {heads}; it must be a multiple of key_heads ({key_heads})")
    for name, given in (("dtype", dtype), ("matrix_dtype", matrix_dtype)):
        if given not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {given}; it must be float32, bfloat16 or float16")
    if matrix_layout not in get_args(MatrixLayout):
        raise ValueError(f"matrix_layout is {matrix_layout!r}; it must be 'VK' or 'KV'")
    channels = 2 * key_heads * key_dim + heads * value_dim
    transposed = matrix_layout == "KV"
    inner = (key_dim, value_dim) if transposed else (value_dim, key_dim)
    decay = (heads, 1, key_dim) if channel_decay else (heads, 1)
    return Recurrence(
        checkpoint=CheckpointSpec(
            conv_state=conv_state_spec(channels, conv_width, dtype, conv_layout),
            matrix=TensorSpec("matrix", (heads, *inner), matrix_dtype),
        ),
        records=(
            TensorSpec("u", (heads, 1, value_dim), torch.float32, token_axis=1),
            TensorSpec("k", (key_heads, 1, key_dim), dtype, token_axis=1),
            TensorSpec("g", decay, torch.float32, token_axis=1),
            TensorSpec("rk", (key_heads, 1), torch.float32, token_axis=1),
        ),
        params=(),
        flush=partial(_flush, transposed),
    )


def _flush(
    transposed: bool,
    table: StateTable,
    records: tuple[Tensor, ...],
    params: tuple[Tensor, ...],
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None,
) -> None:
    assert not params
    replay_flush(table, Records(*records), listed, slot, positions, rounding, transposed)
