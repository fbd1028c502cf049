"""Gated DeltaNet's kernels compile for a Hopper GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.hopper import aligned, compiled, spilled, spilled_in_copying_loop
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.common.strides import ChannelStrides, HeadStrides, StateStrides
from hybrid_runtime.kernels.gdn import chunk_scan as scan
from hybrid_runtime.kernels.gdn import chunk_scan_kernels, flush
from hybrid_runtime.kernels.gdn import replay_launch as launch
from hybrid_runtime.kernels.gdn import replay_update as update
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE

TYPES: dict[str, Any] = dict.fromkeys(
    ("seed", "certain", "listed", "offset", "pending", "cursor", "writes"), "*i32"
)
TYPES |= {
    "u_ring": "*fp32",
    "k_ring": "*bf16",
    "g_ring": "*fp32",
    "rk_ring": "*fp32",
    "lines": "*fp32",
}
STRIDES = launch.InputStrides(8192, 128, 1, 8192, 128, 1, 8192, 128, 1, 32, 1, 32, 1)
FLOATS = ("q", "k", "v", "a", "b", "k_ring", "out")


def shaped(
    states: str, ring: int, tokens: int, strides: tuple[int, int], key: int = 128
) -> launch.UpdateShape:
    itemsize = 4 if states == "*fp32" else 2
    shape = launch.update_shape(32, 16, key, 128, strides, ring, tokens, itemsize)
    return shape._make(constant.value for constant in shape)


@pytest.mark.parametrize(
    ("states", "ring", "tokens", "part", "local"),
    [
        ("*fp32", 19, 4, "prepares", 0),
        ("*fp32", 19, 4, "prepared", 0),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("*fp32", 19, 4, "whole", 64),
                ("*fp32", 23, 8, "whole", 128),
                ("*fp32", 23, 8, "prepared", 64),
                ("*fp32", 16, 1, "prepared", 0),
                ("*bf16", 19, 4, "prepared", 128),
                ("*fp32", 47, 16, "prepared", 1024),
            )
        ),
    ],
)
def test_update_compiles(
    states: str, ring: int, tokens: int, part: str, local: int, tmp_path: Path
) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    types = TYPES | {"strides": STRIDES, "states": states} | dict.fromkeys(FLOATS, "*bf16")
    types |= {"shape": shaped(states, ring, tokens, (128, 1))}
    constants: dict[str, Any] = {
        "seed": None, "place": None, "dot_type": tl.bfloat16, "PREPARES": part == "prepares",
    }  # fmt: skip
    constants |= {"lines": None} if part == "whole" else {}
    aligned = ("q", "k", "v", "u_ring", "k_ring", "states", "state_stride", "out")
    code = compiled(kernel, constants, aligned, {"num_warps": 1}, **types)
    text = code.asm["ptx"]
    assert "mma.sync" in text
    # Keys, queries and states come 16 bytes at once.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) >= 16
    # Few registers go to local memory, bytes a thread.
    assert spilled(code, tmp_path) <= local


@pytest.mark.slow
@pytest.mark.parametrize(("key", "order"), [(128, (1, 128)), (100, (100, 1))])
@pytest.mark.parametrize("dot_type", [tl.float32, tl.bfloat16], ids=str)
def test_update_compiles_for_other_orders_and_sizes(
    key: int, order: tuple[int, int], dot_type: tl.dtype
) -> None:
    """Also with states that are rounded stochastically."""
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    floats = "*fp32" if dot_type == tl.float32 else "*bf16"
    types = TYPES | {"strides": STRIDES, "states": "*fp16"} | dict.fromkeys(FLOATS, floats)
    types |= {"shape": shaped("*fp16", 19, 4, order, key)}
    types |= {"place": LAST_PLACE[torch.float16]}
    constants: dict[str, Any] = {"dot_type": dot_type, "lines": None, "PREPARES": False}
    assert compiled(kernel, constants, (), {"num_warps": 1}, **types).asm["cubin"]


@pytest.mark.parametrize(("key", "order"), [(128, (128, 1)), (100, (1, 60))])
@pytest.mark.parametrize("rounds", [False, True])
def test_flush_compiles(key: int, order: tuple[int, int], rounds: bool) -> None:
    kernel = flush._flush_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    shape = flush.flush_shape(32, 16, key, 60 if key == 100 else 128, order, 19)
    types: dict[str, Any] = TYPES | {"shape": shape._make(one.value for one in shape)}
    types |= {"place": LAST_PLACE[torch.float16]} if rounds else {}
    constants: dict[str, Any] = {
        "state_type": tl.float16, "tap_type": tl.int16, "TAPS": 3, "CONV_TILE": 1024,
        "VECTOR": True,
    }  # fmt: skip
    constants |= {} if rounds else {"seed": None, "place": None}
    assert compiled(kernel, constants, **types).asm["cubin"]


# Of one prompt and of many, where multiprocessors are 132, of a small model, and of a larger one.
SCANS: list[Any] = [(128, 1, torch.float16), (128, 8, torch.float16), (16, 1, torch.float16)]
SCANS += [pytest.param(256, 1, torch.float16, marks=pytest.mark.slow), (128, 1, torch.float32)]


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize(("dim", "rows", "product"), SCANS, ids=str)
def test_scan_fits_into_registers(
    dim: int, rows: int, product: torch.dtype, cut: bool, tmp_path: Path
) -> None:
    half = product == torch.float16
    tiling = scan.scan_tiling(rows, 32, dim, dim, product, 132)
    given, operand = ("*bf16", "*fp16") if half else ("*fp32", "*fp32")
    shape = scan.scan_shape(32, 16, dim, dim, tiling.chunk)
    types: dict[str, Any] = dict.fromkeys(("q", "k", "v", "a", "b", "out"), given)
    types |= dict.fromkeys(("keys", "queries", "to_change", "to_output"), operand)
    types |= {"decays": "*fp32", "largest": "*fp32", "rows": "i32"}
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), HeadStrides("i32", "i32", 1))
    types |= dict.fromkeys(("a_stride", "b_stride"), ChannelStrides("i32", 1))
    types |= {"state_stride": StateStrides("i32", "i32", "i32", 1)}
    types |= {"shape": shape._make(one.value for one in shape)}
    names: dict[str, Any] = {
        "dot_type": tl.float16 if half else tl.float32, "TRIPS": 0, "TILE": tiling.tile,
    }  # fmt: skip
    names |= {} if cut else {"cut": None, "cut_column": None}
    names |= {} if half else {"largest": None}
    for kernel, warps, stages in (
        (chunk_scan_kernels.prepare_kernel, tiling.prepare_warps, 3),
        (chunk_scan_kernels.carry_kernel, tiling.carry_warps, tiling.carry_stages),
    ):
        if not isinstance(kernel, JITFunction):
            pytest.skip("the interpreter is on")
        constants = {name: names[name] for name in kernel.arg_names if name in names}
        options = {"num_warps": warps, "num_stages": stages}
        code = compiled(kernel, constants, aligned(kernel, constants), options, **types)
        assert spilled(code, tmp_path) <= (128 if tiling.tile == 64 else 0)
        assert code.metadata.shared <= 227 * 1024
        assert ("wgmma.mma_async" in code.asm["ptx"]) == half
        if half and kernel is chunk_scan_kernels.carry_kernel:
            # All that a chunk multiplies is on its way ahead of its use, 16 bytes at once.
            assert "cp.async.cg.shared.global" in code.asm["ptx"]
            assert spilled_in_copying_loop(code, tmp_path) == 0
