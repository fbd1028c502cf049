"""States of decode rows (one update a token) and of prompts (a scan over chunks): each kernel
against its reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, kernels, plain
from helpers.mamba_cases import Ssm, rows_of
from helpers.replayed import check_replay
from helpers.state_rows import prefill_rows, update_rows
from helpers.tensors import DEVICE, frame_is_whole, framed, ints, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.conv.varlen import conv1d_varlen
from hybrid_runtime.kernels.mamba2.chunk_scan import ScanTiling, _heads_each, chunk_scan
from hybrid_runtime.kernels.mamba2.naive import (
    chunk_scan_reference,
    selective_state_update_reference,
)
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update

SEEDS = range(5 if CUDA else 1)
SMALL = ScanTiling(32, 16, 16, 2, 16)
LENGTHS = (1, 31, 32, 33, 70, 5)
BASES = (
    Ssm(),
    Ssm(x=torch.float32, lengths=LENGTHS, heads=4, dim=16, state=32, tiling=SMALL),
)
DECODE, PROMPT = BASES
CHANGES: list[dict[str, Any]] = [
    {},
    {"x": torch.bfloat16},
    {"x": torch.float16},
    {"x": torch.float32},
    {"states": torch.float16},
    {"states": torch.bfloat16},
    {"groups": 1},
    {"heads": 4},
    {"dim": 5, "state": 12},
    {"pad": 3},
    {"states": torch.float16, "pad": 5, "skew": 1},
    {"x": torch.float32, "limits": (0.3, 0.9)},
    {"table_pad": 5},
]
DEFAULT = {"tiling": None, "lengths": (1, 127, 128, 129, 300), "heads": 2, "padded": False}
SSMS = [
    *dict.fromkeys(replace(base, **change) for base in BASES for change in CHANGES),
    *(replace(DECODE, x=torch.float32, drafts=drafts) for drafts in (0, 1, 2, 4)),
    replace(DECODE, drafts=7),
    replace(DECODE, drafts=15, heads=1, groups=1),
    replace(DECODE, dim=24),
    *(replace(PROMPT, lengths=(length,), padded=False) for length in (1, 16, 31, 32, 33, 70)),
    replace(PROMPT, lengths=(1,) * 5),
    pytest.param(
        replace(PROMPT, lengths=(1,) * 130, heads=1, groups=1, padded=False), id="130 rows"
    ),
    replace(PROMPT, **DEFAULT),
    replace(PROMPT, **DEFAULT, x=torch.bfloat16),
    replace(PROMPT, **DEFAULT, x=torch.bfloat16, dim=64, state=64),
    replace(PROMPT, tiling=ScanTiling(16, 32, 16, 1)),
    replace(PROMPT, tiling=ScanTiling(64, 16, 32, 4)),
    replace(PROMPT, x=torch.bfloat16, states=torch.bfloat16),
    replace(PROMPT, groups=4),
    replace(PROMPT, heads=6, lengths=(70, 1)),
    replace(PROMPT, heads=18, lengths=(40, 1)),
    replace(PROMPT, dim=80, heads=2),
    replace(PROMPT, state=100, lengths=(70, 1)),
    replace(PROMPT, mixed=True),
    replace(PROMPT, strong=13.0),
    replace(PROMPT, strong=0.03),
]
if CUDA:
    big: dict[str, Any] = {"heads": 128, "groups": 8, "dim": 64, "state": 128, "tiling": None}
    long = replace(PROMPT, **big, lengths=(1000, 1, 128, 257, 64))
    SSMS += [
        *(replace(DECODE, **big, states=dtype) for dtype in (torch.float32, torch.float16)),
        replace(DECODE, **big, states=torch.bfloat16, drafts=5),
        replace(DECODE, **big, x=torch.float32, drafts=7),
        replace(DECODE, **big | {"dim": 80}),
        replace(DECODE, **big | {"heads": 64}, drafts=0, pad=32),
        long,
        replace(long, x=torch.bfloat16),
        replace(long, x=torch.float16, states=torch.float16),
        replace(long, dim=80, x=torch.bfloat16),
        replace(long, dim=80),
        replace(long, heads=32, state=256, x=torch.bfloat16),
        replace(long, heads=32, dim=128, x=torch.bfloat16),
    ]
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of outputs and states of single updates."""
SCANNED = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of outputs of a scan, whose sums are longer."""


@kernels
@pytest.mark.parametrize("shape", SSMS, ids=str)
def test_states_and_outputs(shape: Ssm) -> None:
    operation: Any = selective_state_update
    reference: Any = selective_state_update_reference
    if scans := shape.lengths is not None:
        operation = partial(chunk_scan, chunk_size=128, tiling=shape.tiling)
        reference = partial(chunk_scan_reference, chunk_size=128)
    for seed in SEEDS:
        rows = rows_of(shape, seed)
        arguments, states, memory = shape.arguments(rows, seed)
        before = memory.clone()
        y = framed(arguments["x"])
        operation(states=states, out=y, **arguments)
        assert frame_is_whole(y)
        after, mine = memory.clone(), states.clone()
        memory.copy_(before)
        y_reference = reference(states=states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
        assert error <= (SCANNED if scans else ROUNDING)[shape.x]
        tolerance = ROUNDING[shape.states]
        if scans:
            # Sums of decays are fp32 unless x is; on a GPU products are formed in the type of x.
            fine = 5e-6 if shape.x == torch.float32 else 1e-4
            tolerance = max(tolerance, ROUNDING[shape.x] if CUDA else fine, 5e-6)
        for _, slot, draft, _, _, write in rows.active:
            for block in (rows.block(slot, write + j) for j in range(draft + 1)):
                want = states[block].float()
                assert (mine[block].float() - want).abs().max() <= tolerance * want.abs().max()
                # Nothing else changed: put the reference's states over ours and compare all bytes.
                mine[block] = states[block]
        assert same_bytes(mine, states)
        size = states[0].numel()
        for whole in (after, before):
            whole[shape.skew :].view(rows.blocks, -1)[:, :size] = 0
        assert same_bytes(after, before)


@plain
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
    shape = replace(PROMPT, lengths=(77,), padded=False)
    arguments, states, memory = shape.arguments(rows_of(shape, 0), 0)
    scan = partial(chunk_scan, states=states, chunk_size=128, tiling=SMALL)
    where = arguments.pop("rows")
    before, start = memory.clone(), where.cu_seqlens
    where = where._replace(read_column=where.write_column - 1)
    whole = scan(rows=where, **arguments)
    state = states.clone()
    memory.copy_(before)
    first = where._replace(cu_seqlens=start - ints(0, 40))
    second = where._replace(cu_seqlens=start + ints(37, 0), read_column=where.write_column)
    parts = scan(rows=first, **arguments) + scan(rows=second, **arguments)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(states, state, rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
def test_time_step_keeps_its_relative_precision() -> None:
    """The state after one token with x = B = 1 from nothing is the time step itself."""
    heads = 41
    raw = torch.linspace(-40, 40, heads, device=DEVICE)
    states = torch.full((2, heads, 2, 4), float("nan"), device=DEVICE)
    zeros, group = torch.zeros(heads, device=DEVICE), torch.ones(1, 1, 4, device=DEVICE)
    x = torch.ones(1, heads, 2, device=DEVICE)
    rows = StateRows(*(ints(*each) for each in ([[1]], [0], [0, 1], [0], [-1], [0], [0])))
    selective_state_update(x, raw[None], zeros, group, group, zeros, zeros, states, rows, 1)
    want = torch.log1p(torch.exp(raw.double()))
    error = (states[1].double() / want[:, None, None] - 1).abs().max()
    assert error < 3e-6
    assert states[0].isnan().all()


KERNELS = (selective_state_update, partial(chunk_scan, chunk_size=8))
REFERENCES = (selective_state_update_reference, partial(chunk_scan_reference, chunk_size=8))


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_rows(kernel: Any, tokens: int) -> None:
    none = ints()
    rows = StateRows(none.view(0, 1), none, ints(0), none, none, none, none)
    head, states = torch.zeros(2, device=DEVICE), torch.ones(1, 2, 4, 3, device=DEVICE)
    x, group = torch.ones(tokens, 2, 4, device=DEVICE), torch.ones(tokens, 1, 3, device=DEVICE)
    y = kernel(x, x[..., 0], head, group, group, head, head, states, rows, 4)
    assert y.shape == x.shape
    assert not y.any()


def vectors_of(x: Tensor) -> tuple[Tensor, ...]:
    """Arguments up to the states, of two heads and one group."""
    heads, vector = x.unflatten(1, (2, -1)), torch.zeros(2, device=DEVICE)
    group = x[:, : 16 if x.shape[1] > 16 else 4].unsqueeze(1)
    return heads, x[:, :2], vector, group, group, vector, vector


@kernels
@pytest.mark.parametrize("operation", [*REFERENCES, *KERNELS])
def test_wrong_shapes_are_refused(operation: Any) -> None:
    rows = prefill_rows((9,), 0, 0, False)
    given = vectors_of(torch.zeros(rows.tokens, 4, device=DEVICE))
    with pytest.raises(ValueError, match="states is"):
        operation(*given, torch.zeros(9, 2, 4, 2, device=DEVICE), **rows.arguments)


@kernels
def test_what_a_kernel_cannot_do_is_refused() -> None:
    rows = prefill_rows((9,), 0, 0, False)
    given = vectors_of(torch.zeros(rows.tokens, 4, device=DEVICE))
    states = torch.zeros(9, 2, 2, 4, device=DEVICE)
    for scan in (chunk_scan, chunk_scan_reference):
        with pytest.raises(ValueError, match="chunk_size is 0"):
            scan(*given, states, **rows.arguments, chunk_size=0)
    with pytest.raises(ValueError, match=r"out is torch\.float64"):
        chunk_scan(*given, states, **rows.arguments, chunk_size=8, out=given[0].double())
    three = given[3].expand(-1, 3, -1)
    with pytest.raises(ValueError, match="multiple of B's 3 groups"):
        chunk_scan(*given[:3], three, three, *given[5:], states, **rows.arguments, chunk_size=8)
    with pytest.raises(ValueError, match="strides"):
        selective_state_update(*given, states.mT.contiguous().mT, **rows.arguments)
    with pytest.raises(ValueError, match=r"out is .* strides"):
        selective_state_update(*given, states, **rows.arguments, out=given[0].clone().mT)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, None])
def test_nothing_waits_and_the_graph_replays(tokens: int | None) -> None:
    """Convolution and states run without a host synchronisation and inside a CUDA graph."""
    rows = update_rows(tokens, 0) if tokens else prefill_rows((200, 1, 90), 0, 0, True)
    conv, kernel = (conv1d_update, KERNELS[0]) if tokens else (conv1d_varlen, KERNELS[1])
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = noise(generator, rows.tokens, 64, dtype=torch.bfloat16)
    weight = noise(generator, 64, 4, dtype=torch.bfloat16)
    conv_states = noise(generator, rows.blocks, 2 + (tokens or 4), 64, dtype=torch.bfloat16)
    states = noise(generator, rows.blocks, 2, 32, 16, dtype=torch.float32)
    arguments = rows.arguments  # once: it copies the table

    def run() -> tuple[Tensor, Tensor]:
        y = conv(x, weight, None, conv_states, **arguments)
        return y, kernel(*vectors_of(y), states, **arguments)

    check_replay(run, [conv_states, states])


@pytest.mark.gpu
@pytest.mark.parametrize("scans", [False, True])
def test_block_strides_beyond_32_bits(scans: bool) -> None:
    """Block times stride passes 2**31 elements at block 3 (#35275)."""
    far = (1 << 30) + 4096
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, 2, 16, 16), (far, 256, 16, 1))
    noises = torch.Generator("cuda").manual_seed(0)
    states.copy_(noise(noises, 4, 2, 16, 16, dtype=torch.float16))
    near, tokens, draft = states.clone(), 50 if scans else 3, 0 if scans else 2
    given = vectors_of(noise(noises, tokens, 32, dtype=torch.float32))
    rows = StateRows(
        *(ints(*values) for values in ([[3, 1, 2, 0]], [0], [0, tokens], [draft], [0], [0], [0]))
    )
    z = KERNELS[scans](*given, states, rows, tokens)
    want = REFERENCES[scans](*given, near, rows, tokens)
    torch.testing.assert_close(z, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    torch.testing.assert_close(states, near)
