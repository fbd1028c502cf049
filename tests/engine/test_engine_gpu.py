"""The engine on a GPU: the CPU's text, with graphs and without, and no hidden waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import randomise

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Engine, EngineConfig, Request, SamplingParams
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.specdecode.drafter import HeadDrafter
from hybrid_runtime.state import sync_guard

pytestmark = pytest.mark.gpu
TOKENS = 80
NARROW: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "pattern": "M*M", "mtp_pattern": "*",
    "num_nextn_predict_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 64,
}  # fmt: skip
NOISE = 1e-3
"""Logits closer than this may swap places between devices."""


def build(device: str, **options: Any) -> Engine:
    options = {"drafter": "mtp", "num_speculative_tokens": 3, "block_size": 32} | options
    return Engine.from_pretrained(SHIPPED, device=device, dtype="float32", **options)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain = build("cpu", drafter=None, num_speculative_tokens=0)
    return [a.tokens for a in plain.generate(PROMPTS, params)]


def margin(prompt: str, tokens: list[int]) -> float:
    """Distance of the two best logits after these tokens."""
    plain = build("cpu", drafter=None, num_speculative_tokens=0, max_requests=1)
    found = []
    plain.model.backbone.norm_f.register_forward_hook(lambda *a: found.append(a[2]))
    original = plain.model.logits

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        found.append(original(hidden))
        return found[-1]

    plain.model.logits = watch  # type: ignore[method-assign]
    plain.generate([[*prompt.encode(), *tokens]], SamplingParams(max_tokens=1, ignore_eos=True))
    best = found[-1].flatten().topk(2).values
    return float(best[0] - best[1])


ROWS = [
    *(
        {"strategy": s, "graphs": g}
        for s in ("auto", "always", "defer", "blocking")
        for g in (0, 1)
    ),
    *({"num_speculative_tokens": k} for k in (1, 2, 5)),
    {"drafter": None, "num_speculative_tokens": 0},
    {"drafter": None, "num_speculative_tokens": 0, "graphs": 0},
    *({"max_requests": n} for n in (1, 3, 16)),
    *({"block_size": b} for b in (16, 128)),
    {"drafter": "eagle"},
    {"drafter": "ngram"},
    {"steps_ahead": 0},
    {"conv_layout": "DS"},
    {"max_tokens_per_step": 40},
    *(
        {"state_layout": "replay"} | more
        for more in (
            {},
            {"graphs": 0},
            {"num_speculative_tokens": 5},
            {"max_requests": 3},
            {"block_size": 16, "strategy": "blocking"},
            {"ring_tokens": 0},
            {"ring_tokens": 0, "block_size": 16, "graphs": 0},
            {"ring_tokens": 4, "block_size": 16},
            {"num_speculative_tokens": 7, "ring_tokens": 8},
            {"num_speculative_tokens": 15},
            {"num_speculative_tokens": 15, "drafter": "ngram", "ring_tokens": 0},
        )
    ),
    {"state_layout": "columns", "num_speculative_tokens": 15},
]


@pytest.mark.parametrize("options", ROWS, ids=str)
def test_greedy_text_is_that_of_the_cpu(wanted: list[list[int]], options: dict[str, Any]) -> None:
    if "graphs" in options:
        options = options | {"graphs": bool(options["graphs"])}
    answers = build("cuda", **options).generate(
        PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    )
    for prompt, answer, want in zip(PROMPTS, answers, wanted, strict=True):
        assert answer.finish_reason == "length", answer.error
        for i, (a, b) in enumerate(zip(answer.tokens, want, strict=True)):
            if a != b:
                assert margin(prompt, want[:i]) < NOISE, f"token {i} is {a} instead of {b}"
                break


@pytest.mark.parametrize(
    "options", [{}, {"ssm_dtype": torch.float16, "stochastic_rounding": True}], ids=str
)
def test_seeded_sampling_is_the_same_with_graphs(options: dict[str, Any]) -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    found = [
        [a.tokens for a in build("cuda", graphs=graphs, **options).generate(PROMPTS, params)]
        for graphs in (True, False)
    ]
    assert found[0] == found[1]


ARRIVALS = [
    {"state_layout": "replay"},
    {"state_layout": "columns", "max_requests": 3},
    {"max_prompt_tokens": 24, "max_tokens_per_step": 80, "max_requests": 16},
    {"drafter": None, "num_speculative_tokens": 0},
    {"ssm_dtype": "float16", "sampled_drafts": True},
]


@pytest.mark.parametrize("options", ARRIVALS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_with_prompts_give_the_text_of_eager_ones(
    options: dict[str, Any], temperature: float
) -> None:
    """Requests arrive one by one: prompts mix into decode steps. From memory full of NaN."""
    found = []
    prompts = [f"{prompt}{'# ' * n}" for n in range(9) for prompt in PROMPTS]
    for graphs in (True, False):
        runs = build("cuda", graphs=graphs, **options)
        runs.capture()
        caches = runs.runner.caches
        for pair in (*caches.kv.values(), *caches.states.values()):
            for tensor in pair:
                tensor.fill_(float("nan"))
        requests: list[Request] = []
        while len(requests) < len(prompts) or not runs.idle:
            if len(requests) < len(prompts):
                n = len(requests)
                params = SamplingParams(
                    temperature=temperature, seed=n, max_tokens=20 + n, ignore_eos=True
                )
                requests.append(runs.submit(prompts[n], params))
            runs.step()
            runs.step()
        assert all(request.error is None for request in requests)
        found.append(requests)
    for prompt, one, other in zip(prompts, *found, strict=True):
        for i, (a, b) in enumerate(zip(one.output, other.output, strict=True)):
            if a != b:
                assert temperature or margin(prompt, other.output[:i]) < NOISE
                break
    same = sum(one.output == other.output for one, other in zip(*found, strict=True))
    assert same >= 0.9 * len(prompts)


def test_drafts_by_an_output_weight_in_8_bits_are_the_same() -> None:
    """Of a wide vocabulary and random weights, whose best tokens are close to each other."""
    shape = NemotronHConfig(**NARROW)
    model = NemotronH(shape, "cuda", torch.bfloat16)
    head = MTPHead(model)
    randomise(model, seed=1)
    randomise(head, seed=2)
    found = []
    for narrows in (True, False):
        config = EngineConfig(drafter="mtp", max_requests=20, block_size=32, steps_ahead=0)
        runs = Engine(model, config, eos_token_ids=(), head=head)
        drafter = runs.runner._phases.drafter
        assert isinstance(drafter, HeadDrafter)
        if not narrows:
            drafter.narrow_head = None
        assert (drafter.narrow_head is not None) == narrows
        runs.capture()
        prompts = [[7 * n, 3000 - n, 5] for n in range(20)]
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [runs.submit(prompt, params) for prompt in prompts]
        drafts = []
        while not runs.idle:
            runs.step()
            drafts.append(runs.sequences.drafts.clone())
        found.append((torch.stack(drafts), [request.output for request in requests]))
    (ours, texts), (wanted, wanted_texts) = found
    assert texts == wanted_texts
    # Sums in another order may round a logit to another neighbour.
    assert torch.eq(ours, wanted).float().mean() > 0.99


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_second_turns_start_behind_the_last_drafts(steps_ahead: int) -> None:
    """What they passed is folded, or stored by the step that is queued, and nobody waits."""
    options = {"block_size": 16, "max_requests": 16, "num_blocks": (600, 400)}
    runs = build("cuda", steps_ahead=steps_ahead, **options)
    runs.capture()
    plain = build("cuda", prefix_caching=False, **options)
    prompts = [f"# {n}\n{prompt}" for n in range(8) for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=20 + n, ignore_eos=True) for n in range(len(prompts))]
    runs.generate(["x = 1"] * 3, params[:3])  # compiles what only such loads need
    with sync_guard() as waits:
        first = runs.generate(prompts, params)
        chats = [[*p.encode(), *a.tokens] for p, a in zip(prompts, first, strict=True)]
        second = runs.generate(chats, params[0])
    assert not waits.undeclared, waits.reasons
    for prompt, before, chat, answer, want in zip(
        prompts, first, chats, second, plain.generate(chats, params[0]), strict=True
    ):
        assert answer.hit.tokens >= len(chat) - 16
        for i, (a, b) in enumerate(zip(answer.tokens, want.tokens, strict=True)):
            if a != b:
                assert margin(prompt, before.tokens + want.tokens[:i]) < NOISE
                break
    stats = runs.stats().state
    assert stats.rows_flushed >= stats.flush_launches
    assert stats.flush_launches > 0 or steps_ahead


@pytest.mark.parametrize(
    "options", [{"strategy": "auto"}, {"strategy": "always"}, {"state_layout": "replay"}], ids=str
)
def test_300_steps_of_mixed_load_never_wait_unseen(options: dict[str, Any]) -> None:
    """Prefill and decode, sampled and greedy, arrivals, aborts and ends of all kinds."""
    runs = build("cuda", max_requests=6, max_model_len=512, **options)
    runs.capture()
    rng = np.random.default_rng(0)
    live: list[Request] = []

    def some_steps(count: int) -> None:
        for _ in range(count):
            if rng.random() < 0.3 or runs.idle:
                prompt = [int(t) for t in rng.integers(0, 256, rng.integers(1, 200))]
                params = SamplingParams(
                    temperature=float(rng.integers(2)) * 0.8,
                    max_tokens=int(rng.integers(1, 60)),
                    ignore_eos=bool(rng.integers(2)),
                )
                live.append(runs.submit(prompt, params))
            if rng.random() < 0.05:
                runs.abort(live[int(rng.integers(len(live)))])
            runs.step()

    some_steps(60)  # compiles what only such loads need
    with sync_guard() as waits:
        some_steps(300)
    assert not waits.undeclared, waits.reasons
    assert all(r.error is None for r in live)
    behind = sum(n for why, n in waits.reasons.items() if "nothing queued" in why)
    assert behind <= 0.1 * 300, waits.reasons
