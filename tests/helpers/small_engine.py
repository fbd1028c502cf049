"""A small model of random weights, its text by transformers, and engines that must give it.

`hf`, `tokenizer`, `prompts`, `wanted` and `make` are fixtures of all tests in tests/engine; others
import those that they use.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import hf_model, our_model, random_config, randomise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Completion, Engine, EngineConfig, SamplingParams
from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.nemotron_h import MTPHead
from hybrid_runtime.specdecode.drafter import VerifyOutput
from hybrid_runtime.state import sync_guard

NEW_TOKENS = 24
VOCABULARY = 96
CONFIG = random_config(
    "M*M-E",
    vocab_size=VOCABULARY,
    num_nextn_predict_layers=1,
    mtp_layers_block_type=["attention", "moe"],
)
EAGLE = EagleConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
DRAFTERS = pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "num_speculative_tokens": 3},
        {"drafter": "mtp", "num_speculative_tokens": 2, "steps_ahead": 1},
        {"drafter": "mtp", "graphs": True, "max_requests": 4, "max_tokens_per_step": 32},
    ],
    ids=["ngram", "mtp", "graphs"],
)
Make = Callable[..., Engine]
NOISE = 1e-4
"""Logits closer than this are a tie in fp32: several times the largest difference measured between
this engine and transformers (1e-5 of the largest logit, which is about 3 here)."""


@pytest.fixture(scope="module")
def hf() -> NemotronHForCausalLM:
    return hf_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 4, 7, 16, 17, 33, 40, 61)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def wanted(hf: NemotronHForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(hf, prompt) for prompt in prompts]


def hf_greedy(hf: NemotronHForCausalLM, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def engine(hf: NemotronHForCausalLM, tokenizer: Tokenizer | None, **options: Any) -> Engine:
    model = our_model(CONFIG, hf)
    head: Any = None
    drafter = options.get("drafter")
    if drafter == "mtp":
        head = MTPHead(model)
    elif drafter == "eagle":
        head = EagleHead(EAGLE, model)
    if head is not None:
        randomise(head, seed=5)
    sizes = {"drafter": None, "max_model_len": 128, "block_size": 16}
    config = EngineConfig(**sizes | options)
    return Engine(model, config, tokenizer=tokenizer, eos_token_ids=(), head=head)


@pytest.fixture
def make(hf: NemotronHForCausalLM, tokenizer: Tokenizer) -> Iterator[Make]:
    """Makes engines of these options; in the end nothing may be left in any of them."""
    made = []

    def one(**options: Any) -> Engine:
        made.append(engine(hf, **{"tokenizer": tokenizer} | options))
        return made[-1]

    yield one
    for runs in made:
        nothing_leaked(runs)


def same_text(hf: NemotronHForCausalLM, prompt: list[int], got: list[int], want: list[int]) -> None:
    """Equal, or different from a token on whose two best logits are closer than `NOISE`."""
    if got == want:
        return
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + want[:first]])).logits[0, -1]
    best = logits.topk(2).values
    assert best[0] - best[1] < NOISE, f"token {first}: {got[first]} instead of {want[first]}"


class Script:
    """A drafter that knows the right text and errs where it is told to: any acceptances."""

    def __init__(self, texts: list[list[int]], k: int, pattern: list[int]) -> None:
        self.texts, self.k = texts, k
        self.errors = itertools.cycle(pattern)

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        sequences, drafts = output.sequences, []
        for slot, emits in zip(
            output.inputs.slot.tolist(), output.inputs.emits.tolist(), strict=True
        ):
            known = sequences.history[slot, : int(sequences.length[slot])].tolist()
            guess = [-1] * self.k
            if emits:
                right = next(self.errors) % (self.k + 2)
                # The last step may emit more than was asked for, and one behind it anything.
                texts = (t for t in self.texts if t[: len(known)] == known[: len(t)])
                text = next(texts, known)
                guess = [*text[len(known) :], *[0] * self.k][: self.k]
                if right <= self.k:  # k + 1: offer no draft at all
                    guess = [t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(guess)]
                else:
                    guess = [-1] * self.k
            drafts.append(guess)
        return torch.tensor(drafts, dtype=torch.int32)[:, :count], None


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def drain(runs: Engine) -> None:
    """Run until nothing is left, a step that was queued ahead included."""
    while not runs.idle:
        runs.step()


def at_call(number: int, act: Callable[[], object]) -> Callable[..., None]:
    """A hook that acts in its call of this number, counted from 0, and in no other."""
    calls = itertools.count()

    def hook(*_: Any) -> None:
        if next(calls) == number:
            act()

    return hook


def fail_at(number: int, error: BaseException) -> Callable[..., None]:
    """A hook that raises in its call of this number, counted from 0, and in no other."""

    def fail() -> None:
        raise error

    return at_call(number, fail)


def with_graphs_and_without(params: list[SamplingParams]) -> list[tuple[Completion, Completion]]:
    """Answers of the shipped checkpoint on a GPU. Nothing may wait unseen, once all kinds of steps
    have been met."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    answers = []
    for graphs in (True, False):
        runs = Engine.from_pretrained(
            SHIPPED, device="cuda", dtype="float32", drafter="mtp", block_size=32, graphs=graphs
        )
        for prompt, one in zip(prompts, params, strict=True):
            runs.generate([prompt], one)
        runs.generate(prompts, params)
        with sync_guard() as waits:
            answers.append(runs.generate(prompts, params))
        assert not waits.undeclared, waits.reasons
    return list(zip(*answers, strict=True))


def nothing_leaked(runs: Engine) -> None:
    """Every block, slot and reservation is back."""
    assert runs.idle
    for pool in (runs.scheduler.kv.pool, runs.scheduler.state.pool):
        assert pool.free == pool.size
    assert sorted(runs.scheduler._slots) == list(range(runs.manager.max_requests))
    assert not runs.manager._ledger.live.any()
