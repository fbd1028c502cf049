"""Attention with heads of 256, as Qwen3-Next and Qwen3.5 have them, fits a Hopper GPU."""

from pathlib import Path

import pytest
import torch
from helpers.hopper import compiled, spilled
from helpers.interpreter import plain

from hybrid_runtime.kernels.attention.launch import (
    AttentionShape,
    CacheStrides,
    TokenStrides,
    attention_shape,
    attention_tiling,
)
from hybrid_runtime.kernels.attention.paged import _attention_kernel
from hybrid_runtime.kernels.common.types import FLOAT_TYPES

VALUES = ("q", "k_cache", "v_cache", "out")
OTHERS = (
    dict.fromkeys(("block_table", "slot", "cu_seqlens", "computed"), "*i32")
    | dict.fromkeys(("tokens", "limit", "least"), "i32")
    | {"scale": "fp32", "partial": "*fp32", "partial_lse": "*fp32"}
)
STRIDES = {
    "q_stride": TokenStrides("i32", "i32", 1),  # type: ignore[arg-type]
    "k_stride": CacheStrides("i32", "i32", "i32", 1),  # type: ignore[arg-type]
    "v_stride": CacheStrides("i32", "i32", "i32", 1),  # type: ignore[arg-type]
}


@plain
@pytest.mark.parametrize(
    ("group", "dtype", "scheduled"),
    [
        *((4, torch.bfloat16, tokens) for tokens in (1, 8, 2560)),
        *((group, torch.bfloat16, 4) for group in (6, 8, 16)),
        *((group, torch.float32, 2560) for group in (4, 16)),
    ],
    ids=str,
)
def test_launch_shapes_fit(group: int, dtype: torch.dtype, scheduled: int, tmp_path: Path) -> None:
    tiling = attention_tiling(group, 256, scheduled, dtype)
    shape = AttentionShape(*(one.value for one in attention_shape(2 * group, 2, 256, 64, tiling)))
    types = dict.fromkeys(VALUES, "*bf16" if dtype == torch.bfloat16 else "*fp32") | OTHERS
    constants = {
        "dot_type": FLOAT_TYPES[dtype], "SPLIT": True, "TRIPS": 0, "k_scale": None,
        "v_scale": None,
    }  # fmt: skip
    code = compiled(
        _attention_kernel, constants, (*VALUES, "partial", "partial_lse", *STRIDES),
        {"num_warps": tiling.warps, "num_stages": tiling.stages}, shape=shape, **types, **STRIDES,
    )  # fmt: skip
    assert code.metadata.shared <= 227 * 1024
    assert spilled(code, tmp_path) <= 64
