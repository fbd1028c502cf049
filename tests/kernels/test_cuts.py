"""Rows that leave a checkpoint on the way: the same as two calls that split them there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.interpreter import kernels, plain
from helpers.mamba_cases import Conv, Ssm
from helpers.replay_cases import BIG
from helpers.replayed import check_replay
from helpers.state_rows import Rows, prefill_rows
from helpers.tensors import ints, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows, split_rows
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.conv.varlen import ConvTiling, conv1d_varlen
from hybrid_runtime.kernels.mamba2.chunk_scan import ScanTiling, chunk_scan
from hybrid_runtime.kernels.mamba2.naive import chunk_scan_reference

CHUNK = 32
SCAN = ScanTiling(CHUNK, 16, 16, 2, 16)
CONV = ConvTiling(4, 64, 1)
SMALL = Ssm(heads=4, dim=16, state=32)
# Around the window (W - 1 = 3), a chunk, two of them, at the end; 0: no cut.
AFTER = (1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 69, 0, 5)
LENGTHS = (2, 5, 5, 5, 70, 70, 70, 70, 70, 70, 6)


def cut_rows(
    lengths: tuple[int, ...] = LENGTHS, after: tuple[int, ...] = AFTER, seed: int = 0
) -> tuple[Rows, Cuts]:
    """Rows of these lengths, padded ones among them, and their cuts. Some checkpoints go to the
    column that is read."""
    rows = prefill_rows(lengths, seed, 0, padded=True)
    runs = [scheduled > 0 and min(slot, write) >= 0 for scheduled, slot, *_, write in rows.spec]
    cuts = [after[row[1]] if here else 0 for row, here in zip(rows.spec, runs, strict=True)]
    columns = [row[1] % 3 // 2 * 2 if cut else -1 for row, cut in zip(rows.spec, cuts, strict=True)]
    return rows, Cuts(ints(*cuts), ints(*columns))


def conv_inputs(
    rows: Rows, dtype: torch.dtype, layout: str = "SD", channels: int = 40
) -> tuple[dict[str, Any], Tensor]:
    """Arguments and conv_states."""
    types = {"x": dtype, "window": dtype, "weight": dtype}
    shape = Conv(layout=layout, channels=channels, wide=0, bias=False, **types)
    return shape.inputs(rows, 0)[:2]


def scan_inputs(
    rows: Rows, dtype: torch.dtype, states_dtype: torch.dtype, shape: Ssm = SMALL
) -> tuple[dict[str, Any], Tensor]:
    """Arguments and states."""
    arguments, states, _ = replace(shape, x=dtype, states=states_dtype).arguments(rows, 0)
    return arguments | {"chunk_size": 128}, states


def in_two_calls(kernel: Any, cuts: Cuts, rows: StateRows, **arguments: Any) -> Tensor:
    """Outputs of the rows as two calls run them."""
    first, second = (kernel(rows=part, **arguments) for part in split_rows(rows, cuts))
    total: Tensor = first + second  # each is 0 where the other is not
    return total


@kernels
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_at_a_cut(layout: str, dtype: torch.dtype) -> None:
    rows, cuts = cut_rows()
    arguments, conv_states = conv_inputs(rows, dtype, layout)
    mine, reference, split = conv_states.clone(), conv_states.clone(), conv_states.clone()
    y = conv1d_varlen(conv_states=mine, cuts=cuts, tiling=CONV, **arguments)
    y_reference = conv1d_reference(conv_states=reference, cuts=cuts, **arguments)
    tolerance = 5e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, y_reference, rtol=tolerance, atol=tolerance)
    y_split = in_two_calls(conv1d_varlen, cuts, conv_states=split, tiling=CONV, **arguments)
    assert torch.equal(y, y_split)
    assert not y[~rows.owned].any()
    assert same_bytes(mine, reference)
    assert same_bytes(mine, split)


@kernels
@pytest.mark.parametrize(
    ("dtype", "states_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_states_at_a_cut(dtype: torch.dtype, states_dtype: torch.dtype) -> None:
    rows, cuts = cut_rows()
    arguments, states = scan_inputs(rows, dtype, states_dtype)
    mine, reference, split = states.clone(), states.clone(), states.clone()
    y = chunk_scan(states=mine, cuts=cuts, tiling=SCAN, **arguments)
    y_split = in_two_calls(chunk_scan, cuts, states=split, tiling=SCAN, **arguments)
    assert torch.equal(y, y_split)
    assert same_bytes(mine, split)
    y_reference = chunk_scan_reference(states=reference, cuts=cuts, **arguments)
    assert not y[~rows.owned].any()
    error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2)
    written = ~reference.isnan()
    assert torch.equal(written, ~mine.isnan())
    mine, reference = mine[written].float(), reference[written].float()
    assert (mine - reference).abs().max() <= 8e-3 * reference.abs().max()


@plain
def test_references_as_in_two_calls() -> None:
    """In fp64 every rounding of the references but that of the states themselves is gone."""
    rows, cuts = cut_rows()
    arguments, conv_states = conv_inputs(rows, torch.float64)
    split = conv_states.clone()
    y = conv1d_reference(conv_states=conv_states, cuts=cuts, **arguments)
    y_split = in_two_calls(conv1d_reference, cuts, conv_states=split, **arguments)
    torch.testing.assert_close(y, y_split)
    assert same_bytes(conv_states, split)
    arguments, states = scan_inputs(rows, torch.float64, torch.float64)
    whole = states.clone()
    y = chunk_scan_reference(states=states, cuts=cuts, **arguments)
    torch.testing.assert_close(y, chunk_scan_reference(states=whole, **arguments))
    for i, (_, slot, *_, write) in enumerate(rows.spec):
        if cuts.after[i] > 0:
            block = rows.block(slot, write)
            torch.testing.assert_close(states[block], whole[block])
            checkpoint = states[rows.block(slot, int(cuts.column[i]))]
            assert not torch.allclose(checkpoint, states[block])


@kernels
def test_cuts_of_nobody_change_nothing() -> None:
    """Without a cut, the launches for cuts leave the same bytes as those without."""
    rows, cuts = cut_rows((33, 5, 1, 70), (0, 0, 0, 0))
    arguments, states = scan_inputs(rows, torch.bfloat16, torch.float32, Ssm(groups=1, dim=16))
    conv_arguments, conv_states = conv_inputs(rows, torch.bfloat16)
    plain_states, plain_conv_states = states.clone(), conv_states.clone()
    y = chunk_scan(states=states, cuts=cuts, tiling=SCAN, **arguments)
    z = conv1d_varlen(conv_states=conv_states, cuts=cuts, tiling=CONV, **conv_arguments)
    assert torch.equal(y, chunk_scan(states=plain_states, tiling=SCAN, **arguments))
    assert torch.equal(
        z, conv1d_varlen(conv_states=plain_conv_states, tiling=CONV, **conv_arguments)
    )
    assert same_bytes(states, plain_states)
    assert same_bytes(conv_states, plain_conv_states)


@kernels
def test_cuts_of_many_rows() -> None:
    """More parts than one look of `part_of_tile` sees."""
    lengths = (3,) * 70
    rows, cuts = cut_rows(lengths, tuple(i % 3 for i in range(70)))
    arguments, states = scan_inputs(
        rows, torch.float32, torch.float32, Ssm(heads=1, groups=1, dim=16)
    )
    split = states.clone()
    y = chunk_scan(states=states, cuts=cuts, tiling=SCAN, **arguments)
    assert torch.equal(y, in_two_calls(chunk_scan, cuts, states=split, tiling=SCAN, **arguments))
    assert same_bytes(states, split)


@pytest.mark.gpu
@pytest.mark.parametrize("states_dtype", [torch.float32, torch.float16], ids=str)
def test_large_states_as_in_two_calls(states_dtype: torch.dtype) -> None:
    """Shapes of Nemotron-H-8B, with launch shapes as chosen, in a CUDA graph too."""
    rows, cuts = cut_rows((2048, 1500, 300, 1057, 129), (1056, 556, 0, 1056, 128))
    arguments, states = scan_inputs(rows, torch.bfloat16, states_dtype, Ssm(**BIG))
    mine, split = states.clone(), states.clone()
    y = chunk_scan(states=mine, cuts=cuts, **arguments)
    assert torch.equal(y, in_two_calls(chunk_scan, cuts, states=split, **arguments))
    assert same_bytes(mine, split)
    conv_arguments, conv_states = conv_inputs(rows, torch.bfloat16, "SD", 10240)

    def run() -> tuple[Tensor, Tensor]:
        z = conv1d_varlen(conv_states=conv_states, cuts=cuts, **conv_arguments)
        return z, chunk_scan(states=states, cuts=cuts, **arguments)

    check_replay(run, [conv_states, states])
