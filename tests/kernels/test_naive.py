"""Every reference operation against a naive oracle that loops over rows and tokens."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.state_rows import Rows
from helpers.tensors import same_bytes
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention_reference
from hybrid_runtime.kernels.attention.store_kv import store_kv_reference
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.mamba2.naive import (
    chunk_scan_reference,
    selective_state_update_reference,
)

K, TAPS, COLUMNS, SLOTS = 3, 4, 8, 6


# Read column one below, equal to, and above the write column; zero state; fewer tokens than taps;
# drafts of every number; two kinds of padded row, with and without tokens.
UPDATE_ROWS = Rows(
    [
        (4, 0, 3, 1, 2, 2),
        (1, 1, 0, 2, 0, 2),
        (2, -1, 1, 1, 0, 2),
        (4, 2, 3, 3, 1, 2),
        (3, 3, 2, -1, 0, 0),
        (2, 4, 0, 4, 3, 4),
        (0, -1, 0, -1, 0, -1),
        (3, 5, 1, 1, 0, -1),
    ],
    device="cpu",
)
PREFILL_ROWS = Rows(
    [
        (37, 2, 0, -1, 0, 2),
        (1, 0, 0, 1, 2, 1),
        (5, -1, 0, 1, 0, 2),
        (16, 3, 0, 2, 1, 3),
        (2, 5, 0, 4, 0, 3),
        (6, 1, 0, 1, 0, -1),
    ],
    device="cpu",
)
ALL_ROWS = pytest.mark.parametrize("rows", [UPDATE_ROWS, PREFILL_ROWS], ids=["update", "prefill"])


def block_table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SLOTS * COLUMNS, generator=generator) + 1
    return order.reshape(SLOTS, COLUMNS).to(torch.int32)


def poisoned(blocks: int, *shape: int, used: set[int], seed: int, dtype: torch.dtype) -> Tensor:
    """Random in the blocks that are read, NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((blocks, *shape), float("nan"), dtype=dtype)
    for block in used:
        memory[block] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return memory


@ALL_ROWS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_causal_conv(rows: Rows, bias: bool, dtype: torch.dtype, layout: str) -> None:
    channels = 6
    torch.manual_seed(1)
    table = block_table(2)
    x = torch.randn(rows.tokens, channels).to(dtype)
    weight = torch.randn(channels, TAPS).to(dtype)
    offset = torch.randn(channels).to(dtype) if bias else None
    used = {
        int(table[slot, read]) for _, _, slot, _, read, _, write in rows if min(read, slot) >= 0
    }
    blocks = SLOTS * COLUMNS + 1
    conv_states = poisoned(blocks, TAPS - 1 + K, channels, used=used, seed=3, dtype=dtype)
    if layout == "DS":
        conv_states = conv_states.transpose(1, 2).contiguous().transpose(1, 2)
    expected, y_expected = conv_states.clone(), torch.zeros(rows.tokens, channels).double()
    for tokens, s, slot, d, read, start, write in rows:
        if slot < 0 or write < 0 or s == 0:
            continue
        old = torch.zeros(TAPS - 1, channels).double()
        if read >= 0:
            old = conv_states[int(table[slot, read]), start : start + TAPS - 1].double()
        inputs = torch.cat([old, x[tokens].double()])
        y = F.conv1d(
            inputs.T[None],
            weight.double()[:, None],
            None if offset is None else offset.double(),
            groups=channels,
        )
        y_expected[tokens] = F.silu(y[0].T)
        keep = TAPS - 1 + d
        expected[int(table[slot, write]), :keep] = inputs[-keep:].to(dtype)
    y = conv1d_reference(x, weight, offset, conv_states, rows.on(table), rows.max_scheduled)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y.double(), y_expected, rtol=tolerance, atol=tolerance)
    assert same_bytes(conv_states, expected)


def ssm_arguments(rows: Rows, dtype: torch.dtype, strong: float = 1.0) -> dict[str, Any]:
    heads, size, groups, state = 6, 4, 2, 5
    torch.manual_seed(4)
    return {
        "x": torch.randn(rows.tokens, heads, size).to(dtype),
        "dt": strong * torch.randn(rows.tokens, heads).to(dtype),
        "A_log": torch.log(1 + 7 * torch.rand(heads)),
        "B": torch.randn(rows.tokens, groups, state).to(dtype),
        "C": torch.randn(rows.tokens, groups, state).to(dtype),
        "D": torch.randn(heads),
        "dt_bias": torch.randn(heads),
    }


def naive_ssm(
    rows: Rows,
    states: Tensor,
    table: Tensor,
    a: dict[str, Tensor],
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Outputs, and the states to be stored by physical block, all in fp64."""
    a = {name: value.double() for name, value in a.items()}
    heads = a["x"].shape[1]
    group = torch.arange(heads) // (heads // a["B"].shape[1])
    y, stored = torch.zeros_like(a["x"]), {}
    for tokens, s, slot, d, read, offset, write in rows:
        if slot < 0 or write < 0:
            continue
        h = torch.zeros(states.shape[1:]).double()
        if read >= 0:
            h = states[int(table[slot, read + offset])].double()
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            step = torch.log1p(torch.exp(a["dt"][t] + a["dt_bias"])).clamp(dt_min, dt_max)
            decay = torch.exp(-step * torch.exp(a["A_log"]))
            for head in range(heads):
                b, c = a["B"][t, group[head]], a["C"][t, group[head]]
                x = a["x"][t, head]
                h = h.clone()
                h[head] = h[head] * decay[head] + step[head] * torch.outer(x, b)
                y[t, head] = h[head] @ c + a["D"][head] * x
            if i >= s - 1 - d:
                stored[int(table[slot, write + i - (s - 1 - d)])] = h
    return y, stored


def check_ssm(
    y: Tensor,
    states: Tensor,
    before: Tensor,
    want: tuple[Tensor, dict[int, Tensor]],
    tolerance: float,
) -> None:
    y_expected, stored = want
    scale = float(y_expected.abs().max())
    assert float((y.double() - y_expected).abs().max()) <= tolerance * scale
    for block, state in stored.items():
        error = float((states[block].double() - state).abs().max())
        assert error <= tolerance * float(state.abs().max())
    untouched = [block for block in range(states.shape[0]) if block not in stored]
    assert same_bytes(states[untouched], before[untouched])


def ssm_states(rows: Rows, table: Tensor, dtype: torch.dtype) -> Tensor:
    used = {
        int(table[slot, read + offset])
        for _, _, slot, _, read, offset, _ in rows
        if min(read, slot) >= 0
    }
    return poisoned(SLOTS * COLUMNS + 1, 6, 4, 5, used=used, seed=5, dtype=dtype)


@ALL_ROWS
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 3e-6),
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float16, 1e-3),
        (torch.bfloat16, torch.float32, 8e-3),
    ],
)
def test_ssm_update(
    rows: Rows, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float
) -> None:
    table, a = block_table(6), ssm_arguments(rows, dtype)
    states = ssm_states(rows, table, state_dtype)
    before, want = states.clone(), naive_ssm(rows, states, table, a)
    y = selective_state_update_reference(
        **a,
        states=states,
        rows=rows.on(table),
        max_scheduled=rows.max_scheduled,
    )
    assert y.dtype == dtype
    check_ssm(y, states, before, want, tolerance)


@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
@pytest.mark.parametrize("strong", [1.0, 8.0])
def test_ssm_chunk_scan(chunk_size: int, strong: float) -> None:
    rows, table = PREFILL_ROWS, block_table(7)
    a = ssm_arguments(rows, torch.float32, strong)
    states = ssm_states(rows, table, torch.float32)
    before, want = states.clone(), naive_ssm(rows, states, table, a)
    y = chunk_scan_reference(
        **a,
        states=states,
        rows=rows.on(table),
        max_scheduled=rows.max_scheduled,
        chunk_size=chunk_size,
    )
    check_ssm(y, states, before, want, 5e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_ssm_clamps_the_time_step(scan: bool) -> None:
    rows, table = PREFILL_ROWS, block_table(8)
    a = ssm_arguments(rows, torch.float64)
    states = ssm_states(rows, table, torch.float64)
    before = states.clone()
    want = naive_ssm(rows, states, table, a, 0.3, 0.9)
    more: dict[str, Any] = {"chunk_size": 8} if scan else {}
    operation: Any = chunk_scan_reference if scan else selective_state_update_reference
    y = operation(
        **a,
        states=states,
        rows=rows.on(table),
        max_scheduled=rows.max_scheduled,
        dt_min=0.3,
        dt_max=0.9,
        **more,
    )
    check_ssm(y, states, before, want, 1e-12)


# (slot, computed, scheduled): decode, T tokens, prefill, fresh prefill, padded.
ATTENTION_ROWS = [(3, 20, 1), (0, 6, 4), (-1, 3, 2), (2, 0, 13), (5, 9, 7), (-1, 0, 0), (4, 0, 1)]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_store_kv_and_paged_attention(block_size: int, dtype: torch.dtype) -> None:
    heads, kv_heads, size = 6, 2, 8
    torch.manual_seed(9)
    tokens = sum(row[2] for row in ATTENTION_ROWS) + 2  # two belong to no row
    starts = [sum(row[2] for row in ATTENTION_ROWS[:i]) for i in range(len(ATTENTION_ROWS) + 1)]
    slot, computed, _ = (
        torch.tensor(v, dtype=torch.int32) for v in zip(*ATTENTION_ROWS, strict=True)
    )
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    q = torch.randn(tokens, heads, size, dtype=dtype)
    k, v = torch.randn(2, tokens, kv_heads, size, dtype=dtype)
    table = block_table(10)
    shape = (SLOTS * COLUMNS + 1, block_size, kv_heads, size)
    caches = (torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype))
    history: dict[int, list[Tensor]] = {}
    for s, n, _ in ATTENTION_ROWS:
        if s >= 0:
            history[s] = [torch.randn(n, kv_heads, size, dtype=dtype) for _ in range(2)]
            for p in range(n):
                for blocks, old in zip(caches, history[s], strict=True):
                    blocks[int(table[s, p // block_size]), p % block_size] = old[p]
    expected = [blocks.clone() for blocks in caches]
    y_expected = torch.zeros(tokens, heads, size, dtype=dtype)
    for i, (s, n, count) in enumerate(ATTENTION_ROWS):
        own = slice(starts[i], starts[i] + count)
        if s < 0 or count == 0:
            continue
        whole = []
        for blocks, old, new in zip(expected, history[s], (k, v), strict=True):
            for j, value in enumerate(new[own]):
                p = n + j
                blocks[int(table[s, p // block_size]), p % block_size] = value
            joined = torch.cat([old, new[own]]).repeat_interleave(heads // kv_heads, dim=1)
            whole.append(joined.transpose(0, 1))
        mask = torch.ones(count, n + count, dtype=torch.bool).tril(n)
        y_expected[own] = F.scaled_dot_product_attention(
            q[own].transpose(0, 1), whole[0], whole[1], attn_mask=mask, scale=0.3
        ).transpose(0, 1)
    cache = KVCache(*caches, table)
    rows = AttentionRows(slot, cu_seqlens, computed)
    store_kv_reference(k, v, cache, rows)
    for found, want in zip(caches, expected, strict=True):
        assert same_bytes(found, want)
    y = paged_attention_reference(q, cache, rows, max_scheduled=13, max_context=25, scale=0.3)
    torch.testing.assert_close(y, y_expected, rtol=1e-5, atol=1e-6)


def test_caches_of_two_shapes_are_refused() -> None:
    rows = UPDATE_ROWS
    with pytest.raises(ValueError, match=r"cache\.v is"):
        store_kv_reference(
            torch.zeros(1, 2, 8),
            torch.zeros(1, 2, 8),
            KVCache(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 1, 8), block_table(0)),
            AttentionRows(rows.fields[0][:1], rows.fields[1][:2], rows.fields[2][:1]),
        )
