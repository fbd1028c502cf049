"""Embeddings from the engine against transformers' own hidden states, alone and under load."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_engine import (
    NEW_TOKENS,
    VOCABULARY,
    Make,
    fail_at,
    hf_greedy,
    same_text,
    text,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import NemotronHForCausalLM

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, QueueFull, Request, SamplingParams
from hybrid_runtime.state import sync_guard

BLOCK = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 40)
MTP = {"drafter": "mtp", "num_speculative_tokens": 3}
ENGINES: list[dict[str, Any]] = [
    {},
    {"steps_ahead": 1, "max_requests": 3},
    {"max_tokens_per_step": 5},
    MTP | {"steps_ahead": 1},
    MTP | {"state_layout": "columns", "max_tokens_per_step": 13},
    {"drafter": "ngram", "num_speculative_tokens": 3, "strategy": "blocking", "steps_ahead": 1},
    {"drafter": "eagle", "num_speculative_tokens": 5, "prefix_caching": False},
]
PROMPTS = [text(n, 200 + n) for n in LENGTHS]


@pytest.fixture
def make(make: Make) -> Make:
    return lambda **options: make(**{"block_size": BLOCK} | options)


def wanted(
    hf: NemotronHForCausalLM,
    prompts: Sequence[list[int]],
    pooling: str,
    instruction: Sequence[int] = (),
    normalize: bool = True,
) -> Tensor:
    """What transformers' hidden states after the final norm give."""
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            hidden = hf.model(torch.tensor([[*instruction, *prompt]])).last_hidden_state[0]
        kept = hidden[-1:] if pooling == "last" else hidden[len(instruction) :]
        found.append(kept.mean(0))
    vectors = torch.stack(found)
    return vectors / vectors.norm(dim=1, keepdim=True) if normalize else vectors


def close(found: Tensor, want: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("options", ENGINES, ids=str)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(
    make: Make, hf: NemotronHForCausalLM, pooling: Any, options: dict[str, Any]
) -> None:
    """In one chunk and in many, one prompt a step and eight, with an instruction and without; the
    second time around from the cache, where there is one."""
    runs = make(**options)
    for instruction in ([], text(19, 1)):
        want = wanted(hf, PROMPTS, pooling, instruction)
        for _ in range(2):
            close(runs.embed(PROMPTS, pooling, instruction), want)
    assert runs.stats().emitted == 0
    raw = runs.embed(PROMPTS[3:5], pooling, normalize=False)
    close(raw, wanted(hf, PROMPTS[3:5], pooling, normalize=False))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_does_not_depend_on_the_batch(make: Make, pooling: Any) -> None:
    runs = make(prefix_caching=False)
    alone = torch.cat([runs.embed([prompt], pooling) for prompt in PROMPTS])
    torch.testing.assert_close(runs.embed(PROMPTS, pooling), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES[1:5], ids=str)
def test_embedding_and_generating_share_steps(
    make: Make, hf: NemotronHForCausalLM, options: dict[str, Any]
) -> None:
    """Neither knows of the other, whoever comes first, and whoever is found in the cache."""
    runs = make(**options)
    shared = []
    runs.model.register_forward_hook(lambda *_: shared.append(kinds(runs)))
    texts, vectors = [], []
    for prompt in PROMPTS:
        texts.append(runs.submit(prompt, GREEDY))
        vectors.append(runs.submit_embedding(prompt, "mean"))
        vectors.append(runs.submit_embedding(prompt, "last"))
        runs.step()
    while not runs.idle:
        runs.step()
    assert {True, False} in shared
    for prompt, request in zip(PROMPTS, texts, strict=True):
        same_text(hf, prompt, request.output, hf_greedy(hf, prompt))
    assert {r.finish_reason for r in vectors} == {"embedded"}
    for pooling, requests in (("mean", vectors[::2]), ("last", vectors[1::2])):
        want = wanted(hf, PROMPTS, pooling, normalize=False)
        close(torch.stack([vector(r) for r in requests]), want)


def kinds(runs: Engine) -> set[bool]:
    return {r.pooled_from is None for r in runs.scheduler.running}


def vector(request: Request) -> Tensor:
    assert request.embedding is not None
    return request.embedding


def test_a_hit_never_takes_what_is_pooled(make: Make, hf: NemotronHForCausalLM) -> None:
    runs = make()
    instruction, prompt = text(23, 1), text(22, 2)
    want = {p: wanted(hf, [prompt], p, instruction, normalize=False)[0] for p in ("mean", "last")}
    cases = [("mean", 0, None), ("mean", 16, "pooled"), ("last", 40, None), ("mean", 16, "pooled")]
    for pooling, tokens, short in cases:
        request = runs.submit_embedding(prompt, pooling, instruction)  # type: ignore[arg-type]
        while request.finish_reason is None:
            runs.step()
        assert (request.hit.tokens, request.hit.short) == (tokens, short)
        close(vector(request), want[pooling])
    # Others start from what an embedding has left.
    answer = runs.generate([instruction + prompt], GREEDY)[0]
    assert answer.hit.tokens == 40
    same_text(hf, instruction + prompt, answer.tokens, hf_greedy(hf, instruction + prompt))
    assert runs.stats().prefix.short["pooled"] == 2


@pytest.mark.parametrize(("pooling", "tokens"), [("mean", 16), ("last", 40)])
def test_a_hit_from_the_host_is_cut_alike(
    make: Make, hf: NemotronHForCausalLM, pooling: Any, tokens: int
) -> None:
    runs = make(max_requests=1, num_blocks=(14, 9), host_blocks=(60, 60))
    instruction, prompt = text(19, 1), text(22, 2)
    runs.embed([prompt], "last", instruction)
    for table in (runs.scheduler.kv, runs.scheduler.state):  # the device forgets, the host does not
        table.pool.clear()
    request = runs.submit_embedding(prompt, pooling, instruction)
    while request.finish_reason is None:
        runs.step()
    assert runs.stats().prefix.host_blocks > 0
    assert request.hit.tokens == tokens
    close(vector(request), wanted(hf, [prompt], pooling, instruction, normalize=False)[0])


def test_embeddings_need_no_logits(make: Make, hf: NemotronHForCausalLM) -> None:
    runs = make(max_tokens_per_step=16)
    runs.model.logits = lambda _: 1 / 0  # type: ignore[method-assign, return-value, assignment]
    close(runs.embed(PROMPTS), wanted(hf, PROMPTS, "last"))


@pytest.mark.parametrize("options", [{}, MTP | {"steps_ahead": 1}], ids=str)
def test_a_preempted_embedding_begins_again(
    make: Make, hf: NemotronHForCausalLM, options: dict[str, Any]
) -> None:
    """In the middle of its prompt, when its sum is not empty."""
    runs = make(max_tokens_per_step=11, **options)
    prompt, instruction = text(60, 3), text(9, 4)
    requests = [
        runs.submit_embedding(prompt, "mean"),
        runs.submit_embedding(prompt, "mean", instruction),
        runs.submit_embedding(prompt, "last"),
    ]
    for turn in range(12):
        runs.step()
        if turn in (3, 4, 9) and runs.scheduler.running:
            runs.scheduler.preempt(runs.scheduler.running[-1])
    while not runs.idle:
        runs.step()
    assert runs.stats().preemptions == 3
    close(vector(requests[0]), wanted(hf, [prompt], "mean", normalize=False)[0])
    close(vector(requests[1]), wanted(hf, [prompt], "mean", instruction, normalize=False)[0])
    close(vector(requests[2]), wanted(hf, [prompt], "last", normalize=False)[0])


def test_embeddings_give_way_when_memory_is_short(make: Make, hf: NemotronHForCausalLM) -> None:
    """Texts that grow take the blocks of embeddings that came later and are half done."""
    runs = make(**MTP, num_blocks=(26, 40), max_tokens_per_step=17)
    prompts = [text(40 + n, 300 + n) for n in range(6)]
    texts = [runs.submit(prompt[:20], GREEDY) for prompt in prompts[:4]]
    for _ in range(5):
        runs.step()
    vectors = [runs.submit_embedding(prompt, "mean") for prompt in prompts]
    while not runs.idle:
        runs.step()
    assert sum(r.restarts for r in vectors) > 0
    for prompt, request in zip(prompts, texts, strict=False):
        same_text(hf, prompt[:20], request.output, hf_greedy(hf, prompt[:20]))
    want = wanted(hf, prompts, "mean", normalize=False)
    close(torch.stack([vector(r) for r in vectors]), want)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_aborts_deadlines_and_failing_steps_touch_nobody_else(
    make: Make, hf: NemotronHForCausalLM, steps_ahead: int
) -> None:
    runs = make(max_tokens_per_step=16, max_requests=3, max_waiting=9,
        steps_ahead=steps_ahead,
    )  # fmt: skip
    runs.model.register_forward_pre_hook(fail_at(6, RuntimeError("no vectors today")))
    prompts = [text(40, 400 + n) for n in range(8)]
    requests = [runs.submit_embedding(prompt, "mean") for prompt in prompts]
    late = runs.submit_embedding(prompts[0], deadline=0.0)
    with pytest.raises(QueueFull):
        runs.submit_embedding(prompts[0])
    runs.step()
    runs.step()
    for request in (requests[0], requests[7]):
        runs.abort(request)
    while not runs.idle:
        runs.step()
    assert late.finish_reason == "deadline"
    assert [requests[i].finish_reason for i in (0, 7)] == ["abort", "abort"]
    failed = [r for r in requests if r.finish_reason == "error"]
    assert 0 < len(failed) <= 3
    assert all(r.embedding is None for r in (late, *failed))
    done = [i for i, r in enumerate(requests) if r.finish_reason == "embedded"]
    assert len(done) == 6 - len(failed)
    want = wanted(hf, [prompts[i] for i in done], "mean", normalize=False)
    close(torch.stack([vector(requests[i]) for i in done]), want)


def test_embed_raises_what_a_step_raises(make: Make, hf: NemotronHForCausalLM) -> None:
    runs = make(max_requests=2)
    failing = runs.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.embed(PROMPTS)
    failing.remove()
    close(runs.embed(PROMPTS), wanted(hf, PROMPTS, "last"))


@pytest.mark.parametrize("options", [{}, MTP], ids=str)
def test_a_prompt_may_fill_the_model(
    make: Make, hf: NemotronHForCausalLM, options: dict[str, Any]
) -> None:
    runs = make(max_model_len=48, **options)
    prompt, short = text(48, 6), text(5, 7)
    for pooling in ("last", "mean"):
        close(runs.embed([prompt, short], pooling), wanted(hf, [prompt, short], pooling))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prompt has 49 tokens; it must fit max_model_len \(48\)"):
        runs.embed([short, prompt], instruction=[1])


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Words, between a token that begins every text (1) and one that ends it (2)."""
    made = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="t1 $A t2", special_tokens=[("t1", 1), ("t2", 2)]
    )
    return made


@pytest.mark.parametrize(
    ("instruction", "prompt", "tokens", "count"),
    [
        ("t7 t8: ", "t9 t10", [1, 7, 8, 0, 9, 10, 2], 4),
        ("t7 t", "9 t10", [1, 7, 9, 10, 2], 2),  # a token of both is the prompt's
        ("", "t9 t10", [1, 9, 10, 2], 0),
    ],
)
def test_an_instruction_ends_where_the_prompts_first_token_begins(
    make: Make,
    hf: NemotronHForCausalLM,
    words: Tokenizer,
    instruction: str,
    prompt: str,
    tokens: list[int],
    count: int,
) -> None:
    runs = make(tokenizer=words)
    for pooling in ("mean", "last"):
        found = runs.embed([prompt], pooling, instruction)  # type: ignore[arg-type]
        close(found, wanted(hf, [tokens[count:]], pooling, tokens[:count]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompts": "t1"}, "prompts is a str"),
    ({"prompts": [[]]}, "prompt is empty"),
    ({"prompts": [""], "instruction": "t1"}, "prompt is empty"),
    ({"prompts": [" "], "instruction": "t1"}, "prompt is ' '; it must give at least one token"),
    ({"prompts": [[VOCABULARY]]}, f"prompt holds token {VOCABULARY}"),
    ({"prompts": [[1]], "instruction": [-1]}, "instruction holds token -1"),
    ({"prompts": [[1]], "instruction": "t1"}, "instruction is a str; it must be token ids"),
    ({"prompts": ["t1"], "instruction": [1]}, "instruction is token ids; it must be a str"),
    ({"prompts": [[1]], "pooling": "max"}, "pooling is 'max'; it must be one of"),
    ({"prompts": [[1] * 129]}, "prompt has 129 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused_and_leaves_nothing_behind(
    make: Make, words: Tokenizer, arguments: dict[str, Any], message: str
) -> None:
    words = Tokenizer.from_str(words.to_str())
    words.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    runs = make(tokenizer=words)
    with pytest.raises(ValueError, match=message):
        runs.embed(**arguments)
    runs.tokenizer = None
    with pytest.raises(ValueError, match="without a tokenizer"):
        runs.embed(["t1"])
    assert runs.embed([]).shape == (0, runs.model.hidden_size)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "options", [{}, {"drafter": "mtp", "num_speculative_tokens": 3}], ids=["plain", "mtp"]
)
def test_only_embeddings_come_back_from_the_device(
    tmp_path: Path, pooling: Any, options: dict[str, Any]
) -> None:
    """No copy of token ids, of lengths or of anything else, and no wait that is not declared."""
    runs = Engine.from_pretrained(
        SHIPPED, device="cuda", dtype="float32", max_requests=8,
        max_tokens_per_step=256, block_size=32, **{"drafter": None} | options,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (24,), generator=rng).tolist()
    prompts = [torch.randint(0, 256, (n,), generator=rng).tolist() for n in lengths]
    instruction = torch.randint(0, 256, (40,), generator=rng).tolist()
    runs.embed(prompts, pooling, instruction)  # compiles, and takes pinned memory
    torch.cuda.synchronize()
    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled,
        sync_guard() as waits,
    ):
        found = runs.embed(prompts, pooling, instruction)
    assert not waits.undeclared, waits.reasons
    assert found.shape == (24, runs.model.hidden_size)
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [e["args"]["bytes"] for e in events if "Memcpy DtoH" in e.get("name", "")]
    line = 4 * runs.model.hidden_size
    # One copy for each step that completed embeddings: of those, and of nothing else.
    assert sum(copies) == len(prompts) * line
    assert all(size % line == 0 for size in copies)
    cpu = Engine.from_pretrained(SHIPPED, device="cpu", drafter=None, max_requests=1)
    want = cpu.embed(prompts[:6], pooling, instruction)
    torch.testing.assert_close(found[:6], want, rtol=1e-3, atol=1e-4)
