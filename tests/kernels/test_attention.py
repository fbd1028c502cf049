"""KV store and paged attention kernels against their references and PyTorch's own attention."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from helpers.interpreter import INTERPRETED, elsewhere, kernels, run_in_interpreter
from helpers.interpreter_changes import round_to_nearest
from helpers.tensors import DEVICE, frame_is_whole, framed, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.attention import reduce
from hybrid_runtime.kernels.attention.launch import (
    AttentionRows,
    KVCache,
    Splits,
    attention_scratch,
    attention_splits,
    attention_tiling,
)
from hybrid_runtime.kernels.attention.paged import paged_attention, paged_attention_reference
from hybrid_runtime.kernels.attention.store_kv import store_kv, store_kv_reference
from hybrid_runtime.kernels.linear.quantize import E4M3

GPU = torch.cuda.is_available()
if INTERPRETED:
    round_to_nearest()


@pytest.mark.slow
@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


TWO = Splits(2)


@dataclass(frozen=True)
class Case:
    """Rows are (context before the row, tokens of the row), or None for a padded row of 2 tokens;
    two tokens before the first row and one behind the last belong to nobody. scales: of keys and
    values."""

    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    rows: tuple[tuple[int, int] | None, ...] = ((40, 4), None, (0, 1), (5, 8), (69, 3), (30, 0))
    splits: Splits | None = TWO
    cache_dtype: torch.dtype | None = None
    scales: tuple[float, float] | None = None
    strided: bool = False


BASE = Case()
NARROW = replace(BASE, cache_dtype=E4M3, scales=(0.01, 0.37))
VERIFY = ((296, 4), (31, 4), None, (79, 4))
PROMPTS = ((0, 70), (33, 13), (0, 1))
SMALL = {
    "base": BASE,
    "bf16": replace(BASE, dtype=torch.bfloat16),
    "fp16": replace(BASE, dtype=torch.float16),
    "fp16 cache": replace(BASE, cache_dtype=torch.float16),
    "wide cache": replace(BASE, dtype=torch.bfloat16, cache_dtype=torch.float32),
    "one head": replace(BASE, heads=1, kv_heads=1),
    "one group": replace(BASE, heads=4, kv_heads=1),
    "no groups": replace(BASE, heads=3, kv_heads=3),
    "group of 5": replace(BASE, heads=5, kv_heads=1),
    "group of 16": replace(BASE, heads=16, kv_heads=1, rows=((69, 3), (0, 8))),
    "head of 128": replace(BASE, size=128),
    "head of 8": replace(BASE, size=8),
    "head of 80": replace(BASE, size=80),
    "block of 48": replace(BASE, block_size=48),
    "block of 128": replace(BASE, block_size=128),
    "block of 7": replace(BASE, block_size=7),
    "tiles in two blocks": replace(
        BASE, block_size=80, rows=((296, 4), (75, 8), None, (79, 1), (0, 70), (80, 1))
    ),
    "1 split": replace(BASE, splits=Splits(1)),
    "3 splits": replace(BASE, splits=Splits(3)),
    "8 splits": replace(BASE, splits=Splits(8)),
    "8 splits of 48 or more": replace(BASE, splits=Splits(8, 48)),
    "chosen splits": replace(BASE, splits=None),
    "strided": replace(BASE, strided=True),
    "8 splits of blocks of 128": replace(BASE, block_size=128, splits=Splits(8)),
    "all padded": replace(BASE, rows=(None, None)),
    "prefill": replace(BASE, rows=((0, 20), (33, 13)), heads=8, kv_heads=1),
    "prefill of several tiles": replace(BASE, rows=((0, 70), (33, 13)), heads=8, kv_heads=1),
    "splits behind what the first token sees": replace(
        BASE, heads=2, size=256, rows=((15, 40), (0, 33)), splits=Splits(4)
    ),
    "lengths 1..8": replace(BASE, rows=tuple((i * 9, i) for i in range(1, 9))),
    "context 1": replace(BASE, rows=((0, 1),)),
    "bf16 cache": replace(BASE, cache_dtype=torch.bfloat16),
    "e4m3": NARROW,
    "e4m3 without scales": replace(NARROW, scales=None),
    "e4m3 of bf16": replace(NARROW, dtype=torch.bfloat16),
    "e4m3 of fp16": replace(NARROW, dtype=torch.float16, scales=(3.0, 0.004)),
    "e4m3, decode": replace(NARROW, rows=tuple((37 * i, 1) for i in range(5))),
    "e4m3, verify": replace(NARROW, rows=VERIFY, splits=Splits(8)),
    "e4m3, verify in bf16": replace(
        NARROW, dtype=torch.bfloat16, rows=VERIFY, splits=None, block_size=80, size=128
    ),
    "e4m3, prompts": replace(NARROW, rows=PROMPTS, heads=8, kv_heads=1, splits=Splits(3)),
    "e4m3, strided": replace(NARROW, strided=True, size=80, block_size=48),
    "context 300": replace(BASE, rows=((296, 4), (31, 1), (32, 1), (255, 1))),
}
LARGE = {
    f"{dtype} {heads}/{kv_heads}x{size} block {block} rows {len(rows)}": Case(
        dtype, heads, kv_heads, size, block, rows, splits
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for heads, kv_heads, size, block, rows, splits in [
        (32, 8, 128, 1056, ((4000, 4), (1055, 4), (1, 4), None, (2111, 1), (700, 8)), None),
        (32, 8, 128, 128, tuple((37 * i, 1 + i % 4) for i in range(48)), None),
        (32, 2, 128, 16, ((3000, 4), (2000, 8)), Splits(64)),
        (40, 8, 128, 48, ((1500, 4), None, (3, 3)), Splits(16, 100)),
        (8, 4, 64, 128, ((0, 700), (500, 300), (10, 1)), None),
        (32, 8, 128, 1056, ((1000, 300), (0, 70), (2100, 33)), None),
        (16, 4, 256, 16, ((3000, 4), (17, 4), None, (900, 1)), None),
        (24, 4, 256, 64, ((1000, 300), (0, 70), (2100, 8)), None),
        (16, 2, 256, 64, ((2000, 8), (63, 4), (5, 700)), Splits(16)),
    ]
}
LARGE |= {
    f"e4m3, {name}": replace(case, cache_dtype=E4M3, scales=(0.02, 0.3))
    for name, case in LARGE.items()
    if case.dtype != torch.float32
}
CASES = [pytest.param(case, id=name) for name, case in SMALL.items()]
CASES += [
    pytest.param(case, id=name, marks=pytest.mark.gpu)
    for name, case in LARGE.items()
    if GPU or not triton.knobs.runtime.interpret
]


class Setup:
    """Everything random, NaN wherever nobody may read."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = [2 if row is None else row[1] for row in case.rows]
        self.starts = [2 + sum(tokens[:i]) for i in range(len(tokens) + 1)]
        self.tokens = self.starts[-1] + 1
        self.contexts = [0 if row is None else sum(row) for row in case.rows]
        self.max_context = max([*self.contexts, 1]) + 11
        self.max_scheduled = max(tokens)
        cache_dtype = case.cache_dtype or case.dtype
        columns = -(-self.max_context // case.block_size)
        slots = len(case.rows) + 2
        order = torch.randperm(slots * columns, generator=generator) + 1
        table = order.reshape(slots, columns).to(torch.int32)
        used = [0 if row is None else row[0] for row in case.rows]
        slot = torch.randperm(slots, generator=generator)[: len(case.rows)].to(torch.int32)
        slot[[row is None for row in case.rows]] = -1

        def cache(scale: float | None) -> Tensor:
            shape = (slots * columns + 1, case.block_size, case.kv_heads, case.size)
            if case.strided:  # [blocks, heads, positions, dim], and room behind each block
                shape = (shape[0], case.kv_heads + 1, case.block_size, case.size)
            memory = torch.full(shape, math.nan, dtype=cache_dtype)
            if case.strided:
                memory = memory[:, : case.kv_heads].transpose(1, 2)
            for s, length in zip(slot.tolist(), used, strict=True):
                if s < 0:
                    continue
                position = torch.arange(length)
                block = table[s, position // case.block_size].long()
                values = torch.randn(length, case.kv_heads, case.size, generator=generator)
                values = (values / (scale or 1)).clamp(-448, 448)
                memory[block, position % case.block_size] = values.to(cache_dtype)
            return memory.to(DEVICE)

        def heads(count: int) -> Tensor:
            extra = 16 if case.strided else 0
            values = torch.randn(self.tokens, count, case.size + extra, generator=generator)
            return values.to(case.dtype).to(DEVICE)[..., : case.size]

        scales = case.scales or (None, None)
        k, v = map(cache, scales)
        tensors = (None if one is None else torch.tensor(one, device=DEVICE) for one in scales)
        self.cache = KVCache(k, v, table.to(DEVICE), *tensors)
        self.q, self.k, self.v = heads(case.heads), heads(case.kv_heads), heads(case.kv_heads)
        self.rows = AttentionRows(
            slot.to(DEVICE),
            torch.tensor(self.starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(used, dtype=torch.int32, device=DEVICE),
        )
        self.scale = case.size**-0.5
        self.bounds = (self.max_scheduled, self.max_context, self.scale)

    def expected(self) -> Tensor:
        """PyTorch's attention, row by row, in fp64."""
        y = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        block_size = self.cache.k.shape[1]
        for i, s in enumerate(self.rows.slot.tolist()):
            own = slice(self.starts[i], self.starts[i + 1])
            count = own.stop - own.start
            if s < 0 or count == 0:
                continue
            position = torch.arange(self.contexts[i], device=DEVICE)
            block = self.cache.block_table[s, position // block_size].long()
            k, v = (
                blocks[block, position % block_size].double().transpose(0, 1)
                * (1 if scale is None else scale.double())
                for blocks, scale in (
                    (self.cache.k, self.cache.k_scale),
                    (self.cache.v, self.cache.v_scale),
                )
            )
            mask = torch.ones(count, len(position), dtype=torch.bool, device=DEVICE)
            y[own] = F.scaled_dot_product_attention(
                self.q[own].double().transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask.tril(len(position) - count),
                scale=self.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return y


@kernels
@pytest.mark.parametrize("case", CASES)
def test_writes_and_attends(case: Case) -> None:
    setup = Setup(case)
    expected = setup.cache._replace(k=setup.cache.k.clone(), v=setup.cache.v.clone())
    store_kv_reference(setup.k, setup.v, expected, setup.rows)
    store_kv(setup.k, setup.v, setup.cache, setup.rows)
    assert same_bytes(setup.cache.k, expected.k)
    assert same_bytes(setup.cache.v, expected.v)

    y = framed(setup.q)
    paged_attention(setup.q, setup.cache, setup.rows, *setup.bounds, splits=case.splits, out=y)
    assert frame_is_whole(y)
    want = setup.expected()
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case.dtype]
    error = float((y.double() - want).norm() / max(float(want.norm()), 1e-30))
    assert error <= tolerance
    assert float((y.double() - want).abs().max()) <= 8 * tolerance
    reference = paged_attention_reference(setup.q, setup.cache, setup.rows, *setup.bounds)
    torch.testing.assert_close(y, reference, rtol=4 * tolerance, atol=4 * tolerance)
    nobody = want.abs().sum((1, 2)) == 0
    assert bool((y[nobody] == 0).all())


@kernels
@pytest.mark.parametrize("rows", [BASE.rows, ((69, 3), (296, 5), (0, 9))], ids=["base", "uneven"])
def test_many_programs_sum_several_steps_each(
    rows: tuple[tuple[int, int] | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(replace(BASE, rows=rows))
    store_kv(setup.k, setup.v, setup.cache, setup.rows)
    arguments = (setup.q, setup.cache, setup.rows, *setup.bounds, Splits(4))
    few = paged_attention(*arguments)
    monkeypatch.setattr(reduce, "FEW_PROGRAMS", 0)
    many = framed(setup.q)
    paged_attention(*arguments, out=many)
    assert frame_is_whole(many)
    assert torch.equal(many, few)


@pytest.mark.parametrize(
    ("group", "drafts", "tiles"), [(4, 15, 1), (5, 15, 1), (16, 7, 1), (16, 15, 2), (1, 0, 1)]
)
def test_decoding_rows_take_few_tiles(group: int, drafts: int, tiles: int) -> None:
    """Each reads the whole context."""
    for dtype in (torch.bfloat16, torch.float16):
        assert attention_tiling(group, 128, drafts + 1, dtype).query_tiles == tiles


@pytest.mark.parametrize("tokens", [4, 16, 64, 3072])
def test_small_heads_stay_below_64_rows(tokens: int) -> None:
    """Of which Triton 3.6 makes wrong outputs."""
    assert attention_tiling(8, 16, tokens, torch.bfloat16).block_m < 64
    assert attention_tiling(8, 32, max(tokens, 8), torch.bfloat16).block_m >= 64


@kernels
def test_scratch_of_the_caller() -> None:
    setup = Setup(replace(BASE, rows=((296, 4), (31, 1), None)))
    store_kv(setup.k, setup.v, setup.cache, setup.rows)
    needed = attention_scratch(setup.q, Splits(4))
    scratch = torch.full((needed + 3,), math.nan, device=DEVICE)
    arguments = (setup.q, setup.cache, setup.rows, *setup.bounds, Splits(4))
    assert torch.equal(paged_attention(*arguments, scratch), paged_attention(*arguments))
    assert bool(scratch[needed:].isnan().all())
    with pytest.raises(ValueError, match="scratch is"):
        paged_attention(*arguments, scratch[: needed - 1])
    assert attention_scratch(setup.q, Splits(1)) == 0


@kernels
@pytest.mark.parametrize("scale", [None, 1.0, 0.0371, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
def test_stored_in_8_bits_is_the_nearest_number(
    store: Any, dtype: torch.dtype, scale: float | None
) -> None:
    """Of those that there are, the one that is even where two are as near; what is beyond all of
    them becomes the largest, and NaN stays NaN."""
    setup = Setup(replace(NARROW, dtype=dtype, rows=((3, 100),), size=32))
    given = None if scale is None else torch.tensor(scale, device=DEVICE)
    cache = setup.cache._replace(k_scale=given, v_scale=given)
    exponents = torch.rand(setup.k.shape, generator=torch.Generator().manual_seed(2)) * 24 - 13
    setup.k *= exponents.exp2().to(DEVICE, dtype) * (scale or 1)
    setup.k[5, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    ties = torch.tensor([17.0, 19.0, 0.0009765625, 0.0029296875, -464.0, 1e9, -1e-9])
    setup.k[6, 1, :7] = (ties * (scale or 1)).to(DEVICE, dtype)
    store(setup.k, setup.v, cache, setup.rows)

    numbers = torch.arange(128, dtype=torch.uint8, device=DEVICE)[:-1].view(E4M3).double()
    factor = 1 if given is None else given.reciprocal()
    x = (setup.k[2:102].float() * factor).double().clamp(-448, 448)
    distance = (x.abs()[..., None] - numbers).abs()
    distance[..., 1::2] *= 1 + 1e-12  # of two as near the even one
    want = numbers[distance.nan_to_num().argmin(-1)].copysign(x).where(~x.isnan(), x)
    position = torch.arange(3, 103, device=DEVICE)
    block = cache.block_table[setup.rows.slot.long(), position // 16].long()
    found = cache.k[block, position % 16].double()
    assert torch.equal(found.nan_to_num(1e3), want.nan_to_num(1e3))
    assert int(found.isnan().sum()) == 1
    assert int((found.abs() == 448).sum()) > 2


@kernels
def test_wrong_shapes_are_refused() -> None:
    setup = Setup(BASE)
    with pytest.raises(ValueError, match="q has 3 heads"):
        paged_attention(setup.q[:, :3], setup.cache, setup.rows, *setup.bounds)
    with pytest.raises(ValueError, match="out is"):
        paged_attention(setup.q, setup.cache, setup.rows, *setup.bounds, out=setup.q[1:])
    with pytest.raises(ValueError, match=r"cache\.v is"):
        store_kv(setup.k, setup.v[:, :1], setup.cache, setup.rows)
    one, narrow = torch.ones((), device=DEVICE), Setup(NARROW).cache
    for cache, words in (
        (
            setup.cache._replace(k_scale=one),
            r"k_scale is torch.float32 \[\] of a cache in torch.fl",
        ),
        (narrow._replace(k_scale=one.double()), r"k_scale is torch.float64 \[\] of a cache in"),
        (narrow._replace(v_scale=one[None]), r"v_scale is torch.float32 \[1\] of a cache in"),
    ):
        for store in (store_kv, store_kv_reference):
            with pytest.raises(ValueError, match=rf"cache\.{words}"):
                store(setup.k, setup.v, cache, setup.rows)


@pytest.mark.gpu
def test_splits_fill_the_gpu_from_bounds_alone() -> None:
    q = torch.empty(4096, 32, 128, dtype=torch.bfloat16, device="cuda")
    for bound in (1024, 8192):
        chosen = [attention_splits(q, 8, rows, 4, bound) for rows in (1, 16, 64, 1024)]
        assert chosen == sorted(chosen, key=lambda splits: (-splits.programs, splits.least))
        assert chosen[0].programs > 16
        assert chosen[-1].programs == -(-bound // chosen[-1].least)
    assert attention_splits(q, 8, 1, 4, 64).programs <= 2


@pytest.mark.gpu
def test_one_graph_serves_every_context() -> None:
    """Splits and scratch from bounds; what is replayed follows the lengths on the device."""
    setup = Setup(replace(BASE, dtype=torch.bfloat16, rows=((900, 4), (300, 4))))
    store_kv(setup.k, setup.v, setup.cache, setup.rows)
    arguments = (setup.q, setup.cache, setup.rows, *setup.bounds)
    paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = paged_attention(*arguments)
    slots = setup.rows.slot.tolist()
    for computed, slot in [((900, 300), slots), ((17, 200), slots), ((899, 0), [-1, slots[1]])]:
        setup.rows.computed.copy_(torch.tensor(computed))
        setup.rows.slot.copy_(torch.tensor(slot))
        graph.replay()
        want = paged_attention_reference(*arguments)
        torch.testing.assert_close(y, want, rtol=3e-2, atol=3e-2)
