"""What tests of the replay layout's kernels share: shapes with random inputs, rows of every kind,
and many steps of it beside the columns layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from helpers.interpreter import CUDA
from helpers.tensors import DEVICE, ints, noise
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba2.naive import selective_state_update_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.replay.ring import MAX_TOKENS, SHORT_RING_TOKENS, ring_length
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

SEEDS = range(5 if CUDA else 1)
BIG: dict[str, Any] = {"heads": 128, "groups": 8, "dim": 64, "state": 128}
# A sum of logarithms of decays of 100 has an ulp of 8e-6, by which a weight may be off.
ROUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Ssm:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    drafts: int = 3
    tokens: int = 4
    ring_tokens: int = 15
    heads: int = 2
    groups: int = 2
    dim: int = 8
    state: int = 16
    pad: int = 0  # elements behind each block's state, and behind each head's x
    skew: int = 0  # elements by which the pool starts off its allocation
    limits: tuple[float, float] = (0.0, float("inf"))
    rounding: bool = False
    far: float = 0.0  # added to every third token's time step, so that it erases the state

    def vectors(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "A_log": torch.log(1 + 7 * torch.rand(self.heads, generator=generator, device=DEVICE)),
            "D": noise(generator, self.heads, dtype=dtype),
            "dt_bias": noise(generator, self.heads, dtype=dtype),
            "dt_min": self.limits[0],
            "dt_max": self.limits[1],
        }

    def inputs(self, generator: torch.Generator, tokens: int) -> dict[str, Tensor]:
        """Of views of one tensor, as a model has them."""
        sizes = [
            self.heads * (self.dim + self.pad),
            self.groups * self.state,
            self.groups * self.state,
            5,
        ]
        mixed = noise(generator, tokens, sum(sizes) + self.heads, dtype=self.x)
        x, B, C, _, dt = mixed.split([*sizes, self.heads], dim=1)
        group = (self.groups, self.state)
        x = x.unflatten(1, (self.heads, self.dim + self.pad))[..., : self.dim]
        dt = 3 * dt
        dt[::3] += self.far
        return {"x": x, "dt": dt, "B": B.unflatten(1, group), "C": C.unflatten(1, group)}

    def records(self, generator: torch.Generator, slots: int) -> Records:
        length = ring_length(self.drafts, self.ring_tokens)
        fine = torch.promote_types(self.x, torch.float32)
        return Records(
            x=noise(generator, slots, self.heads, length, self.dim, dtype=self.x),
            B=noise(generator, slots, self.groups, length, self.state, dtype=self.x),
            dt=torch.rand(slots, self.heads, length, generator=generator, device=DEVICE).to(fine),
        )


class Case(NamedTuple):
    """A row of `Rows`: its fields of `ReplayRows` and `ReplayPositions`."""

    scheduled: int
    draft: int
    pending: int = 0
    read: int = 0
    write: int = 0
    writes: int = 1
    checkpoint: int = -1
    after: int = 0
    offset: int = 0
    cursor: int = 0
    slot: int = -1

    @property
    def active(self) -> bool:
        return self.scheduled > 0 and self.write >= 0 and self.slot >= 0

    @property
    def rounds_once(self) -> bool:
        """Not folded in two passes, see `replay_update`, whatever the ring."""
        return self.pending + self.scheduled - self.draft <= MAX_TOKENS


class Rows:
    """Rows with few and many pending, certain and drafted tokens and every place of a checkpoint,
    that write or don't, reading the block they write, another, or none. Behind them padded rows of
    both kinds with and without tokens, an empty row, and tokens that belong to no row. Slots are
    not in row order.
    """

    def __init__(self, drafts: int, tokens: int, seed: int, ring_tokens: int = 15) -> None:
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        most, self.ring = max(ring_tokens, drafts), ring_length(drafts, ring_tokens)
        draft = min(drafts, tokens - 1)
        spec: list[Case] = []
        for pending in sorted(
            {0, 1, drafts, max(ring_tokens - draft - 1, 0), most} & {*range(most + 1)}
        ):
            fits = pending + draft + 1 <= ring_tokens
            offset = pick(0, min(pending, drafts))
            spec.append(Case(draft + 1, draft, pending, writes=not fits, offset=offset))
            few = pick(0, draft)
            scheduled = min(few + pick(1, 2), tokens, self.ring - pending)
            few = min(few, scheduled - 1)
            for after in {pick(min(1 - offset, 0), 0), pick(1, scheduled - few)}:
                if after + offset > 0:
                    spec.append(
                        Case(scheduled, few, pending, checkpoint=2, after=after, offset=offset)
                    )
        several = min(tokens, max(ring_tokens, 1))
        several_writes = several > ring_tokens or min(draft, several - 1) == 0
        spec.append(Case(several, min(draft, several - 1), writes=several_writes))
        spec.append(Case(draft + 1, draft, read=1))
        spec.append(Case(draft + 1, draft, read=-1))
        spec.append(Case(tokens, draft, read=-1, checkpoint=2, after=1))
        spec.append(Case(tokens, 0, min(1, most), checkpoint=2, after=tokens))
        room = min(tokens, self.ring - most)
        spec.append(Case(room, 0, most, checkpoint=2, after=room))
        spec.append(Case(1, 0, most, offset=min(drafts, most)))
        near = MAX_TOKENS - 3 if ring_tokens <= SHORT_RING_TOKENS else most - 2
        if near <= most and tokens >= 4 and draft >= 2:  # the drafts are too much, not the others
            spec.append(Case(4, 2, near))
        spec.append(Case(1, 0))
        slots = len(spec)
        table = torch.randperm(3 * slots, generator=generator).int() + 1
        cases = [
            case._replace(slot=slot, cursor=pick(0, self.ring - 1))
            for slot, case in enumerate(spec)
        ]
        cases[1:1] = [Case(tokens, 0, checkpoint=2, after=1), Case(0, 0, read=-1, write=-1)]
        cases += [Case(1, 0, write=-1, checkpoint=2, slot=0), Case(0, 0, checkpoint=2, slot=1)]
        order = torch.randperm(len(cases), generator=generator).tolist()
        cases = [cases[i] for i in order]
        numbers = torch.tensor([[int(value) for value in case] for case in cases])
        fields = dict(zip(Case._fields, numbers.int().T.contiguous().to(DEVICE), strict=True))
        scheduled_ = fields["scheduled"]
        start = torch.cat([ints(0), scheduled_.cumsum(0).int()])
        self.slots, self.blocks, self.tokens = slots, 3 * slots + 1, int(start[-1]) + 3
        self.table = table.view(slots, 3).to(DEVICE)
        positions = ReplayPositions(
            read_column=fields["read"], offset=fields["offset"], pending=fields["pending"],
            cursor=fields["cursor"], write_column=fields["write"], writes=fields["writes"],
            checkpoint_column=fields["checkpoint"], checkpoint_after=fields["after"],
            certain=scheduled_ * 7 + 100,
        )  # fmt: skip
        self.rows = ReplayRows(self.table, fields["slot"], start, fields["draft"], positions)
        self.arguments: dict[str, Any] = {"rows": self.rows, "max_scheduled": tokens}
        live = (fields["slot"] >= 0) & (positions.write_column >= 0)
        owner = torch.repeat_interleave(torch.arange(len(cases), device=DEVICE), scheduled_.long())
        self.owned = torch.cat([live[owner], torch.zeros(3, dtype=torch.bool, device=DEVICE)])
        self.active = [case for case in cases if case.active]


# In the interpreter time goes by programs and the operations of each: small models, heads least.


class History:
    """Steps with random acceptance in the replay layout, beside them the columns layout.

    Each slot has a live block (column 0) and a checkpoint's (column 1); in the columns layout a
    block for each draft. A boundary lies after every `block` tokens.
    """

    def __init__(self, shape: Ssm, slots: int, seed: int, block: int) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.pick = torch.Generator().manual_seed(seed)
        self.shape, self.slots, self.block = shape, slots, block
        inner = (shape.heads, shape.dim, shape.state)
        self.states = torch.full((2 * slots, *inner), float("nan"), device=DEVICE).to(shape.states)
        wide = slots * (shape.drafts + 1)
        self.columns = torch.full((wide, *inner), float("nan"), device=DEVICE).to(shape.states)
        order = torch.randperm(2 * slots, generator=self.pick)
        self.table = order.view(slots, 2).int().to(DEVICE)
        self.wide_table = torch.arange(wide, device=DEVICE).int().view(slots, -1)
        other = torch.Generator(DEVICE).manual_seed(seed + 1)  # draws as the ring is long
        self.records = shape.records(other, slots)
        fine = torch.promote_types(shape.x, torch.float32)
        self.vectors = shape.vectors(self.generator, fine)
        self.fold = [0] * slots  # drafts accepted in the last step
        self.certain = [0] * slots  # tokens that were certain before them
        self.written = [0] * slots  # tokens in the live state
        self.checkpoints: dict[int, tuple[int, Tensor]] = {}
        self.kept: dict[int, Tensor] = {}  # what the columns layout had when the state was written

    def below(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.pick))

    def step(self, update: Any) -> tuple[Tensor, Tensor]:
        """One step of some of the slots in any order; outputs of both layouts."""
        shape = self.shape
        slots = torch.randperm(self.slots, generator=self.pick).tolist()
        slots = slots[: 1 + self.below(self.slots)]
        draft = [self.below(min(shape.drafts, shape.tokens - 1) + 1) for _ in slots]
        # A row has one certain token, or several if no boundary lies inside them.
        scheduled = [d + 1 + self.below(shape.tokens - d) for d in draft]
        length = self.records.length
        reads, checkpoint, after, pending, cursor, writes = [], [], [], [], [], []
        for i, slot in enumerate(slots):
            final = self.certain[slot] + self.fold[slot]
            running = final + scheduled[i] - draft[i]
            boundary = running // self.block * self.block
            crosses = boundary > self.certain[slot]
            checkpoint.append(1 if crosses else -1)
            after.append(boundary - final if crosses else 0)
            reads.append(0 if self.written[slot] else -1)
            pending.append(final - self.written[slot])
            cursor.append(self.written[slot] % length)
            full = pending[i] + scheduled[i] > shape.ring_tokens
            writes.append(crosses or reads[i] < 0 or full)
        starts = torch.tensor([0, *scheduled]).cumsum(0).int().to(DEVICE)
        slot, drafts, zero = ints(*slots), ints(*draft), ints(*[0] * len(slots))
        fold = ints(*(self.fold[s] for s in slots))
        inputs = shape.inputs(self.generator, int(starts[-1])) | self.vectors
        before = self.columns.clone()
        begun = ints(*(0 if self.certain[s] else -1 for s in slots))
        wide_rows = StateRows(self.wide_table, slot, starts, drafts, begun, fold, zero)
        wide = selective_state_update_reference(
            **inputs, states=self.columns, rows=wide_rows, max_scheduled=shape.tokens
        )
        positions = ReplayPositions(
            read_column=ints(*reads), offset=fold, pending=ints(*pending), cursor=ints(*cursor),
            write_column=zero, writes=ints(*map(int, writes)), checkpoint_column=ints(*checkpoint),
            checkpoint_after=ints(*after), certain=zero,
        )  # fmt: skip
        y = update(
            **inputs,
            states=self.states,
            records=self.records,
            rows=ReplayRows(self.table, slot, starts, drafts, positions),
            max_scheduled=shape.tokens,
        )
        for i, slot_ in enumerate(slots):
            if checkpoint[i] > 0:
                boundary = self.certain[slot_] + self.fold[slot_] + after[i]
                if after[i] <= 0:  # one of the drafts that were accepted
                    state = before[self.wide_table[slot_, after[i] + self.fold[slot_]].long()]
                    self.checkpoints[slot_] = (boundary, state)
                elif after[i] == scheduled[i] - draft[i]:
                    state = self.columns[self.wide_table[slot_, 0].long()].clone()
                    self.checkpoints[slot_] = (boundary, state)
                else:
                    self.checkpoints.pop(slot_, None)
            self.certain[slot_] += self.fold[slot_] + scheduled[i] - draft[i]
            self.fold[slot_] = self.below(draft[i] + 1)
            if writes[i]:
                self.written[slot_] = self.certain[slot_]
                self.kept[slot_] = self.columns[self.wide_table[slot_, 0].long()].clone()
        return y, wide

    def live(self, which: int = 0) -> Tensor:
        return self.states[self.table[:, which].long()]

    def check(self, tolerance: float) -> int:
        """Live states and checkpoints against the columns layout; how many checkpoints."""
        for slot in range(self.slots):
            pairs = [(0, self.kept[slot])] if self.written[slot] else []
            if slot in self.checkpoints:
                pairs.append((1, self.checkpoints[slot][1]))
            for which, want in pairs:
                got = self.live(which)[slot]
                error = (got.double() - want.double()).abs().max()
                assert error <= tolerance * want.double().abs().max()
        return len(self.checkpoints)
