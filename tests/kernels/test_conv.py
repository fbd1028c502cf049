"""The convolution of decode rows and of prompts: each kernel against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, kernels
from helpers.mamba_cases import Conv, rows_of
from helpers.state_rows import prefill_rows
from helpers.tensors import DEVICE, ints, noise, same_bytes

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.conv.varlen import ConvTiling, conv1d_varlen

SEEDS = range(5 if CUDA else 1)
KERNELS = (conv1d_update, conv1d_varlen)
MIXED = (1, 5, 16, 17, 33, 3)
BASES = (Conv(), Conv(lengths=MIXED, tiling=ConvTiling(4, 64, 1)))
DECODE, PROMPT = BASES
FINE = {"x": torch.float32, "window": torch.float32, "weight": torch.float32}
CHANGES: list[dict[str, Any]] = [
    {},
    FINE,
    {"x": torch.float16, "window": torch.float16},
    {"window": torch.float32},
    {"x": torch.float32, "window": torch.float16},
    {"layout": "DS"},
    {"layout": "DS", "window": torch.float32, "pad": 3},
    {"channels": 300},
    {"channels": 3, "wide": 0},
    {"taps": 2},
    {"taps": 1},
    {"bias": False},
    {"pad": 7},
    {"wide": 1},
    {"table_pad": 5},
    {"drafts": 0},
    {"layout": "DS", "drafts": 5},
]
CONVS = [
    *(replace(base, **change) for base in BASES for change in CHANGES),
    *(replace(DECODE, drafts=drafts) for drafts in (1, 2, 4, 7, 15)),
    replace(PROMPT, tiling=None),
    replace(PROMPT, tiling=ConvTiling(8, 16, 1)),
    *(replace(PROMPT, lengths=(length,), padded=False) for length in (1, 2, 3, 4, 5, 30)),
    replace(PROMPT, lengths=(1,) * 5),
    pytest.param(replace(PROMPT, lengths=(1,) * 130, channels=3, padded=False), id="130 rows"),
    replace(PROMPT, drafts=6),
    replace(PROMPT, taps=8),
]
if CUDA:
    WIDE: dict[str, Any] = {"channels": 10240, "wide": 8320, "tiling": None}
    CONVS += [
        # The interpreter rounds to bfloat16 another way.
        *(replace(base, x=torch.float32) for base in BASES),
        *(replace(base, **WIDE, layout=layout) for base in BASES for layout in ("SD", "DS")),
        *(
            replace(PROMPT, **WIDE, lengths=(1000, 1, 300), layout=layout)
            for layout in ("SD", "DS")
        ),
        replace(DECODE, channels=10240, window=torch.float32, drafts=7),
    ]


@kernels
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_conv1d(shape: Conv) -> None:
    for seed in SEEDS:
        rows = rows_of(shape, seed)
        arguments, conv_states, pages = shape.inputs(rows, seed)
        before = pages.clone()
        if shape.lengths is None:
            y = conv1d_update(conv_states=conv_states, **arguments)
        else:
            y = conv1d_varlen(conv_states=conv_states, tiling=shape.tiling, **arguments)
        after = pages.clone()
        pages.copy_(before)
        y_reference = conv1d_reference(conv_states=conv_states, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        exact = 2e-6 if shape.lengths is None else 5e-6
        tolerance = {torch.float32: exact, torch.float16: 2e-3, torch.bfloat16: 1e-2}[shape.x]
        torch.testing.assert_close(y, y_reference, rtol=tolerance, atol=tolerance)
        # The window holds inputs as they came, so it agrees to the bit, what is not written too.
        assert same_bytes(after, pages)
        # A read window other than the written one is as it was.
        kept = torch.ones(rows.blocks, dtype=torch.bool)
        kept[[rows.block(row[1], row[5]) for row in rows.active]] = False
        assert same_bytes(after[kept], before[kept])


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_rows(kernel: Any, tokens: int) -> None:
    none = ints()
    rows = StateRows(none.view(0, 1), none, ints(0), none, none, none, none)
    x, conv_states = torch.ones(tokens, 8, device=DEVICE), torch.ones(1, 6, 8, device=DEVICE)
    y = kernel(x, torch.ones(8, 4, device=DEVICE), None, conv_states, rows, 4)
    assert y.shape == x.shape
    assert not y.any()


@kernels
@pytest.mark.parametrize("operation", [conv1d_reference, *KERNELS])
def test_wrong_shapes_are_refused(operation: Any) -> None:
    rows = prefill_rows((9,), 0, 0, False)
    x, weight = torch.zeros(rows.tokens, 4, device=DEVICE), torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="conv_states is"):
        operation(x, weight, None, torch.zeros(9, 2, 4, device=DEVICE), **rows.arguments)
    with pytest.raises(ValueError, match="x has 4 channels"):
        operation(x, weight[:3], None, weight[None], **rows.arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_block_strides_beyond_32_bits(kernel: Any) -> None:
    """Block times stride passes 2**31 elements at block 3 (#35275)."""
    far = (1 << 30) + 4096
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    conv_states = pool[4096:].as_strided((4, 6, 32), (far, 32, 1))
    noises = torch.Generator("cuda").manual_seed(0)
    conv_states.copy_(noise(noises, 4, 6, 32, dtype=torch.float16))
    near, tokens = conv_states.clone(), 3 if kernel is conv1d_update else 50
    x = noise(noises, tokens, 32, dtype=torch.float32)
    weight, draft = noise(noises, 32, 4, dtype=torch.float32), 2 if tokens == 3 else 0
    rows = StateRows(
        *(ints(*values) for values in ([[3, 1, 2, 0]], [0], [0, tokens], [draft], [0], [0], [0]))
    )
    y = kernel(x, weight, None, conv_states, rows, tokens)
    torch.testing.assert_close(y, conv1d_reference(x, weight, None, near, rows, tokens))
    assert torch.equal(conv_states, near)
