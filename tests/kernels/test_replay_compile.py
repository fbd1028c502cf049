"""The kernels of the replay layout compile for a Hopper GPU into what makes them fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from helpers.hopper import compiled, spilled
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.replay import flush, launch, update

REPLAY: dict[str, Any] = {
    "x_token": 10240, "x_head": 64, "x_dim": 1, "dt_token": 18560, "dt_head": 1, "B_token": 10240,
    "B_group": 128, "B_state": 1, "C_token": 10240, "C_group": 128, "C_state": 1, "HEADS": 128,
    "HEADS_PER_GROUP": 16, "DIM": 64, "STATE": 128, "TOKENS": 4, "RECORDS": 3, "dot_type": None,
}  # fmt: skip
RECORDS = {"x_cache": "*bf16", "B_cache": "*bf16", "dt_cache": "*fp32"}
RECORDS |= {"rows": "*i32", "seed": "*i32", "position": "*i32"}
NEAREST: dict[str, Any] = {
    "seed": None, "position": None, "ROUND": False, "DIGITS": 0, "LEAST": 0,
}  # fmt: skip
BY_CHANCE: dict[str, Any] = {"ROUND": True, "DIGITS": 10 << 23, "LEAST": 103 << 23}


def replay_tile(shape: launch.Shape) -> dict[str, Any]:
    return {
        "TILE": shape.tile, "LOW": shape.low, "SPLIT": 128 // shape.low, "HIGH": shape.high,
        "RUN": shape.run, "STAGES": shape.stages,
    }  # fmt: skip


@pytest.mark.parametrize("type_", ["*fp32", "*fp16"])
@pytest.mark.parametrize("changed", [{}, {"TOKENS": 1, "RECORDS": 0}, {"TOKENS": 3, "RECORDS": 5}])
def test_replay_moves_16_bytes_at_once(type_: str, changed: dict[str, Any], tmp_path: Path) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    itemsize = 4 if type_ == "*fp32" else 2
    shape = launch.shape_of(64, 128, itemsize)
    constants = REPLAY | NEAREST | replay_tile(shape) | changed
    constants["KEEP"] = constants["TOKENS"] + constants["RECORDS"] < 8
    options = {"num_warps": 1}
    # States of 16 bits come here with inputs that are not bfloat16.
    types = RECORDS | dict.fromkeys(("x", "B", "C", "dt", "x_cache", "B_cache"), "*fp16")
    types |= {"states": type_, "out": "*fp16"}
    names = ("x", "B", "C", "x_cache", "B_cache", "states", "state_stride", "out")
    code = compiled(kernel, constants, names, options, **types)
    parts = shape.tile * 128 * itemsize // (16 * 32)
    text = code.asm["ptx"]
    # States are copied to shared memory ahead of their use.
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", text)
    assert len(copies) >= parts
    assert set(copies) == {"0x10"}
    # The live state, and again with a snapshot where there are registers for that; token by token,
    # which takes one chunk after another, it and snapshots in three places.
    passes = 3 if type_ == "*fp32" and constants["KEEP"] else 1
    chunk = parts * shape.high // shape.tile
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == passes * parts + 4 * chunk
    if constants["KEEP"]:
        assert spilled(code, tmp_path) == 0


@pytest.mark.parametrize("type_", ["*fp16", "*bf16"])
def test_replay_by_matrix_products(type_: str, tmp_path: Path) -> None:
    kernel = update._replay_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    shape = launch.shape_of(64, 128, 2, products=True)
    constants = REPLAY | NEAREST | replay_tile(shape) | {"KEEP": False, "dot_type": tl.bfloat16}
    names = ("x", "B", "C", "x_cache", "B_cache", "states", "state_stride", "out")
    types = RECORDS | {"states": type_}
    code = compiled(kernel, constants, names, {"num_warps": 1}, **types)
    parts = shape.tile * 128 * 2 // (16 * 32)
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
# head per program, arguments that are not aligned, rounding by chance.
@pytest.mark.parametrize(
    ("dim", "state", "drafts", "run", "rounding"),
    [(80, 128, 3, 2, BY_CHANCE), (60, 100, 7, 1, NEAREST)],
)
def test_replay_kernels_compile(
    dim: int, state: int, drafts: int, run: int, rounding: dict[str, Any]
) -> None:
    update_kernel, flush_kernel = update._replay_update_kernel, flush._flush_kernel
    if not isinstance(update_kernel, JITFunction):
        pytest.skip("the interpreter is on")
    model = {"DIM": dim, "STATE": state, "RECORDS": drafts}
    types = RECORDS | {"states": "*fp16"}
    for products in (False, True):
        shape = launch.shape_of(dim, state, 2, products)
        constants = REPLAY | rounding | model | replay_tile(shape) | {"TOKENS": drafts + 1}
        constants |= {"RUN": run, "KEEP": 2 * drafts + 1 < 8}
        constants |= {"dot_type": tl.bfloat16} if products else {}
        assert compiled(update_kernel, constants, (), {"num_warps": 1}, **types).asm["cubin"]
    moved: dict[str, Any] = {
        "state_type": tl.float16, "tap_type": tl.int16, "HEADS": 128, "HEADS_PER_GROUP": 16,
        "TAPS": 3, "TILE": 16, "SPLIT": 4, "LOW": 32, "WINDOW_TILE": 1024, "VECTOR": True,
    }  # fmt: skip
    constants = moved | rounding | model
    assert compiled(flush_kernel, constants, **RECORDS).asm["cubin"]
