"""Boundaries and retention: what the kernels decide is what `state.align` decides, over all small
cases. Without a GPU the references are compared here, and the kernels in the interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from torch import Tensor

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import IDLE, Positions, SlotState, advance
from hybrid_runtime.kernels.step.boundary import keeps, keeps_reference, load_rule
from hybrid_runtime.kernels.step.state_copy import postcopy
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import POSTCOPY, PRECOPY, VllmCounts, decide_and_move
from hybrid_runtime.state.align import arithmetic
from hybrid_runtime.state.boundaries import RetentionRule

DEVICE = "cuda" if CUDA else "cpu"
BLOCK, DRAFTS, COLUMNS = 4, 3, 7
RULES = [(BLOCK, 0, 0), (2 * BLOCK, BLOCK, 0), (0, 0, 0), (0, 2 * BLOCK, 3 * BLOCK)]


@pytest.mark.slow
@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def ints(values: np.ndarray | list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(DEVICE)


def lines(cases: int, **values: np.ndarray) -> Tensor:
    """Entries of slots 0, 1, ... with these fields, as they reach the device."""
    entries = np.zeros((cases, fields.ENTRY_FIELDS), np.int32)
    entries[:, fields.SLOT] = np.arange(cases)
    entries[:, fields.PREVIOUS] = -1
    for name, value in values.items():
        entries[:, getattr(fields, name)] = value
    return ints(entries)


@triton.jit
def keeps_kernel(  # type: ignore[no-untyped-def]
    entries, boundary, out, count, FIELDS: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = row < count
    every, first, second = load_rule(entries + row * FIELDS, here)
    kept = keeps(tl.load(boundary + row, mask=here, other=1), every, first, second)
    tl.store(out + row, kept.to(tl.int32), mask=here)


KEPT = np.array(list(itertools.product(range(1, 25), range(6), range(0, 25, 4), (0, 5, 12)))).T


def kept_boundaries() -> tuple[Tensor, Tensor, np.ndarray]:
    boundary, every, first, second = KEPT
    entries = lines(len(boundary), EVERY=every, FIRST=first, SECOND=second)
    return entries, ints(boundary), RetentionRule(every, first, second).keeps(boundary)


def test_keeps_is_retention_keeps() -> None:
    entries, boundary, wanted = kept_boundaries()
    assert (keeps_reference(boundary, entries).cpu().numpy() == wanted).all()
    assert 0 < wanted.sum() < len(wanted)


@kernels
def test_keeps_in_a_kernel_is_retention_keeps() -> None:
    entries, boundary, wanted = kept_boundaries()
    out = torch.full_like(boundary, -7)
    grid = (triton.cdiv(len(boundary), 512),)
    keeps_kernel[grid](
        entries, boundary, out, len(boundary), FIELDS=int(fields.ENTRY_FIELDS), TILE=512
    )
    assert (out.cpu().numpy() == wanted).all()


def ended_steps() -> tuple[np.ndarray, ...]:
    """certain, draft, accepted, column, every, first, second of every small step that ended."""
    steps = [
        (r, d, a, (r + d - 1) // BLOCK, *rule)
        for r in range(1, 3 * BLOCK + 1)
        for d in range(DRAFTS + 1)
        for a in range(1, d + 2)
        for rule in RULES
    ]
    return tuple(np.array(steps).T)


def pools(slots: int) -> tuple[StateTable, Tensor, Tensor]:
    """One layer whose states and window inputs are numbered by column and position."""
    table = torch.arange(slots * COLUMNS, dtype=torch.int32, device=DEVICE).view(slots, COLUMNS)
    column = (table.flatten() % COLUMNS).float()
    ssm = column[:, None, None, None].expand(-1, 1, 1, 4).contiguous()
    position = torch.arange(3 + DRAFTS, device=DEVICE) / 8
    window = (column[:, None] + position)[:, :, None].expand(-1, -1, 2).contiguous()
    return StateTable.build([window], [ssm], [table], 3), window, ssm


def same_moves(move: arithmetic.Move, window: Tensor, ssm: Tensor) -> None:
    """The memory of `pools` after the moves, and no others."""
    slots = len(move.acts)
    _, first_window, first_ssm = pools(slots)
    shape = slots, COLUMNS
    wanted = first_ssm.view(*shape, -1).cpu().numpy().copy()
    inputs = first_window.view(*shape, 3 + DRAFTS, 2).cpu().numpy().copy()
    slot = np.flatnonzero(move.acts)
    source, offset, target = (value[slot] for value in move[1:])
    wanted[slot, target] = wanted[slot, source + offset]
    taken = inputs[slot[:, None], source[:, None], offset[:, None] + np.arange(3)]
    inputs[slot, target, :3] = taken
    assert (ssm.view(*shape, -1).cpu().numpy() == wanted).all()
    assert (window.view(inputs.shape).cpu().numpy() == inputs).all()


def test_postcopy_is_aligns() -> None:
    certain, draft, accepted, column, *rule = ended_steps()
    n = len(certain)
    entries = lines(n, EVERY=rule[0], FIRST=rule[1], SECOND=rule[2])
    placed = ints(np.stack([certain, column, draft, 0 * draft]))
    states, window, ssm = pools(n)
    postcopy(states, entries, placed, ints(accepted), n, True, BLOCK)
    move = arithmetic.postcopy(certain, draft, accepted, column, BLOCK, RetentionRule(*rule))
    assert move.acts.sum() > 20
    same_moves(move, window, ssm)


def test_vllms_postcopy_is_aligns() -> None:
    certain, draft, accepted, column, *rule = ended_steps()
    n = len(certain)
    entries = lines(n, EVERY=rule[0], FIRST=rule[1], SECOND=rule[2], PREVIOUS=np.arange(n))
    counts = VllmCounts(ints(column), ints(accepted), ints(certain + accepted - 1))
    states, window, ssm = pools(n)
    decided(states, entries, counts, n, POSTCOPY)
    move = arithmetic.postcopy(certain, draft, accepted, column, BLOCK, RetentionRule(*rule))
    same_moves(move, window, ssm)


def decided(states: StateTable, entries: Tensor, counts: VllmCounts, n: int, phase: int) -> Tensor:
    moves = ints(np.full((3, n), -7))
    totals = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    decide_and_move(states, entries, n, counts, moves, totals, ints([0]), BLOCK, phase)
    return moves


def begun_steps() -> tuple[np.ndarray, ...]:
    """computed, held, offset, scheduled, draft, decodes of every small step that begins."""
    steps = [
        (n, held, offset, s, d, reads)
        for n in range(1, 2 * BLOCK + 1)
        for held in ((n - 1) // BLOCK, (n - 1) // BLOCK + 1)
        for offset in range(DRAFTS + 1)
        for d in range(DRAFTS + 1)
        for s in (d + 1, d + 3, d + 2 * BLOCK + 1)
        for reads in (0, 1)
    ]
    return tuple(np.array(steps).T)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("in_place", "cuts"), [(False, False), (False, True), (True, False)])
def test_a_placed_step_is_aligns(rule: tuple[int, int, int], in_place: bool, cuts: bool) -> None:
    computed, held, offset, scheduled, draft, reads = begun_steps()
    n = len(computed)
    entries = lines(
        n, SCHEDULED=scheduled, DRAFT=draft, DECODES=reads,
        EVERY=np.full(n, rule[0]), FIRST=np.full(n, rule[1]), SECOND=np.full(n, rule[2]),
    )  # fmt: skip
    slots = SlotState(ints(computed), ints(held), ints(offset))
    positions = Positions(*(ints(np.full(n, idle)) for idle in IDLE))
    placed, moves = ints(np.full((4, n), -7)), ints(np.full((3, n), -7))
    advance(
        entries, n, n, slots, placed, placed[0], placed, positions, moves, BLOCK, in_place,
        cuts,
    )  # fmt: skip
    end = computed + scheduled
    column = arithmetic.running_column(end, BLOCK)
    resets = (draft > 0) & (end % BLOCK == 0) & RetentionRule(*rule).keeps(end)
    wanted = np.stack([end - draft, column, draft, resets])
    assert (placed.cpu().numpy() == wanted).all()
    move = arithmetic.precopy(held, offset, column, reads > 0)
    acts = move.acts & in_place
    if in_place:
        target = np.where(acts, move.target, -1)
        assert (moves.cpu().numpy() == np.stack([held, offset, target])).all()
    cut = arithmetic.prompt_cut(computed, end - draft, draft, BLOCK, RetentionRule(*rule)) * cuts
    assert cut.any() == (cuts and rule != (0, 0, 0))
    after = np.where(cut > 0, cut - computed, 0)
    read = (
        np.where(acts, column, held), np.where(acts, 0, offset), column, after, cut // BLOCK - 1
    )  # fmt: skip
    for found, value in zip(positions, read, strict=True):
        assert (found.cpu().numpy() == value).all()


def test_vllms_running_column_is_aligns() -> None:
    computed, held, offset, scheduled, *_ = begun_steps()
    n = len(computed)
    entries = lines(n, SCHEDULED=scheduled, PREVIOUS=np.arange(n))
    counts = VllmCounts(ints(held), ints(offset + 1), ints(computed))
    states, window, ssm = pools(n)
    moves = decided(states, entries, counts, n, PRECOPY)
    column = arithmetic.running_column(computed + scheduled, BLOCK)
    assert (counts.column.cpu().numpy() == column).all()
    move = arithmetic.precopy(held, offset, column, np.ones(n, bool))
    assert (moves[fields.TARGET].cpu().numpy() == np.where(move.acts, column, -1)).all()
    same_moves(move, window, ssm)
