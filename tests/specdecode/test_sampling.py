"""Random numbers, token distributions and request parameters."""

import math
import re
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from helpers.sampling import sampling_tensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid_runtime.kernels.sampling.naive import probabilities_reference, sample_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.sampling import (
    ACCEPT,
    DRAFT,
    SYNTHETIC,
    TARGET,
    SamplingParams,
    uniform,
)

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform_oracle(seed: int, position: int, stream: int) -> float:
    start = mix((mix((seed + GAMMA) & MASK) + GAMMA * (stream + 1)) & MASK)
    return (mix((start + GAMMA * (position + 1)) & MASK) >> 40) / 2**24


def tensors(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> SamplingTensors:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return sampling_tensors([params] * rows, list(range(rows)))


def test_mix_is_published_splitmix64() -> None:
    # Published test vector: the first outputs for the seed 1234567.
    outputs = [mix((1234567 + GAMMA * (i + 1)) & MASK) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 3))
def test_uniform_equals_unbounded_integers(seed: int, position: int, stream: int) -> None:
    got = uniform(torch.tensor([seed]), torch.tensor([position]), stream)
    assert got.dtype == torch.float32
    assert got.item() == uniform_oracle(seed, position, stream)
    assert 0 <= got.item() < 1


def test_uniform_knows_nothing_of_the_batch() -> None:
    seed = torch.arange(50)
    position = torch.arange(50)[:, None] * 3 + torch.arange(4)
    whole = uniform(seed, position, ACCEPT)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seed[order], position[order], ACCEPT), whole[order])
    assert torch.equal(uniform(seed[7:8], position[7:8, 2], ACCEPT), whole[7:8, 2])
    assert torch.equal(uniform(seed, position[:, :, None], ACCEPT)[:, :, 0], whole)


def test_uniform_looks_random() -> None:
    seeds, positions = 512, 512
    seed = torch.arange(seeds)
    position = torch.arange(positions).expand(seeds, -1).contiguous()
    u = {s: uniform(seed, position, s).double() for s in (DRAFT, ACCEPT, TARGET, SYNTHETIC)}
    limit = 5 / math.sqrt(seeds * positions)  # five standard deviations of a correlation
    centred = {}
    for stream, value in u.items():
        assert abs(value.mean().item() - 0.5) < limit * math.sqrt(1 / 12)
        assert abs(value.var().item() - 1 / 12) < limit * math.sqrt(1 / 180)
        counts = torch.histc(value, 64, 0, 1)
        chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum().item()
        assert chi < 63 + 5 * math.sqrt(2 * 63)
        centred[stream] = (value - 0.5) * math.sqrt(12)
        for shifted in (centred[stream].roll(1, 0), centred[stream].roll(1, 1)):
            assert abs((centred[stream] * shifted).mean().item()) < limit
        # Any two rows, not only neighbours.
        between = centred[stream] @ centred[stream].T / positions
        between.fill_diagonal_(0)
        assert between.abs().max().item() < 6.5 / math.sqrt(positions)
    for a, b in pairwise(centred):
        assert abs((centred[a] * centred[b]).mean().item()) < limit
        assert not torch.equal(u[a], u[b])


def test_uniform_refuses_wrong_input() -> None:
    with pytest.raises(ValueError, match=r"seed is 'int32 \[2\]', must be int64"):
        uniform(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match=r"position is 'int64 \[3\]', must be int64 \[2"):
        uniform(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 0)


def distribution_oracle(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if temperature == 0:
        return [float(t == order[0]) for t in range(len(logits))]
    order = order[: top_k or len(order)]
    weight = {t: math.exp((logits[t] - logits[order[0]]) / temperature) for t in order}
    total = sum(weight.values())
    kept: list[int] = []
    before = 0.0
    for token in order:
        assume(top_p == 1 or not kept or abs(before - top_p) > 1e-5)
        if kept and before >= top_p and top_p < 1:
            break
        kept.append(token)
        before += weight[token] / total
    total = sum(weight[t] for t in kept)
    return [weight[t] / total if t in kept else 0.0 for t in range(len(logits))]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    # Few different values, so that ties are the rule.
    st.lists(st.integers(-4, 4).map(lambda x: x / 2), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.integers(0, 14),
    st.sampled_from([0.001, 0.2, 0.5, 0.77, 0.95, 1.0]),
)
def test_probabilities_equal_sorted_oracle(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected = torch.tensor(distribution_oracle(logits, temperature, top_k, top_p))
    got = probabilities_reference(
        torch.tensor(logits)[None, None], tensors(1, temperature, top_k, top_p)
    )
    assert got.dtype == torch.float32
    assert torch.equal(got[0, 0] > 0, expected > 0)
    torch.testing.assert_close(got[0, 0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60])
@pytest.mark.parametrize("top_p", [0.2, 0.85, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.03])
def test_probabilities_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 3 * torch.randn(20, 100, generator=torch.Generator().manual_seed(3))
    warpers: list[Any] = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    wanted = logits
    for warper in warpers:
        wanted = warper(None, wanted)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities_reference(logits[:, None], sampling_tensors([params] * 20, [0] * 20))
    assert torch.equal(got[:, 0] > 0, wanted > -torch.inf)
    torch.testing.assert_close(got[:, 0], wanted.softmax(-1), rtol=1e-5, atol=1e-8)


def test_ties_keep_the_lowest_tokens() -> None:
    flat = torch.zeros(1, 1, 4)
    assert probabilities_reference(flat, tensors(1, 0.0)).tolist() == [[[1, 0, 0, 0]]]
    assert probabilities_reference(flat, tensors(1, 1.0, top_k=2)).tolist() == [[[0.5, 0.5, 0, 0]]]
    assert probabilities_reference(flat, tensors(1, 1.0, top_p=0.5)).tolist() == [
        [[0.5, 0.5, 0, 0]]
    ]
    third = probabilities_reference(flat, tensors(1, 1.0, top_p=0.51))
    torch.testing.assert_close(third[0, 0], torch.tensor([1, 1, 1, 0]) / 3)
    # top-p sees what top-k left: of two halves the first alone reaches a half.
    assert probabilities_reference(flat, tensors(1, 1.0, 2, 0.5)).tolist() == [[[1, 0, 0, 0]]]


def test_rows_keep_their_own_parameters() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.6),
    ]
    logits = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(1))
    sampling = sampling_tensors(params, [5, 6, 7, 8])
    got = probabilities_reference(logits, sampling)
    for row in range(4):
        alone = sampling.select(torch.tensor([row], dtype=torch.int32))
        torch.testing.assert_close(
            probabilities_reference(logits[row : row + 1], alone)[0], got[row]
        )
    assert sampling.select(torch.tensor([2, -1])).seed.tolist() == [7, 5]
    torch.testing.assert_close(got.sum(-1), torch.ones(4, 3))


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[3e38, -3e38, -torch.inf, 1.0]]])
    for temperature in (0.0, 1e-30, 1e-3, 1.0, 1e30):
        got = probabilities_reference(logits, tensors(1, temperature))
        assert got[0, 0, 2] == 0
        torch.testing.assert_close(got.sum(), torch.tensor(1.0))
    # A tail that rounding swallows is still there when nothing was asked to be cut.
    wide = probabilities_reference(torch.tensor([[[0.0] + [-18.0] * 50]]), tensors(1, 1.0))
    assert (wide > 0).all()


def test_sample_inverts_the_distribution() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    got = sample_reference(probs.expand(6, -1), u)
    assert got.dtype == torch.int32
    assert got.tolist() == [1, 1, 3, 3, 4, 4]
    # Weights that do not sum to 1 mean the same.
    assert sample_reference(probs.expand(6, -1) * 0.3, u).tolist() == got.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]))
def test_sample_never_takes_an_impossible_token(seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(4, 3000, generator=generator) ** 30
    probs[torch.rand(4, 3000, generator=generator) < 0.5] = 0
    probs[:, 0] = 0
    probs[:, -1] = 0
    token = sample_reference(probs, torch.full((4,), u))
    assert (probs.gather(1, token[:, None].long()) > 0).all()


def test_sampled_frequencies() -> None:
    rows = 200_000
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    u = uniform(torch.arange(rows), torch.full((rows,), 11), TARGET)
    counts = torch.bincount(sample_reference(probs.expand(rows, -1), u).long(), minlength=5)
    assert counts[1] == 0
    expected = probs[probs > 0] * rows
    chi = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    assert chi < 21.1  # three degrees of freedom, one in 10,000


WRONG: list[tuple[str, list[Any], str]] = [
    ("temperature", [-0.1, math.nan, math.inf, "1"], "a finite number >= 0"),
    ("top_k", [-1, 1.5], "an integer >= 0"),
    ("top_p", [0.0, 1.01], "a number > 0 and <= 1"),
    ("min_p", [-0.1, 1.5], "a number in [0, 1]"),
    ("repetition_penalty", [0, math.inf, 1e-38, 1e39], "a number in [1e-30, 1e+30]"),
    ("presence_penalty", [2.1], "a number in [-2, 2]"),
    ("frequency_penalty", [math.nan], "a number in [-2, 2]"),
    (
        "logit_bias",
        [[1], {-1: 0.0}, {"1": 0.0}, {1: 101}, dict.fromkeys(range(301), 1.0)],
        "None or a mapping of at most 300 tokens",
    ),
    ("logprobs", [21, True], "None or an integer in [0, 20]"),
    ("n", [0], "an integer in [1, 128]"),
    ("seed", [-1, 2**63], "None or an integer >= 0"),
    ("prompt_logprobs", [21, -1], "None or an integer in [0, 20]"),
    ("max_tokens", [-1, True], "an integer >= 0"),
    ("min_tokens", [-1, 129], "an integer in [0, 128], at most max_tokens"),
    (
        "bad_words",
        ["word", ("",), ("a",) * 129, ("a" * 257,)],
        "a tuple of at most 128 non-empty strings of at most 256 characters",
    ),
    ("allowed_token_ids", [(), (-1,), 3], "None or a tuple of at least one integer >= 0"),
    ("stop", ["end", ("",)], "a tuple of non-empty strings"),
    ("stop_token_ids", [(-1,), 3, (2**31,)], "a tuple of integers >= 0"),
    ("ignore_eos", [1], "True or False"),
    ("include_stop_str_in_output", [1], "True or False"),
    ("skip_special_tokens", [None], "True or False"),
]
"""Arguments, wrong values of each, and what it must be."""


@pytest.mark.parametrize(
    ("argument", "value", "must"),
    [(name, value, must) for name, values, must in WRONG for value in values],
)
def test_params_are_validated(argument: str, value: object, must: str) -> None:
    message = f"{argument} is {value!r}, must be {must}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SamplingParams(**cast(dict[str, Any], {argument: value}))


def test_params_accept_what_they_should() -> None:
    SamplingParams()
    stop: Any = ["\n"]  # a list, where the type says tuple
    params = SamplingParams(temperature=1, top_k=5, top_p=1, seed=0, stop=stop)
    assert params.stop == ("\n",)
    bias: Any = {3: 1, 5: -2.5}
    params = SamplingParams(logit_bias=bias)
    bias[7] = 1
    assert params.logit_bias == {3: 1, 5: -2.5}
    params.check_vocabulary(6)
    with pytest.raises(ValueError, match=r"^logit_bias is .* must be of tokens in 0\.\.4"):
        params.check_vocabulary(5)
    params = SamplingParams(top_k=2**31, max_tokens=0, allowed_token_ids=(7, 2), min_tokens=0)
    params.check_vocabulary(8)
    with pytest.raises(ValueError, match=r"^allowed_token_ids is .* must be of tokens in 0\.\.6"):
        params.check_vocabulary(7)


EXTREMES: dict[str, list[Any]] = {
    "temperature": [0], "top_p": [1], "min_p": [0, 1], "repetition_penalty": [1e-30, 1e30],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2], "logprobs": [0, 20], "n": [128],
    "logit_bias": [{0: -100, 2**31 - 1: 100}, dict.fromkeys(range(300), 1.0)],
    "seed": [0, 2**63 - 1], "prompt_logprobs": [0, 20], "min_tokens": [128],
    "bad_words": [("a" * 256,) * 128], "allowed_token_ids": [(0, 2**31 - 1)],
    "stop_token_ids": [(0, 2**31 - 1)],
}  # fmt: skip
ADJUST = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_accepted(name: str) -> None:
    for value in EXTREMES[name]:
        params = SamplingParams(**cast(dict[str, Any], {name: value}))
        assert params.adjusts == (name in (*ADJUST, "allowed_token_ids"))


def test_each_completion_has_parameters_of_its_own() -> None:
    each = SamplingParams(n=3, seed=2**63 - 2, temperature=0.5).each()
    assert [p.seed for p in each] == [2**63 - 2, 2**63 - 1, 0]
    assert {(p.n, p.temperature) for p in each} == {(1, 0.5)}
    assert [p.seed for p in SamplingParams(n=2).each()] == [None, None]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \[3, 1, 4\], must be \[2"):
        probabilities_reference(torch.zeros(3, 1, 4), tensors(2, 1.0))
    with pytest.raises(ValueError, match=r"u has shape \[3\], must be \[2\]"):
        sample_reference(torch.ones(2, 4), torch.zeros(3))


def test_nothing_depends_on_the_data() -> None:
    # Meta tensors have no values: any host read or data-dependent shape raises.
    params = [SamplingParams(temperature=1.0)] * 3
    with torch.device("meta"):
        sampling = sampling_tensors(params, [1, 2, 3], "meta")
        position = torch.zeros(3, 2, dtype=torch.int64)
        probs = probabilities_reference(torch.zeros(3, 2, 9, dtype=torch.bfloat16), sampling)
        token = sample_reference(probs, uniform(sampling.seed, position, TARGET))
    assert token.shape == (3, 2)
    assert token.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bits_on_every_device() -> None:
    seed = torch.randint(0, 2**62, (300,), generator=torch.Generator().manual_seed(0))
    position = torch.arange(300)[:, None] * 1000 + torch.arange(4)
    u = uniform(seed, position, TARGET)
    assert torch.equal(uniform(seed.cuda(), position.cuda(), TARGET).cpu(), u)
    probs = torch.randn(300, 4, 30_000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    assert torch.equal(sample_reference(probs.cuda(), u.cuda()).cpu(), sample_reference(probs, u))
