"""Mamba-2 as a `Recurrence`."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.kernels.conv.spec import ConvLayout, conv_state_spec
from hybrid_runtime.kernels.mamba2.flush import replay_flush
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.recurrence import CheckpointSpec, Recurrence, TensorSpec
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable


def mamba2(
    heads: int,
    head_dim: int,
    state_size: int,
    groups: int,
    conv_width: int,
    dtype: torch.dtype = torch.float32,
    matrix_dtype: torch.dtype = torch.float32,
    conv_layout: ConvLayout = "SD",
) -> Recurrence:
    """Of a layer with these sizes, whose convolution runs over x, B and C.

    The matrix is `[heads, head_dim, state_size]`, the records are `Records`, and the only parameter
    is A_log, `[heads]`.

    Args:
        groups: of heads that share B and C.
        conv_width: inputs of one output of the convolution.
        dtype: of the activations, the conv_state and the records of x and B: float32, bfloat16 or
            float16.
        matrix_dtype: of the matrix, likewise.
        conv_layout: how blocks hold a conv_state, see `ConvLayout`.

    Raises:
        ValueError: `heads` is no multiple of `groups`, or another argument has no such value.
    """
    if heads % groups:
        raise ValueError(f"heads is {heads}; it must be a multiple of groups ({groups})")
    for name, given in (("dtype", dtype), ("matrix_dtype", matrix_dtype)):
        if given not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {given}; it must be float32, bfloat16 or float16")
    channels = heads * head_dim + 2 * groups * state_size
    return Recurrence(
        checkpoint=CheckpointSpec(
            conv_state=conv_state_spec(channels, conv_width, dtype, conv_layout),
            matrix=TensorSpec("matrix", (heads, head_dim, state_size), matrix_dtype),
        ),
        records=(
            TensorSpec("x", (heads, 1, head_dim), dtype, token_axis=1),
            TensorSpec("B", (groups, 1, state_size), dtype, token_axis=1),
            TensorSpec("dt", (heads, 1), torch.float32, token_axis=1),
        ),
        params=(TensorSpec("A_log", (heads,), torch.float32),),
        flush=_flush,
    )


def _flush(
    table: StateTable,
    records: tuple[Tensor, ...],
    params: tuple[Tensor, ...],
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None,
) -> None:
    (A_log,) = params
    replay_flush(table, Records(*records), A_log, listed, slot, positions, rounding)
