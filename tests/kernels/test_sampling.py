"""Kernels that choose, accept and draw tokens, against their references."""

from typing import Any

import pytest
import torch
from helpers.hopper import compiled
from helpers.interpreter import kernels, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.sampling import accept, argmax, uniform

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lines", "vocabulary"), [(3, 9000), (1, 4096), (5, 37), (0, 10)])
def test_argmax(lines: int, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(lines)
    logits = torch.randint(-9, 9, (lines, vocabulary + 3), generator=generator)  # many ties
    logits = logits.to(DEVICE, dtype)[:, :vocabulary]
    out = torch.full((lines, 2), -1, dtype=torch.int32, device=DEVICE)
    argmax.argmax(logits, out[:, 1])
    best = logits.float().amax(-1, keepdim=True) if lines else logits
    wanted = (logits == best).int().argmax(-1) if lines else logits[:, 0]
    assert torch.equal(out[:, 1].long(), wanted.long())
    assert (out[:, 0] == -1).all()


@kernels
def test_argmax_of_nothing_finite_is_a_token() -> None:
    for value in (float("-inf"), float("nan")):
        for vocabulary in (5000, 2 * argmax.TILE):
            found = argmax.argmax(torch.full((2, vocabulary), value, device=DEVICE))
            assert ((found >= 0) & (found < vocabulary)).all()


@kernels
@pytest.mark.parametrize("vocabulary", [37, argmax.TILE, 2 * argmax.TILE + 5])
def test_argmax_counts_broken_logits(vocabulary: int) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(6, vocabulary)
    logits[:, 3] = 1.0
    broken = [0, 1, 2, 3, vocabulary, vocabulary]
    logits[0, 5:] = -inf  # forbidden tokens
    logits[1, -1] = nan
    logits[2, [0, -1]] = inf
    logits[3, [0, 7, -1]] = torch.tensor([nan, inf, nan])
    logits[4], logits[5] = nan, -inf
    out = torch.empty(6, dtype=torch.int32, device=DEVICE)
    for act in (argmax.argmax, argmax.argmax_reference):
        found = act(logits.to(DEVICE), out, marks=True)
        assert found.tolist() == [-1 - count if count else 3 for count in broken]
    found = argmax.argmax(logits.to(DEVICE))
    assert found[0] == 3
    assert ((found >= 0) & (found < vocabulary)).all()


@kernels
@settings(max_examples=40)
@given(st.data())
def test_accept_drafts(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    num_draft = data.draw(st.one_of(st.integers(0, 5), st.just(15)))
    few = st.integers(-1, 2)

    def table(width: int, values: st.SearchStrategy[int]) -> Tensor:
        lines = [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in range(rows)]
        return torch.tensor(lines, dtype=torch.int32, device=DEVICE).view(rows, width)

    more = data.draw(st.integers(0, 2))  # columns, for drafts that no row of this step has
    chosen, drafts = table(num_draft + 1, st.integers(0, 2)), table(num_draft + more, few)
    drafts = drafts[:, :num_draft]
    count = table(1, st.integers(0, num_draft))[:, 0]
    emits = table(1, st.integers(0, 1))[:, 0]
    forced: tuple[Tensor, ...] = ()
    if data.draw(st.booleans()) and num_draft:
        rates = torch.tensor([[0.9, 0.5, 0.5, 0.2, *[0.0] * 11], [1.0, *[0.3] * 14]], device=DEVICE)
        kind = table(1, st.integers(0, 1))[:, 0].long()
        rates = rates[kind, :num_draft] if data.draw(st.booleans()) else rates[:1].expand(rows, -1)
        rates = rates[:, :num_draft]
        forced = (rates, table(1, st.integers(0, 9))[:, 0] / 10)
    found = accept.accept_drafts(chosen, drafts, count, emits, *forced)
    wanted = accept.accept_drafts_reference(chosen, drafts, count, emits, *forced)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@kernels
def test_each_row_is_forced_by_its_own_number() -> None:
    ones = torch.ones(4, 4, dtype=torch.int32, device=DEVICE)
    rates = torch.tensor([0.9, 0.5, 0.2], device=DEVICE).expand(4, -1)
    drawn = torch.tensor([0.1, 0.3, 0.6, 0.95], device=DEVICE)
    for act in (accept.accept_drafts, accept.accept_drafts_reference):
        _, counts = act(0 * ones, ones[:, 1:], 3 * ones[:, 0], ones[:, 0], rates, drawn)
        assert counts.tolist() == [4, 3, 2, 1]


@kernels
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4), (200, 3)])
def test_uniform(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    seed = torch.randint(-(2**62), 2**62, shape[:1], generator=generator).to(DEVICE)
    position = torch.randint(0, 2**20, shape, generator=generator).to(DEVICE)
    for stream in (0, 3):
        found = uniform.uniform(seed, position, stream)
        assert torch.equal(found, uniform.uniform_reference(seed, position, stream))


COMPILED = [
    (
        argmax._part_kernel,
        {"V": 131072, "PARTS": 32, "TILE": 4096},
        {"logits": "*bf16", "values": "*fp32"},
    ),
    *(
        (
            argmax._whole_kernel,
            {"V": 131072, "PARTS": 32, "WIDTH": 32, "MARKS": marks},
            {"values": "*fp32"},
        )
        for marks in (False, True)
    ),
    *(
        (
            accept._accept_drafts_kernel,
            {"NUM_DRAFT": 3, "FORCED": forced, "WIDTH": 8},
            {"rates": "*fp32", "drawn": "*fp32"},
        )
        for forced in (False, True)
    ),
    (
        uniform._uniform_kernel,
        {"START": uniform.stream_start(2), "TILE": 128},
        {"seed": "*i64", "position": "*i64", "out": "*fp32"},
    ),
]
NUMBERS = {"rows", "count", "width", "stride"}


@plain
@pytest.mark.parametrize(("kernel", "constants", "types"), COMPILED)
def test_compiles_for_hopper(
    kernel: JITFunction, constants: dict[str, Any], types: dict[str, str]
) -> None:
    plain = {
        name: "i32" if name in NUMBERS or name.endswith("_stride") else "*i32"
        for name in kernel.arg_names
    }
    assert compiled(kernel, constants, **plain | types).asm["cubin"]
