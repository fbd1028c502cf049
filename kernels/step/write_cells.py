"""Write single cells of tables: of large tables the host sends only what has changed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.direct_launch import DirectLaunch

CELLS = tl.constexpr(256)
"""Per program."""


def write_cells_reference(table: Tensor, cells: Tensor, count: int) -> None:
    """Write values to cells of a table.

    Args:
        table: int32 `[n]`, changed.
        cells: int32 `[lines, 2]`, of which the first `count` are an index and the value for it. An
            index that comes twice has the same value both times.
        count: valid lines.
    """
    index, value = cells[:count].unbind(1)
    table[index.long()] = value


@triton.jit(do_not_specialize=["count"])
def _write_cells_kernel(table, cells, count):
    i_line = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    here = i_line < count
    index = tl.load(cells + 2 * i_line, mask=here, other=0)
    value = tl.load(cells + 2 * i_line + 1, mask=here, other=0)
    tl.store(table + index, value, mask=here)


_launch = DirectLaunch(_write_cells_kernel)


def write_cells(table: Tensor, cells: Tensor, count: int) -> None:
    """`write_cells_reference` by one launch where Triton runs; one of no lines compiles it."""
    if not runs_triton(table):
        write_cells_reference(table, cells, count)
        return
    programs = max(-(-count // CELLS.value), 1)  # triton.cdiv is slow on the host
    _launch((programs, 1, 1), (table, cells, count), ())
