"""The replay layout's state update: the kernel against its reference, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, INTERPRETED, elsewhere, kernels, plain, run_in_interpreter
from helpers.replay_cases import BIG, ROUNDS, SEEDS, Rows, Ssm
from helpers.replayed import check_replay
from helpers.tensors import DEVICE, frame_is_whole, framed, ints, noise, same_bytes
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from hybrid_runtime.kernels.conv.replay import replay_conv1d_update
from hybrid_runtime.kernels.mamba2 import replay_update as update
from hybrid_runtime.kernels.mamba2.naive import replay_update_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.replay_launch import choose_tile
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.rounding import (
    Rounding,
    round_state_reference,
    rounding_key_reference,
)
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import IDLE, ReplayPositions

SSMS = [
    Ssm(),
    Ssm(x=torch.float32),
    *(Ssm(x=torch.float32, drafts=d, tokens=d + 1) for d in (0, 2, 4)),
    Ssm(drafts=7, tokens=8, heads=1, groups=1),
    Ssm(drafts=15, tokens=16, heads=1, groups=1),
    Ssm(drafts=15, tokens=16, ring_tokens=0, heads=1, groups=1, states=torch.float16),
    Ssm(drafts=15, tokens=16, ring_tokens=31, heads=1, groups=1),
    Ssm(x=torch.float32, ring_tokens=31),
    Ssm(ring_tokens=0),
    Ssm(ring_tokens=4),
    Ssm(drafts=1, tokens=6),
    Ssm(drafts=5, tokens=2),
    Ssm(groups=1, pad=3),
    Ssm(heads=4),
    Ssm(heads=1, groups=1, dim=22),
    Ssm(heads=1, groups=1, state=64),
    Ssm(dim=5, state=12),
    Ssm(dim=5, state=50, states=torch.float16),
    Ssm(states=torch.float16, groups=1, pad=5, skew=1),
    Ssm(x=torch.float32, limits=(0.3, 0.9)),
    Ssm(states=torch.float16, rounding=True),
    Ssm(states=torch.bfloat16, rounding=True),
    Ssm(x=torch.float16, states=torch.float16),
    Ssm(x=torch.float32, states=torch.bfloat16),
    Ssm(states=torch.float16, drafts=7, tokens=8, heads=1, groups=1),
    Ssm(states=torch.float16, drafts=6, tokens=10, heads=1, groups=1),
    Ssm(states=torch.float16, drafts=0, tokens=1),
    Ssm(states=torch.bfloat16, drafts=2, tokens=6, heads=4),
    Ssm(states=torch.float16, heads=2, groups=1, state=64, rounding=True),
    Ssm(states=torch.float16, heads=1, groups=1, dim=40, state=40),
    Ssm(states=torch.bfloat16, groups=1, limits=(0.1, 1e6), far=2e6),
    # Tiles of 32 rows.
    Ssm(states=torch.float16, dim=32),
    Ssm(states=torch.float16, dim=32, drafts=15, tokens=16, ring_tokens=31, heads=1, groups=1),
    Ssm(states=torch.float16, dim=64, heads=1, groups=1, rounding=True),
    Ssm(states=torch.float16, dim=32, state=50, groups=1, drafts=7, tokens=8, ring_tokens=0),
    Ssm(x=torch.float16, states=torch.bfloat16, dim=32, groups=1),
]
SHARED = [
    Ssm(heads=2, groups=1, dim=34, tokens=6, drafts=2, states=states)
    for states in (torch.float32, torch.float16)
]
"""Two heads of a group, two tiles or more of a head."""
if CUDA:
    SSMS += [
        Ssm(**BIG),
        Ssm(**BIG, states=torch.float16),
        Ssm(**BIG, states=torch.float16, rounding=True),
        Ssm(**BIG, drafts=15, tokens=16, ring_tokens=31),
        Ssm(**BIG, states=torch.float16, drafts=15, tokens=16, ring_tokens=31),
        Ssm(heads=64, groups=8, dim=40, state=80, states=torch.float16),
        Ssm(**BIG, states=torch.bfloat16, drafts=5, tokens=6),
        Ssm(**BIG, x=torch.float32, drafts=7, tokens=8),
        Ssm(heads=128, groups=8, dim=80, state=128),
        Ssm(heads=64, groups=8, dim=64, state=256),
        Ssm(heads=64, groups=8, dim=64, state=128, drafts=0, tokens=1, pad=32),
    ]


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize("tests", ["test_replay_update[", "not test_replay_update["])
def test_kernels_in_the_interpreter(tests: str) -> None:
    run_in_interpreter(__file__, "-k", tests)


@kernels
@pytest.mark.parametrize("shape", SSMS, ids=str)
def test_replay_update(shape: Ssm) -> None:
    for seed in SEEDS:
        rows = Rows(shape.drafts, shape.tokens, seed, shape.ring_tokens)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        size = shape.heads * shape.dim * shape.state
        flat = torch.full(
            (shape.skew + rows.blocks * (size + shape.pad),),
            float("nan"),
            dtype=shape.states,
            device=DEVICE,
        )
        pages = flat[shape.skew :].view(rows.blocks, -1)
        states = pages[:, :size].unflatten(1, (shape.heads, shape.dim, shape.state))
        records = shape.records(generator, rows.slots)
        for row in rows.active:
            past = (row.cursor + torch.arange(row.pending)) % rows.ring
            for part in records:  # what no pending token has written is never looked at
                spoilt = torch.ones(rows.ring, dtype=torch.bool)
                spoilt[past] = False
                part[row.slot, :, spoilt.to(DEVICE)] = float("nan")
            if row.read >= 0:
                states[rows.table[row.slot, row.read]] = noise(
                    generator, shape.heads, shape.dim, shape.state, dtype=shape.states
                )
        before = flat.clone(), Records(*(part.clone() for part in records))
        arguments: dict[str, Any] = {
            **shape.inputs(generator, rows.tokens),
            **shape.vectors(generator, torch.float32),
            **rows.arguments,
        }
        if shape.rounding:
            seeds = torch.arange(rows.slots, device=DEVICE).int() - 5
            arguments["rounding"] = Rounding(seeds, layer=3)
        y = framed(arguments["x"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update, "replay_update_reference", None)  # the kernel does it
            replay_update(states=states, records=records, out=y, **arguments)
        assert frame_is_whole(y)
        after, mine = flat.clone(), Records(*(part.clone() for part in records))
        flat.copy_(before[0])
        for part, old in zip(records, before[1], strict=True):
            part.copy_(old)
        y_reference = replay_update_reference(states=states, records=records, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
        assert error <= ROUNDS[shape.x]
        tolerance = ROUNDS[shape.states] * (2 if shape.rounding else 1)
        active = rows.active
        written = {int(rows.table[row.slot, row.write]) for row in active if row.writes}
        written |= {
            int(rows.table[row.slot, row.checkpoint]) for row in active if row.checkpoint >= 0
        }
        once = {
            int(rows.table[row.slot, column])
            for row in active
            if row.rounds_once
            for column in (row.write, row.checkpoint)
            if column >= 0
        }
        got = after[shape.skew :].view(rows.blocks, -1)[:, :size].unflatten(1, states.shape[1:])
        for block in written:
            want = states[block].float()
            assert want.isfinite().all()
            assert (got[block].float() - want).abs().max() <= tolerance * want.abs().max()
            if shape.rounding and block in once:
                assert (got[block] == states[block]).float().mean() > 0.99
            # Nothing else changed: put the reference's states over ours and compare all bytes.
            got[block] = states[block]
        assert same_bytes(after, flat)
        assert same_bytes(mine.x, records.x)
        assert same_bytes(mine.B, records.B)
        torch.testing.assert_close(mine.dt, records.dt, rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter tells who writes")
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_one_program_of_a_group_records_B(shape: Ssm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all heads, tiles and chunks that share it: none would write anything else, only often."""
    rows = Rows(shape.drafts, shape.tokens, 0, shape.ring_tokens)
    generator = torch.Generator(DEVICE).manual_seed(0)
    records = shape.records(generator, rows.slots)
    size = rows.blocks, shape.heads, shape.dim, shape.state
    states = noise(generator, *size, dtype=shape.states)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    first, past = records.B.data_ptr(), records.B.data_ptr() + records.B.nbytes
    writes: Counter[int] = Counter()

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        address = pointers.data[mask.data.astype(bool)]
        writes.update(address[(address >= first) & (address < past)].tolist())
        return plainly(builder, pointers, value, mask, *options)

    plainly = InterpreterBuilder.create_masked_store
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
    replay_update(states=states, records=records, **arguments, **rows.arguments)
    kept = sum(row.draft if row.writes else row.scheduled for row in rows.active)
    assert kept
    assert list(writes.values()) == [1] * (kept * shape.groups * shape.state)


@kernels
@pytest.mark.parametrize("states", [torch.float16, torch.bfloat16], ids=str)
def test_queries_of_any_size(states: torch.dtype) -> None:
    """Outputs without D are linear in C, so a power of two passes through, far from fp16's range
    too, where products with an fp16 state have to bring C first."""
    shape = Ssm(states=states, state=32, heads=1, groups=1, drafts=2, tokens=3)
    rows = Rows(shape.drafts, shape.tokens, 0, shape.ring_tokens)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    arguments |= rows.arguments | {"D": torch.zeros(shape.heads, device=DEVICE)}
    pool = noise(generator, rows.blocks, shape.heads, shape.dim, shape.state, dtype=states)
    records = shape.records(generator, rows.slots)
    generator = torch.Generator(DEVICE).manual_seed(1)
    power = torch.randint(-60, 60, (rows.tokens,), generator=generator, device=DEVICE)
    scale = torch.exp2(power.float())[:, None, None]
    tiny = torch.tensor(2.0**-118, device=DEVICE)
    outputs = []
    for factor in (scale**0, scale, tiny, tiny * 0):
        C = (arguments["C"].float() * factor).to(shape.x)
        copies = Records(*(part.clone() for part in records))
        outputs.append(
            replay_update(states=pool.clone(), records=copies, **(arguments | {"C": C})).float()
        )
    assert outputs[0].any()
    assert torch.equal(outputs[0] * scale, outputs[1])
    # What drafts add to each other loses digits that small.
    torch.testing.assert_close(outputs[2] / tiny, outputs[0], rtol=0.05, atol=0.05)
    assert not outputs[3].any()


@plain
def test_tiles_are_those_measured_as_best() -> None:
    """On an H200 with 128 heads in 8 groups, or near it."""

    def chosen(itemsize: int, tokens: int) -> list[tuple[int, int]]:
        return [choose_tile(n, 128, 16, 64, itemsize, tokens, 132) for n in (1, 4, 16, 64, 128)]

    assert choose_tile(2, 128, 16, 64, 4, 4, 132) == (16, 1)
    assert chosen(4, 4) == chosen(4, 8) == [(16, 1), (16, 2), (16, 8), (16, 8), (16, 8)]
    assert chosen(4, 16) == [(16, 2), (16, 2), (16, 8), (16, 8), (16, 8)]
    for tokens in (4, 8, 16):
        assert chosen(2, tokens) == [(16, 1), (32, 1), (32, 2), (32, 4), (32, 4)]


@plain
def test_tiles_fit_the_heads_and_the_head_dim() -> None:
    assert choose_tile(64, 128, 16, 80, 2, 4, 132).rows == 16
    assert choose_tile(64, 12, 12, 64, 4, 4, 132) == (16, 2)
    assert [choose_tile(1000, 5, 5, 64, 4, tokens, 132).run for tokens in (4, 16)] == [1, 1]


@kernels
@pytest.mark.parametrize("states", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_drafts_that_are_not_finite_leave_the_state_alone(states: torch.dtype) -> None:
    shape = Ssm(states=states, drafts=2)
    rows = Rows(2, 3, 0)
    assert any(row.draft and row.writes for row in rows.active)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = shape.inputs(generator, rows.tokens)
    rest = shape.vectors(generator, torch.float32) | rows.arguments
    pool = noise(generator, rows.blocks, shape.heads, shape.dim, shape.state, dtype=states)
    records = shape.records(generator, rows.slots)
    spoilt = {name: part.clone() for name, part in inputs.items()}
    for end, draft in zip(rows.rows.cu_seqlens[1:], rows.rows.draft, strict=True):
        for part in spoilt.values():
            part[end - draft : end] = float("nan")
    after = []
    for given in (inputs, spoilt):
        after.append(pool.clone())
        copies = Records(*(part.clone() for part in records))
        replay_update(states=after[-1], records=copies, **given, **rest)
    assert not same_bytes(after[0], pool)
    assert same_bytes(*after)


@plain
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    state = torch.tensor([1.0003, -0.7071, 2e-5, 300.2, 0.0, 3e-8], device=DEVICE)
    state = state.view(1, 1, 1, -1)
    many = torch.arange(20000, device=DEVICE)
    keys = rounding_key_reference(many, 2, many)
    rounded = round_state_reference(state.expand(20000, -1, -1, -1), dtype, keys)
    digits = 10 if dtype == torch.float16 else 7
    unit = torch.exp2(torch.floor(torch.log2(state.abs().clamp(min=1e-30)))) * 2.0**-digits
    if dtype == torch.float16:
        unit = unit.clamp(min=2.0**-24)
    assert ((rounded.double() - state).abs() <= unit * 1.0001).all()
    assert ((rounded.double().mean(0) - state[0]).abs() <= 0.02 * unit[0]).all()
    assert (rounded[0] == round_state_reference(state, dtype, keys[:1])[0]).all()
    assert (rounded[:, 0, 0, 0].unique().numel()) == 2


@kernels
def test_wrong_shapes_are_refused() -> None:
    shape = Ssm()
    rows = Rows(3, 4, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    records = shape.records(generator, rows.slots)
    states = torch.zeros(rows.blocks, 2, 8, 16, device=DEVICE)
    refused: dict[str, dict[str, Any]] = {
        "states is": {"states": states[..., :12]},
        "states has strides": {"states": states.mT.contiguous().mT},
        "records.x is": {"records": records._replace(x=records.x[..., :4])},
        "records.B is torch.float32": {"records": records._replace(B=records.B.float())},
        "x has 2 heads": {"B": torch.zeros(rows.tokens, 3, 16, device=DEVICE)},
        "C is torch.float64": {"C": arguments["C"].double()},
        "out is torch.float32": {"out": torch.zeros(rows.tokens, 2, 4, device=DEVICE)},
    }
    for name, bad in refused.items():
        call: dict[str, Any] = {**arguments, **rows.arguments, "states": states}
        with pytest.raises(ValueError, match=name):
            replay_update(**(call | {"records": records} | bad))


def test_a_cache_of_another_ring_than_the_rows_were_placed_for_is_refused() -> None:
    """Its cursors point elsewhere, in silence."""
    shape, rows = Ssm(), Rows(3, 4, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    arguments["states"] = torch.zeros(rows.blocks, 2, 8, 16, device=DEVICE)
    placed, most = rows.rows._replace(ring_length=rows.ring), rows.arguments["max_scheduled"]
    for ring in (rows.ring - 1, rows.ring + 1, 16 + rows.ring):
        cache = Records(
            torch.zeros(rows.slots, 2, ring, 8, device=DEVICE, dtype=shape.x),
            torch.zeros(rows.slots, 2, ring, 16, device=DEVICE, dtype=shape.x),
            torch.zeros(rows.slots, 2, ring, device=DEVICE),
        )
        with pytest.raises(ValueError, match=f"records has rings of {ring} .* {rows.ring}"):
            replay_update(**arguments, records=cache, rows=placed, max_scheduled=most)
    assert not arguments["states"].any()


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    shape = Ssm()
    generator = torch.Generator(DEVICE).manual_seed(0)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    y = replay_update(
        **shape.inputs(generator, tokens),
        **shape.vectors(generator, torch.float32),
        states=torch.zeros(1, 2, 8, 16, device=DEVICE),
        records=shape.records(generator, 2),
        rows=ReplayRows(none.view(0, 1), none, ints(0), none, ReplayPositions(*[none] * len(IDLE))),
        max_scheduled=4,
    )
    assert y.shape == (tokens, 2, 8)
    assert not y.any()


@pytest.mark.gpu
def test_nothing_waits_and_the_graph_replays() -> None:
    shape = Ssm(heads=4, groups=1, dim=16, state=32)
    rows = Rows(3, 4, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    states = noise(generator, rows.blocks, 4, 16, 32, dtype=torch.float32)
    conv_states = noise(generator, rows.blocks, 6, 64, dtype=torch.bfloat16)
    records = shape.records(generator, rows.slots)
    x = arguments["x"].flatten(1)
    weight = noise(generator, 64, 4, dtype=torch.bfloat16)

    def run() -> tuple[Tensor, Tensor]:
        y = replay_conv1d_update(x, weight, None, conv_states, **rows.arguments)
        return y, replay_update(**arguments, **rows.arguments, states=states, records=records)

    check_replay(run, [states, conv_states, *records])


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    far = (1 << 30) + 4096
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, 2, 8, 16), (far, 128, 16, 1))
    shape = Ssm()
    generator = torch.Generator(DEVICE).manual_seed(0)
    states.copy_(noise(generator, 4, 2, 8, 16, dtype=torch.float16))
    near, records = states.clone(), shape.records(generator, 1)
    positions = ReplayPositions(
        read_column=ints(0), offset=ints(2), pending=ints(2), cursor=ints(15), write_column=ints(0),
        writes=ints(1), checkpoint_column=ints(2), checkpoint_after=ints(-1), certain=ints(4),
    )  # fmt: skip
    rows: dict[str, Any] = {
        "rows": ReplayRows(ints([3, 1, 2, 0]), ints(0), ints(0, 4), ints(2), positions),
        "max_scheduled": 4,
    }
    inputs = shape.inputs(generator, 4) | shape.vectors(generator, torch.float32)
    other = Records(*(part.clone() for part in records))
    y = replay_update(**inputs, **rows, states=states, records=records)
    z = replay_update_reference(**inputs, **rows, states=near, records=other)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(states.clone(), near, rtol=1e-3, atol=1e-3)
