"""Every kernel compiles for a Hopper GPU, on machines without one: the interpreter accepts more
than the compiler does (names that change type between branches, for one)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels import (
    advance,
    block_fill,
    causal_conv_update,
    kv_write,
    norm,
    paged_attention,
    ssm_update,
    state_move,
)

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "entries", "step", "accepted", "slot_computed", "slot_held", "slot_offset", "previous",
    "placed", "read_column", "read_offset", "write_column", "moves", "blocks",
    "block_table", "slot", "row_start", "draft",
}  # fmt: skip
TYPES = {
    "addresses": "*i64", "value": "fp32", "x": "*bf16", "out": "*bf16", "weight": "*bf16",
    "bias": "*bf16", "windows": "*bf16", "dt": "*bf16", "B": "*bf16", "C": "*bf16",
    "A_log": "*fp32", "D": "*fp32", "dt_bias": "*fp32", "dt_min": "fp32", "dt_max": "fp32",
    "states": "*fp32",
}  # fmt: skip
MOVE: dict[str, Any] = {
    "word_type": tl.int32, "tap_type": tl.int16, "FIELDS": 16, "POST": True, "EVERY_ROW": False,
    "BLOCK_SIZE": 4336, "ROWS": 16, "TAPS": 3, "SSM_WORDS": 8192, "SSM_TILES": 2,
    "SSM_TILE": 4096, "WINDOW_TILES": 1, "WINDOW_TILE": 1024, "VECTOR": True, "SSM_PARTS": 4,
}  # fmt: skip
FILL: dict[str, Any] = {
    "window_type": tl.bfloat16, "ssm_type": tl.float16, "WINDOW": 600, "SSM": 8192,
    "WINDOW_TILES": 1, "SSM_TILES": 2, "TILE": 4096,
}  # fmt: skip
ADVANCE: dict[str, Any] = {"BLOCK_SIZE": 4336, "IN_PLACE": False, "FIELDS": 16, "LINES": 128}
CONV: dict[str, Any] = {
    "CHANNELS": 10240, "TAPS": 4, "TOKENS": 4, "TILE": 256,
    "x_channel": 1, "window_channel": 1, "weight_tap": 1, "bias_channel": 1,
}  # fmt: skip
SSM: dict[str, Any] = {
    "HEADS": 128, "HEADS_PER_GROUP": 16, "DIM": 64, "STATE": 128, "TOKENS": 4, "TILE": 8,
    "WIDTH": 128, "x_dim": 1, "dt_head": 1, "B_state": 1, "C_state": 1,
}  # fmt: skip
KERNELS = [
    (advance._advance_kernel, ADVANCE),
    (advance._advance_kernel, ADVANCE | {"IN_PLACE": True}),
    (state_move._move_kernel, MOVE),
    (state_move._move_kernel, MOVE | {"POST": False}),
    (state_move._move_kernel, MOVE | {"EVERY_ROW": True, "ROWS": 1024}),
    (state_move._move_kernel, MOVE | {"word_type": tl.int8, "tap_type": tl.int32, "VECTOR": False}),
    (block_fill._fill_kernel, FILL),
    (block_fill._fill_kernel, FILL | {"window_type": tl.float32, "ssm_type": tl.float32}),
    (causal_conv_update._causal_conv_update_kernel, CONV),
    (causal_conv_update._causal_conv_update_kernel, CONV | {"bias": None, "TOKENS": 1, "TAPS": 1}),
    (causal_conv_update._causal_conv_update_kernel, CONV | {"CHANNELS": 10, "TOKENS": 8}),
    (ssm_update._ssm_update_kernel, SSM),
    (ssm_update._ssm_update_kernel, SSM | {"TOKENS": 8, "DIM": 60, "STATE": 100}),
]


@pytest.mark.parametrize(("kernel", "constants"), KERNELS)
def test_compiles_for_hopper(kernel: JITFunction, constants: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    assert compiled(kernel, constants).asm["cubin"]


@pytest.mark.parametrize(("type_", "tile"), [("*fp32", 8), ("*fp16", 16), ("*bf16", 16)])
def test_state_update_moves_16_bytes_at_once(type_: str, tile: int) -> None:
    kernel = ssm_update._ssm_update_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    constants = SSM | {"TILE": tile}
    text = compiled(kernel, constants, ("states", "state_stride"), states=type_).asm["ptx"]
    loads = tile * 128 * (4 if type_ == "*fp32" else 2) // (16 * 64)  # of 64 threads
    assert text.count("ld.global.v4.b32") == loads
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == 4 * loads


def compiled(
    kernel: JITFunction, constants: dict[str, Any], multiples: Sequence[str] = (), **types: str
) -> Any:
    """`multiples`: arguments that are multiples of 16, as launches find out by themselves."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = (TYPES | types).get(name, "*i32" if name in POINTERS else "i32")
        if name in multiples:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return compile_kernel(source, target=HOPPER, options={"num_warps": 2 if multiples else 4})


ATTENTION: dict[str, Any] = {
    "dot_type": tl.bfloat16, "HEADS": 32, "KV_HEADS": 8, "D": 128, "BLOCK_SIZE": 1056,
    "SPLIT": True, "TRIPS": 0, "TOKENS": 4, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_D": 128,
}  # fmt: skip
UNALIGNED = {"HEADS": 10, "KV_HEADS": 2, "D": 80, "BLOCK_SIZE": 48, "SPLIT": False, "BLOCK_N": 64}
EXACT = {"dot_type": tl.float32, "BLOCK_M": 32}
REDUCE: dict[str, Any] = {
    "HEADS": 32, "D": 128, "SPLITS": 8, "TOKENS": 4, "BLOCK_N": 32, "BLOCK_S": 8, "BLOCK_D": 128,
}  # fmt: skip
KV_WRITE: dict[str, Any] = {
    "KV_HEADS": 8, "D": 128, "BLOCK_SIZE": 1056, "ROWS": 128, "BLOCK_H": 8, "BLOCK_D": 128,
}  # fmt: skip
NORM: dict[str, Any] = {
    "RESIDUAL": True, "GATED": False, "SIZE": 4096, "GROUPS": 1, "BLOCK": 4096,
}  # fmt: skip
GATED_NORM = {"RESIDUAL": False, "GATED": True, "SIZE": 1280, "GROUPS": 8, "BLOCK": 2048}
ROWS = dict.fromkeys(("block_table", "slot", "row_start", "computed"), "*i32")
SCALARS = {"scale": "fp32", "eps": "fp32"} | dict.fromkeys(("tokens", "limit", "least"), "i32")
PARTIAL = {"partial": "*fp32", "partial_lse": "*fp32"}
VALUES = ("q", "k", "v", "k_cache", "v_cache", "out", "x", "other", "weight", "total")


@pytest.mark.parametrize(
    ("kernel", "constants", "type_", "access"),
    [
        (paged_attention._attention_kernel, ATTENTION, "*bf16", "cp.async.cg.shared.global"),
        (paged_attention._attention_kernel, ATTENTION | UNALIGNED, "*fp16", "cp.async.cg"),
        (paged_attention._attention_kernel, ATTENTION | EXACT, "*fp32", "cp.async.cg"),
        (paged_attention._reduce_kernel, REDUCE, "*bf16", "ld.global.v4"),
        (kv_write._kv_write_kernel, KV_WRITE, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, NORM, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, NORM | GATED_NORM, "*fp32", "ld.global.v4"),
    ],
)
def test_attention_and_norms_move_16_bytes_at_once(
    kernel: JITFunction, constants: dict[str, Any], type_: str, access: str
) -> None:
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    dense = {name: 1 for name in kernel.arg_names if name.endswith("stride_dim")}
    types = dict.fromkeys(VALUES, type_) | ROWS | SCALARS | PARTIAL
    strides = [name for name in kernel.arg_names if "stride" in name and name not in dense]
    code = compiled(kernel, constants | dense, (*VALUES, *PARTIAL, *strides), **types)
    assert code.asm["cubin"]
    assert access in code.asm["ptx"]
