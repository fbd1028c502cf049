"""Gated DeltaNet's kernels compile for a Hopper GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.hopper import compiled, spilled
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.gdn import flush
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
