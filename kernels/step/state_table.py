"""All state tensors of a model as one table of addresses, so that one launch covers every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.constant import Constant

BASE_WINDOW = Constant(0)
"""Words of a layer's line of `StateTable.addresses`, int64: base address of its windows,"""
STRIDE_WINDOW = Constant(1)
"""their block stride in bytes,"""
BASE_SSM = Constant(2)
"""base address of its SSM states,"""
STRIDE_SSM = Constant(3)
"""their block stride in bytes,"""
BASE_TABLE = Constant(4)
"""base address of its block table,"""
STRIDE_TABLE = Constant(5)
"""and the table's row stride in entries."""
ADDRESS_FIELDS = Constant(6)


@dataclass(frozen=True, slots=True)
class StateTable:
    """Views of every layer's blocks and their block tables.

    windows: per layer `[blocks, positions, channels]` (any strides, so SD and DS alike).
    ssm: per layer `[blocks, H, P, N]`, each block contiguous; block strides may be padded.
    tables: per layer the int32 `[slots, columns]` block table of its cache group.
    taps: inputs that a convolution needs from its window, `conv_width - 1`.
    addresses: int64 `[layers, ADDRESS_FIELDS]` on the device, of the fields named above.
    word: bytes of the widest access that every SSM address allows (4 at most; 16-byte accesses
    come from vectorising words when `vector` says that all addresses are multiples of 16).
    """

    windows: tuple[Tensor, ...]
    ssm: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    taps: int
    addresses: Tensor
    word: int
    vector: bool

    @classmethod
    def build(
        cls,
        windows: Sequence[Tensor],
        ssm: Sequence[Tensor],
        tables: Sequence[Tensor],
        taps: int,
    ) -> StateTable:
        rows = []
        grain = 16
        for window, state, table in zip(windows, ssm, tables, strict=True):
            stride = state.stride(0) * state.element_size()
            grain = math.gcd(grain, state.data_ptr(), stride, state[0].numel() * state.itemsize)
            rows.append(
                [
                    window.data_ptr(),
                    window.stride(0) * window.element_size(),
                    state.data_ptr(),
                    stride,
                    table.data_ptr(),
                    table.stride(0),
                ]
            )
        addresses = torch.tensor(rows, dtype=torch.int64).to(windows[0].device)
        return cls(
            tuple(windows),
            tuple(ssm),
            tuple(tables),
            taps,
            addresses,
            word=min(grain, 4),
            vector=grain == 16,
        )

    @property
    def ssm_bytes(self) -> int:
        """Natural bytes of one layer's SSM state (the padding of a page is never copied)."""
        return self.ssm[0][0].numel() * self.ssm[0].element_size()

    def bytes_per_move(self) -> int:
        """Bytes read (and again written) when one row's state moves in every layer."""
        window = self.windows[0]
        return len(self.windows) * (
            self.ssm_bytes + self.taps * window.shape[2] * window.element_size()
        )
