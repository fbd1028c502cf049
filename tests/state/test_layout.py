"""What a block holds, and the block size that follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.models.registry import load_config
from hybrid_runtime.state import StateLayout
from hybrid_runtime.state.layout import ALIGNMENT, Component

SUPER = SimpleNamespace(
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    conv_kernel=4,
    num_key_value_heads=2,
    head_dim=128,
)


def test_block_size_of_nemotron_3_super() -> None:
    """128 heads x 64 x 128 fp16 + 6 x 10240 bf16, against 2 KV heads x 128 x fp8: 4336 tokens."""
    layout = StateLayout.from_config(
        SUPER, 3, torch.float16, conv_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn
    )
    assert layout.block_size == 4336
    assert layout.page_bytes == 128 * 64 * 128 * 2 + 6 * 10240 * 2


@pytest.mark.parametrize(("dtype", "mib"), [(torch.float32, 823), (torch.float16, 423)])
def test_bytes_per_request_of_nemotron_3_super(dtype: torch.dtype, mib: int) -> None:
    """40 layers, 3 drafts, one snapshot: running column, drafts' columns, the snapshot's."""
    layout = StateLayout.from_config(SUPER, 3, dtype, conv_dtype=torch.bfloat16)
    assert round(layout.bytes_per_request(40, snapshots=1) / 2**20) == mib


def test_the_shipped_checkpoint_has_small_blocks() -> None:
    _, config = load_config(SHIPPED)
    for drafts in range(6):
        assert StateLayout.from_config(config, drafts).block_size <= 128
        assert StateLayout.from_config(config, drafts, conv_dtype=torch.bfloat16).block_size <= 128


@pytest.mark.parametrize("drafts", [0, 1, 2, 8])
@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allocated_blocks_have_the_components_shapes(
    drafts: int, conv_layout: Any, dtype: torch.dtype
) -> None:
    layout = StateLayout(10, 4, (2, 3, 5), drafts, 16, dtype, torch.float32, conv_layout)
    window, ssm = layout.allocate(7, "cpu")
    for tensor, component in zip((window, ssm), layout.components, strict=True):
        assert tensor.shape == (7, *component.shape)
        assert tensor.dtype == component.dtype
        assert tensor[0].is_contiguous()
        assert tensor.stride(0) * tensor.element_size() == layout.page_bytes
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert layout.page_bytes % ALIGNMENT == 0
    assert layout.positions_first(window).shape == (7, 3 + drafts, 10)
    # The two share pages and must not share bytes.
    window.fill_(1)
    assert not ssm.any()
    ssm.fill_(2)
    assert (window == 1).all()


BAD = [
    ({"conv_layout": "XX"}, "conv_layout is 'XX'"),
    ({"conv_dtype": torch.int8}, "conv_dtype is torch.int8"),
    ({"ssm_dtype": torch.float64}, "ssm_dtype is torch.float64"),
    ({"conv_width": 1}, "conv_width is 1"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
    ({"block_size": 3}, "block_size is 3; it must be larger than num_speculative_tokens"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "conv_channels": 10,
        "conv_width": 4,
        "ssm_shape": (2, 3, 5),
        "num_speculative_tokens": 3,
        "block_size": 16,
    }
    with pytest.raises(ValueError, match=message):
        StateLayout(**arguments | changes)


def test_a_component_without_a_rule_is_refused() -> None:
    rule: Any = "none"
    with pytest.raises(
        ValueError, match="rollback is 'none'; it must be 'window', 'column' or 'window_cache'"
    ):
        Component("history", (4,), torch.float32, rule)
    with pytest.raises(ValueError, match="shape is"):
        Component("history", (4, 0), torch.float32, "window")


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        StateLayout(10, 4, (2, 3, 5), 3, 16).allocate(0, "cpu")
