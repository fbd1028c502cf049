"""The replay layout's flush kernel against its reference, and that against the next fold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, plain, run_in_interpreter
from helpers.replay_cases import BIG, ROUNDS, SEEDS, History, Ssm
from helpers.tensors import DEVICE, ints, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.mamba2.flush import (
    replay_flush,
    replay_flush_reference,
)
from hybrid_runtime.kernels.mamba2.naive import replay_update_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def flush_case(
    shape: Ssm, layers: int, seed: int
) -> tuple[StateTable, Records, Tensor, dict[str, Any]]:
    """States, records and rows of a flush, with 0, 1, .. pending tokens from anywhere on."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    most = max(shape.drafts, shape.ring_tokens)
    slots, taps = most + 5, 3
    table = torch.randperm(2 * slots, generator=torch.Generator().manual_seed(seed))
    table = table.view(slots, 2).int().to(DEVICE)
    inner = (shape.heads, shape.dim, shape.state)
    states = [noise(generator, 2 * slots, *inner, dtype=shape.states) for _ in range(layers)]
    size = 2 * slots, taps + shape.drafts, 20
    conv_states = [noise(generator, *size, dtype=shape.x) for _ in states]
    every = [shape.records(generator, slots) for _ in states]
    records = Records(*(torch.stack(parts) for parts in zip(*every, strict=True)))
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed)).int().to(DEVICE)
    number = torch.arange(slots, device=DEVICE).int()
    pending, ring = number % (most + 1), records.length
    offset, cursor = pending.clamp(max=shape.drafts), (number * 5) % ring
    for i in range(slots):
        past = (torch.arange(int(pending[i]), device=DEVICE) + cursor[i]) % ring
        unused = torch.ones(ring, dtype=torch.bool, device=DEVICE)
        unused[past] = False
        for part in records:
            part[:, order[i].long(), :, unused] = float("nan")
    ones = torch.ones(slots, dtype=torch.int32, device=DEVICE)
    read, write = ones * 0, number % 2
    read[-1], write[-2] = -1, -1
    positions = ReplayPositions(
        read_column=read, offset=offset, pending=pending, cursor=cursor, write_column=write,
        writes=ones, checkpoint_column=ones, checkpoint_after=ones, certain=number + 70,
    )  # fmt: skip
    order[-3] = -1
    A_log = torch.rand(layers, shape.heads, generator=generator, device=DEVICE)
    state_table = StateTable.build(conv_states, states, [table] * layers, taps)
    return state_table, records, A_log, {"slot": order, "positions": positions}


FLUSHED = [
    Ssm(),
    Ssm(states=torch.float16),
    Ssm(states=torch.bfloat16, dim=5, state=12),
    Ssm(drafts=0),
    Ssm(ring_tokens=0),
    Ssm(ring_tokens=31),
    Ssm(
        drafts=15, tokens=16, ring_tokens=31, heads=1, groups=1, states=torch.float16, rounding=True
    ),
    Ssm(drafts=15, heads=1, groups=1, dim=40),
    Ssm(states=torch.float16, rounding=True),
]
if CUDA:
    FLUSHED += [Ssm(**BIG), Ssm(**BIG, states=torch.float16)]


@kernels
@pytest.mark.parametrize("shape", FLUSHED, ids=str)
def test_flush(shape: Ssm) -> None:
    for seed in SEEDS:
        table, records, A_log, rows = flush_case(shape, layers=2, seed=seed)
        count = len(rows["slot"])
        chosen = [i for i in range(count) if i != 2]
        listed = ints(*chosen[::-1], -1)
        if shape.rounding:
            rows["rounding"] = Rounding(torch.arange(count, device=DEVICE).int() * 9 - 4, layer=5)
        before = [t.clone() for t in (*table.conv_states, *table.matrices)]
        replay_flush(table, records, A_log, listed, **rows)
        after = [t.clone() for t in (*table.conv_states, *table.matrices)]
        for tensor, old in zip((*table.conv_states, *table.matrices), before, strict=True):
            tensor.copy_(old)
        replay_flush_reference(table, records, A_log, listed, **rows)
        for layer in range(2):
            assert same_bytes(after[layer], table.conv_states[layer])
            got, want = after[2 + layer], table.matrices[layer]
            assert want.isfinite().all()
            # A row that is already whole stays as it is, and so does all that was not listed.
            unchanged = (want == before[2 + layer]).flatten(1).all(1)
            assert torch.equal(got[unchanged], want[unchanged])
            tolerance = ROUNDS[shape.states] * (2 if shape.rounding else 1)
            assert (got.float() - want.float()).abs().max() <= tolerance * want.abs().max()
            assert not unchanged.all()
            if shape.rounding:  # of another key's numbers half would be others
                assert (got == want)[~unchanged].float().mean() > 0.99


@kernels
@pytest.mark.parametrize("target", [0, 1])
def test_a_row_that_reads_nothing_is_zeroed_in_any_physical_block(target: int) -> None:
    """Block 0 too, which is what a masked load of the block that is read gives."""
    shape = Ssm()
    table, records, A_log, rows = flush_case(shape, layers=1, seed=0)
    row = len(rows["slot"]) - 1
    slot = int(rows["slot"][row])
    blocks = table.tables[0]
    column = int(rows["positions"].write_column[row])
    blocks[blocks == target] = blocks[slot, column].clone()
    blocks[slot, column] = target
    assert int(rows["positions"].read_column[row]) == -1
    replay_flush(table, records, A_log, ints(row), **rows)
    assert not table.matrices[0][target].any()
    assert not table.conv_states[0][target, : table.taps].any()


def test_a_cache_that_fits_other_layers_is_refused_before_anything_is_written() -> None:
    table, records, A_log, rows = flush_case(Ssm(), layers=2, seed=0)
    listed = ints(*range(len(rows["slot"])))
    before = [t.clone() for t in (*table.conv_states, *table.matrices)]
    cases: list[tuple[Records, Tensor]] = [
        (records.layer(0), A_log),
        (Records(*(part[:1] for part in records)), A_log),
        (records._replace(x=records.x[..., :-1]), A_log),
        (records._replace(dt=records.dt[..., :-1]), A_log),
        (records._replace(B=records.B[:, :-1]), A_log),
        (records, A_log[0]),
        (records, A_log[:, :-1]),
    ]
    for cache, rates in cases:
        with pytest.raises(ValueError, match=r"records|states is|A_log"):
            replay_flush(table, cache, rates, listed, **rows)
    for now, then in zip((*table.conv_states, *table.matrices), before, strict=True):
        assert same_bytes(now, then)


@plain
def test_flush_reference_is_the_next_fold() -> None:
    """After any step, the flushed state is what the columns layout holds."""
    shape = Ssm(x=torch.float64, states=torch.float64)
    history = History(shape, slots=4, seed=3, block=1 << 30)
    for _ in range(30):
        history.step(replay_update_reference)
        everyone = torch.arange(4, dtype=torch.int32, device=DEVICE)
        held = ints(*(0 if n else -1 for n in history.written))
        final = ints(*history.certain) + ints(*history.fold)
        written = ints(*history.written)
        positions = ReplayPositions(
            read_column=held, offset=ints(*history.fold), pending=final - written,
            cursor=written % history.records.length, write_column=everyone * 0 + 1,
            writes=held, checkpoint_column=held, checkpoint_after=held, certain=held,
        )  # fmt: skip
        window = torch.zeros(8, 3 + shape.drafts, 2, device=DEVICE)
        table = StateTable.build([window], [history.states], [history.table], 3)
        stacked = Records(*(part[None] for part in history.records))
        A_log = history.vectors["A_log"][None]
        replay_flush_reference(table, stacked, A_log, everyone, everyone, positions)
        for slot in range(4):
            if history.certain[slot]:
                want = history.columns[history.wide_table[slot, history.fold[slot]].long()]
                torch.testing.assert_close(history.live(1)[slot], want, rtol=1e-12, atol=1e-12)
