"""The columns layout's bookkeeping kernel against its reference, over histories: on a GPU where
there is one, else in the interpreter, in a process of its own."""

import numpy as np
import pytest
import torch
from helpers.interpreter import CUDA, kernels

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import (
    IDLE,
    Positions,
    SlotState,
    advance,
    advance_reference,
)

DEVICE = "cuda" if CUDA else "cpu"
BLOCK, DRAFTS = 4, 3
RULES = [(BLOCK, 0, 0), (2 * BLOCK, BLOCK, 0), (0, 0, 0), (0, 2 * BLOCK, 3 * BLOCK)]


class Device:
    """What one manager keeps on the device, for `n` slots."""

    def __init__(self, n: int) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=DEVICE)

        self.slots = SlotState(ints(n), ints(n), ints(n))
        self.placed = [ints(4, n) for _ in range(2)]
        self.positions = Positions(*(ints(n).fill_(idle) for idle in IDLE))
        self.moves = ints(3, n)

    def seen(self, placed: torch.Tensor, live: torch.Tensor, in_place: bool) -> list[torch.Tensor]:
        """What others may read; only of `live` rows where the step placed them."""
        moves = [self.moves[fields.TARGET], self.moves[:, live]] if in_place else []
        return [*self.slots, placed[:, live], *self.positions, *moves]


def entries_of(
    rng: np.random.Generator, n: int, busy: np.ndarray, before: np.ndarray
) -> tuple[torch.Tensor, int, int]:
    """Lines of a random step after one whose rows were `before` (slot by row), and its rows."""
    slots = rng.permutation(n)[: rng.integers(1, n + 1)]
    rows = len(slots)
    lines = np.zeros((2 * n, fields.ENTRY_FIELDS), np.int32)
    named = lines[:rows, fields.SLOT] = np.where(rng.random(rows) < 0.1, -1, slots)
    lines[:rows, fields.DRAFT] = draft = rng.integers(0, DRAFTS + 1, rows)
    lines[:rows, fields.SCHEDULED] = draft + rng.integers(1, 2 + BLOCK, rows)
    lines[:rows, fields.DECODES] = rng.integers(0, 2, rows)
    lines[:rows, fields.EVERY : fields.SECOND + 1] = np.array(RULES)[rng.integers(0, 4, rows)]
    lines[:, fields.PREVIOUS] = -1
    for i, slot in enumerate(named):
        if slot < 0:
            continue
        at = np.flatnonzero(before == slot)
        if not busy[slot] or rng.random() < 0.1:  # a new tenant, perhaps of a running slot
            tokens = int(rng.integers(0, 3)) * BLOCK
            column = tokens // BLOCK - 1
            lines[i, fields.ADMIT : fields.ADMIT_COLUMN + 1] = 1, tokens, column
            busy[slot] = True
        elif len(at):
            lines[i, fields.PREVIOUS] = at[0]
    left = [(row, slot) for row, slot in enumerate(before) if slot >= 0 and slot not in named]
    for i, (row, slot) in enumerate(left, start=rows):
        lines[i, fields.SLOT], lines[i, fields.PREVIOUS] = slot, row
    return torch.from_numpy(lines).to(DEVICE), rows + len(left), rows


@kernels
@pytest.mark.parametrize("n", [1, 5, 17, 150])
@pytest.mark.parametrize(("in_place", "cuts"), [(False, False), (False, True), (True, False)])
def test_kernel_and_reference_agree(n: int, in_place: bool, cuts: bool) -> None:
    """Counts of 0 and beyond the drafts, dead rows that go on, new tenants, padded rows, cuts, and
    boundaries that nobody keeps."""
    rng = np.random.default_rng(n)
    mine, theirs = Device(n), Device(n)
    before, busy = np.empty(0, np.int32), np.zeros(n, bool)
    beyond = still_dead = stays = cut = 0
    for number in range(60 if CUDA else 30 if n < 20 else 8):
        lines, count, rows = entries_of(rng, n, busy, before)
        counts = np.where(rng.random(n) < 0.7, DRAFTS + 1, rng.integers(0, 7, n))
        accepted = torch.from_numpy(counts.astype(np.int32)).to(DEVICE)
        held = [t.clone() for t in (lines, accepted)]
        finished = mine.placed[number % 2][:, : len(before)].cpu().numpy()
        for device, act in ((mine, advance), (theirs, advance_reference)):
            previous, placed = device.placed[number % 2], device.placed[1 - number % 2]
            act(
                lines, count, rows, device.slots, previous, accepted, placed, device.positions,
                device.moves, BLOCK, in_place, cuts,
            )  # fmt: skip
        live = (lines[:rows, fields.SLOT] >= 0).nonzero()[:, 0]
        found, wanted = (d.seen(d.placed[1 - number % 2], live, in_place) for d in (mine, theirs))
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)
        for now, then in zip((lines, accepted), held, strict=True):
            assert torch.equal(now, then)
        certain, column, draft, resets = finished
        beyond += int((counts[: len(before)] > draft + 1).sum())
        still_dead += int(((column < 0) & (before >= 0)).sum())
        stays += int(((draft > 0) & ((certain + draft) % BLOCK == 0) & (resets == 0)).sum())
        before = lines[:rows, fields.SLOT].cpu().numpy()
        cut += int((mine.positions.cut_after > 0).sum())
    assert bool(cut) == cuts or n == 1
    assert beyond
    assert n < 17 or (still_dead and stays)
