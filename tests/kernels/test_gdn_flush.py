"""Gated DeltaNet's flush: the kernel against its reference, and that against the recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gdn_cases import BIG, Gdn, History, relative
from helpers.interpreter import CUDA, elsewhere, kernels, plain, run_in_interpreter
from helpers.replay_cases import ROUNDS, SEEDS
from helpers.tensors import DEVICE, ints, noise, same_bytes

from hybrid_runtime.kernels.gdn import flush
from hybrid_runtime.kernels.gdn.flush import replay_flush, replay_flush_reference
from hybrid_runtime.kernels.gdn.naive import replay_update_reference
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def flush_case(shape: Gdn, layers: int, seed: int) -> tuple[StateTable, Records, dict[str, Any]]:
    """States, records and rows of a flush, with 0, 1, .. pending tokens from anywhere on."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pick = torch.Generator().manual_seed(seed)
    most = max(shape.drafts, shape.ring_tokens)
    slots, taps = most + 5, 3
    table = torch.randperm(2 * slots, generator=pick).view(slots, 2).int().to(DEVICE)
    inner = shape.matrix if not shape.transposed else (shape.heads, shape.key, shape.value)
    states = [noise(generator, 2 * slots, *inner, dtype=shape.states) for _ in range(layers)]
    size = 2 * slots, taps + shape.drafts, 20
    conv_states = [noise(generator, *size, dtype=shape.x) for _ in states]
    every = [shape.records(generator, slots) for _ in states]
    records = Records(*(torch.stack(parts) for parts in zip(*every, strict=True)))
    order = torch.randperm(slots, generator=pick).int().to(DEVICE)
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
    rows: dict[str, Any] = {"slot": order, "positions": positions, "transposed": shape.transposed}
    return StateTable.build(conv_states, states, [table] * layers, taps), records, rows


FLUSHED = [
    Gdn(),
    Gdn(states=torch.float16, drafts=0),
    Gdn(states=torch.bfloat16, key=12, value=5),
    Gdn(ring_tokens=0, heads=6, key_heads=2),
    Gdn(ring_tokens=31, drafts=15, heads=1, states=torch.float16, rounding=True),
    Gdn(transposed=True, key=40, value=24),
    Gdn(transposed=True, states=torch.bfloat16, key=8, rounding=True),
]
if CUDA:
    FLUSHED += [Gdn(**BIG), Gdn(**BIG, states=torch.float16, transposed=True)]


@kernels
@pytest.mark.parametrize("shape", FLUSHED, ids=str)
def test_flush(shape: Gdn, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        table, records, rows = flush_case(shape, layers=2, seed=seed)
        count = len(rows["slot"])
        listed = ints(*[i for i in range(count) if i != 2][::-1], -1)
        if shape.rounding:
            rows["rounding"] = Rounding(torch.arange(count, device=DEVICE).int() * 9 - 4, layer=5)
        before = [t.clone() for t in (*table.conv_states, *table.matrices)]
        with monkeypatch.context() as patch:
            patch.setattr(flush, "replay_flush_reference", None)  # the kernel does it
            replay_flush(table, records, listed, **rows)
        after = [t.clone() for t in (*table.conv_states, *table.matrices)]
        for tensor, old in zip((*table.conv_states, *table.matrices), before, strict=True):
            tensor.copy_(old)
        replay_flush_reference(table, records, listed, **rows)
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


@plain
def test_records_of_other_layers_are_refused_before_anything_is_written() -> None:
    table, records, rows = flush_case(Gdn(), layers=2, seed=0)
    listed = ints(*range(len(rows["slot"])))
    before = [t.clone() for t in (*table.conv_states, *table.matrices)]
    for wrong in (
        records.layer(0),
        Records(*(part[:1] for part in records)),
        records._replace(g=records.g[:1]),
        records._replace(u=records.u[..., :-1]),
        records._replace(rk=records.rk[..., :-1]),
        records._replace(k=records.k[:, :-1]),
    ):
        with pytest.raises(ValueError, match=r"records|states is"):
            replay_flush(table, wrong, listed, **rows)
    for now, then in zip((*table.conv_states, *table.matrices), before, strict=True):
        assert same_bytes(now, then)


@plain
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_a_flushed_state_has_all_tokens(kda: bool, transposed: bool) -> None:
    """After any step, compared with the recurrence."""
    shape = Gdn(x=torch.float64, states=torch.float64, kda=kda, transposed=transposed, key=8)
    history = History(shape, slots=4, seed=3)
    folded = 0
    for _ in range(30):
        history.step(replay_update_reference)
        everyone = torch.arange(4, dtype=torch.int32, device=DEVICE)
        held = ints(*(0 if n else -1 for n in history.written))
        pending = [history.final(slot) - history.written[slot] for slot in range(4)]
        written = ints(*history.written)
        positions = ReplayPositions(
            read_column=held, offset=everyone * 0, pending=ints(*pending),
            cursor=written % history.records.length, write_column=everyone * 0 + 1, writes=held,
            checkpoint_column=held, checkpoint_after=held, certain=held,
        )  # fmt: skip
        window = torch.zeros(8, 3 + shape.drafts, 2, device=DEVICE)
        stored = history.states.mT if transposed else history.states
        table = StateTable.build([window], [stored], [history.table], 3)
        stacked = Records(*(part[None] for part in history.records))
        replay_flush(table, stacked, everyone, everyone, positions, None, transposed)
        for slot in range(4):
            if history.certain[slot]:
                got = history.states[int(history.table[slot, 1])]
                assert relative(got, history.exact[slot][-1]) < 1e-12
                folded += pending[slot] > 0
    assert folded > 20
