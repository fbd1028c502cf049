"""The inputs of a step's forward pass and of its drafter, against their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.hopper import compiled
from helpers.interpreter import kernels, plain
from torch import Tensor
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.step import (
    advance_columns,
    advance_replay,
    commit_tokens,
    entry,
    prepare_inputs,
    write_cells,
)
from hybrid_runtime.kernels.step.commit_tokens import DraftInputs, TextEnds
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SLOTS, LENGTH = 6, 300


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def garbage(fields: tuple[Tensor, ...]) -> None:
    """Whatever is not written would show."""
    for field in fields:
        field.fill_(-77)


class World:
    """Sequences of random tokens, and a step that continues them."""

    def __init__(self, num_draft: int, rows: list[tuple[int, int, int]], seed: int) -> None:
        """rows: slot (-1 = padded), tokens scheduled, drafts among them."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

        self.num_draft, self.rows = num_draft, rows
        lines = draw(-1, 90, SLOTS + 1, num_draft + 3).to(DEVICE)
        self.drafts, self.length = lines[:, 1 : num_draft + 1], lines[:, num_draft + 2]
        stops = draw(-1, 400, SLOTS + 1, commit_tokens.MAX_ENDS + 1).to(DEVICE)
        bits = draw(-(2**31), 2**31 - 1, SLOTS + 1, 3) & draw(-(2**31), 2**31 - 1, SLOTS + 1, 3)
        most = draw(0, 90, SLOTS + 1, 3).to(DEVICE)[:, 1]
        self.ends = TextEnds(most, stops[:, 1:], bits.to(DEVICE))
        self.history = draw(0, 90, SLOTS + 1, LENGTH).to(DEVICE)
        self.computed = draw(0, 40, SLOTS).to(DEVICE)
        entries = draw(0, 3, 2 * SLOTS, entry.ENTRY_FIELDS)
        for i, (slot, scheduled, draft) in enumerate(rows):
            entries[i, entry.SLOT] = slot
            entries[i, entry.SCHEDULED] = scheduled
            entries[i, entry.DRAFT] = draft
            if slot >= 0:  # some are in the middle of their prompt
                left = 0 if draft else int(draw(0, 3, 1)) * 20
                self.length[slot] = int(self.computed[slot]) + scheduled - draft + left
        self.entries = entries.to(DEVICE)
        self.tokens = sum(s for _, s, _ in rows)
        self.longest = max([s for _, s, _ in rows], default=1)
        self.accepted = [1 + int(draw(0, d + 1, 1)) for _, _, d in rows]

    def endless(self) -> TextEnds:
        """Nothing ends a text."""
        self.ends.most.fill_(LENGTH)
        self.ends.tokens.fill_(-1)
        self.ends.bits.zero_()
        return self.ends

    def prepared(
        self, prepare: Callable[..., None], padded: int, pad: int, behind: int
    ) -> StepInputs:
        rows = len(self.rows) + padded
        tokens = self.tokens + padded * pad + behind
        out = StepInputs.empty(rows, tokens, self.num_draft, DEVICE)
        garbage(out)
        prepare(
            self.entries, len(self.rows), self.computed, self.history, self.drafts, self.length,
            out, self.longest, pad,
        )  # fmt: skip
        return out


ROWS = {
    "base": (3, [(4, 4, 3), (0, 4, 3), (2, 4, 3)]),
    "no drafts": (0, [(1, 1, 0), (3, 1, 0)]),
    "fewer drafts": (3, [(1, 2, 1), (3, 1, 0), (0, 3, 2)]),
    "none of 3 drafts": (3, [(1, 1, 0), (3, 1, 0), (0, 9, 0)]),
    "prefill": (3, [(5, 4, 3), (1, 150, 0), (2, 1, 0), (0, 128, 0)]),
    "padded": (2, [(5, 3, 2), (-1, 3, 2), (0, 3, 2)]),
    "nobody": (3, []),
    "one": (5, [(0, 6, 5)]),
    "most drafts": (15, [(4, 16, 15), (0, 3, 2), (2, 16, 15)]),
}
EXTRA = {"exact": (0, 0, 0), "uniform": (3, 4, 0), "tokens behind": (0, 0, 70)}


@kernels
@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_prepare_inputs(
    case: tuple[int, list[tuple[int, int, int]]], extra: tuple[int, int, int]
) -> None:
    world = World(*case, seed=1)
    if not len(case[1]) + extra[0]:
        return
    found = world.prepared(prepare_inputs.prepare_inputs, *extra)
    wanted = world.prepared(prepare_inputs.prepare_inputs_reference, *extra)
    for name in StepInputs._fields:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_prepare_inputs_by_hand() -> None:
    world = World(2, [(1, 3, 2), (3, 4, 0)], seed=0)
    world.computed[:] = ints(0, 5, 0, 2, 0, 0)
    world.length[1], world.length[3] = 6, 9
    world.history[1, :6] = ints(10, 11, 12, 13, 14, 15)
    world.history[3, :9] = ints(20, 21, 22, 23, 24, 25, 26, 27, 28)
    world.drafts[1] = ints(70, -1)
    out = world.prepared(prepare_inputs.prepare_inputs, padded=1, pad=3, behind=0)
    assert out.tokens.tolist() == [15, 70, 0, 22, 23, 24, 25, 0, 0, 0]
    assert out.cu_seqlens.tolist() == [0, 3, 7, 10]
    assert out.slot.tolist() == [1, 3, -1]
    assert out.certain.tolist() == [6, 6, 0]
    assert out.emits.tolist() == [1, 0, 0]
    assert out.drafts[0].tolist() == [70, -1]
    assert out.verify.tolist() == [[0, 1, 2], [6, 6, 6], [9, 9, 9]]


def committed(
    world: World, act: Callable[..., None], columns: int | None = None
) -> Iterator[Tensor]:
    """columns: of the accepted tokens; None: K + 1."""
    at = world.prepared(prepare_inputs.prepare_inputs_reference, 2, world.num_draft + 1, 3)
    rows, width = at.slot.shape[0], world.num_draft + 1
    counts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    counts[: len(world.rows)] = ints(*world.accepted)
    counts = torch.where(at.emits > 0, counts, 0)
    tokens = torch.arange(rows * width, device=DEVICE, dtype=torch.int32).view(rows, width) % 90
    tokens = torch.where(torch.arange(width, device=DEVICE) < counts[:, None], tokens, -1)
    history, length = world.history.clone(), world.length.clone()
    out = DraftInputs.empty(rows, at.tokens.shape[0], world.num_draft, DEVICE)
    sent = torch.full((rows, width + 1), -77, dtype=torch.int32, device=DEVICE)
    signed = torch.full((rows,), -77, dtype=torch.int32, device=DEVICE)
    garbage(out)
    tokens = tokens[:, :columns].contiguous()
    act(at, tokens, counts, history, length, world.ends, sent, signed, out, world.longest)
    yield from (history[:SLOTS], length[:SLOTS], sent, signed, *out)


@kernels
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_commit_tokens(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    world = World(*case, seed=1)
    found = list(committed(world, commit_tokens.commit_tokens))
    wanted = list(committed(world, commit_tokens.commit_tokens_reference))
    for name, a, b in zip(
        ("history", "length", "emitted", "counts", *DraftInputs._fields), found, wanted, strict=True
    ):
        assert torch.equal(a, b), name


@kernels
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["commit_tokens", "commit_tokens_reference"])
def test_columns_that_no_row_has_drafts_for_can_be_left_out(
    case: tuple[int, list[tuple[int, int, int]]], name: str
) -> None:
    world, act = World(*case, seed=1), getattr(commit_tokens, name)
    columns = 1 + max((draft for _, _, draft in case[1]), default=0)
    for found, wanted in zip(committed(world, act, columns), committed(world, act), strict=True):
        assert torch.equal(found, wanted)


def test_commit_tokens_by_hand() -> None:
    world = World(2, [(1, 3, 2), (3, 4, 0)], seed=0)
    world.computed[:] = ints(0, 5, 0, 2, 0, 0)
    world.length[1], world.length[3] = 6, 9
    world.history[3, :9] = ints(20, 21, 22, 23, 24, 25, 26, 27, 28)
    at = world.prepared(prepare_inputs.prepare_inputs, 0, 0, 0)
    out = DraftInputs.empty(2, 7, 2, DEVICE)
    sent = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    tokens = torch.stack([ints(70, 33, -1), ints(-1, -1, -1)])
    counts, ends = torch.zeros_like(at.slot), world.endless()
    commit_tokens.commit_tokens(
        at, tokens, ints(2, 0), world.history, world.length, ends, sent, counts, out, 4
    )
    assert counts.tolist() == [2, 0]
    assert world.history[1, 6:8].tolist() == [70, 33]
    assert world.length[[1, 3]].tolist() == [8, 9]
    assert sent.tolist() == [[70, 33, -1, 2], [-1, -1, -1, 0]]
    assert out.tokens.tolist() == [70, 33, 0, 23, 24, 25, 26]
    assert out.last.tolist() == [1, 6]
    assert out.slot.tolist() == [1, -1]
    assert out.computed.tolist() == [[6, 5], [7, 6]]


@kernels
def test_the_mark_of_broken_logits_reaches_the_host_and_no_text() -> None:
    world = World(2, [(1, 3, 2), (3, 4, 0)], seed=0)
    world.computed[:] = ints(0, 5, 0, 2, 0, 0)
    world.length[1], world.length[3] = 6, 9
    at = world.prepared(prepare_inputs.prepare_inputs, 0, 0, 0)
    out = DraftInputs.empty(2, 7, 2, DEVICE)
    sent = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    tokens = torch.stack([ints(70, -3, -1), ints(-1, -1, -1)])
    counts, ends = torch.zeros_like(at.slot), world.endless()
    commit_tokens.commit_tokens(
        at, tokens, ints(2, 0), world.history, world.length, ends, sent, counts, out, 4
    )
    assert sent[0].tolist() == [70, -3, -1, 2]
    assert world.history[1, 6:8].tolist() == [70, 0]
    assert (out.tokens >= 0).all()


@kernels
@pytest.mark.parametrize("name", ["commit_tokens", "commit_tokens_reference"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("stops", "most", "ended"),
    [
        ((), 9, False),
        ((70,), 9, True),
        ((5, 6, 7, 8, 9, 10, 11, 33), 9, True),
        ((44,), 9, False),  # emitted by no row: behind the count
        ((12, 81), 9, False),  # in the text, and emitted by another row
        ((), 8, True),
        ((), 7, True),
    ],
)
def test_counts_are_negative_where_a_text_ends(
    name: str, stops: tuple[int, ...], most: int, ended: bool, listed: bool
) -> None:
    """At a token among those that it emits, or at its length."""
    world = World(2, [(1, 3, 2), (4, 3, 2)], seed=0)
    world.computed[:] = ints(0, 5, 0, 2, 3, 0)
    world.length[1], world.length[4] = 6, 4
    world.history[1, :6] = ints(10, 11, 12, 13, 14, 15)
    at = world.prepared(prepare_inputs.prepare_inputs, 0, 0, 0)
    out = DraftInputs.empty(2, 6, 2, DEVICE)
    sent = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    tokens, counts = torch.stack([ints(70, 33, 44), ints(81, -1, -1)]), torch.zeros_like(at.slot)
    ends = world.endless()
    ends.most[1] = most
    if listed:
        words = [sum(1 << t % 32 for t in stops if t // 32 == word) for word in range(3)]
        ends.bits[1] = torch.tensor(words).int()
    else:
        ends.tokens[1, : len(stops)] = ints(*stops)
    getattr(commit_tokens, name)(
        at, tokens, ints(2, 1), world.history, world.length, ends, sent, counts, out, 4
    )
    assert counts.tolist() == sent[:, -1].tolist() == [-2 if ended else 2, 1]
    assert sent[:, :-1].tolist() == [[70, 33, -1], [81, -1, -1]]
    assert world.length[[1, 4]].tolist() == [8, 5]


@kernels
@pytest.mark.parametrize("count", [0, 1, 255, 256, 700])
def test_cells_are_written_and_no_others(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    cells = torch.stack([torch.randperm(1000, generator=generator)] * 2, dim=1).int()
    cells[:, 1] += 5
    wanted = torch.full((1000,), -1, dtype=torch.int32)
    write_cells.write_cells_reference(wanted, cells, count)
    assert int((wanted >= 0).sum()) == count
    assert (wanted[wanted >= 0] == (wanted >= 0).nonzero()[:, 0] + 5).all()
    table = torch.full((1000,), -1, dtype=torch.int32, device=DEVICE)
    write_cells.write_cells(table, cells.to(DEVICE), count)
    assert table.tolist() == wanted.tolist()


PREPARE = {"WIDTH": 8, "ROWS": 64, "TILE": 128}
COMMIT = {"WIDTH": 8, "ENDS": 8, "TILE": 128}
COMPILED: list[tuple[Any, dict[str, Any]]] = [
    *((prepare_inputs._prepare_inputs_kernel, PREPARE | {"NUM_DRAFT": k}) for k in (0, 3)),
    *((commit_tokens._commit_tokens_kernel, COMMIT | {"NUM_DRAFT": k}) for k in (0, 1, 3)),
    (prepare_inputs._prepare_inputs_kernel, PREPARE | {"NUM_DRAFT": 15, "WIDTH": 16}),
    (commit_tokens._commit_tokens_kernel, COMMIT | {"NUM_DRAFT": 15, "WIDTH": 32}),
    (write_cells._write_cells_kernel, {}),
]
NUMBERS = {"num_rows", "rows", "pad", "num_tokens", "count"}


@plain
@pytest.mark.parametrize(("kernel", "constants"), COMPILED)
def test_compiles_for_hopper(kernel: JITFunction, constants: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    types = {
        name: "i32" if name in NUMBERS or name.endswith("_stride") else "*i32"
        for name in kernel.arg_names
    }
    assert compiled(kernel, constants, **types).asm["cubin"]


LAUNCHED_DIRECTLY = (
    prepare_inputs._prepare_inputs_kernel,
    advance_columns._advance_kernel,
    advance_replay._advance_replay_kernel,
    write_cells._write_cells_kernel,
)
NUMBERS_OF_ALL = NUMBERS | {"num_entries", "max_rows", "live_column", "window", "ring"}


@plain
@pytest.mark.parametrize("kernel", LAUNCHED_DIRECTLY)
def test_one_handle_serves_launches_with_any_numbers(kernel: Any) -> None:
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    for parameter in kernel.params:
        if parameter.name in NUMBERS_OF_ALL or parameter.name.endswith("_stride"):
            assert parameter.do_not_specialize, parameter.name
