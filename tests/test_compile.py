"""Every kernel compiles for a Hopper GPU, on machines without one: the interpreter accepts more
than the compiler does (names that change type between branches, for one)."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels import advance, block_fill, state_move

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "entries", "step", "accepted", "slot_computed", "slot_held", "slot_offset", "previous",
    "placed", "read_column", "read_offset", "write_column", "moves", "blocks",
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
KERNELS = [
    (advance._advance_kernel, ADVANCE),
    (advance._advance_kernel, ADVANCE | {"IN_PLACE": True}),
    (state_move._move_kernel, MOVE),
    (state_move._move_kernel, MOVE | {"POST": False}),
    (state_move._move_kernel, MOVE | {"EVERY_ROW": True, "ROWS": 1024}),
    (state_move._move_kernel, MOVE | {"word_type": tl.int8, "tap_type": tl.int32, "VECTOR": False}),
    (block_fill._fill_kernel, FILL),
    (block_fill._fill_kernel, FILL | {"window_type": tl.float32, "ssm_type": tl.float32}),
]


@pytest.mark.parametrize(("kernel", "constants"), KERNELS)
def test_compiles_for_hopper(kernel: JITFunction, constants: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "addresses":
            signature[name] = "*i64"
        else:
            signature[name] = "*i32" if name in POINTERS else "fp32" if name == "value" else "i32"
    compiled = compile_kernel(ASTSource(kernel, signature, constants), target=HOPPER)
    assert compiled.asm["cubin"]
