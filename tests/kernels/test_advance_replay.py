"""Which checkpoints a replay step stores, by brute force, and when it writes its state; and the
kernel that decides it, against its reference: on a GPU where there is one, else in the interpreter,
in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.hopper import compiled
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.step import advance_replay as advance_replay_module
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_replay import (
    IDLE,
    ReplayPlace,
    ReplayPositions,
    ReplaySlots,
    advance_replay,
    advance_replay_reference,
)
from hybrid_runtime.state import boundaries
from hybrid_runtime.state.boundaries import RetentionRule
from hybrid_runtime.state.replay import arithmetic as replay_arithmetic

DEVICE = "cuda" if CUDA else "cpu"


# What is stored


def rules(apart: int) -> list[RetentionRule]:
    """None, one or two positions, at least so many tokens apart."""
    pairs = [(0, 0), (apart, 0), (0, apart + 1), (2 * apart, apart), (apart - 1, 2 * apart + 1)]
    return [RetentionRule(0, *pair) for pair in pairs]


def steps(block: int, most: int) -> np.ndarray:
    """All (tokens certain before, guesses then, accepted of them, s, d) that the manager admits."""
    tokens = range(1, 2 * block + 2)
    after_drafts = [
        (c, g, f, d + 1, d)
        for c in tokens
        for g in range(1, most + 1)
        for f in range(g + 1)
        for d in range(most + 1)
    ]
    chunks = [
        (c, 0, 0, s, d)
        for c, s, d in itertools.product(range(2 * block + 1), tokens, range(most + 1))
        if d < s
    ]
    return np.array(after_drafts + chunks)


@pytest.mark.parametrize(("block", "most"), [(2, 1), (4, 3), (5, 2), (8, 4), (9, 0)])
def test_stored_checkpoints_and_candidates_by_walking(block: int, most: int) -> None:
    """Exhaustively: token by token through the fold, and at the end of the certain tokens."""
    before, guesses, fold, s, d = steps(block, most).T
    computed = before + fold
    certain = computed + s - d
    for kept in rules(block):
        found = replay_arithmetic.replay_checkpoint(before, computed, certain, d, kept)
        first = replay_arithmetic.first_stored(before, computed + s - d, guesses)
        may = replay_arithmetic.replay_candidates(first, computed, certain, d, guesses, kept)
        for i in range(len(before)):
            seen = {*range(before[i] + 1, computed[i] + 1), certain[i]}
            want = [b for b in seen if kept.keeps(np.array(b))]
            assert len(want) < 2
            assert found.position[i] == (want[0] if want else 0)
            extra = bool(want) and (want[0] <= computed[i] or d[i] > 0)
            assert found.extra[i] == extra
            assert found.after[i] == (want[0] - computed[i] if want else 0)
            assert may[i] == extra  # sound and tight
            assert not extra or found.after[i] in {*range(1 - fold[i], 1), s[i] - d[i]}


@given(
    st.integers(1, 40), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4),
    st.integers(5, 9), st.integers(0, 4),
)  # fmt: skip
def test_bounds_rule_out_only_what_no_count_can_reach(
    low: int, spread: int, guesses: int, draft: int, block: int, rule: int
) -> None:
    """low .. low + spread tokens were certain before, and up to `guesses` more are computed."""
    kept = rules(block)[rule]
    exact = False
    for before, fold in itertools.product(range(low, low + spread + 1), range(guesses + 1)):
        values = (np.array([v]) for v in (before, before + fold, before + fold + 1, draft))
        exact |= bool(replay_arithmetic.replay_checkpoint(*values, kept).extra[0])
    least, most = np.array([low]), np.array([low + spread + guesses])
    drafts, last = np.array([draft]), np.array([guesses])
    first = replay_arithmetic.first_stored(least, least + 1, last)
    assert (
        replay_arithmetic.replay_candidates(first, most, most + 1, drafts, last, kept)[0] == exact
    )


@given(st.integers(0, 200), st.integers(1, 12), st.integers(0, 4))
def test_last_retained_is_the_last_that_is_kept(position: int, block: int, rule: int) -> None:
    kept = rules(block)[rule]
    found = [b for b in range(1, position + 1) if kept.keeps(np.array(b))]
    assert boundaries.last_retained(np.array([position]), kept)[0] == (found[-1] if found else 0)


@pytest.mark.parametrize("ring_tokens", [0, *range(1, 16), 31])
def test_a_ring_has_room_for_pending_tokens_beside_a_steps_own(ring_tokens: int) -> None:
    """Whatever the state may lack, a step that writes it leaves all of its drafts pending."""
    for num_draft in range(16):
        pending = max(ring_tokens, num_draft)
        length = ring_length(num_draft, ring_tokens)
        indices = [position % length for position in range(pending + num_draft + 1)]
        assert len(set(indices)) == len(indices)


# The kernel


def test_compiles_for_hopper() -> None:
    kernel = advance_replay_module._advance_replay_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    numbers = {"num_entries", "num_rows", "max_rows", "live_column", "ring_tokens", "ring"}
    types = {
        name: "i32" if name in numbers or name.endswith("_stride") else "*i32"
        for name in kernel.arg_names
    }
    for cuts in (False, True):
        assert compiled(kernel, {"CUTS": cuts}, **types).asm["cubin"]


@pytest.mark.slow
@elsewhere
def test_the_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "kernel")


class Device:
    """What one manager keeps on the device, for `n` slots."""

    def __init__(self, n: int) -> None:
        def ints(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

        self.slots = ReplaySlots(ints(-1, n), ints(-1, n), ints(0, n), ints(0, n))
        self.placed = [ints(-1, 4, n) for _ in range(2)]
        self.positions = ReplayPositions(*(ints(value, n) for value in IDLE))

    def tensors(self) -> list[torch.Tensor]:
        return [*self.slots, *self.placed, *self.positions]


def entries_of(
    rng: np.random.Generator, n: int, busy: np.ndarray, before: np.ndarray, block: int
) -> tuple[torch.Tensor, int, int]:
    """Lines of a random step after one whose rows were `before` (slot by row), and its rows."""
    slots = rng.permutation(n)[: rng.integers(1, n + 1)]
    lines = np.zeros((2 * n, fields.ENTRY_FIELDS), np.int32)
    rows = len(slots)
    lines[:rows, fields.SLOT] = np.where(rng.random(rows) < 0.1, -1, slots)
    chunk = rng.random(rows) < 0.3
    draft = np.where(chunk & (rng.random(rows) < 0.5), 0, rng.integers(0, 4, rows))
    lines[:rows, fields.SCHEDULED] = draft + 1
    lines[:rows, fields.DRAFT] = draft
    lines[:rows, fields.DECODES] = (draft > 0) | (rng.random(rows) < 0.5)
    named = lines[:rows, fields.SLOT]
    lines[:rows, fields.PREVIOUS] = -1
    for i, slot in enumerate(named):
        if slot < 0:
            continue
        at = np.flatnonzero(before == slot)
        if not busy[slot] or rng.random() < 0.15:  # a new tenant, perhaps of a running slot
            tokens = int(rng.integers(0, 3)) * block + int(rng.integers(0, 2))
            column = -1 if not tokens else int(rng.integers(0, 3))
            lines[i, fields.ADMIT : fields.ADMIT_COLUMN + 1] = 1, tokens, column
            lines[i, fields.SCHEDULED] += rng.integers(0, 2 * block)
            busy[slot] = True
        elif len(at):
            lines[i, fields.PREVIOUS] = at[0]
        _, lines[i, fields.FIRST_SAVE], lines[i, fields.SECOND_SAVE] = rules(block)[
            rng.integers(0, 5)
        ]
        columns = fields.FIRST_COLUMN, fields.SECOND_COLUMN
        lines[i, columns] = rng.permutation(9)[:2]
    left = [(row, slot) for row, slot in enumerate(before) if slot >= 0 and slot not in named]
    for i, (row, slot) in enumerate(left, start=rows):
        lines[i, fields.SLOT], lines[i, fields.PREVIOUS] = slot, row
    return torch.from_numpy(lines).to(DEVICE), rows + len(left), rows


@pytest.mark.parametrize("window", [0, 4, 5, 15])
@pytest.mark.parametrize("rule", rules(4), ids=str)
@pytest.mark.parametrize("cuts", [False, True])
def test_kernel_stores_what_align_says(rule: RetentionRule, window: int, cuts: bool) -> None:
    """All small steps at once, from states of any age, in the live column or another; the
    reference where kernels don't run."""
    block, live, ring = 4, 99, ring_length(3, window)
    before, guesses, fold, s, d = (np.repeat(v, 2) for v in steps(block, 3).T)
    n = len(before)
    rng = np.random.default_rng(window)
    decodes = (d > 0) | ((s == 1) & (rng.random(n) < 0.5))
    lacks = np.minimum(rng.integers(0, max(window, 1), n), before)
    written = np.where(decodes | (guesses > 0), before - lacks, before)
    held = np.where((guesses == 0) & (np.arange(n) % 2 > 0), before // block, live)
    device = Device(n)
    device.slots.written.copy_(torch.from_numpy(written.astype(np.int32)))
    previous = np.zeros((4, n), np.int32)
    previous[fields.CERTAIN], previous[fields.PLACED_DRAFT] = before, guesses
    previous[fields.COLUMN] = held
    lines = np.zeros((n, fields.ENTRY_FIELDS), np.int32)
    lines[:, fields.SLOT] = lines[:, fields.PREVIOUS] = np.arange(n)
    lines[:, fields.SCHEDULED], lines[:, fields.DRAFT], lines[:, fields.DECODES] = s, d, decodes
    _, lines[:, fields.FIRST_SAVE], lines[:, fields.SECOND_SAVE] = rule
    lines[:, fields.FIRST_COLUMN], lines[:, fields.SECOND_COLUMN] = 6, 5
    entries, finished, accepted = (
        torch.from_numpy(v.astype(np.int32)).to(DEVICE) for v in (lines, previous, fold + 1)
    )
    advance_replay(
        entries, n, n, device.slots, finished, accepted, device.placed[0], device.positions,
        ReplayPlace(live, window, ring, cuts),
    )  # fmt: skip
    computed, certain = before + fold, before + fold + s - d
    stored = replay_arithmetic.replay_checkpoint(before, computed, certain, d, rule)
    direct = (stored.position == certain) & (d == 0)
    inside = replay_arithmetic.save_inside(computed, certain, d, rule) * cuts
    assert inside.any() == (cuts and rule != (0, 0, 0))
    assert not (stored.extra & (inside > 0)).any()
    extra, kept = stored.extra | (inside > 0), np.where(inside > 0, inside, stored.position)
    pending = computed - written
    stores, is_live = (stored.position > 0) | (inside > 0), held == live
    writes = replay_arithmetic.replay_writes(pending, s, decodes, stores, is_live, window)
    assert writes.any()
    for plain in (d > 0, decodes & (d == 0)):
        assert not writes[plain].all() or not window
    wanted = {
        "read_column": held,
        "offset": fold,
        "pending": pending,
        "cursor": written % ring,
        "certain": certain,
        "writes": writes,
        "write_column": np.where(direct, np.where(certain == rule.first, 6, 5), live),
        "checkpoint_column": np.where(extra, np.where(kept == rule.first, 6, 5), -1),
        "checkpoint_after": np.where(extra, kept - computed, 0),
    }
    assert set(wanted) == set(ReplayPositions._fields)
    for name, value in wanted.items():
        assert (getattr(device.positions, name).cpu().numpy() == value).all(), name
    after = np.where(writes, certain, written)
    assert (device.slots.written.cpu().numpy() == after).all()


@kernels
@kernels
@pytest.mark.parametrize("act", [advance_replay, advance_replay_reference])
@pytest.mark.parametrize(("draft", "accepted", "computed"), [(3, 4, 9), (3, 2, 7), (0, 1, 6)])
def test_kernel_runs_no_text_that_has_ended(
    act: Callable[..., None], draft: int, accepted: int, computed: int
) -> None:
    """A step that was queued before that was known leaves its state as it is, and so do later ones;
    the count is exact."""
    device, place = Device(2), ReplayPlace(11, 15, ring_length(3, 15), cuts=True)
    device.slots.written.fill_(6)
    device.placed[0].zero_()
    device.placed[0][fields.CERTAIN] = 6
    device.placed[0][fields.COLUMN] = place.live_column
    device.placed[0][fields.PLACED_DRAFT] = draft
    lines = np.zeros((2, fields.ENTRY_FIELDS), np.int32)
    lines[:, fields.SLOT] = lines[:, fields.PREVIOUS] = 0, 1
    lines[:, fields.SCHEDULED], lines[:, fields.DRAFT], lines[:, fields.DECODES] = 4, 3, 1
    lines[:, fields.FIRST_SAVE], lines[:, fields.FIRST_COLUMN] = 7, 0
    entries = torch.from_numpy(lines).to(DEVICE)
    for number in range(2):
        counts = torch.tensor([-accepted, accepted], dtype=torch.int32, device=DEVICE)
        previous, placed = device.placed[number % 2], device.placed[1 - number % 2]
        act(entries, 2, 2, device.slots, previous, counts, placed, device.positions, place)
        ended, runs = torch.stack(list(device.positions)).T.tolist()
        assert ended == list(IDLE)
        assert runs[ReplayPositions._fields.index("write_column")] == place.live_column
        assert device.slots.held.tolist() == [fields.DEAD, place.live_column]
        assert device.slots.computed[0] == computed
        if not number:
            assert device.slots.computed[1] == computed
            assert device.slots.written[0] == 6


@pytest.mark.parametrize("n", [1, 5, 17, 150])
@pytest.mark.parametrize(("block", "window"), [(4, 15), (16, 15), (16, 4), (16, 0)])
def test_kernel_and_reference_agree(n: int, block: int, window: int) -> None:
    """Over histories: counts of 0 and beyond the drafts, dead rows, ended texts, new tenants and
    padded rows."""
    rng = np.random.default_rng(n)
    mine, theirs = Device(n), Device(n)
    before, busy = np.empty(0, np.int32), np.zeros(n, bool)
    stored = direct = dead = folded = written = 0
    for number in range(60 if CUDA or n < 20 else 8):
        lines, count, rows = entries_of(rng, n, busy, before, block)
        counts = rng.integers(0, 6, n)
        counts[rng.random(n) < 0.7] = 4
        if n > 5:  # of few slots none would be left
            counts[rng.random(n) < 0.1] *= -1
        accepted = torch.from_numpy(counts.astype(np.int32)).to(DEVICE)
        held = [t.clone() for t in (lines, accepted)]
        for device, act in ((mine, advance_replay), (theirs, advance_replay_reference)):
            previous, placed = device.placed[number % 2], device.placed[1 - number % 2]
            act(
                lines, count, rows, device.slots, previous, accepted, placed, device.positions,
                ReplayPlace(11, window, ring_length(3, window), cuts=number % 3 > 0),
            )  # fmt: skip
        for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(a, b)
        for now, then in zip((lines, accepted), held, strict=True):
            assert torch.equal(now, then)
        before = lines[:rows, fields.SLOT].cpu().numpy()
        out = mine.positions
        stored += int((out.checkpoint_column >= 0).sum())
        direct += int(((out.write_column >= 0) & (out.write_column < 11)).sum())
        folded += int((out.pending > 0).sum())
        written += int(out.writes.sum())
        dead += int((mine.slots.held == fields.DEAD).sum())
    assert stored
    assert n < 17 or (direct and dead and folded and written)
