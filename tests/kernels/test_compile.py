"""Every kernel compiles for a Hopper GPU, on machines without one: the interpreter accepts more
than the compiler does (names that change type between branches, for one)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.hopper import aligned, compiled, spilled
from helpers.interpreter import plain
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.attention import paged, reduce, rotary, store_kv
from hybrid_runtime.kernels.attention.launch import (
    AttentionShape,
    CacheStrides,
    TokenStrides,
    attention_shape,
    attention_tiling,
)
from hybrid_runtime.kernels.common.strides import (
    ChannelStrides,
    ConvStateStrides,
    HeadStrides,
    StateStrides,
)
from hybrid_runtime.kernels.common.types import FLOAT_TYPES
from hybrid_runtime.kernels.conv import update as conv1d_update
from hybrid_runtime.kernels.conv import varlen as conv1d_varlen
from hybrid_runtime.kernels.layers import activation, embedding, norm, pooling
from hybrid_runtime.kernels.mamba2 import chunk_scan_kernels
from hybrid_runtime.kernels.mamba2 import state_update as selective_state_update
from hybrid_runtime.kernels.mamba2.chunk_scan import STEP_HEADS, ScanShape, scan_shape, scan_tiling
from hybrid_runtime.kernels.moe import align_block_size, fused_moe, topk
from hybrid_runtime.kernels.step import (
    advance_columns,
    move_rows,
    state_copy,
    vllm_decide,
    vllm_rows,
)

pytestmark = plain

COPY = move_rows.CopyTiling(
    word=tl.int32, tap=tl.int16, taps=3, matrix_words=8192, matrix_tiles=2, matrix_tile=4096,
    matrix_parts=4, conv_tiles=1, conv_tile=1024, vector=True,
)  # fmt: skip
BYTES = COPY._replace(word=tl.int8, tap=tl.int32, vector=False)
MOVE: dict[str, Any] = {
    "POST": True, "EVERY_ROW": False, "BLOCK_SIZE": 4336, "ROWS": 16, "TILING": COPY,
}  # fmt: skip
DECIDE: dict[str, Any] = {"BLOCK_SIZE": 4336, "ROWS": 16, "TILING": COPY, "REPLAYS": False}
PLACE: dict[str, Any] = {"BLOCK_SIZE": 4336, "BY_SLOT": False, "GROUPS": 6, "ROWS": 128}
ADVANCE: dict[str, Any] = {"BLOCK_SIZE": 4336, "IN_PLACE": False, "CUTS": True}
CONV: dict[str, Any] = {
    "CHANNELS": 10240, "TAPS": 4, "TOKENS": 4, "TILE": 256, "weight_tap": 1, "bias_channel": 1,
}  # fmt: skip
SSM: dict[str, Any] = {
    "HEADS": 128, "HEADS_PER_GROUP": 16, "DIM": 64, "STATE": 128, "TOKENS": 4, "TILE": 8,
    "WIDTH": 128,
}  # fmt: skip
SSM_STRIDES: dict[str, Any] = {
    "x_stride": HeadStrides("i32", "i32", 1), "dt_stride": ChannelStrides("i32", 1),
    "B_stride": HeadStrides("i32", "i32", 1), "C_stride": HeadStrides("i32", "i32", 1),
}  # fmt: skip
CONV_STRIDES: dict[str, Any] = {
    "x_stride": ChannelStrides("i32", 1), "conv_stride": ConvStateStrides("i32", "i32", 1),
}  # fmt: skip
TYPES = {
    "_embedding_kernel": {"tokens": "*i32", "out": "*bf16"},
    "_conv1d_update_kernel": CONV_STRIDES, "_selective_state_update_kernel": SSM_STRIDES,
}  # fmt: skip
POOL: dict[str, Any] = {"FIELDS": 6, "SIZE": 4096, "TOKENS": 32, "TILE": 128}
EMBEDDING: dict[str, Any] = {"V": 131072, "SIZE": 4480, "BLOCK": 1024}
NO_CUTS = {"cut": None, "cut_column": None}
NO_CHECKPOINT = {"checkpoint_column": None, "checkpoint_after": None}
KERNELS = [
    (advance_columns._advance_kernel, ADVANCE),
    (advance_columns._advance_kernel, ADVANCE | {"IN_PLACE": True, "CUTS": False}),
    (state_copy._move_kernel, MOVE),
    (state_copy._move_kernel, MOVE | {"POST": False}),
    (state_copy._move_kernel, MOVE | {"EVERY_ROW": True, "ROWS": 1024}),
    (state_copy._move_kernel, MOVE | {"TILING": BYTES}),
    *((vllm_decide._decide_move_kernel, DECIDE | {"PHASE": phase}) for phase in (0, 1)),
    (vllm_decide._decide_move_kernel, DECIDE | {"PHASE": 0, "REPLAYS": True}),
    (vllm_rows._place_rows_kernel, PLACE),
    (vllm_rows._place_rows_kernel, PLACE | {"BY_SLOT": True}),
    (vllm_rows._decide_flush_kernel, {"BLOCK_SIZE": 4336, "ROWS": 128}),
    (pooling._pooling_kernel, POOL),
    (embedding._embedding_kernel, EMBEDDING),
    (conv1d_update._conv1d_update_kernel, CONV | NO_CHECKPOINT),
    (
        conv1d_update._conv1d_update_kernel,
        CONV | NO_CHECKPOINT | {"bias": None, "TOKENS": 1, "TAPS": 1},
    ),
    (conv1d_update._conv1d_update_kernel, CONV | {"CHANNELS": 10, "TOKENS": 16}),
    (selective_state_update._selective_state_update_kernel, SSM),
    (
        selective_state_update._selective_state_update_kernel,
        SSM | {"TOKENS": 16, "DIM": 60, "STATE": 100},
    ),
]


@pytest.mark.parametrize(("kernel", "constants"), KERNELS)
def test_compiles_for_hopper(kernel: JITFunction, constants: dict[str, Any]) -> None:
    assert compiled(kernel, constants, **TYPES.get(kernel.__name__, {})).asm["cubin"]


@pytest.mark.parametrize(("type_", "tile"), [("*fp32", 8), ("*fp16", 16), ("*bf16", 16)])
def test_state_update_moves_16_bytes_at_once(type_: str, tile: int) -> None:
    kernel = selective_state_update._selective_state_update_kernel
    constants = SSM | {"TILE": tile}
    types = SSM_STRIDES | {"states": type_}
    text = compiled(kernel, constants, ("states", "state_stride"), **types).asm["ptx"]
    loads = tile * 128 * (4 if type_ == "*fp32" else 2) // (16 * 64)  # of 64 threads
    assert text.count("ld.global.v4.b32") == loads
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == 4 * loads


PLAIN = {"k_scale": None, "v_scale": None}
ATTENTION: dict[str, Any] = PLAIN | {"dot_type": tl.bfloat16, "SPLIT": True, "TRIPS": 0}
EXACT = {"dot_type": tl.float32}
HEADS = AttentionShape(
    HEADS=32, KV_HEADS=8, D=128, BLOCK_SIZE=1056, TOKENS=4, BLOCK_M=16, BLOCK_N=32, BLOCK_D=128
)  # fmt: skip
PROMPTS = HEADS._replace(TOKENS=16, BLOCK_M=64, BLOCK_N=64)
WIDE = HEADS._replace(HEADS=16, KV_HEADS=4, D=256, BLOCK_D=256, BLOCK_N=16)
WIDE_PROMPTS = WIDE._replace(TOKENS=16, BLOCK_M=64, BLOCK_N=32)
ROTARY: dict[str, Any] = {
    "HEADS": 16, "KV_HEADS": 4, "D": 256, "HALF": 32, "ROWS": 128, "BLOCK_D": 256, "BLOCK_H": 32,
}  # fmt: skip
UNALIGNED = HEADS._replace(HEADS=10, KV_HEADS=2, D=80, BLOCK_SIZE=48, BLOCK_N=64)
REDUCE: dict[str, Any] = {"SPLITS": 8, "BLOCK_S": 8, "EACH": 1}
STORE_KV: dict[str, Any] = PLAIN | {
    "KV_HEADS": 8, "D": 128, "BLOCK_SIZE": 1056, "ROWS": 128, "BLOCK_H": 8, "BLOCK_D": 128,
}  # fmt: skip
NORM: dict[str, Any] = {
    "RESIDUAL": True, "GATED": False, "NORM_FIRST": False, "CENTRED": False, "LINES": False,
    "scale": None, "SIZE": 4096, "GROUPS": 1, "HELD": 1, "BLOCK_G": 1, "BLOCK": 4096,
}  # fmt: skip
HEAD_NORM = {
    "RESIDUAL": False, "GATED": True, "NORM_FIRST": True, "SIZE": 128, "GROUPS": 32, "BLOCK": 128,
}  # fmt: skip
GATED_NORM = {"RESIDUAL": False, "GATED": True, "SIZE": 1280, "GROUPS": 8, "BLOCK": 2048}
QUANTISED = {name: value for name, value in NORM.items() if name != "scale"}
EIGHT_BITS = {"scale": "*fp32", "out": "*fp8e4nv"}
OF_LINES = {"LINES": True, "HELD": 8, "BLOCK_G": 8, "SIZE": 1024, "BLOCK": 1024}
ROWS = dict.fromkeys(("block_table", "slot", "cu_seqlens", "computed"), "*i32")
SCALARS = {"scale": "fp32", "eps": "fp32"} | dict.fromkeys(("tokens", "limit", "least"), "i32")
PARTIAL = {"partial": "*fp32", "partial_lse": "*fp32"}
STRIDES = dict.fromkeys(("q_stride",), TokenStrides("i32", "i32", 1))
STRIDES |= dict.fromkeys(("k_stride", "v_stride"), CacheStrides("i32", "i32", "i32", 1))
STORE_STRIDES = dict.fromkeys(("k_stride", "v_stride"), TokenStrides("i32", "i32", 1))
STORE_STRIDES |= dict.fromkeys(
    ("k_cache_stride", "v_cache_stride"), CacheStrides("i32", "i32", "i32", 1)
)
QUERIES: dict[str, Any] = {
    "q_stride": TokenStrides("i32", "i32", 1), "frequencies": "*fp32",
}  # fmt: skip
VALUES = (
    "q",
    "k",
    "q_weight",
    "k_weight",
    "q_out",
    "k_out",
    "v",
    "k_cache",
    "v_cache",
    "out",
    "x",
    "other",
    "weight",
    "total",
)


@pytest.mark.parametrize(
    ("kernel", "constants", "tuples", "type_", "access"),
    [
        (
            paged._attention_kernel, ATTENTION, STRIDES | {"shape": HEADS},
            "*bf16", "cp.async.cg.shared.global",
        ),
        (
            paged._attention_kernel, ATTENTION | {"SPLIT": False}, STRIDES | {"shape": UNALIGNED},
            "*fp16", "cp.async.cg",
        ),
        (
            paged._attention_kernel, ATTENTION | EXACT,
            STRIDES | {"shape": HEADS._replace(BLOCK_M=32)}, "*fp32", "cp.async.cg",
        ),
        (
            paged._attention_kernel, ATTENTION | {"SPLIT": False}, STRIDES | {"shape": PROMPTS},
            "*bf16", "cp.async.cg.shared.global",
        ),
        (
            paged._attention_kernel, ATTENTION, STRIDES | {"shape": WIDE},
            "*bf16", "cp.async.cg.shared.global",
        ),
        (
            paged._attention_kernel, ATTENTION, STRIDES | {"shape": WIDE_PROMPTS},
            "*bf16", "cp.async.cg.shared.global",
        ),
        (rotary._rotate_heads_kernel, ROTARY, STORE_STRIDES | QUERIES, "*bf16", "ld.global.v2"),
        (
            rotary._rotate_heads_kernel, ROTARY | {"HALF": 128, "q_weight": None, "k_weight": None},
            STORE_STRIDES | QUERIES, "*bf16", "ld.global",
        ),
        (reduce._reduce_kernel, REDUCE, {"shape": HEADS}, "*bf16", "ld.global.v4"),
        (reduce._reduce_kernel, REDUCE | {"EACH": 4}, {"shape": HEADS}, "*bf16", "ld.global.v4"),
        (store_kv._store_kv_kernel, STORE_KV, STORE_STRIDES, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, NORM, {}, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, NORM | GATED_NORM, {}, "*fp32", "ld.global.v4"),
        (norm._norm_kernel, NORM | {"CENTRED": True}, {}, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, NORM | HEAD_NORM, {}, "*bf16", "ld.global"),
        (
            norm._norm_kernel, QUANTISED | HEAD_NORM | {"LINES": True, "HELD": 32, "BLOCK_G": 32},
            EIGHT_BITS, "*bf16", "ld.global.v4",
        ),
        (norm._norm_kernel, QUANTISED, EIGHT_BITS, "*bf16", "ld.global.v4"),
        (norm._norm_kernel, QUANTISED | OF_LINES, EIGHT_BITS, "*bf16", "ld.global.v4"),
    ],
)  # fmt: skip
def test_attention_and_norms_move_16_bytes_at_once(
    kernel: JITFunction,
    constants: dict[str, Any],
    tuples: dict[str, Any],
    type_: str,
    access: str,
) -> None:
    types = dict.fromkeys(VALUES, type_) | ROWS | SCALARS | PARTIAL | tuples
    strides = [name for name in kernel.arg_names if "stride" in name]
    code = compiled(kernel, constants, (*VALUES, *PARTIAL, *strides), **types)
    assert code.asm["cubin"]
    assert access in code.asm["ptx"]


@pytest.mark.parametrize(
    ("group", "head_dim", "half", "scaled"),
    [
        (4, 128, torch.bfloat16, True),
        (16, 128, torch.bfloat16, True),
        (4, 64, torch.float16, False),
    ],
)
@pytest.mark.parametrize("scheduled", [1, 4, 2560])
def test_attention_reads_keys_and_values_in_8_bits(
    scheduled: int, group: int, head_dim: int, half: torch.dtype, scaled: bool, tmp_path: Path
) -> None:
    tiling = attention_tiling(group, head_dim, scheduled, half)
    shape = AttentionShape(
        *(one.value for one in attention_shape(2 * group, 2, head_dim, 64, tiling))
    )
    constants = ATTENTION | {"dot_type": FLOAT_TYPES[half]}
    scales = dict.fromkeys(PLAIN, "*fp32")
    if scaled:
        constants = {name: value for name, value in constants.items() if name not in PLAIN}
    types = dict.fromkeys(VALUES, "*bf16" if half == torch.bfloat16 else "*fp16") | ROWS | SCALARS
    types |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv") | scales | PARTIAL | STRIDES
    multiples = (*VALUES, *PARTIAL, "q_stride", "k_stride", "v_stride")
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    code = compiled(paged._attention_kernel, constants, multiples, options, shape=shape, **types)
    assert "cp.async.cg.shared.global" in code.asm["ptx"]
    assert spilled(code, tmp_path) == 0
    assert code.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("scaled", [True, False])
def test_keys_and_values_are_stored_in_8_bits(scaled: bool) -> None:
    constants = {n: v for n, v in STORE_KV.items() if not scaled or n not in PLAIN}
    types = dict.fromkeys(VALUES, "*bf16") | dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv")
    types |= dict.fromkeys(PLAIN, "*fp32") | ROWS | STORE_STRIDES
    strides = [name for name in store_kv._store_kv_kernel.arg_names if "stride" in name]
    code = compiled(store_kv._store_kv_kernel, constants, (*VALUES, *strides), **types)
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.asm["ptx"]
    assert "min.NaN" in code.asm["ptx"]  # cut off, with NaN left as it is


# Heads of Nemotron-H-8B, Nemotron-Nano-9B-v2 and Falcon-H1, and larger ones.
SIZES = [(64, 128), (80, 128), (64, 256), (128, 128)]
SCANS = [(*size, dtype) for size in SIZES for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dim", "state", "dtype"), [*SCANS, (256, 128, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("cuts", [NO_CUTS, {}], ids=["whole", "cut"])
def test_chunk_scan_fits_into_registers(
    dim: int, state: int, dtype: torch.dtype, cuts: dict[str, Any], tmp_path: Path
) -> None:
    half = dtype == torch.bfloat16
    shape, type_ = scan_tiling(dim, state, dtype), "*bf16" if half else "*fp32"
    padded = triton.next_power_of_2(state)
    everything: dict[str, Any] = {
        "dot_type": tl.bfloat16 if half else tl.float32, "TRIPS": 0, "TOKENS": shape.tokens,
        "EACH": shape.each, "BLOCK_N": padded, "PIECE": min(shape.piece, padded), **cuts,
    }  # fmt: skip
    types: dict[str, Any] = dict.fromkeys(("x", "B", "C", "dt", "out", "carried"), type_)
    types |= dict.fromkeys(("steps", "totals", "rests"), "*fp32") | {"rows": "i32"}
    types |= SSM_STRIDES | {"state_stride": StateStrides("i32", "i32", "i32", 1)}
    constexprs = scan_shape(128, 16, dim, state, shape.chunk, dtype)
    types["shape"] = ScanShape(*(entry.value for entry in constexprs))
    for kernel, tile, warps, stages in (
        (chunk_scan_kernels.steps_kernel, STEP_HEADS, 4, 3),
        (chunk_scan_kernels.carry_kernel, shape.tile, shape.carry_warps, shape.carry_stages),
        (chunk_scan_kernels.outputs_kernel, 0, shape.output_warps, shape.output_stages),
    ):
        names = everything | {"TILE": tile}
        constants = {name: names[name] for name in kernel.arg_names if name in names}
        options = {"num_warps": warps, "num_stages": stages}
        code = compiled(kernel, constants, aligned(kernel, constants), options, **types)
        assert spilled(code, tmp_path) <= 64  # of 255 registers a thread, 16 words at most
        assert code.metadata.shared <= 227 * 1024
        if kernel is not chunk_scan_kernels.steps_kernel:
            assert ("wgmma.mma_async" in code.asm["ptx"]) == half


@pytest.mark.parametrize(
    "changed", [{}, NO_CUTS, {"bias": None, "TAPS": 2, "LENGTH": 1}, {"CHANNELS": 10}]
)
def test_long_convolution_moves_8_bytes_at_once(changed: dict[str, Any], tmp_path: Path) -> None:
    kernel = conv1d_varlen._conv1d_varlen_kernel
    shape = conv1d_varlen.ConvTiling()
    constants = CONV | {"LENGTH": 6, "TOKENS": shape.tokens, "TILE": shape.channels} | changed
    options = {"num_warps": shape.warps}
    code = compiled(
        kernel, constants, aligned(kernel, constants), options, rows="i32", **CONV_STRIDES
    )
    assert spilled(code, tmp_path) == 0
    if constants["CHANNELS"] % 16 == 0:
        assert len(re.findall(r"ld\.global\.(v2\.b32|v4\.b16)", code.asm["ptx"])) >= shape.tokens


PRODUCT: dict[str, Any] = {
    "dot_type": tl.bfloat16, "N": 1856, "K": 2688, "TOP_K": 6, "RELU2": True, "GATED": False,
    "x_scale": None, "weight_scale": None, "out_scale": None, "x_scale_stride": None,
    "weight_scale_stride": None,
}  # fmt: skip
DOWN = {"N": 2688, "K": 1856, "TOP_K": 1, "RELU2": False}
SWIGLU = {"N": 1024, "K": 2048, "TOP_K": 8, "RELU2": False, "GATED": True}


@pytest.mark.parametrize("sizes", [{}, DOWN, SWIGLU], ids=["up", "down", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 256, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_expert_products_stream_their_matrices(
    dtype: torch.dtype, tokens: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    kernel = fused_moe._fused_moe_kernel
    shape = fused_moe.moe_tiling(6 * tokens, 128, dtype)
    constants = PRODUCT | sizes | {
        "dot_type": FLOAT_TYPES[dtype], "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
    }  # fmt: skip
    half = "*fp16" if dtype == torch.float16 else "*bf16"
    type_ = "*fp32" if dtype == torch.float32 else half
    types: dict[str, Any] = {
        "x": type_, "weight": type_, "out": "*fp32" if sizes is DOWN else type_,
        "sorted_token_ids": "*i32", "blocks": "*i32", "x_stride": fused_moe.LineStrides("i32", 1),
        "weight_stride": fused_moe.WeightStrides("i32", "i32", 1),
    }  # fmt: skip
    strides = ("x", "weight", "out", "x_stride", "weight_stride")
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    code = compiled(kernel, constants, strides, options, **types)
    text = code.asm["ptx"]
    assert spilled(code, tmp_path) == 0
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    assert ("mma" in text) == (dtype != torch.float32)
    assert ("wgmma.mma_async" in text) == (dtype != torch.float32 and shape.block_m >= 64)


TOPK: dict[str, Any] = {
    "NUM_EXPERTS": 128, "NUM_GROUPS": 1, "TOPK_GROUP": 1, "TOP_K": 6, "SOFTMAX": False,
    "RENORMALIZE": True,
    "PRECISE": True, "BLOCK_G": 1, "BLOCK_E": 128, "BLOCK_K": 8, "bias_stride": 1,
}  # fmt: skip
TOPK_GROUPS = {"NUM_EXPERTS": 96, "NUM_GROUPS": 8, "TOPK_GROUP": 3, "BLOCK_G": 8, "BLOCK_E": 16}
TOPK_MANY = {
    "NUM_EXPERTS": 512, "BLOCK_E": 512, "TOP_K": 22, "BLOCK_K": 32, "RENORMALIZE": False,
}  # fmt: skip
ALIGN: dict[str, Any] = {"BLOCK_SIZE": 16, "BINS": 128, "COUNTED": 128, "RANKED": 128, "LINES": 32}
SUM: dict[str, Any] = {"SIZE": 2688, "TOP_K": 6, "BLOCK": 512}
TOPK_SOFTMAX = {
    "NUM_EXPERTS": 512, "BLOCK_E": 512, "TOP_K": 10, "BLOCK_K": 16, "SOFTMAX": True, "bias": None,
}  # fmt: skip
RELU2: dict[str, Any] = {"BLOCK": 4096, "x_dim": 1}
SIGMOID_GATE: dict[str, Any] = {"SIZE": 4096, "D": 256, "BLOCK": 1024, "added": None}


@pytest.mark.parametrize(
    ("kernel", "constants", "warps", "access"),
    [
        (topk._topk_kernel, TOPK, 1, "ld.global"),
        (topk._topk_kernel, TOPK | TOPK_GROUPS, 1, "ld.global"),
        (topk._topk_kernel, TOPK | TOPK_MANY, 2, "ld.global"),
        (topk._topk_kernel, TOPK | TOPK_SOFTMAX, 2, "ld.global"),
        (align_block_size._align_block_size_kernel, ALIGN, 4, "ld.global"),
        (
            align_block_size._align_block_size_kernel,
            ALIGN | {"BINS": 512, "COUNTED": 1024},
            4,
            "ld.global",
        ),
        (fused_moe._moe_sum_kernel, SUM, 4, "ld.global.v4"),
        (activation._relu2_kernel, RELU2, 8, "ld.global.v4"),
        (activation._swiglu_kernel, {"BLOCK": 2048}, 4, "ld.global.v4"),
        (activation._sigmoid_gate_kernel, SIGMOID_GATE, 4, "ld.global.v4"),
    ],
)
def test_what_surrounds_the_experts(
    kernel: JITFunction, constants: dict[str, Any], warps: int, access: str, tmp_path: Path
) -> None:
    types: dict[str, Any] = dict.fromkeys(("logits", "bias", "topk_weights", "outputs"), "*fp32")
    types |= {"scale": "fp32", "topk_ids": "*i64", "sorted_token_ids": "*i32"}
    types |= {"logits_stride": topk.LogitsStrides("i32", 1), "blocks": "*i32"}
    types |= {"weights_stride": fused_moe.LineStrides("i32", 1), "gate": "*bf16", "up": "*bf16"}
    types |= {"gate_stride": activation.GateStrides("i32", "i32", 1)}
    multiples = (
        "logits",
        "bias",
        "topk_ids",
        "outputs",
        "topk_weights",
        "x",
        "out",
        "x_line",
        "gate",
        "up",
        "gate_line",
        "up_line",
        "gate_stride",
        "size",
    )
    found = [name for name in multiples if name in kernel.arg_names and name not in constants]
    code = compiled(kernel, constants, found, {"num_warps": warps}, **types)
    assert spilled(code, tmp_path) == 0
    assert access in code.asm["ptx"]
