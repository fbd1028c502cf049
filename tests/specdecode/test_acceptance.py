"""Greedy, rejection and synthetic acceptance."""

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.sampling import assert_emits, excess, rows_of, sampling_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.kernels.sampling.naive import probabilities_reference, sample_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.acceptance import (
    Acceptance,
    Accepted,
    greedy,
    rejection,
    synthetic,
    synthetic_acceptance,
)
from hybrid_runtime.specdecode.reference import matching
from hybrid_runtime.specdecode.reference import rejection as rejection_reference
from hybrid_runtime.specdecode.sampling import (
    DRAFT,
    SamplingParams,
    uniform,
)

V = 8
ROWS = 100_000
START = 3  # first absolute position
Numbers = Callable[[int, int, int], float]  # by row, stream and index of the emitted token


def tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target logits and draft logits given the token before: two different Markov chains."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(V, V, generator=generator)
    return target, target + 1.2 * torch.randn(V, V, generator=generator)


def generate(
    target: Tensor,
    sampling: SamplingTensors,
    num_draft: int,
    length: int,
    draft: Tensor | None = None,
    claimed: Tensor | None = None,
    limit: Tensor | None = None,
) -> Tensor:
    """``length`` tokens per row by speculative steps, as the step loop makes them.

    ``draft`` [V, V] is the distribution that drafts are drawn from, ``claimed`` what the acceptance
    takes for it (default: the same); without ``draft`` the drafts are the next higher tokens.
    ``limit`` [rows]: drafts per row (default: ``num_draft``).
    """
    rows = len(sampling.seed)
    limit = torch.full((rows,), num_draft) if limit is None else limit
    position = torch.full((rows,), START)
    last = torch.zeros(rows, dtype=torch.int64)
    text = torch.full((rows, length * (num_draft + 1)), -1, dtype=torch.int32)
    for _ in range(length):
        chain, device_tokens = [last], []
        for j in range(num_draft):
            if draft is None:
                chain.append((chain[-1] + 1) % V)
            else:
                drawn = sample_reference(
                    draft[chain[-1]], uniform(sampling.seed, position + j, DRAFT)
                )
                device_tokens.append((draft if claimed is None else claimed)[chain[-1]])
                chain.append(drawn.long())
        drafts = torch.stack(chain, 1)[:, 1:].int()
        drafts = torch.where(torch.arange(num_draft) < limit[:, None], drafts, -1)
        accepted = rejection(
            target[torch.stack(chain, 1)],
            drafts,
            limit.int(),
            torch.ones(rows, dtype=torch.bool),
            torch.stack(device_tokens, 1) if device_tokens else None,
            sampling,
            position,
        )
        index = (position - START)[:, None] + torch.arange(num_draft + 1)
        text.scatter_(1, index, accepted.tokens)
        count = accepted.num_accepted.long()
        last = accepted.tokens.gather(1, count[:, None] - 1)[:, 0].long()
        position = position + count
    return text[:, :length].long()


def misfit(text: Tensor, logits: Tensor, params: SamplingParams) -> float:
    """Worst ``excess`` of the first token and the pairs (1, 2) and (2, 3) against the target."""
    p = probabilities_reference(logits[:, None], rows_of(params, V))[:, 0]
    first = p[0]
    pair = first[:, None] * p
    later = (first @ p)[:, None] * p
    return max(
        excess(text[:, 0], first),
        excess(text[:, 0] * V + text[:, 1], pair.flatten()),
        excess(text[:, 1] * V + text[:, 2], later.flatten()),
    )


SAMPLED = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_k=6, top_p=0.93, min_p=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [0, 1, 3])
@pytest.mark.parametrize("params", [SAMPLED, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "fixed"])
def test_distribution_is_the_targets(num_draft: int, params: SamplingParams, drawn: bool) -> None:
    target, draft = tables()
    text = generate(
        target, rows_of(params, ROWS), num_draft, 3, draft.softmax(-1) if drawn else None
    )
    assert misfit(text, target, params) < 1


@pytest.mark.slow
def test_distribution_with_one_hot_probabilities_and_unequal_counts() -> None:
    # Fixed drafts that come with explicit one-hot distributions take the general path.
    target, _ = tables(1)
    next_token = torch.eye(V).roll(1, 1)
    text = generate(target, rows_of(SAMPLED, ROWS), 3, 3, next_token, limit=torch.arange(ROWS) % 4)
    assert misfit(text, target, SAMPLED) < 1


@pytest.mark.slow
def test_statistic_detects_a_wrong_draft_distribution() -> None:
    target, draft = tables()
    text = generate(
        target, rows_of(SAMPLED, ROWS), 3, 3, draft.softmax(-1), claimed=torch.full((V, V), 1 / V)
    )
    assert misfit(text, target, SAMPLED) > 10


def one_draft(
    weights: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0),
    share_number: bool = False,
    ratio: Callable[[Tensor, Tensor], Tensor] = torch.div,
    fixed: bool = False,
) -> float:
    """``excess`` of a plain version of the algorithm with one draft, by torch's own generator."""
    target, draft = (table.softmax(-1) for table in tables())
    p = target[0]
    q = torch.eye(V)[int(p.argmax())] if fixed else draft[0]
    generator = torch.Generator().manual_seed(5)
    drafted = torch.multinomial(q, ROWS, replacement=True, generator=generator)
    u = torch.rand(ROWS, generator=generator)
    other = u if share_number else torch.rand(ROWS, generator=generator)
    cumulative = weights(p, q).cumsum(0)
    replaced = torch.searchsorted(cumulative / cumulative[-1], other, right=True).clamp(max=V - 1)
    emitted = torch.where(u < ratio(p, q)[drafted], drafted, replaced)
    return excess(emitted, p)


@pytest.mark.parametrize("fixed", [False, True], ids=["drawn", "fixed"])
def test_statistic_accepts_the_residual_and_detects_everything_else(fixed: bool) -> None:
    assert one_draft(fixed=fixed) < 1
    assert one_draft(lambda p, q: p, fixed=fixed) > 10
    assert one_draft(lambda p, q: (p - q).abs(), fixed=fixed) > 10
    assert one_draft(share_number=True, fixed=fixed) > 10
    assert one_draft(ratio=lambda p, q: torch.ones(V), fixed=fixed) > 10


@pytest.mark.parametrize("same", [False, True], ids=["other", "same"])
def test_acceptance_is_as_high_as_it_can_be(same: bool) -> None:
    # Leviathan et al. 2023, corollary 3.6: the mean acceptance rate is sum(min(p, q)).
    target, draft = tables()
    sampling = rows_of(SAMPLED, ROWS)
    p, q = probabilities_reference(torch.stack([target[:1], draft[:1]]), rows_of(SAMPLED, 2))[:, 0]
    q = p if same else q
    position = torch.full((ROWS,), START)
    drafts = sample_reference(q.expand(ROWS, -1), uniform(sampling.seed, position, DRAFT))[:, None]
    ones, logits = torch.ones(ROWS, dtype=torch.int32), target[0].expand(ROWS, 2, V)
    got = rejection(logits, drafts, ones, ones, q.expand(ROWS, 1, V), sampling, position)
    rate = got.num_accepted.double().mean().item() - 1
    expected = min(torch.minimum(p, q).sum().item(), 1.0)
    assert abs(rate - expected) <= 4 * math.sqrt(expected * (1 - expected) / ROWS) + same * 1e-6


def test_fixed_drafts_do_not_change_the_text() -> None:
    target, _ = tables(2)
    sampling = rows_of(FILTERED, 500)
    plain = generate(target, sampling, 0, 12)
    for num_draft in (1, 2, 5):
        assert torch.equal(generate(target, sampling, num_draft, 12), plain)


def test_text_of_a_seed_does_not_depend_on_the_batch() -> None:
    target, draft = tables(2)
    sampling = rows_of(SAMPLED, 64)
    q, order = draft.softmax(-1), torch.tensor([40, 3, 17])
    whole = generate(target, sampling, 3, 8, q)
    assert torch.equal(generate(target, sampling.select(order), 3, 8, q), whole[order])


def test_residual_of_zero_falls_back_to_the_target() -> None:
    # The draft has no probability in either, and nothing is left of p - q.
    logits = torch.tensor([-torch.inf, 0.0, 0.0]).expand(40, 2, 3)
    q = torch.tensor([0.0, 0.5, 0.5]).expand(40, 1, 3)
    sampling = rows_of(SAMPLED, 40)
    ones = torch.ones(40, dtype=torch.int32)
    got = rejection(logits, ones[:, None] * 0, ones, ones, q, sampling, torch.arange(40))
    assert got.num_accepted.tolist() == [1] * 40
    assert set(got.tokens[:, 0].tolist()) == {1, 2}


def by_reference(
    p: Tensor, q: Tensor | None, drafts: Tensor, num_draft: Tensor, emits: Tensor, numbers: Numbers
) -> tuple[list[list[int]], list[int]]:
    """Tokens and counts of all rows, each by the reference."""
    tokens, counts = [], []
    for row, drafted in enumerate(drafts.tolist()):
        emitted: list[int] = []
        if emits[row]:
            made = [*drafted[: num_draft[row]], -1]
            made = made[: made.index(-1)]  # a draft that was not made ends them
            accept = matching if q is None else rejection_reference
            q_row = [] if q is None else list(q[row])
            n, own = accept(list(p[row]), q_row, made, partial(numbers, row))
            emitted = [*made[:n], own]
        counts.append(len(emitted))
        tokens.append(emitted + [-1] * (p.shape[1] - len(emitted)))
    return tokens, counts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 5) | st.just(15), st.integers(1, 5), st.integers(0, 2**31), st.integers(2, 4))
def test_every_acceptance_equals_the_reference(
    most: int, rows: int, seed: int, vocabulary: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Three values only, so that ties are the rule.
    logits = torch.randint(0, 3, (rows, most + 1, vocabulary), generator=generator).float()
    drafts = torch.randint(-1, vocabulary, (rows, most), generator=generator).int()
    best = logits[:, :most].argmax(-1).int()
    drafts = torch.where(torch.rand(rows, most, generator=generator) < 0.7, best, drafts)
    num_draft = torch.randint(0, most + 1, (rows,), generator=generator).int()
    emits = torch.rand(rows, generator=generator) < 0.8
    draft_probs = torch.rand(rows, most, vocabulary, generator=generator).softmax(-1)
    position = torch.arange(rows) + START

    def numbers(row: int, stream: int, index: int) -> float:
        return uniform(sampling.seed, position + index, stream)[row].item()

    # The same as lines, without those behind a row's drafts, in any order and among others.
    tried = torch.minimum(torch.arange(most + 1), num_draft[:, None])
    order = torch.randperm(rows * (most + 1) + 2, generator=generator)[: rows * (most + 1)]
    verify = order.view(rows, -1).gather(1, tried.long()).int()
    lines = torch.full((rows * (most + 1) + 2, vocabulary), float("nan"))
    lines[verify.long()] = logits.gather(1, tried.long()[:, :, None].expand_as(logits))

    # Temperature 0 is greedy whatever the draft distribution was.
    sampling = rows_of(SamplingParams(top_k=2, top_p=0.5), rows)
    p = probabilities_reference(logits, sampling)
    expected = by_reference(p, None, drafts, num_draft, emits, numbers)
    assert_emits(greedy(logits, drafts, num_draft, emits), *expected)
    assert_emits(greedy(logits.bfloat16(), drafts, num_draft, emits.int()), *expected)
    assert_emits(greedy(lines, drafts, num_draft, emits, verify=verify), *expected)
    for q in (None, draft_probs):
        assert by_reference(p, q, drafts, num_draft, emits, numbers) == expected
        got = rejection(logits, drafts, num_draft, emits, q, sampling, position)
        assert_emits(got, *expected)

    sampling = rows_of(FILTERED, rows)
    p = probabilities_reference(logits, sampling)
    for q in (None, draft_probs):
        expected = by_reference(p, q, drafts, num_draft, emits, numbers)
        for x, at in ((logits, None), (lines, verify)):
            got = rejection(x, drafts, num_draft, emits, q, sampling, position, at)
            assert_emits(got, *expected)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    target, draft = tables()
    rows = 400
    params = [SamplingParams(), SAMPLED] * (rows // 2)
    sampling = sampling_tensors(params, list(range(rows)))
    text = generate(target, sampling, 3, 4, draft.softmax(-1))
    assert (text[::2] == text[0]).all()
    assert not (text[1::2] == text[1]).all()


def test_wrong_shapes_are_refused() -> None:
    logits, drafts, count = torch.zeros(2, 4, V), torch.zeros(2, 3).int(), torch.ones(2).int()
    sampling, zeros = rows_of(SAMPLED, 2), torch.zeros(2).long()
    for wrong, message in (
        ((logits[:, 0], drafts, count, count), "logits has shape [2, 8], must be [rows, K + 1, V]"),
        ((logits, count[:, None], count, count), "drafts has shape [2, 1], must be [2, 3]"),
        ((logits, drafts, count[:1], count), "num_draft has shape [1], must be [2]"),
        ((logits, drafts, count, count[:1]), "emits has shape [1], must be [2]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            greedy(*wrong)
        with pytest.raises(ValueError, match=re.escape(message)):
            rejection(*wrong, None, sampling, zeros)
    with pytest.raises(ValueError, match=r"draft_probs has shape \[2, 4, 8\], must be None or"):
        rejection(logits, drafts, count, count, logits, sampling, zeros)
    with pytest.raises(ValueError, match=r"rates has shape \[1, 2\], must be \[2, 3\]"):
        synthetic(logits, drafts, count, count, torch.ones(1, 2), zeros, zeros)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 4, 8\] and verify \[2, 4\], must"):
        greedy(logits, drafts, count, count, verify=drafts.new_zeros(2, 4))
    with pytest.raises(ValueError, match=r"drafts has shape \[2, 3\], must be \[2, 2\]"):
        greedy(logits[0], drafts, count, count, verify=drafts.new_zeros(2, 3))


def test_nothing_depends_on_the_data() -> None:
    # Meta tensors have no values: any host read or data-dependent shape raises.
    forced = synthetic_acceptance([[1.0, 0.5, 0.0]], "meta")
    methods: tuple[Acceptance, ...] = (greedy, rejection, forced)
    with torch.device("meta"):
        logits, drafts = torch.zeros(2, 4, V), torch.zeros(2, 3, dtype=torch.int32)
        count = torch.ones(2, dtype=torch.int32)
        sampling = sampling_tensors([SAMPLED] * 2, [0, 1], "meta")
        position = torch.zeros(2, dtype=torch.int64)
        for method in methods:
            for q in (None, logits[:, 1:]):
                for x, at in ((logits, None), (logits.flatten(0, 1)[:5], drafts.new_zeros(2, 4))):
                    got = method(x, drafts, count, count, q, sampling, position, at)
                    assert got.tokens.shape == (2, 4)
                    assert got.num_accepted.shape == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lines", [False, True], ids=["rows", "lines"])
@pytest.mark.parametrize("name", ["greedy", "rejection", "rejection of drawn", "synthetic"])
def test_captured_in_a_cuda_graph(name: str, lines: bool) -> None:
    target, draft = tables()
    rows = 64
    params = [SamplingParams(), SAMPLED, FILTERED, SAMPLED] * (rows // 4)
    drafts = torch.randint(-1, V, (rows, 3), generator=torch.Generator().manual_seed(0)).int()
    previous = torch.cat([torch.zeros(rows, 1), drafts.clamp(min=0)], 1).long()
    position = torch.arange(rows) + START

    def step(device: str, position: Tensor) -> Callable[[], Accepted]:
        forced = synthetic_acceptance([[1.0, 0.5, 0.0]], device)
        methods: dict[str, Acceptance] = {"greedy": greedy, "synthetic": forced}
        q = draft.softmax(-1)[previous[:, :3]].to(device) if "drawn" in name else None
        sampling = sampling_tensors(params, list(range(rows)), device)
        num_draft, emits = (torch.arange(rows) % 4).int(), torch.arange(rows) % 5 != 0
        inputs = [x.to(device) for x in (target[previous], drafts, num_draft, emits)]
        accept, verify = methods.get(name, rejection), None
        if lines:
            inputs[0] = inputs[0].flatten(0, 1)
            verify = torch.arange(len(inputs[0]), dtype=torch.int32, device=device).view(rows, -1)
        return lambda: accept(*inputs, q, sampling, position, verify)

    on_device = position.cuda()
    run = step("cuda", on_device)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for shift in (0, 100):
        on_device.copy_(position + shift)
        graph.replay()
        expected = step("cpu", position + shift)()
        assert torch.equal(got.tokens.cpu(), expected.tokens)
        assert torch.equal(got.num_accepted.cpu(), expected.num_accepted)
