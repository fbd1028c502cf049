"""State blocks of a model: their smallest size, and both by Hugging Face's field names."""

from typing import Any, NamedTuple

import torch

from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.recurrence import Recurrence

KERNEL_GRANULARITY = 16
"""Attention kernels address KV in units of this many tokens, so block sizes are multiples of it."""


class StateBlocks(NamedTuple):
    """recurrence: what a block of states holds. block_size: tokens of a block."""

    recurrence: Recurrence
    block_size: int


def smallest_block(
    recurrence: Recurrence,
    num_speculative_tokens: int,
    kv_shape: tuple[int, int],
    kv_dtype: torch.dtype,
) -> int:
    """Tokens of the smallest block whose keys and values take as much memory as a state.

    Attention and state blocks share one page size, so it is the bytes of one layer's state over the
    KV bytes per token of one attention layer, rounded up to `KERNEL_GRANULARITY`. kv_shape:
    (num_key_value_heads, head_dim).
    """
    state = sum(part.longer(num_speculative_tokens).nbytes for part in recurrence.checkpoint)
    heads, dim = kv_shape
    page = 2 * heads * dim * kv_dtype.itemsize * KERNEL_GRANULARITY
    return -(-state // page) * KERNEL_GRANULARITY


def nemotron_h_states(
    config: Any,
    num_speculative_tokens: int,
    matrix_dtype: torch.dtype = torch.float32,
    conv_layout: ConvLayout = "SD",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int | None = None,
) -> StateBlocks:
    """Of a model with such a config, weights of `dtype` and matrices of `matrix_dtype`.

    block_size: None = `smallest_block` beside keys and values of `kv_dtype` (None: `dtype`).
    """
    recurrence = mamba2(
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_size=config.ssm_state_size,
        groups=config.n_groups,
        conv_width=config.conv_kernel,
        dtype=dtype,
        matrix_dtype=matrix_dtype,
        conv_layout=conv_layout,
    )
    if block_size is None:
        kv_shape = config.num_key_value_heads, config.head_dim
        block_size = smallest_block(recurrence, num_speculative_tokens, kv_shape, kv_dtype or dtype)
    return StateBlocks(recurrence, block_size)
