"""Tokens drawn by a threshold search, against the distribution found by sorting."""

from typing import Any

import pytest
import torch
from helpers.hopper import compiled, spilled
from helpers.interpreter import elsewhere, kernels, plain, run_in_interpreter
from helpers.sampling import misdrawn, sampling_tensors
from torch import Tensor

from hybrid_runtime.kernels.sampling import probabilities, select, uniform
from hybrid_runtime.kernels.sampling.naive import probabilities_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.sampling import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = select.SelectTiling(tile=128, piece=64, few=16, warps=1)
STREAM = 2
V = 300

# Every way through the kernel: no cut, a cut that leaves few or many, ties at it, none at all.
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=90),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=V + 1),
    SamplingParams(temperature=1.0, top_p=0.301),
    SamplingParams(temperature=2.0, top_p=0.951),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, top_k=8, top_p=0.6),
    SamplingParams(temperature=1.5, top_k=100, top_p=0.903),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=60, top_p=0.903, min_p=0.05),
    SamplingParams(temperature=1e-30, top_p=0.903),
    SamplingParams(temperature=1e30, top_k=40),
    SamplingParams(temperature=0.1, top_k=90, top_p=0.951),
    SamplingParams(temperature=0.02, top_k=50),
]


def kinds(seed: int) -> dict[str, Tensor]:
    """Logits of one line each: smooth, with ties nearly everywhere, one peak, all the same."""
    generator = torch.Generator().manual_seed(seed)
    smooth = 2 * torch.randn(V, generator=generator)
    ties = torch.randint(-3, 3, (V,), generator=generator) / 2
    peak = smooth.clone()
    peak[117] = 30
    masked = smooth.clone()
    masked[::2] = -torch.inf
    return {"smooth": smooth, "ties": ties, "peak": peak, "masked": masked, "flat": 0 * smooth}


def strided(sampling: SamplingTensors, slots: Tensor) -> SamplingTensors:
    """The same rows, as sequences keep them: by slot, in lines of several words."""
    rows = len(slots)
    words = torch.zeros((rows + 2, 6), dtype=torch.int32, device=DEVICE)
    floats = words.view(torch.float32)
    lines = SamplingTensors(
        floats[:, 2], words[:, 3], floats[:, 4], floats[:, 5], words.view(torch.int64)[:, 0]
    )
    for line, value in zip(lines, sampling[:5], strict=False):
        assert line is not None
        assert value is not None
        line[slots.long()] = value
    return lines.of(slots.int())


@elsewhere
@pytest.mark.parametrize("kind", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(kind: str) -> None:
    run_in_interpreter(__file__, "-m", kind)


@kernels
@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        (torch.float32, 0),
        (torch.bfloat16, 1),
        pytest.param(torch.float32, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 3, marks=pytest.mark.slow),
        pytest.param(torch.float16, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_draws_what_the_reference_draws(dtype: torch.dtype, first: int) -> None:
    rows = len(PARAMS)
    lines = [list(kinds(row).values())[(row + first) % 5] for row in range(rows)]
    logits = torch.stack(lines)[:, None].to(DEVICE, dtype)
    sampling = sampling_tensors(PARAMS, list(range(rows)), DEVICE)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    position = torch.arange(rows, device=DEVICE, dtype=torch.int32) * 5
    got, probs = probabilities.select_with_probabilities(
        logits, strided(sampling, slots), position, STREAM, tiling=SMALL
    )
    expected = probabilities_reference(logits, sampling)
    assert torch.equal(probs > 1e-11, expected > 1e-11)  # see `cut._NOTHING`
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-9)
    u = uniform.uniform(sampling.seed, position[:, None].long(), STREAM)
    assert not misdrawn(got, expected, u).any()


@kernels
def test_top_p_is_of_what_top_k_keeps_of_many_ties() -> None:
    """Top-k cuts among ties, of which it keeps two: the others have no part in top-p's sum."""
    logits = torch.zeros(1, 1, V)
    logits[..., [200, 17, 90, 5]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    for top_p, kept in ((0.85, 2), (0.94, 3), (0.97, 4), (0.98, 5), (0.999, 6)):
        params = SamplingParams(temperature=1.0, top_k=6, top_p=top_p)
        sampling = sampling_tensors([params], [0], DEVICE)
        position = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        _, probs = probabilities.select_with_probabilities(
            logits.to(DEVICE), sampling, position, STREAM, tiling=SMALL
        )
        assert (probs > 0).sum() == kept
        torch.testing.assert_close(probs, probabilities_reference(logits.to(DEVICE), sampling))


@kernels
@pytest.mark.parametrize("left", [1, 3])
def test_draws_among_the_few_tokens_that_are_allowed(left: int) -> None:
    """Fewer than top-k keeps, in the middle of the line."""
    rows = len(PARAMS)
    logits = torch.full((rows, 1, V), -torch.inf, device=DEVICE)
    logits[..., 130 : 130 + left] = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)[:left]
    sampling = sampling_tensors(PARAMS, list(range(rows)), DEVICE)
    position = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    got, probs = probabilities.select_with_probabilities(
        logits, sampling, position, STREAM, marks=True, tiling=SMALL
    )
    torch.testing.assert_close(probs, probabilities_reference(logits, sampling))
    u = uniform.uniform(sampling.seed, position[:, None].long(), STREAM)
    assert not misdrawn(got, probs, u).any()


@kernels
@pytest.mark.parametrize("few", [16, 512])
def test_several_positions_of_rows_with_drafts(few: int) -> None:
    rows, width = 4, 3
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(rows, width, V, generator=generator).to(DEVICE)
    params = [PARAMS[0], PARAMS[9], PARAMS[7], PARAMS[12]]
    sampling = sampling_tensors(params, [5, 6, 7, 8], DEVICE)
    position = torch.tensor([3, 0, 70000, 5], device=DEVICE)
    num_draft = torch.tensor([2, 1, 0, 2], device=DEVICE, dtype=torch.int32)
    emits = torch.tensor([1, 1, 1, 0], device=DEVICE)
    got = select.select_tokens(
        logits, sampling, position, STREAM, num_draft, emits, tiling=SMALL._replace(few=few)
    )
    u = uniform.uniform(sampling.seed, position[:, None] + torch.arange(width, device=DEVICE), 2)
    wrong = misdrawn(got, probabilities_reference(logits, sampling), u)
    asked = (torch.arange(width, device=DEVICE) <= num_draft[:, None]) & (emits > 0)[:, None]
    assert not (wrong & asked).any()
    assert ((got >= 0) & (got < V)).all()


@kernels
def test_what_is_not_finite_ends_and_gives_a_token() -> None:
    generator = torch.Generator().manual_seed(3)
    params = [PARAMS[row] for row in (0, 4, 7, 9, 11)]
    rows = len(params)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for share in (0.5, 1.0):
            logits = torch.randn(rows, 1, V, generator=generator)
            logits[torch.rand(rows, 1, V, generator=generator) < share] = bad
            sampling = sampling_tensors(params, list(range(rows)), DEVICE)
            position = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
            got = select.select_tokens(logits.to(DEVICE), sampling, position, STREAM, tiling=SMALL)
            assert ((got >= 0) & (got < V)).all()


@kernels
@pytest.mark.parametrize("with_probabilities", [False, True])
def test_broken_logits_are_counted_and_no_other_draw_changes(with_probabilities: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    params = [PARAMS[row] for row in (0, 4, 7, 9, 11)]
    rows = len(params)
    sampling = sampling_tensors(params, list(range(rows)), DEVICE)
    position = torch.zeros(rows, dtype=torch.int32, device=DEVICE)

    def tokens(logits: Tensor) -> list[int]:
        args = logits.to(DEVICE), sampling, position, STREAM
        if with_probabilities:
            got, _ = probabilities.select_with_probabilities(*args, marks=True, tiling=SMALL)
        else:
            got = select.select_tokens(*args, marks=True, tiling=SMALL)
        return got[:, 0].tolist()

    logits = torch.randn(rows, 1, V, generator=generator)
    wanted = tokens(logits)
    assert min(wanted) >= 0
    logits[1, 0, [0, V - 1]] = torch.nan
    logits[3, 0, 2] = torch.inf
    logits[4] = -torch.inf
    assert tokens(logits) == [wanted[0], -3, wanted[2], -2, -1 - V]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_distribution_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    rows, vocabulary = 512, 131072
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(1, 1, vocabulary, generator=generator).to(DEVICE, dtype)
    for params in PARAMS:
        sampling = sampling_tensors([params] * rows, list(range(rows)), DEVICE)
        position = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        got, probs = probabilities.select_with_probabilities(
            logits.expand(rows, -1, -1).contiguous(), sampling, position, STREAM
        )
        expected = probabilities_reference(logits, sampling_tensors([params], [0], DEVICE))
        u = uniform.uniform(sampling.seed, position[:, None].long(), STREAM)
        assert not misdrawn(got, expected.expand(rows, -1, -1), u).any(), params
        torch.testing.assert_close(probs[:1], expected, rtol=1e-4, atol=1e-8)


TYPES: dict[str, str] = dict.fromkeys(
    ("indices", "few_tokens", "top_k", "slot", "position", "num_draft", "emits", "out", "token",
     "cut_last"), "*i32",
) | dict.fromkeys(
    ("values", "temperature", "top_p", "min_p", "cut_value", "cut_total", "cut_best", "best"),
    "*fp32",
) | {"seed": "*i64"}  # fmt: skip


@plain
@pytest.mark.parametrize("type_", ["*bf16", "*fp32"])
@pytest.mark.parametrize("keeps", [False, True])
def test_select_compiles_for_hopper(type_: str, keeps: bool, tmp_path: Any) -> None:
    kernel = select._select_kernel
    shape = select.TILING
    constants: dict[str, Any] = {
        "START": uniform.stream_start(STREAM), "WIDTH": 4, "BY_SLOT": True, "VERIFIES": not keeps,
        "MARKS": not keeps, "KEEPS_CUT": keeps, "V": 131072, "PARTS": 32, "PART_WIDTH": 32,
        "TILE": shape.tile, "PIECE": shape.piece, "PIECES": 131072 // shape.piece, "FEW": shape.few,
        "SHIFT": 16 if type_ == "*bf16" else 0,
    }  # fmt: skip
    aligned = ("logits", "stride", "few_tokens")
    types = TYPES | {"logits": type_}
    code = compiled(kernel, constants, aligned, {"num_warps": shape.warps}, **types)
    assert spilled(code, tmp_path) <= 64
    assert "ld.global.v4" in code.asm["ptx"]  # 16 bytes at once


@plain
def test_probabilities_compile_for_hopper() -> None:
    kernel = probabilities._probabilities_kernel
    constants = {"WIDTH": 4, "BY_SLOT": True, "V": 131072, "TILE": probabilities.TILE}
    types = TYPES | {"logits": "*bf16", "out": "*fp32"}
    assert compiled(kernel, constants, ("logits", "stride", "out"), {"num_warps": 8}, **types)
