"""The kernels of prefill rows against their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.replayed import check_replay
from helpers.state_rows import Rows, prefill_rows
from helpers.tensors import DEVICE, frame_is_whole, framed, ints, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.conv.varlen import ConvTiling, conv1d_varlen
from hybrid_runtime.kernels.mamba2.chunk_scan import ScanTiling, _heads_each, chunk_scan
from hybrid_runtime.kernels.mamba2.naive import chunk_scan_reference

SEEDS = range(5 if CUDA else 1)


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


MIXED = (1, 5, 16, 17, 33, 3)
SHORT = ConvTiling(4, 64, 1)


@dataclass(frozen=True)
class Conv:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    window: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    layout: str = "SD"
    lengths: tuple[int, ...] = MIXED
    padded: bool = True
    drafts: int = 3
    channels: int = 40
    taps: int = 4
    bias: bool = True
    pad: int = 0  # elements behind each block's window
    wide: int = 24  # channels of x that belong to others
    table_pad: int = 0
    tiling: ConvTiling | None = SHORT


CONVS = [
    Conv(),
    Conv(tiling=None),
    Conv(tiling=ConvTiling(8, 16, 1)),
    Conv(x=torch.float32, window=torch.float32, weight=torch.float32),
    Conv(x=torch.float16, window=torch.float16),
    Conv(window=torch.float32),
    Conv(x=torch.float32, window=torch.float16),
    Conv(layout="DS"),
    Conv(layout="DS", window=torch.float32, pad=3),
    *(Conv(lengths=(length,), padded=False) for length in (1, 2, 3, 4, 5, 30)),
    Conv(lengths=(1,) * 5),
    pytest.param(Conv(lengths=(1,) * 130, channels=3, padded=False), id="130 rows"),
    Conv(drafts=0),
    Conv(drafts=6),
    Conv(layout="DS", drafts=6),
    Conv(channels=100),
    Conv(channels=3, wide=0),
    Conv(taps=2),
    Conv(taps=1),
    Conv(taps=8),
    Conv(bias=False),
    Conv(pad=7),
    Conv(wide=1),
    Conv(table_pad=5),
]
if CUDA:
    CONVS += [
        Conv(x=torch.float32),  # the interpreter rounds to bfloat16 another way
        *(
            Conv(channels=10240, wide=8320, lengths=lengths, layout=layout, tiling=None)
            for lengths in (MIXED, (1000, 1, 300))
            for layout in ("SD", "DS")
        ),
    ]


@kernels
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_causal_conv_scan(shape: Conv) -> None:
    for seed in SEEDS:
        rows = prefill_rows(shape.lengths, seed, shape.drafts, shape.padded, shape.table_pad)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        history, length = shape.taps - 1, shape.taps - 1 + shape.drafts
        wide = noise(generator, rows.tokens, shape.channels + shape.wide, dtype=shape.x)
        x = wide[:, shape.wide :]
        x[~rows.owned] = float("nan")
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
        arguments = {"x": x, "weight": weight, "bias": bias, **rows.arguments}
        y = conv1d_varlen(conv_states=conv_states, tiling=shape.tiling, **arguments)
        after = pages.clone()
        pages.copy_(before)
        y_reference = conv1d_reference(conv_states=conv_states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[shape.x]
        torch.testing.assert_close(y, y_reference, rtol=tolerance, atol=tolerance)
        # The window holds inputs as they came, so it agrees to the bit, what is not written too.
        assert same_bytes(after, pages)
        kept = torch.ones(rows.blocks, dtype=torch.bool)
        kept[[rows.block(row[1], row[5]) for row in rows.active]] = False
        assert same_bytes(after[kept], before[kept])


SMALL = ScanTiling(32, 16, 16, 2, 16)


@dataclass(frozen=True)
class Ssm:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    lengths: tuple[int, ...] = (1, 31, 32, 33, 70, 5)
    padded: bool = True
    heads: int = 4
    groups: int = 2
    dim: int = 16
    state: int = 32
    pad: int = 0  # elements behind each block's state
    mixed: bool = False  # dimensions of a state's block are strided
    strong: float = 3.0  # size of raw time steps
    limits: tuple[float, float] = (0.0, float("inf"))
    table_pad: int = 0
    tiling: ScanTiling | None = SMALL


DEFAULT = {"tiling": None, "lengths": (1, 127, 128, 129, 300), "heads": 2, "padded": False}
SSMS = [
    Ssm(),
    Ssm(x=torch.bfloat16),
    Ssm(x=torch.float16),
    Ssm(states=torch.float16),
    Ssm(x=torch.bfloat16, states=torch.bfloat16),
    *(Ssm(lengths=(length,), padded=False) for length in (1, 16, 31, 32, 33, 70)),
    Ssm(lengths=(1,) * 5),
    pytest.param(Ssm(lengths=(1,) * 130, heads=1, groups=1, padded=False), id="130 rows"),
    Ssm(**DEFAULT),
    Ssm(**DEFAULT, x=torch.bfloat16),
    Ssm(**DEFAULT, x=torch.bfloat16, dim=64, state=64),
    Ssm(tiling=ScanTiling(16, 32, 16, 1)),
    Ssm(tiling=ScanTiling(64, 16, 32, 4)),
    Ssm(groups=1),
    Ssm(groups=4),
    Ssm(heads=6, lengths=(70, 1)),
    Ssm(heads=18, lengths=(40, 1)),
    Ssm(dim=80, heads=2),
    Ssm(dim=5, state=12),
    Ssm(state=100, lengths=(70, 1)),
    Ssm(pad=3),
    Ssm(mixed=True),
    Ssm(strong=40.0),
    Ssm(strong=0.1),
    Ssm(limits=(0.3, 0.9)),
    Ssm(table_pad=5),
]
if CUDA:
    big: dict[str, Any] = {"heads": 128, "groups": 8, "dim": 64, "state": 128, "tiling": None}
    LONG = (1000, 1, 128, 257, 64)
    SSMS += [
        Ssm(**big, lengths=LONG),
        Ssm(**big, lengths=LONG, x=torch.bfloat16),
        Ssm(**big, lengths=LONG, x=torch.float16, states=torch.float16),
        Ssm(**(big | {"dim": 80}), lengths=LONG, x=torch.bfloat16),
        Ssm(**(big | {"dim": 80}), lengths=LONG),
        Ssm(**(big | {"heads": 32, "state": 256}), lengths=LONG, x=torch.bfloat16),
        Ssm(**(big | {"heads": 32, "dim": 128}), lengths=LONG, x=torch.bfloat16),
    ]


def inputs(
    shape: Ssm, rows: Rows, generator: torch.Generator
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Arguments, the pool that lies in pages of NaN, and the pages."""
    heads, dim, groups, state = shape.heads, shape.dim, shape.groups, shape.state
    inner, outer = heads * dim, groups * state
    mixed = noise(generator, rows.tokens, inner + 2 * outer + 5 + heads, dtype=shape.x)
    mixed[~rows.owned] = float("nan")
    x, B, C, _, dt = mixed.split([inner, outer, outer, 5, heads], dim=1)
    size = heads * dim * state
    pages = torch.full(
        (rows.blocks, size + shape.pad), float("nan"), dtype=shape.states, device=DEVICE
    )
    states = pages[:, :size].unflatten(1, (heads, dim, state))
    if shape.mixed:
        states = pages[:, :size].unflatten(1, (state, heads, dim)).permute(0, 2, 3, 1)
    for _, slot, _, read, offset, _ in rows.active:
        if read >= 0:
            states[rows.block(slot, read + offset)] = noise(
                generator, heads, dim, state, dtype=shape.states
            )
    arguments: dict[str, Any] = {
        "x": x.unflatten(1, (heads, dim)),
        "dt": shape.strong * dt,
        "A_log": torch.log(1 + 7 * torch.rand(heads, generator=generator, device=DEVICE)),
        "B": B.unflatten(1, (groups, state)),
        "C": C.unflatten(1, (groups, state)),
        "D": noise(generator, heads, dtype=torch.float32),
        "dt_bias": noise(generator, heads, dtype=torch.float32),
        "dt_min": shape.limits[0],
        "dt_max": shape.limits[1],
        "chunk_size": 128,
        **rows.arguments,
    }
    return arguments, states, pages


@kernels
@pytest.mark.parametrize("shape", SSMS, ids=str)
def test_ssm_chunk_scan(shape: Ssm) -> None:
    for seed in SEEDS:
        rows = prefill_rows(shape.lengths, seed, 0, shape.padded, shape.table_pad)
        arguments, states, pages = inputs(shape, rows, torch.Generator(DEVICE).manual_seed(seed))
        before = pages.clone()
        y = framed(arguments["x"])
        chunk_scan(states=states, tiling=shape.tiling, out=y, **arguments)
        assert frame_is_whole(y)
        after, mine = pages.clone(), states.clone()
        pages.copy_(before)
        y_reference = chunk_scan_reference(states=states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
        assert error <= {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[shape.x]
        # Sums of decays are fp32 unless x is; on a GPU products are formed in the type of x, too.
        rounding = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
        products = rounding[shape.x] if CUDA else 5e-6 if shape.x == torch.float32 else 1e-4
        tolerance = max(rounding[shape.states], products)
        for _, slot, _, _, _, write in rows.active:
            block = rows.block(slot, write)
            want = states[block].float()
            assert (mine[block].float() - want).abs().max() <= tolerance * want.abs().max()
            # Nothing else changed: put the reference's states over ours and compare all bytes.
            mine[block] = states[block]
        assert same_bytes(mine, states)
        size = states[0].numel()
        assert same_bytes(after[:, size:], before[:, size:])


@pytest.mark.parametrize(
    ("tokens", "heads", "each"),
    [(1, 1, 2), (1, 4, 2), (1, 8, 4), (1, 16, 8), (65, 4, 4), (65, 8, 8)],
)
def test_a_program_has_fewer_heads_where_programs_are_few(
    tokens: int, heads: int, each: int
) -> None:
    """Two programs are enough on a CPU."""
    assert _heads_each(torch.empty(tokens, heads, 64), ScanTiling(64, 64, 64, 8)) == each


@kernels
def test_the_same_as_in_two_calls() -> None:
    """A row in two parts, the second read from where the first was written."""
    shape = Ssm(lengths=(77,), padded=False)
    rows = prefill_rows(shape.lengths, 0, 0, False)
    arguments, states, pages = inputs(shape, rows, torch.Generator(DEVICE).manual_seed(0))
    where = arguments.pop("rows")
    before, start = pages.clone(), where.cu_seqlens
    where = where._replace(read_column=where.write_column - 1)
    whole = chunk_scan(states=states, rows=where, tiling=SMALL, **arguments)
    state = states.clone()
    pages.copy_(before)
    ends = start.clone()
    ends[1] -= 40
    first = where._replace(cu_seqlens=ends)
    parts = chunk_scan(states=states, rows=first, tiling=SMALL, **arguments)
    ends = start.clone()
    ends[0] += 37
    second = where._replace(cu_seqlens=ends, read_column=where.write_column)
    parts += chunk_scan(states=states, rows=second, tiling=SMALL, **arguments)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(states, state, rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    none = ints()
    rows = StateRows(none.view(0, 1), none, ints(0), none, none, none, none)
    head = torch.zeros(2, device=DEVICE)
    x = torch.ones(tokens, 8, device=DEVICE)
    weight, conv_states = torch.ones(8, 4, device=DEVICE), torch.ones(1, 6, 8, device=DEVICE)
    assert not conv1d_varlen(x, weight, None, conv_states, rows, 4).any()
    states = torch.ones(1, 2, 4, 3, device=DEVICE)
    group = torch.ones(tokens, 1, 3, device=DEVICE)
    heads = x.view(tokens, 2, 4)
    y = chunk_scan(heads, x[:, :2], head, group, group, head, head, states, rows, 4, chunk_size=8)
    assert y.shape == heads.shape
    assert not y.any()


@kernels
def test_wrong_shapes_are_refused() -> None:
    rows = prefill_rows((9,), 0, 0, False)
    x = torch.zeros(rows.tokens, 4, device=DEVICE)
    weight = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="conv_states is"):
        conv1d_varlen(x, weight, None, torch.zeros(9, 2, 4, device=DEVICE), **rows.arguments)
    with pytest.raises(ValueError, match="x has 4 channels"):
        conv1d_varlen(x, weight[:3], None, weight[None], **rows.arguments)
    heads, group, vector = x.view(-1, 2, 2), x.view(-1, 1, 4), torch.zeros(2, device=DEVICE)
    given = (heads, x[:, :2], vector, group, group, vector, vector)
    with pytest.raises(ValueError, match="states is"):
        chunk_scan(*given, torch.zeros(9, 2, 4, 2, device=DEVICE), **rows.arguments, chunk_size=8)
    states = torch.zeros(9, 2, 2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        chunk_scan(*given, states, **rows.arguments, chunk_size=0)
    with pytest.raises(ValueError, match=r"out is torch\.float64"):
        chunk_scan(*given, states, **rows.arguments, chunk_size=8, out=heads.double())
    three = x.view(-1, 1, 4).expand(-1, 3, -1)
    with pytest.raises(ValueError, match="multiple of B's 3 groups"):
        chunk_scan(*given[:3], three, three, *given[5:], states, **rows.arguments, chunk_size=8)


@pytest.mark.gpu
def test_nothing_waits_and_the_graph_replays() -> None:
    """Both run without a host synchronisation and inside a CUDA graph."""
    shape = Ssm(x=torch.bfloat16, lengths=(200, 1, 90), tiling=None)
    rows = prefill_rows(shape.lengths, 0, 0, True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments, states, pages = inputs(shape, rows, generator)
    x = noise(generator, rows.tokens, 64, dtype=torch.bfloat16)
    weight = noise(generator, 64, 4, dtype=torch.bfloat16)
    conv_states = noise(generator, rows.blocks, 6, 64, dtype=torch.bfloat16)
    where = rows.arguments

    def run() -> tuple[Tensor, Tensor]:
        y = conv1d_varlen(x, weight, None, conv_states, **where)
        return y, chunk_scan(states=states, **arguments)

    check_replay(run, [conv_states, pages])


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
    x = noise(noises, 50, 32, dtype=torch.float32)
    weight, vector = noise(noises, 32, 4, dtype=torch.float32), torch.zeros(2, device="cuda")
    group = x[:, :16].unflatten(1, (1, 16))
    rows = StateRows(
        *(ints(*values) for values in ([[3, 1, 2, 0]], [0], [0, 50], [0], [0], [0], [0]))
    )
    given = (x.view(50, 2, 16), x[:, :2], vector, group, group, vector, vector)
    y = conv1d_varlen(x, weight, None, conv_states, rows, 50)
    z = chunk_scan(*given, states, rows, 50, chunk_size=32)
    torch.testing.assert_close(y, conv1d_reference(x, weight, None, near[1], rows, 50))
    want = chunk_scan_reference(*given, near[0], rows, 50, chunk_size=32)
    torch.testing.assert_close(z, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    assert torch.equal(conv_states, near[1])
    torch.testing.assert_close(states, near[0])
