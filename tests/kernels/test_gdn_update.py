"""Gated DeltaNet's state update of the replay layout: the kernel against its reference and the
recurrence itself, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from helpers.gdn_cases import BIG, Gdn, History, relative
from helpers.interpreter import CUDA, INTERPRETED, elsewhere, kernels, run_in_interpreter
from helpers.replay_cases import ROUNDS, SEEDS, Rows
from helpers.replayed import check_replay
from helpers.tensors import DEVICE, frame_is_whole, framed, ints, noise, same_bytes
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from hybrid_runtime.kernels.gdn import replay_update as update
from hybrid_runtime.kernels.gdn.naive import replay_update_reference
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.gdn.replay_launch import prepares
from hybrid_runtime.kernels.gdn.replay_update import replay_update
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import IDLE, ReplayPositions

SHAPES = [
    Gdn(),
    Gdn(x=torch.float32),
    *(Gdn(x=torch.float32, drafts=d, tokens=d + 1) for d in (0, 1, 4)),
    Gdn(drafts=7, tokens=8),
    Gdn(drafts=15, tokens=16),
    Gdn(drafts=15, tokens=16, ring_tokens=0, states=torch.float16),
    Gdn(drafts=15, tokens=16, ring_tokens=31, heads=1),
    Gdn(x=torch.float32, ring_tokens=31),
    Gdn(ring_tokens=0),
    Gdn(ring_tokens=4),
    Gdn(drafts=1, tokens=6),
    Gdn(drafts=5, tokens=2),
    Gdn(heads=6, key_heads=2),
    Gdn(key=32, value=40),
    Gdn(key=12, value=5, pad=3),
    Gdn(key=50, value=20, states=torch.float16, heads=1),
    Gdn(transposed=True, key=32),
    Gdn(transposed=True, states=torch.bfloat16, key=20, value=24, pad=5),
    Gdn(states=torch.float16, rounding=True),
    Gdn(states=torch.bfloat16, rounding=True, key=32),
    Gdn(x=torch.float16, states=torch.float16),
    Gdn(x=torch.float32, states=torch.bfloat16, drafts=2, tokens=6),
]
if CUDA:
    SHAPES += [
        Gdn(**BIG),
        Gdn(**BIG, drafts=7, tokens=8),
        Gdn(**BIG, drafts=0, tokens=1),
        Gdn(**BIG, drafts=15, tokens=16, ring_tokens=31),
        Gdn(**BIG, transposed=True),
        Gdn(**BIG, states=torch.bfloat16),
        Gdn(**BIG, states=torch.float16, rounding=True),
        Gdn(**BIG, x=torch.float32),
        Gdn(**BIG | {"heads": 48, "key": 64}),
    ]


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize("tests", ["test_replay_update[", "not test_replay_update["])
def test_kernels_in_the_interpreter(tests: str) -> None:
    run_in_interpreter(__file__, "-k", tests)


def clones(records: Records) -> Records:
    return Records(*(part.clone() for part in records))


def case(shape: Gdn, rows: Rows, seed: int) -> tuple[Tensor, Records, dict[str, Any]]:
    """States, records and all other arguments. What no row may look at is NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    states, records = shape.pool(rows.blocks), shape.records(generator, rows.slots)
    for row in rows.active:
        past = (row.cursor + torch.arange(row.pending)) % rows.ring
        spoilt = torch.ones(rows.ring, dtype=torch.bool)
        spoilt[past] = False
        for part in records:
            part[row.slot, :, spoilt.to(DEVICE)] = float("nan")
        if row.read >= 0:
            states[rows.table[row.slot, row.read]] = noise(
                generator, *shape.matrix, dtype=shape.states
            )
    inputs: dict[str, Any] = shape.inputs(generator, rows.tokens) | shape.vectors(generator)
    if shape.rounding:
        seeds = torch.arange(rows.slots, device=DEVICE).int() - 5
        inputs["rounding"] = Rounding(seeds, layer=3)
    return states, records, inputs | rows.arguments


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_update(shape: Gdn, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        rows = Rows(shape.drafts, shape.tokens, seed, shape.ring_tokens)
        states, records, arguments = case(shape, rows, seed)
        want, kept = states.clone(), clones(records)
        y_want = replay_update_reference(states=want, records=kept, **arguments)
        for prepared in (False, True):
            got, mine, y = states.clone(), clones(records), framed(arguments["v"])
            with monkeypatch.context() as patch:
                patch.setattr(update, "replay_update_reference", None)  # the kernel does it
                replay_update(states=got, records=mine, out=y, prepared=prepared, **arguments)
            assert frame_is_whole(y)
            assert not y[~rows.owned].any()
            error = (y.float() - y_want.float()).abs().max() / y_want.float().abs().max()
            assert error <= ROUNDS[shape.x]
            tolerance = ROUNDS[shape.states] * (2 if shape.rounding else 1)
            for row in rows.active:
                for column, stored in ((row.write, row.writes), (row.checkpoint, 1)):
                    if column < 0 or not stored:
                        continue
                    block = int(rows.table[row.slot, column])
                    exact = want[block].float()
                    assert exact.isfinite().all()
                    assert (got[block].float() - exact).abs().max() <= tolerance * exact.abs().max()
                    if shape.rounding:
                        assert (got[block] == want[block]).float().mean() > 0.99
                    # Nothing else changed: all bytes are compared with the reference's there.
                    got[block] = want[block]
            assert same_bytes(got, want)
            assert same_bytes(mine.k, kept.k)
            for name in ("u", "g", "rk"):
                ours, theirs = getattr(mine, name), getattr(kept, name)
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


@kernels
@pytest.mark.parametrize(
    ("drafts", "ring_tokens"),
    [(0, 15), (1, 15), (3, 0), (3, 4), (3, 15), (3, 31), (7, 15), (15, 0), (15, 15), (15, 31)],
)
def test_kernel_follows_the_recurrence(drafts: int, ring_tokens: int) -> None:
    shape = Gdn(x=torch.float32, drafts=drafts, tokens=drafts + 1, ring_tokens=ring_tokens)
    history = History(shape, slots=3, seed=drafts, block=drafts + 2)
    for _ in range(60 if CUDA else 12):
        y, want = history.step(replay_update)
        assert relative(y, want) < 1e-6
        assert max([0.0, *history.errors()]) < 1e-6
    assert history.checkpoints


@pytest.mark.skipif(not INTERPRETED, reason="a GPU does that anyway")
def test_operands_in_bfloat16_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which by itself multiplies them as integers."""

    def wide(operand: TensorHandle) -> TensorHandle:
        assert operand.dtype.scalar == tl.bfloat16
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(builder: Any, a: TensorHandle, b: TensorHandle, *more: Any) -> Any:
        return plainly(builder, wide(a), wide(b), *more)

    plainly = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(update, "operand_type", lambda *_: tl.bfloat16)
    history = History(Gdn(key=32), slots=1, seed=1, block=9)
    for _ in range(12):
        history.step(replay_update)
        assert max([0.0, *history.errors()]) < 5e-7
    assert history.checkpoints


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [3, 7])
def test_error_after_10000_tokens(drafts: int) -> None:
    """Of states, with inputs and products in bfloat16; outputs are rounded to that."""
    shape = Gdn(**BIG, drafts=drafts, tokens=drafts + 1)
    history = History(shape, slots=1, seed=1)
    outputs = []
    while history.certain[0] < 10_000:
        y, want = history.step(replay_update)
        outputs.append(relative(y, want))
        if len(outputs) % 50 == 0:
            assert max(history.errors()) <= 1e-6
    assert max(outputs) < 4e-3


@kernels
@pytest.mark.parametrize("states", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_drafts_that_are_not_finite_leave_the_rest_alone(states: torch.dtype) -> None:
    """The states, what is recorded of certain tokens, and their outputs."""
    shape = Gdn(states=states, drafts=2)
    rows = Rows(2, 3, 0)
    assert any(row.draft and row.writes for row in rows.active)
    assert any(row.draft and not row.writes for row in rows.active)
    pool, records, arguments = case(shape, rows, 0)
    spoilt = {name: arguments[name].clone() for name in ("q", "k", "v", "a", "b")}
    is_draft = torch.zeros(rows.tokens, dtype=torch.bool, device=DEVICE)
    for end, draft in zip(rows.rows.cu_seqlens[1:], rows.rows.draft, strict=True):
        is_draft[end - draft : end] = True
    for part in spoilt.values():
        part[is_draft] = float("nan")
    after = []
    for given in ({}, spoilt):
        states_, kept = pool.clone(), clones(records)
        y = replay_update(states=states_, records=kept, **(arguments | given))
        for row in rows.active:  # its drafts' records are spoilt
            at = row.cursor + row.pending + row.scheduled - row.draft
            drafts = (at + torch.arange(row.draft)) % rows.ring
            for part in kept:
                part[row.slot, :, drafts.to(DEVICE)] = 0.0
        after.append([states_, *kept, y[~is_draft]])
    assert not same_bytes(after[0][0], pool)
    for first, second in zip(*after, strict=True):
        assert same_bytes(first, second)


@kernels
def test_what_does_not_fit_is_refused() -> None:
    shape = Gdn()
    rows = Rows(3, 4, 0)
    states, records, arguments = case(shape, rows, 0)
    before = [part.clone() for part in (states, *records)]
    shorter = rows.rows._replace(ring_length=rows.ring - 1)
    refused: dict[str, dict[str, Any]] = {
        "states is": {"states": states[..., :12]},
        "states has strides": {"states": states.repeat_interleave(2, -1)[..., ::2]},
        "records.u is": {"records": records._replace(u=records.u[..., :4])},
        "records.k is torch.float32": {"records": records._replace(k=records.k.float())},
        "records.g is torch.bfloat16": {"records": records._replace(g=records.g.bfloat16())},
        "q is torch.float32": {"q": arguments["q"].float()},
        "q is .* must be": {"q": arguments["q"][..., :4]},
        "a is": {"a": arguments["a"][:, :1]},
        "b is": {"b": arguments["b"][:-1]},
        "A_log is": {"A_log": arguments["A_log"][:1]},
        "dt_bias is": {"dt_bias": arguments["dt_bias"][:1]},
        "v has 2 heads": {
            name: arguments[name].repeat_interleave(3, 1) for name in ("q", "k")
        },
        "out is torch.float32": {"out": torch.zeros(rows.tokens, 2, 16, device=DEVICE)},
        "records has rings of": {"rows": shorter},
    }  # fmt: skip
    for name, bad in refused.items():
        with pytest.raises(ValueError, match=name):
            replay_update(**({"states": states, "records": records} | arguments | bad))
    for part, old in zip((states, *records), before, strict=True):
        assert same_bytes(part, old)


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    shape = Gdn()
    generator = torch.Generator(DEVICE).manual_seed(0)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    y = replay_update(
        **shape.inputs(generator, tokens),
        **shape.vectors(generator),
        states=shape.pool(1),
        records=shape.records(generator, 2),
        rows=ReplayRows(none.view(0, 1), none, ints(0), none, ReplayPositions(*[none] * len(IDLE))),
        max_scheduled=4,
    )
    assert y.shape == (tokens, 2, 16)
    assert not y.any()


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_decays_per_channel_and_fp64_go_to_the_reference(kda: bool) -> None:
    dtype = torch.float32 if kda else torch.float64
    shape = Gdn(x=dtype, states=dtype, kda=kda)
    rows = Rows(3, 4, 1)
    states, records, arguments = case(shape, rows, 1)
    want, kept = states.clone(), clones(records)
    y = replay_update(states=states, records=records, **arguments)
    assert same_bytes(y, replay_update_reference(states=want, records=kept, **arguments))
    for got, expected in zip((states, *records), (want, *kept), strict=True):
        assert same_bytes(got, expected)


def test_a_launch_more_where_there_are_many_tiles() -> None:
    assert [prepares(rows, 32, 128, 132) for rows in (1, 4, 5, 128)] == [False, False, True, True]


@pytest.mark.gpu
def test_nothing_waits_and_the_graph_replays() -> None:
    shape = Gdn(heads=4, key=32, value=32)
    rows = Rows(3, 4, 0)
    states, records, arguments = case(shape, rows, 0)

    def run() -> tuple[Tensor]:
        return (replay_update(states=states, records=records, **arguments),)

    check_replay(run, [states, *records])


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    far = (1 << 30) + 4096
    shape = Gdn(states=torch.float16)
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, *shape.matrix), (far, 256, 16, 1))
    generator = torch.Generator(DEVICE).manual_seed(0)
    states.copy_(noise(generator, 4, *shape.matrix, dtype=torch.float16))
    near, records = states.clone(), shape.records(generator, 1)
    positions = ReplayPositions(
        read_column=ints(0), offset=ints(2), pending=ints(2), cursor=ints(15), write_column=ints(0),
        writes=ints(1), checkpoint_column=ints(2), checkpoint_after=ints(-1), certain=ints(4),
    )  # fmt: skip
    rows: dict[str, Any] = {
        "rows": ReplayRows(ints([3, 1, 2, 0]), ints(0), ints(0, 4), ints(2), positions),
        "max_scheduled": 4,
    }
    inputs = shape.inputs(generator, 4) | shape.vectors(generator)
    other = clones(records)
    y = replay_update(**inputs, **rows, states=states, records=records)
    z = replay_update_reference(**inputs, **rows, states=near, records=other)
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states.clone(), near, rtol=1e-3, atol=1e-3)
