"""The kernels of the replay layout compile for a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.hopper import compiled
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.replay import flush
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE

TYPES = dict.fromkeys(("seed", "certain", "listed", "offset", "pending", "cursor"), "*i32")
TYPES |= {"x_cache": "*bf16", "B_cache": "*bf16", "dt_cache": "*fp32"}


@pytest.mark.parametrize(("dim", "state", "rounds"), [(80, 128, True), (60, 100, False)])
def test_flush_compiles(dim: int, state: int, rounds: bool) -> None:
    kernel = flush._flush_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    shape = flush.flush_shape(128, 8, dim, state, 20)
    types: dict[str, Any] = TYPES | {"shape": shape._make(constant.value for constant in shape)}
    types |= {"place": LAST_PLACE[torch.float16]} if rounds else {}
    moved: dict[str, Any] = {
        "state_type": tl.float16, "tap_type": tl.int16, "TAPS": 3, "WINDOW_TILE": 1024,
        "VECTOR": True,
    }  # fmt: skip
    constants: dict[str, Any] = {} if rounds else {"seed": None, "place": None}
    assert compiled(kernel, moved | constants, **types).asm["cubin"]
