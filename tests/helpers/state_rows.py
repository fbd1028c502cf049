"""Rows of the columns layout that tests run kernels and references on."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from helpers.tensors import DEVICE
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows


class Rows:
    """Rows of a flat token dimension.

    Attributes:
        spec: of each row (scheduled, slot, draft, read column, read offset, write column).
        tokens: size of the token dimension; `lead` before and `tail` behind all rows belong to
            none.
        table: int32 [slots, columns] of physical blocks on the CPU, if the rows have their own.
        blocks: physical blocks there are; the table holds 1 to blocks - 1.
        fields: int32 [rows] each: slot, cu_seqlens ([rows + 1]), draft, read_column, read_offset,
            write_column.
        max_scheduled: most tokens of a row.
        owned: bool [tokens], belongs to a row that is not padded.
        active: entries of `spec` that have tokens and are not padded.
    """

    def __init__(
        self,
        spec: Sequence[Sequence[int]],
        lead: int = 0,
        tail: int = 0,
        table: Tensor | None = None,
        blocks: int = 0,
        device: str = DEVICE,
    ) -> None:
        self.spec, self.blocks, self.device = spec, blocks, device
        scheduled, slot, draft, read, offset, write = torch.tensor(spec).int().T.contiguous()
        start = torch.cat([torch.zeros(1, dtype=torch.int32), scheduled.cumsum(0).int()]) + lead
        fields = (slot, start, draft, read, offset, write)
        self.fields = tuple(field.to(device) for field in fields)
        self.tokens = int(start[-1]) + tail
        self.max_scheduled = int(scheduled.max())
        self.table = torch.empty((0, 0), dtype=torch.int32) if table is None else table
        live = (slot >= 0) & (write >= 0)
        owner = torch.repeat_interleave(torch.arange(len(spec)), scheduled.long())
        outside = torch.zeros(lead + tail, dtype=torch.bool)
        self.owned = torch.cat([outside[:lead], live[owner], outside[lead:]]).to(device)
        self.active = [row for row in spec if row[0] > 0 and min(row[1], row[5]) >= 0]

    def on(self, table: Tensor) -> StateRows:
        """What a kernel takes, with this block table."""
        return StateRows(table.to(self.device), *self.fields)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a kernel takes, with the rows' own table."""
        return {"rows": self.on(self.table), "max_scheduled": self.max_scheduled}

    def block(self, slot: int, column: int) -> int:
        return int(self.table[slot, column])

    def __iter__(self) -> Iterator[tuple[slice, int, int, int, int, int, int]]:
        """The row's tokens and its entry of `spec`."""
        starts = self.fields[1].tolist()
        for i, (scheduled, slot, draft, read, offset, write) in enumerate(self.spec):
            tokens = slice(starts[i], starts[i + 1])
            yield tokens, scheduled, slot, draft, read, offset, write


def update_rows(most: int, seed: int, table_pad: int = 0) -> Rows:
    """Rows of at most `most` tokens, each with a slot and columns of its own.

    Read column one below, equal to and above the write column, with every read offset; scheduled
    and draft counts vary by row. Among them: a zero initial state, padded rows of both kinds with
    and without tokens, an empty row, and tokens that belong to no row.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    spec: list[list[int]] = []
    for read in (0, 1, 2):
        for offset in range(most):
            scheduled = 1 + (offset + read + pick(2)) % most
            spec.append([scheduled, len(spec), pick(scheduled), read, offset, 1])
    spec.append([most, len(spec), most - 1, 1, most - 1, 1])
    spec.append([most, len(spec), most - 1, -1, 0, 1])
    spec.append([1, len(spec), 0, 0, 0, 1])
    slots = len(spec)
    spec[1:1] = [[most, -1, most - 1, 1, 0, 1], [0, -1, 0, -1, -1, -1]]
    spec += [[1, 0, 0, 1, 0, -1], [0, 1, 0, 1, 0, 1], [most, -1, 0, -1, -1, -1]]
    return _scattered(spec, generator, slots, most + 3, table_pad, lead=0, tail=3)


def prefill_rows(
    lengths: tuple[int, ...], seed: int, drafts: int, padded: bool, table_pad: int = 0
) -> Rows:
    """Rows of the given lengths, each with a slot and columns of its own.

    The read column lies one below, equal to and above the write column, with every read offset up
    to `drafts`; every fourth row starts from nothing. Among them, when `padded`: padded rows of
    both kinds with and without tokens, and an empty row.
    """
    spec: list[list[int]] = []
    for i, length in enumerate(lengths):
        read = -1 if i % 4 == 3 else i % 4
        draft = min(length - 1, i % (drafts + 1))
        spec.append([length, i, draft, read, (i + seed) % (drafts + 1) if read >= 0 else 0, 1])
    slots = len(spec)
    if padded:
        spec[1:1] = [[9, -1, 0, 1, 0, 1], [0, -1, 0, -1, -1, -1]]
        spec += [[40, 0, 0, 1, 0, -1], [0, 1, 0, 1, 0, 1], [7, -1, 0, -1, -1, -1]]
    generator = torch.Generator().manual_seed(seed)
    return _scattered(spec, generator, slots, drafts + 3, table_pad, lead=2, tail=5)


def _scattered(
    spec: list[list[int]],
    generator: torch.Generator,
    slots: int,
    columns: int,
    table_pad: int,
    lead: int,
    tail: int,
) -> Rows:
    """Rows and blocks in random order; entries of the table behind its columns are no block."""
    order = torch.randperm(len(spec), generator=generator).tolist()
    table = torch.full((slots, columns + table_pad), 1 << 30, dtype=torch.int32)
    block = torch.randperm(slots * columns, generator=generator).int() + 1
    table[:, :columns] = block.view(slots, columns)
    return Rows([spec[i] for i in order], lead, tail, table, blocks=slots * columns + 1)
