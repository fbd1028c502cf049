"""The kernels of decode and verify rows against their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.replayed import check_replay
from helpers.state_rows import update_rows
from helpers.tensors import DEVICE, frame_is_whole, framed, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.mamba2.naive import selective_state_update_reference
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update

SEEDS = range(5 if CUDA else 1)


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@dataclass(frozen=True)
class Conv:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    window: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    layout: str = "SD"
    tokens: int = 4
    channels: int = 40
    taps: int = 4
    bias: bool = True
    pad: int = 0  # elements behind each block's window
    wide: int = 24  # channels of x that belong to others
    table_pad: int = 0


CONVS = [
    Conv(),
    Conv(x=torch.float32, window=torch.float32, weight=torch.float32),
    Conv(x=torch.float16, window=torch.float16),
    Conv(window=torch.float32),
    Conv(x=torch.float32, window=torch.float16),
    Conv(layout="DS"),
    Conv(layout="DS", window=torch.float32, pad=3),
    *(Conv(tokens=tokens) for tokens in (1, 2, 3, 5, 8, 16)),
    Conv(layout="DS", tokens=6),
    Conv(channels=300),
    Conv(channels=3, wide=0),
    Conv(taps=2),
    Conv(taps=1),
    Conv(bias=False),
    Conv(pad=7),
    Conv(wide=1),
    Conv(table_pad=5),
]
if CUDA:
    CONVS += [
        Conv(x=torch.float32),  # the interpreter rounds to bfloat16 another way
        Conv(channels=10240, wide=8320),
        Conv(channels=10240, wide=8320, layout="DS"),
        Conv(channels=10240, window=torch.float32, tokens=8),
    ]


@kernels
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_causal_conv_update(shape: Conv) -> None:
    for seed in SEEDS:
        rows = update_rows(shape.tokens, seed, shape.table_pad)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        history, length = shape.taps - 1, shape.taps - 2 + shape.tokens
        wide = noise(generator, rows.tokens, shape.channels + shape.wide, dtype=shape.x)
        weight = noise(generator, shape.channels, 1, shape.taps, dtype=shape.weight)[:, 0]
        bias = noise(generator, shape.channels, dtype=shape.weight) if shape.bias else None
        size = length * shape.channels
        pages = torch.full(
            (rows.blocks, size + shape.pad), float("nan"), dtype=shape.window, device=DEVICE
        )
        if shape.layout == "SD":
            conv_states = pages[:, :size].unflatten(1, (length, shape.channels))
        else:
            conv_states = pages[:, :size].unflatten(1, (shape.channels, length)).transpose(1, 2)
        for _, slot, _, read, offset, _ in rows.active:
            if read >= 0:
                conv_states[rows.block(slot, read), offset : offset + history] = noise(
                    generator, history, shape.channels, dtype=shape.window
                )
        before = pages.clone()
        arguments = {"x": wide[:, shape.wide :], "weight": weight, "bias": bias, **rows.arguments}
        y = conv1d_update(conv_states=conv_states, **arguments)
        after = pages.clone()
        pages.copy_(before)
        y_reference = conv1d_reference(conv_states=conv_states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[shape.x]
        torch.testing.assert_close(y, y_reference, rtol=tolerance, atol=tolerance)
        # The window holds inputs as they came, so it agrees to the bit, what is not written too.
        assert same_bytes(after, pages)
        # A read window other than the written one is as it was.
        kept = torch.ones(rows.blocks, dtype=torch.bool)
        kept[[rows.block(row[1], row[5]) for row in rows.active]] = False
        assert same_bytes(after[kept], before[kept])


@dataclass(frozen=True)
class Ssm:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    tokens: int = 4
    heads: int = 2
    groups: int = 2
    dim: int = 8
    state: int = 16
    pad: int = 0  # elements behind each block's state
    skew: int = 0  # elements by which the pool starts off its allocation
    limits: tuple[float, float] = (0.0, float("inf"))
    table_pad: int = 0


SSMS = [
    Ssm(),
    Ssm(x=torch.float32),
    Ssm(x=torch.float16),
    Ssm(states=torch.float16),
    Ssm(states=torch.bfloat16),
    *(Ssm(x=torch.float32, tokens=tokens) for tokens in (1, 2, 3, 5)),
    Ssm(tokens=8),
    Ssm(tokens=16, heads=1, groups=1),
    Ssm(groups=1),
    Ssm(heads=4),
    Ssm(dim=24),
    Ssm(dim=5, state=12),
    Ssm(pad=3),
    Ssm(states=torch.float16, pad=5, skew=1),
    Ssm(x=torch.float32, limits=(0.3, 0.9)),
    Ssm(table_pad=5),
]
if CUDA:
    big = {"heads": 128, "groups": 8, "dim": 64, "state": 128}
    SSMS += [
        Ssm(**big),
        Ssm(**big, states=torch.float16),
        Ssm(**big, states=torch.bfloat16, tokens=6),
        Ssm(**big, x=torch.float32, tokens=8),
        Ssm(heads=128, groups=8, dim=80, state=128),
        Ssm(heads=64, groups=8, dim=64, state=128, tokens=1, pad=32),
    ]


@kernels
@pytest.mark.parametrize("shape", SSMS, ids=str)
def test_ssm_update(shape: Ssm) -> None:
    for seed in SEEDS:
        rows = update_rows(shape.tokens, seed, shape.table_pad)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        heads, dim, groups, state = shape.heads, shape.dim, shape.groups, shape.state
        inner, outer = heads * dim, groups * state
        mixed = noise(generator, rows.tokens, inner + 2 * outer + 5 + heads, dtype=shape.x)
        x, B, C, _, dt = mixed.split([inner, outer, outer, 5, heads], dim=1)
        size = heads * dim * state
        flat = torch.full(
            (shape.skew + rows.blocks * (size + shape.pad),),
            float("nan"),
            dtype=shape.states,
            device=DEVICE,
        )
        pages = flat[shape.skew :].view(rows.blocks, -1)
        states = pages[:, :size].unflatten(1, (heads, dim, state))
        for _, slot, _, read, offset, _ in rows.active:
            if read >= 0:
                states[rows.block(slot, read + offset)] = noise(
                    generator, heads, dim, state, dtype=shape.states
                )
        before = flat.clone()
        arguments: dict[str, Any] = {
            "x": x.unflatten(1, (heads, dim)),
            "dt": 3 * dt,
            "A_log": torch.log(1 + 7 * torch.rand(heads, generator=generator, device=DEVICE)),
            "B": B.unflatten(1, (groups, state)),
            "C": C.unflatten(1, (groups, state)),
            "D": noise(generator, heads, dtype=torch.float32),
            "dt_bias": noise(generator, heads, dtype=torch.float32),
            "dt_min": shape.limits[0],
            "dt_max": shape.limits[1],
            **rows.arguments,
        }
        y = framed(arguments["x"])
        selective_state_update(states=states, out=y, **arguments)
        assert frame_is_whole(y)
        after = flat.clone()
        mine = states.clone()
        flat.copy_(before)
        y_reference = selective_state_update_reference(states=states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
        assert error <= {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[shape.x]
        tolerance = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[shape.states]
        written = [
            rows.block(slot, write + j)
            for _, slot, draft, _, _, write in rows.active
            for j in range(draft + 1)
        ]
        for block in written:
            want = states[block].float()
            assert (mine[block].float() - want).abs().max() <= tolerance * want.abs().max()
            # Nothing else changed: put the reference's states over ours and compare all bytes.
            mine[block] = states[block]
        assert same_bytes(mine, states)
        after[shape.skew :].view(rows.blocks, -1)[:, :size] = 0
        before[shape.skew :].view(rows.blocks, -1)[:, :size] = 0
        assert same_bytes(after, before)


@kernels
def test_time_step_keeps_its_relative_precision() -> None:
    """The state after one token with x = B = 1 from nothing is the time step itself."""
    heads = 41
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    raw = torch.linspace(-40, 40, heads, device=DEVICE)
    states = torch.full((2, heads, 2, 4), float("nan"), device=DEVICE)
    selective_state_update(
        x=torch.ones(1, heads, 2, device=DEVICE),
        dt=raw[None],
        A_log=torch.zeros(heads, device=DEVICE),
        B=torch.ones(1, 1, 4, device=DEVICE),
        C=torch.ones(1, 1, 4, device=DEVICE),
        D=torch.zeros(heads, device=DEVICE),
        dt_bias=torch.zeros(heads, device=DEVICE),
        states=states,
        rows=StateRows(
            block_table=one[None],
            slot=one - 1,
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            draft=one - 1,
            read_column=one - 2,
            read_offset=one - 1,
            write_column=one - 1,
        ),
        max_scheduled=1,
    )
    want = torch.log1p(torch.exp(raw.double()))
    error = (states[1].double() / want[:, None, None] - 1).abs().max()
    assert error < 3e-6
    assert states[0].isnan().all()


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows = StateRows(none.view(0, 1), none, start, none, none, none, none)
    head = torch.zeros(2, device=DEVICE)
    x = torch.ones(tokens, 8, device=DEVICE)
    weight, conv_states = torch.ones(8, 4, device=DEVICE), torch.ones(1, 6, 8, device=DEVICE)
    assert not conv1d_update(x, weight, None, conv_states, rows, 4).any()
    states = torch.ones(1, 2, 4, 3, device=DEVICE)
    group = torch.ones(tokens, 1, 3, device=DEVICE)
    heads = x.view(tokens, 2, 4)
    y = selective_state_update(heads, x[:, :2], head, group, group, head, head, states, rows, 4)
    assert y.shape == heads.shape
    assert not y.any()


@kernels
def test_wrong_shapes_are_refused() -> None:
    rows = update_rows(2, 0)
    x = torch.zeros(rows.tokens, 4, device=DEVICE)
    weight = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="conv_states is"):
        conv1d_update(x, weight, None, torch.zeros(9, 2, 4, device=DEVICE), **rows.arguments)
    with pytest.raises(ValueError, match="x has 4 channels"):
        conv1d_update(x, weight[:3], None, weight[None], **rows.arguments)
    heads, group, vector = x.view(-1, 2, 2), x.view(-1, 1, 4), torch.zeros(2, device=DEVICE)
    inputs = (heads, x[:, :2], vector, group, group, vector, vector)
    with pytest.raises(ValueError, match="states is"):
        selective_state_update(*inputs, torch.zeros(9, 2, 4, 2, device=DEVICE), **rows.arguments)
    with pytest.raises(ValueError, match="strides"):
        selective_state_update(*inputs, torch.zeros(9, 2, 4, 2, device=DEVICE).mT, **rows.arguments)
    states = torch.zeros(9, 2, 2, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"out is .* strides"):
        selective_state_update(*inputs, states, **rows.arguments, out=heads.clone().mT)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_nothing_waits_and_the_graph_replays(tokens: int) -> None:
    """Both run without a host synchronisation and inside a CUDA graph."""
    rows = update_rows(tokens, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = noise(generator, rows.tokens, 64, dtype=torch.bfloat16)
    weight = noise(generator, 64, 4, dtype=torch.bfloat16)
    conv_states = noise(generator, rows.blocks, 2 + tokens, 64, dtype=torch.bfloat16)
    states = noise(generator, rows.blocks, 4, 16, 32, dtype=torch.float32)
    group, vector = x[:, :32].unflatten(1, (1, 32)), torch.zeros(4, device=DEVICE)
    where = rows.arguments

    def run() -> tuple[Tensor, Tensor]:
        y = conv1d_update(x, weight, None, conv_states, **where)
        inputs = (y.view(-1, 4, 16), x[:, :4], vector, group, group, vector, vector)
        return y, selective_state_update(*inputs, states, **where)

    check_replay(run, [conv_states, states])


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    """Block times stride passes 2**31 elements at block 3 (#35275)."""
    far = (1 << 30) + 4096
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, 2, 16, 16), (far, 256, 16, 1))
    conv_states = pool[4096:].as_strided((4, 6, 32), (far, 32, 1))
    noises = torch.Generator("cuda").manual_seed(0)
    states.copy_(noise(noises, 4, 2, 16, 16, dtype=torch.float16))
    conv_states.copy_(noise(noises, 4, 6, 32, dtype=torch.float16))
    near = states.clone(), conv_states.clone()
    x = noise(noises, 3, 32, dtype=torch.float32)
    weight, vector = noise(noises, 32, 4, dtype=torch.float32), torch.zeros(2, device="cuda")
    group = x[:, :16].unflatten(1, (1, 16))
    rows = StateRows(
        *(
            torch.tensor(values, dtype=torch.int32, device="cuda")
            for values in ([[3, 1, 2, 0]], [0], [0, 3], [2], [0], [0], [0])
        )
    )
    inputs = (x.view(3, 2, 16), x[:, :2], vector, group, group, vector, vector)
    y = conv1d_update(x, weight, None, conv_states, rows, 3)
    z = selective_state_update(*inputs, states, rows, 3)
    torch.testing.assert_close(y, conv1d_reference(x, weight, None, near[1], rows, 3))
    torch.testing.assert_close(z, selective_state_update_reference(*inputs, near[0], rows, 3))
    assert torch.equal(conv_states, near[1])
    torch.testing.assert_close(states, near[0])
