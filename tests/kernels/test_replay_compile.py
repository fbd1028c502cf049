"""The kernels of the replay layout compile for a Hopper GPU into what makes them fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.hopper import compiled, spilled
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.replay import flush, launch, update
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE

STRIDES = launch.InputStrides(
    x_token=10240, x_head=64, x_dim=1, dt_token=18560, dt_head=1, B_token=10240, B_group=128,
    B_state=1, C_token=10240, C_group=128, C_state=1,
)  # fmt: skip
TYPES = dict.fromkeys(("seed", "certain", "listed"), "*i32")
TYPES |= {"x_cache": "*bf16", "B_cache": "*bf16", "dt_cache": "*fp32"}
ALIGNED = ("x", "B", "C", "x_cache", "B_cache", "states", "state_stride", "out")
NEAREST: dict[str, Any] = {"seed": None, "place": None}


def shape_of(
    tiling: launch.ReplayTiling, tokens: int = 4, drafts: int = 3, dim: int = 64, state: int = 128
) -> launch.ReplayShape:
    """Of 128 heads in 8 groups, constants as values."""
    shape = launch.replay_shape(128, 8, dim, state, tokens, drafts, tiling)
    return shape._make(constant.value for constant in shape)


@pytest.mark.parametrize("type_", ["*fp32", "*fp16"])
@pytest.mark.parametrize(("tokens", "drafts"), [(4, 3), (1, 0), (3, 5)])
def test_replay_moves_16_bytes_at_once(
    type_: str, tokens: int, drafts: int, tmp_path: Path
) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    itemsize = 4 if type_ == "*fp32" else 2
    tiling = launch.replay_tiling(64, 128, itemsize)
    shape = shape_of(tiling, tokens, drafts)
    options = {"num_warps": 1}
    # States of 16 bits come here with inputs that are not bfloat16.
    types: dict[str, Any] = TYPES | {"strides": STRIDES, "shape": shape}
    types |= dict.fromkeys(("x", "B", "C", "dt", "x_cache", "B_cache", "out"), "*fp16")
    types |= {"states": type_}
    code = compiled(kernel, NEAREST | {"dot_type": None}, ALIGNED, options, **types)
    parts = tiling.tile * 128 * itemsize // (16 * 32)
    text = code.asm["ptx"]
    # States are copied to shared memory ahead of their use.
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", text)
    assert len(copies) >= parts
    assert set(copies) == {"0x10"}
    # The live state, and again with a snapshot where there are registers for that; token by token,
    # which takes one chunk after another, it and snapshots in three places.
    passes = 3 if type_ == "*fp32" and shape.HOLD else 1
    chunk = parts * tiling.chunk // tiling.tile
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == passes * parts + 4 * chunk
    if shape.HOLD:
        assert spilled(code, tmp_path) == 0


@pytest.mark.parametrize("type_", ["*fp16", "*bf16"])
def test_replay_by_matrix_products(type_: str, tmp_path: Path) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    tiling = launch.replay_tiling(64, 128, 2, products=True)
    types: dict[str, Any] = TYPES | {"strides": STRIDES, "shape": shape_of(tiling)}
    types |= {"states": type_}
    constants = NEAREST | {"dot_type": tl.bfloat16}
    code = compiled(kernel, constants, ALIGNED, {"num_warps": 1}, **types)
    parts = tiling.tile * 128 * 2 // (16 * 32)
    text = code.asm["ptx"]
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", text)
    assert len(copies) >= parts
    assert set(copies) == {"0x10"}
    # The live state; token by token, 8 rows after another, it and snapshots in 4 places.
    assert len(re.findall(r"st\.global\.cs\.v4\.b32", text)) == parts + 4 * 4
    # States go from shared memory to the products and back to global memory, lane by lane. What
    # passes between lanes are x, outputs, and vectors of 16 positions.
    assert text.count("ld.shared.v4.b32") + text.count("ld.shared.v4.u32") >= parts
    assert len(re.findall(r"st\.shared|stmatrix", text)) < 2 * parts
    assert spilled(code, tmp_path) <= 64


# Not in the above: tiles with rows behind the head's, parts with columns behind the state's, one
# head per program, arguments that are not aligned, stochastic rounding.
@pytest.mark.parametrize(
    ("dim", "state", "drafts", "run", "rounds"), [(80, 128, 3, 2, True), (60, 100, 7, 1, False)]
)
def test_replay_kernels_compile(dim: int, state: int, drafts: int, run: int, rounds: bool) -> None:
    update_kernel, flush_kernel = update._replay_update_kernel, flush._flush_kernel
    if not isinstance(update_kernel, JITFunction):
        pytest.skip("the interpreter is on")
    types: dict[str, Any] = TYPES | {"states": "*fp16", "strides": STRIDES}
    types |= {"place": LAST_PLACE[torch.float16]} if rounds else {}
    constants = {} if rounds else NEAREST
    for dot_type in (None, tl.bfloat16):
        tiling = launch.replay_tiling(dim, state, 2, dot_type is not None)._replace(run=run)
        types["shape"] = shape_of(tiling, drafts + 1, drafts, dim, state)
        given = constants | {"dot_type": dot_type}
        assert compiled(update_kernel, given, (), {"num_warps": 1}, **types).asm["cubin"]
    types["shape"] = shape_of(flush.TILING, 0, drafts, dim, state)
    moved: dict[str, Any] = {
        "state_type": tl.float16, "tap_type": tl.int16, "TAPS": 3, "WINDOW_TILE": 1024,
        "VECTOR": True,
    }  # fmt: skip
    assert compiled(flush_kernel, moved | constants, **types).asm["cubin"]
