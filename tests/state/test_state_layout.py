"""What a block holds, and the block size that follows from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toy_recurrences import HASH, HashRule

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.recurrence import CheckpointSpec, TensorSpec
from hybrid_runtime.models.registry import load_config
from hybrid_runtime.models.states import nemotron_h_states
from hybrid_runtime.state import (
    StateLayout,
)
from hybrid_runtime.state.layout import ALIGNMENT

SUPER = SimpleNamespace(
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    conv_kernel=4,
    num_key_value_heads=2,
    head_dim=128,
)


def layout_of(config: Any, drafts: int, *dtypes: torch.dtype, **options: Any) -> StateLayout:
    recurrence, block_size = nemotron_h_states(config, drafts, *dtypes, **options)
    return StateLayout(recurrence, drafts, block_size)


def test_block_size_of_nemotron_3_super() -> None:
    """128 heads x 64 x 128 fp16 + 6 x 10240 bf16, against 2 KV heads x 128 x fp8: 4336 tokens."""
    layout = layout_of(SUPER, 3, torch.float16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert layout.block_size == 4336
    assert layout.page_bytes == 128 * 64 * 128 * 2 + 6 * 10240 * 2


@pytest.mark.parametrize(("dtype", "mib"), [(torch.float32, 823), (torch.float16, 423)])
def test_bytes_per_request_of_nemotron_3_super(dtype: torch.dtype, mib: int) -> None:
    """40 layers, 3 drafts, one checkpoint: running column, drafts' columns, the checkpoint's."""
    layout = layout_of(SUPER, 3, dtype, dtype=torch.bfloat16)
    assert round(layout.bytes_per_request(40, checkpoints=1) / 2**20) == mib


def test_the_shipped_checkpoint_has_small_blocks() -> None:
    _, config = load_config(SHIPPED)
    for drafts in range(6):
        assert layout_of(config, drafts).block_size <= 128
        assert layout_of(config, drafts, dtype=torch.bfloat16).block_size <= 128


@pytest.mark.parametrize("drafts", [0, 1, 2, 8])
@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allocated_blocks_have_the_components_shapes(
    drafts: int, conv_layout: Any, dtype: torch.dtype
) -> None:
    rule = HashRule(10, (2, 3, 5), dtype, torch.float32, conv_layout)
    layout = StateLayout(rule.recurrence, drafts, 16)
    conv_states, matrices = layout.allocate(7, "cpu")
    for tensor, part in zip((conv_states, matrices), layout.checkpoint, strict=True):
        assert tensor.shape == (7, *part.shape)
        assert tensor.dtype == part.dtype
        assert tensor[0].is_contiguous()
        assert tensor.stride(0) * tensor.element_size() == layout.page_bytes
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert layout.page_bytes % ALIGNMENT == 0
    assert layout.positions_first(conv_states).shape == (7, 3 + drafts, 10)
    # The two share pages and must not share bytes.
    conv_states.fill_(1)
    assert not matrices.any()
    matrices.fill_(2)
    assert (conv_states == 1).all()


def test_records_lie_in_memory_as_the_kernels_of_mamba_2_read_them() -> None:
    layout = StateLayout(mamba2(4, 3, 5, 2, 4, torch.bfloat16), 3, 16, "replay", ring_tokens=7)
    records = Records(*layout.allocate_records(6, 8, "cpu"))
    length = 7 + 3 + 1
    assert records.length == layout.ring_length == length
    for tensor, shape, dtype in zip(
        records,
        [(6, 8, 4, length, 3), (6, 8, 2, length, 5), (6, 8, 4, length)],
        [torch.bfloat16, torch.bfloat16, torch.float32],
        strict=True,
    ):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    assert layout.record_bytes * 6 * 8 == sum(tensor.nbytes for tensor in records)
    assert replace(layout, kind="columns").allocate_records(6, 8, "cpu") == ()


BAD = [
    ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
    ({"block_size": 3}, "block_size is 3; it must be larger than num_speculative_tokens"),
    ({"kind": "rows"}, "kind is 'rows'; it must be 'columns' or 'replay'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "recurrence": HASH.recurrence, "num_speculative_tokens": 3, "block_size": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        StateLayout(**arguments | changes)


BAD_MAMBA2 = [
    ({"conv_layout": "XX"}, "conv_layout is 'XX'"),
    ({"dtype": torch.int8}, "dtype is torch.int8"),
    ({"matrix_dtype": torch.float64}, "matrix_dtype is torch.float64"),
    ({"conv_width": 1}, "conv_width is 1"),
    ({"groups": 3}, r"heads is 2; it must be a multiple of groups \(3\)"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MAMBA2, ids=[m for _, m in BAD_MAMBA2])
def test_sizes_that_mamba_2_cannot_have_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"heads": 2, "head_dim": 3, "state_size": 5, "groups": 1, "conv_width": 4}
    with pytest.raises(ValueError, match=message):
        mamba2(**arguments | changes)


GOOD = TensorSpec("part", (4, 2), torch.float32)
ROLLS = GOOD._replace(token_axis=0)
BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": CheckpointSpec(GOOD, GOOD)}, "part.token_axis is None; it must be an axis"),
    ({"checkpoint": CheckpointSpec(ROLLS, ROLLS)}, "part.token_axis is 0; it must be None"),
    ({"params": (GOOD._replace(shape=(4, 0)),)}, r"part.shape is \(4, 0\); all must be >= 1"),
    ({"records": (GOOD,)}, "a record must have a token_axis of length 1"),
    ({"records": (ROLLS,)}, "a record must have a token_axis of length 1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_PARTS, ids=[m for _, m in BAD_PARTS])
def test_parts_that_cannot_roll_back_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HASH.recurrence, **changes)


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        StateLayout(HASH.recurrence, 3, 16).allocate(0, "cpu")


def test_a_request_needs_less_than_half_the_bytes() -> None:
    """Nemotron-3 Super's layers, 3 drafts, one checkpoint: 1 + 1 states and the records."""
    sizes = {
        kind: StateLayout(mamba2(128, 64, 128, 8, 4, torch.bfloat16), 3, 4336, kind=kind)
        for kind in ("columns", "replay")
    }
    ratio = {k: layout.bytes_per_request(40, checkpoints=1) for k, layout in sizes.items()}
    assert 0.4 < ratio["replay"] / ratio["columns"] < 0.45
    assert sizes["columns"].record_bytes == 0
    assert sizes["replay"].record_bytes == 19 * ((128 * 64 + 8 * 128) * 2 + 128 * 4)
