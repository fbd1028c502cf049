"""All state tensors of a model as one table of addresses, so that one launch covers every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.constant import Constant

BASE_CONV_STATE = Constant(0)
"""Words of a layer's line of `StateTable.addresses`, int64: base address of its conv_states,"""
STRIDE_CONV_STATE = Constant(1)
"""their block stride in bytes,"""
BASE_MATRIX = Constant(2)
"""base address of its matrices,"""
STRIDE_MATRIX = Constant(3)
"""their block stride in bytes,"""
BASE_TABLE = Constant(4)
"""base address of its block table,"""
STRIDE_TABLE = Constant(5)
"""and the table's row stride in entries."""
ADDRESS_FIELDS = Constant(6)


@dataclass(frozen=True, slots=True)
class StateTable:
    """Views of every layer's blocks and their block tables.

    conv_states: per layer `[blocks, positions, channels]` (any strides, so SD and DS alike).
    matrices: per layer `[blocks, *]`, each block contiguous; block strides may be padded.
    tables: per layer the int32 `[slots, columns]` block table of its cache group.
    taps: inputs that a convolution needs of its conv_state, `conv_width - 1`.
    addresses: int64 `[layers, ADDRESS_FIELDS]` on the device, of the fields named above.
    word: bytes of the widest access that every matrix address allows (4 at most; 16-byte accesses
    come from vectorising words when `vector` says that all addresses are multiples of 16).
    """

    conv_states: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    taps: int
    addresses: Tensor
    word: int
    vector: bool

    @classmethod
    def build(
        cls,
        conv_states: Sequence[Tensor],
        matrices: Sequence[Tensor],
        tables: Sequence[Tensor],
        taps: int,
    ) -> StateTable:
        rows = []
        grain = 16
        for conv_state, matrix, table in zip(conv_states, matrices, tables, strict=True):
            stride = matrix.stride(0) * matrix.element_size()
            grain = math.gcd(grain, matrix.data_ptr(), stride, matrix[0].nbytes)
            rows.append(
                [
                    conv_state.data_ptr(),
                    conv_state.stride(0) * conv_state.element_size(),
                    matrix.data_ptr(),
                    stride,
                    table.data_ptr(),
                    table.stride(0),
                ]
            )
        addresses = torch.tensor(rows, dtype=torch.int64).to(conv_states[0].device)
        return cls(
            tuple(conv_states),
            tuple(matrices),
            tuple(tables),
            taps,
            addresses,
            word=min(grain, 4),
            vector=grain == 16,
        )

    @property
    def matrix_bytes(self) -> int:
        """Natural bytes of one layer's matrix (the padding of a page is never copied)."""
        return self.matrices[0][0].numel() * self.matrices[0].element_size()

    def bytes_per_move(self) -> int:
        """Bytes read (and again written) when one row's state moves in every layer."""
        conv_state = self.conv_states[0]
        return len(self.conv_states) * (
            self.matrix_bytes + self.taps * conv_state.shape[2] * conv_state.element_size()
        )
