"""Prompts of Gated DeltaNet: the scan's specification against the recurrence, the kernels against
the specification."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.gdn_cases import BIG, Gdn, relative, token_inputs
from helpers.interpreter import CUDA, kernels, plain
from helpers.replayed import check_replay
from helpers.state_rows import Rows, prefill_rows
from helpers.tensors import DEVICE, frame_is_whole, framed, ints, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows, split_rows
from hybrid_runtime.kernels.gdn.chunk_scan import ScanTiling, chunk_scan, scan_tiling
from hybrid_runtime.kernels.gdn.naive import CHUNK, chunk_scan_reference, delta_rule_reference

# Around the reference's chunk and those of SMALL; cuts likewise, and at the end. 0: no cut.
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 5, 17, 17)
AFTER = (0, CHUNK - 2, 1, CHUNK, CHUNK + 3, 4, 0, 16)
SMALL = ScanTiling(16, 32)


def cuts_of(rows: Rows, after: tuple[int, ...]) -> Cuts:
    """Cuts after so many tokens of the row of each slot. Some checkpoints go to the column that is
    read."""
    runs = [scheduled > 0 and min(slot, write) >= 0 for scheduled, slot, *_, write in rows.spec]
    cuts = [after[row[1]] if here else 0 for row, here in zip(rows.spec, runs, strict=True)]
    columns = [row[1] % 3 // 2 * 2 if cut else -1 for row, cut in zip(rows.spec, cuts, strict=True)]
    return Cuts(ints(*cuts), ints(*columns))


def walked(
    shape: Gdn, rows: Rows, cuts: Cuts | None, arguments: dict[str, Any], states: Tensor
) -> Tensor:
    """Outputs in fp64, token by token; `states` are changed as a scan must."""
    every = token_inputs(shape, arguments)
    y = torch.zeros(arguments["v"].shape, dtype=torch.float64, device=states.device)
    before = states.clone()
    for i, (own, scheduled, slot, _, read, offset, write) in enumerate(rows):
        if scheduled == 0 or min(slot, write) < 0:
            continue
        after = 0 if cuts is None else int(cuts.after[i])
        parts = [(own.start, own.start + after, int(cuts.column[i]))] if cuts and after else []
        state = torch.zeros(shape.matrix, dtype=torch.float64, device=states.device)
        if read >= 0:
            state = before[rows.block(slot, read + offset)].double()
        for start, end, column in [*parts, (own.start + after, own.stop, write)]:
            given = (part[start:end] for part in every)
            y[start:end], _, state = delta_rule_reference(state, *given)
            states[rows.block(slot, column)] = state.to(states.dtype)
            state = state.to(states.dtype).double()
    return y


@plain
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"kda": True}, {"heads": 6, "key_heads": 2, "key": 3, "value": 7, "transposed": True}],
    ids=["gdn", "kda", "odd"],
)
def test_reference_follows_the_recurrence(changes: dict[str, Any], cut: bool) -> None:
    """In fp64: rows of any length, some from nothing, among padded ones; nothing else changes."""
    shape = replace(Gdn(x=torch.float64, states=torch.float64, key=5, value=3), **changes)
    rows = prefill_rows(LENGTHS, 0, 0, padded=True)
    cuts = cuts_of(rows, AFTER) if cut else None
    arguments, states = shape.prompts(rows, 0)
    want_states = states.clone()
    y = chunk_scan_reference(states=states, cuts=cuts, **arguments)
    want = walked(shape, rows, cuts, arguments, want_states)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, want_states, rtol=1e-11, atol=1e-11, equal_nan=True)
    assert not y[~rows.owned].any()


@plain
def test_states_at_cuts_go_on_as_they_were_stored() -> None:
    """16-bit states are rounded there, and only there and at the end."""
    shape = Gdn(x=torch.float32, states=torch.bfloat16)
    rows = prefill_rows(LENGTHS, 1, 0, padded=True)
    cuts = cuts_of(rows, AFTER)
    arguments, states = shape.prompts(rows, 1)
    want_states = states.clone()
    y = chunk_scan_reference(states=states, cuts=cuts, **arguments)
    want = walked(shape, rows, cuts, arguments, want_states)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    different = (states != want_states) & ~want_states.isnan()
    assert different.float().mean() < 1e-3  # the last place of a few
    assert same_bytes(states.isnan(), want_states.isnan())


OUTPUTS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
STATES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""Of states in fp32, by the type of inputs; those of 16 bits are rounded besides."""
ROUNDED = {torch.float32: 0.0, torch.float16: 3e-4, torch.bfloat16: 5e-3}
PRECISE = Gdn(x=torch.float32)
SHAPES = [
    (PRECISE, SMALL),
    (PRECISE, scan_tiling(1, 2, 16, 16, torch.float32, 1)),
    (PRECISE, ScanTiling(64, 32)),
    (Gdn(), SMALL),
    (Gdn(), None),
    (Gdn(key=32, value=40), ScanTiling(32, 32)),
    (Gdn(heads=4, key_heads=2), ScanTiling(32, 32)),
    (replace(PRECISE, heads=3, key=5, value=33), SMALL),
    (Gdn(x=torch.float16, states=torch.float16, transposed=True), SMALL),
    (Gdn(states=torch.bfloat16, pad=3), SMALL),
]
if CUDA:
    SHAPES += [
        (Gdn(**BIG), None),
        (Gdn(**BIG), ScanTiling(64, 32)),
        (Gdn(**BIG), ScanTiling(64, 64)),
        (Gdn(**BIG, transposed=True, states=torch.float16), None),
        (Gdn(**BIG | {"heads": 48}, x=torch.float16), None),
        (Gdn(**BIG, x=torch.float32), None),
        (Gdn(heads=4, key_heads=2, key=64, value=64), None),
        (Gdn(heads=4, key_heads=2, key=256, value=256), None),
    ]


def in_full(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in fp32, for a reference whose outputs are not rounded."""
    return arguments | {name: arguments[name].float() for name in ("q", "k", "v", "a", "b")}


def check(
    shape: Gdn, rows: Rows, cuts: Cuts | None, tiling: ScanTiling | None, seed: int = 0, **new: Any
) -> None:
    """The kernels on those rows against the reference. new: arguments instead of those drawn."""
    arguments, states = shape.prompts(rows, seed)
    arguments |= new
    mine, y = states.clone(), framed(arguments["v"])
    chunk_scan(states=mine, cuts=cuts, out=y, tiling=tiling, **arguments)
    want = chunk_scan_reference(states=states, cuts=cuts, **in_full(arguments))
    assert frame_is_whole(y)
    assert not y[~rows.owned].any()
    assert relative(y[rows.owned], want[rows.owned].double()) < OUTPUTS[shape.x]
    assert same_bytes(mine.isnan(), states.isnan())
    written = ~states.isnan()
    tolerance = STATES[shape.x] + ROUNDED[shape.states]
    assert relative(mine[written], states[written].double()) < tolerance


@kernels
@pytest.mark.parametrize(
    ("shape", "tiling", "cut"),
    [*((*case, True) for case in SHAPES), (PRECISE, SMALL, False), (Gdn(), None, False)],
    ids=str,
)
def test_kernels(shape: Gdn, tiling: ScanTiling | None, cut: bool) -> None:
    lengths = (130, 1, 64, 65, 300, 5, 17, 17) if CUDA else LENGTHS
    after = (64, 0, 1, 64, 129, 4, 0, 16) if CUDA else AFTER
    rows = prefill_rows(lengths, 0, 0, padded=True, table_pad=2)
    check(shape, rows, cuts_of(rows, after) if cut else None, tiling)


@kernels
@pytest.mark.parametrize("exponent", [-20, 40])
def test_values_and_states_beyond_fp16(exponent: int) -> None:
    """Whatever fits into fp32 fits into the operands, in units of its own."""
    shape, rows = Gdn(), prefill_rows((40, 21, 17, 1), 3, 0, padded=True)
    arguments, states = shape.prompts(rows, 3)
    scale = 2.0**exponent
    pair = []
    for factor in (1.0, scale):
        mine, new = states * factor, arguments | {"v": arguments["v"] * factor}
        pair.append((chunk_scan(states=mine, tiling=SMALL, **new), mine))
    (y, plain_states), (scaled_y, scaled) = pair
    # The same bit by bit, for a power of two.
    assert torch.equal(y * scale, scaled_y)
    assert same_bytes(plain_states * scale, scaled)


@kernels
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_are_all_the_same_and_tokens_that_erase_the_state(x: torch.dtype) -> None:
    """Powers of A, by which one might invert I + A, reach 1e18 for such keys."""
    shape, rows = Gdn(x=x), prefill_rows((70, 64), 2, 0, padded=False)
    given, _ = shape.prompts(rows, 2)
    k, b, a = given["k"].clone(), given["b"].clone(), given["a"].clone()
    k[:], b[:] = k[rows.owned][0], 6.0
    a[:] = -9.0
    a[10::13] = 300.0
    check(shape, rows, None, ScanTiling(64, 32), 2, k=k, a=a, b=b)


@kernels
@pytest.mark.parametrize(
    ("x", "states_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_rows_with_cuts_as_in_two_calls(x: torch.dtype, states_dtype: torch.dtype) -> None:
    rows = prefill_rows(LENGTHS[:5], 0, 0, padded=True)
    cuts = cuts_of(rows, AFTER)
    arguments, states = Gdn(x=x, states=states_dtype).prompts(rows, 0)
    mine, split = states.clone(), states.clone()
    y = chunk_scan(states=mine, cuts=cuts, tiling=SMALL, **arguments)
    where = arguments.pop("rows")
    parts = [
        chunk_scan(states=split, rows=part, tiling=SMALL, **arguments)
        for part in split_rows(where, cuts)
    ]
    assert torch.equal(y, parts[0] + parts[1])
    assert same_bytes(mine, split)


@kernels
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_many_rows(cut: bool) -> None:
    """More than one look of `part_of_tile` sees; without cuts where none is wanted the same."""
    count = 70 if cut else 130
    rows = prefill_rows((3,) * count, 0, 0, padded=False)
    shape = replace(PRECISE, heads=1)
    check(shape, rows, cuts_of(rows, tuple(i % 3 for i in range(count))) if cut else None, SMALL)


@kernels
def test_cuts_of_nobody_change_nothing() -> None:
    rows = prefill_rows((33, 5, 1, 40), 0, 0, padded=True)
    arguments, states = Gdn().prompts(rows, 0)
    mine = states.clone()
    none = cuts_of(rows, (0,) * 4)
    y = chunk_scan(states=mine, cuts=none, tiling=SMALL, **arguments)
    assert torch.equal(y, chunk_scan(states=states, tiling=SMALL, **arguments))
    assert same_bytes(mine, states)


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("operation", [chunk_scan, chunk_scan_reference])
def test_no_rows(operation: Any, tokens: int) -> None:
    none, shape = ints(), Gdn()
    rows = StateRows(none.view(0, 1), none, ints(0), none, none, none, none)
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = shape.inputs(generator, tokens) | shape.vectors(generator)
    y = operation(**given, states=shape.pool(1), rows=rows, max_scheduled=4)
    assert y.shape == given["v"].shape
    assert not y.any()


@kernels
@pytest.mark.parametrize("operation", [chunk_scan, chunk_scan_reference])
def test_wrong_shapes_are_refused(operation: Any) -> None:
    rows = prefill_rows((9,), 0, 0, False)
    arguments, states = Gdn().prompts(rows, 0)
    before = states.clone()
    with pytest.raises(ValueError, match="states is"):
        operation(states=states[..., :8], **arguments)
    for name, wrong in (("q", arguments["q"][1:]), ("b", arguments["b"][:, :1])):
        with pytest.raises(ValueError, match=f"{name} is"):
            operation(states=states, **arguments | {name: wrong})
    assert same_bytes(states, before)


@kernels
def test_what_a_kernel_cannot_do_is_refused() -> None:
    rows = prefill_rows((9,), 0, 0, False)
    arguments, states = Gdn(kda=True).prompts(rows, 0)
    with pytest.raises(ValueError, match="no decay per channel"):
        chunk_scan(states=states, **arguments)
    arguments, states = Gdn().prompts(rows, 0)
    with pytest.raises(ValueError, match=r"out is torch\.float64"):
        chunk_scan(states=states, out=arguments["v"].double(), **arguments)


@plain
def test_the_tile_is_wide_where_narrow_ones_outnumber_multiprocessors() -> None:
    tile = partial(scan_tiling, product=torch.float16, multiprocessors=132)
    assert tile(1, 32, 128, 128) == ScanTiling(64, 32)
    assert tile(1, 48, 128, 128).tile == tile(8, 32, 128, 128).tile == 64
    assert tile(99, 32, 16, 16).tile == tile(99, 32, 256, 256).tile == 32


@pytest.mark.gpu
def test_nothing_waits_and_the_graph_replays() -> None:
    rows = prefill_rows((200, 1, 90), 0, 0, True)
    cuts = cuts_of(rows, (64, 0, 33))
    arguments, states = Gdn(**BIG).prompts(rows, 0)
    check_replay(lambda: [chunk_scan(states=states, cuts=cuts, **arguments)], [states])


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    far, shape = (1 << 30) + 4096, Gdn(states=torch.float16)
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, 2, 16, 16), (far, 256, 16, 1))
    generator = torch.Generator("cuda").manual_seed(0)
    states.copy_(noise(generator, 4, 2, 16, 16, dtype=torch.float16))
    near = states.clone()
    given = shape.inputs(generator, 50) | shape.vectors(generator)
    rows = StateRows(
        *(ints(*values) for values in ([[3, 1, 2, 0]], [0], [0, 50], [0], [0], [0], [0]))
    )
    chunk_scan(**given, states=states, rows=rows, max_scheduled=50)
    chunk_scan_reference(**in_full(given), states=near, rows=rows, max_scheduled=50)
    torch.testing.assert_close(states, near, rtol=2e-3, atol=2e-3)
