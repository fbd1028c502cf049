"""The kernels of the replay layout compile for a Hopper GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.hopper import compiled, spilled, spilled_in_copying_loop
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.mamba2 import flush
from hybrid_runtime.kernels.mamba2 import replay_launch as launch
from hybrid_runtime.kernels.mamba2 import replay_update as update
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE

TYPES = dict.fromkeys(
    ("seed", "certain", "listed", "offset", "pending", "cursor", "writes"), "*i32"
)
TYPES |= {"x_ring": "*bf16", "B_ring": "*bf16", "dt_ring": "*fp32"}


@pytest.mark.parametrize(("dim", "state", "rounds"), [(80, 128, True), (60, 100, False)])
def test_flush_compiles(dim: int, state: int, rounds: bool) -> None:
    kernel = flush._flush_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    shape = flush.flush_shape(128, 8, dim, state, 20)
    types: dict[str, Any] = TYPES | {"shape": shape._make(constant.value for constant in shape)}
    types |= {"place": LAST_PLACE[torch.float16]} if rounds else {}
    moved: dict[str, Any] = {
        "state_type": tl.float16, "tap_type": tl.int16, "TAPS": 3, "CONV_TILE": 1024,
        "VECTOR": True,
    }  # fmt: skip
    constants: dict[str, Any] = {} if rounds else {"seed": None, "place": None}
    assert compiled(kernel, moved | constants, **types).asm["cubin"]


STRIDES = launch.InputStrides(
    x_token=10240, x_head=64, x_dim=1, dt_token=18560, dt_head=1, B_token=10240, B_group=128,
    B_state=1, C_token=10240, C_group=128, C_state=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("states", "values", "dot_type", "ring", "tokens", "rows", "spills", "local"),
    [
        ("*fp32", "*bf16", tl.bfloat16, 16, 1, 16, 0, 400),
        ("*fp32", "*bf16", tl.bfloat16, 19, 4, 16, 0, 400),
        ("*fp16", "*bf16", tl.bfloat16, 19, 4, 32, 0, 400),
        ("*fp16", "*fp16", tl.float32, 19, 4, 32, 0, 400),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("*fp16", "*bf16", tl.bfloat16, 16, 1, 32, 0, 400),
                ("*fp32", "*bf16", tl.bfloat16, 31, 16, 16, 0, 400),
                ("*fp16", "*bf16", tl.bfloat16, 31, 16, 16, 0, 400),
                ("*fp16", "*bf16", tl.bfloat16, 31, 16, 32, 1, 400),
                ("*fp32", "*bf16", tl.bfloat16, 47, 16, 16, 0, 400),
                ("*fp16", "*bf16", tl.bfloat16, 47, 16, 32, 1, 560),
                ("*fp16", "*bf16", tl.bfloat16, 39, 8, 32, 0, 560),
                ("*bf16", "*bf16", tl.bfloat16, 7, 4, 32, 0, 400),
            )
        ),
    ],
)
def test_update_compiles(
    states: str,
    values: str,
    dot_type: tl.dtype,
    ring: int,
    tokens: int,
    rows: int,
    spills: int,
    local: int,
    tmp_path: Path,
) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    itemsize = 4 if states == "*fp32" else 2
    tile = launch.Tile(rows, 128 // rows)
    shape = launch.update_shape(128, 8, 64, 128, ring, tokens, itemsize, tile)
    types: dict[str, Any] = TYPES | {"strides": STRIDES, "states": states}
    types |= {"shape": shape._make(constant.value for constant in shape)}
    types |= dict.fromkeys(("x", "B", "C", "dt", "x_ring", "B_ring", "out"), values)
    aligned = ("x", "B", "C", "x_ring", "B_ring", "states", "state_stride", "out")
    constants: dict[str, Any] = {"seed": None, "place": None, "dot_type": dot_type}
    code = compiled(kernel, constants, aligned, {"num_warps": 1}, **types)
    if dot_type == tl.bfloat16:
        text = code.asm["ptx"]
        # States are copied to shared memory ahead of their use, 16 bytes at once.
        copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", text)
        assert len(copies) >= rows * 128 * itemsize // (16 * 32)
        assert set(copies) == {"0x10"}
        assert "mma.sync" in text
        # Few registers go to local memory, bytes a thread: hardly one that the loop needs.
        assert spilled(code, tmp_path) <= local
        assert spilled_in_copying_loop(code, tmp_path) <= spills


@pytest.mark.parametrize(("dim", "state", "rounds"), [(80, 128, True), (60, 100, False)])
def test_update_compiles_for_one_head(dim: int, state: int, rounds: bool) -> None:
    """Sizes that tiles do not divide, and stochastic rounding."""
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    shape = launch.update_shape(128, 8, dim, state, 19, 4, 2, launch.Tile(16, 1))
    types: dict[str, Any] = TYPES | {"strides": STRIDES, "states": "*fp16"}
    types |= {"shape": shape._make(constant.value for constant in shape)}
    types |= {"place": LAST_PLACE[torch.float16]} if rounds else {}
    constants: dict[str, Any] = {"dot_type": tl.bfloat16}
    constants |= {} if rounds else {"seed": None, "place": None}
    assert compiled(kernel, constants, (), {"num_warps": 1}, **types).asm["cubin"]
