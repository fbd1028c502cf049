"""KV store and paged attention kernels against their references and PyTorch's own attention."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
import triton
from helpers.interpreter import elsewhere, kernels, run_in_interpreter
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

GPU = torch.cuda.is_available()


@pytest.mark.slow
@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


TWO = Splits(2)


@dataclass(frozen=True)
class Case:
    """Rows are (context before the row, tokens of the row), or None for a padded row of 2 tokens;
    two tokens before the first row and one behind the last belong to nobody."""

    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    rows: tuple[tuple[int, int] | None, ...] = ((40, 4), None, (0, 1), (5, 8), (69, 3), (30, 0))
    splits: Splits | None = TWO
    cache_dtype: torch.dtype | None = None
    strided: bool = False


BASE = Case()
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
    ]
}
# The interpreter cuts fp32 off to bf16, where everybody else rounds.
LARGE["bf16 cache"] = replace(BASE, cache_dtype=torch.bfloat16)
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

        def cache() -> Tensor:
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
                memory[block, position % case.block_size] = values.to(cache_dtype)
            return memory.to(DEVICE)

        def heads(count: int) -> Tensor:
            extra = 16 if case.strided else 0
            values = torch.randn(self.tokens, count, case.size + extra, generator=generator)
            return values.to(case.dtype).to(DEVICE)[..., : case.size]

        self.cache = KVCache(cache(), cache(), table.to(DEVICE))
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
                for blocks in (self.cache.k, self.cache.v)
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
    expected = KVCache(setup.cache.k.clone(), setup.cache.v.clone(), setup.cache.block_table)
    store_kv_reference(setup.k, setup.v, expected, setup.rows)
    store_kv(setup.k, setup.v, setup.cache, setup.rows)
    for found, stored in zip(setup.cache, expected, strict=True):
        assert same_bytes(found, stored)

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
def test_wrong_shapes_are_refused() -> None:
    setup = Setup(BASE)
    with pytest.raises(ValueError, match="q has 3 heads"):
        paged_attention(setup.q[:, :3], setup.cache, setup.rows, *setup.bounds)
    with pytest.raises(ValueError, match="out is"):
        paged_attention(setup.q, setup.cache, setup.rows, *setup.bounds, out=setup.q[1:])
    with pytest.raises(ValueError, match=r"cache\.v is"):
        store_kv(setup.k, setup.v[:, :1], setup.cache, setup.rows)


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
