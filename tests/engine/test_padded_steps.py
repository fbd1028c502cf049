"""Steps padded to few sizes, as CUDA graphs need them: the text, and every byte of the caches, are
those of steps that are not. On a CPU the same code runs without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import random_config, randomise
from helpers.small_engine import engine, hf, prompts, same_text, text, tokenizer, wanted
from tokenizers import Tokenizer
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Engine, EngineConfig, Request, SamplingParams
from hybrid_runtime.kernels.step.advance_replay import IDLE
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.specdecode.frame import Frame
from hybrid_runtime.specdecode.phases import Phases

__all__ = ["hf", "prompts", "tokenizer", "wanted"]  # fixtures

MTP = {"drafter": "mtp", "num_speculative_tokens": 3}
ROWS = [
    MTP | {"state_layout": "replay", "steps_ahead": 1},
    MTP | {"state_layout": "columns", "strategy": "defer"},
    {"drafter": None, "max_prompt_tokens": 5},
    {"drafter": "ngram", "max_prompt_tokens": 64, "max_tokens_per_step": 80, "max_requests": 7},
]
SIZES = {"max_requests": 5, "max_tokens_per_step": 40, "max_prompt_tokens": 20}


def memory(runs: Engine) -> list[Tensor]:
    caches = runs.runner.caches
    parts = [*caches.kv.values(), *caches.states.values()]
    return [tensor for pair in parts for tensor in pair]


def served(runs: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    """All prompts, one every second step, from memory full of NaN."""
    for tensor in memory(runs):
        tensor.fill_(float("nan"))
    requests: list[Request] = []
    while len(requests) < len(prompts) or not runs.idle:
        if len(requests) < len(prompts):
            requests.append(runs.submit(prompts[len(requests)], params))
        runs.step()
        runs.step()
    return requests


@pytest.mark.parametrize("options", ROWS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_padding_changes_no_text_and_no_byte(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    wanted: list[list[int]],
    options: dict[str, Any],
) -> None:
    params = SamplingParams(max_tokens=len(wanted[0]), ignore_eos=True)
    plain = engine(hf, tokenizer, **SIZES | options)
    padded = engine(hf, tokenizer, **SIZES | options, graphs=True)
    padded.capture()
    found = [served(runs, prompts, params) for runs in (plain, padded)]
    for prompt, one, other, want in zip(prompts, *found, wanted, strict=True):
        assert one.error is other.error is None
        assert one.output == other.output
        same_text(hf, prompt, other.output, want)
    for one, other in zip(memory(plain), memory(padded), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_a_step_may_fill_its_size(hf: NemotronHForCausalLM, tokenizer: Tokenizer) -> None:
    """No token is left behind the last row, so that padded rows own none that is there."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    found = []
    for graphs in (False, True):
        runs = engine(
            hf, tokenizer, **MTP, max_tokens_per_step=64, steps_ahead=1, prefix_caching=False,
            graphs=graphs,
        )  # fmt: skip
        runs.capture()
        requests = [runs.submit(text(length, seed=length), params) for length in (48, 30)]
        runs.step()
        assert sum(r.computed_max - r.computed for r in requests) == 64
        while not runs.idle:
            runs.step()
        assert all(r.error is None for r in requests)
        found.append([r.output for r in requests])
    assert found[0] == found[1]


def test_embeddings_are_those_of_steps_without_padding(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    """Beside a text, so that padded rows stand before the pooled ones."""
    found = []
    for graphs in (False, True):
        runs = engine(hf, tokenizer, **SIZES | MTP, graphs=graphs)
        runs.capture()
        beside = runs.submit(prompts[3], SamplingParams(max_tokens=40, ignore_eos=True))
        runs.step()
        found.append(runs.embed(prompts, pooling="mean"))
        assert beside.error is None
    assert torch.allclose(*found, atol=1e-5)


def test_sampled_text_is_that_of_steps_without_padding(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    found = []
    for graphs in (False, True):
        runs = engine(hf, tokenizer, **SIZES | MTP, graphs=graphs)
        runs.capture()
        found.append([r.output for r in served(runs, prompts, params)])
    assert found[0] == found[1]


def test_nothing_is_captured_under_load(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step that somebody decodes in finds its phases captured: greedy or sampled, and with
    prompts of which none ends."""
    seen: set[frozenset[str]] = set()
    prepared = Phases.prepare

    def prepare(phases: Phases, frame: Frame, entries: Tensor, num_rows: int) -> None:
        seen.add(frozenset(phase for phase, _ in frame.graphs))
        prepared(phases, frame, entries, num_rows)
        first, shape = frame.inputs.cu_seqlens, frame.shape
        assert first[shape.decode_rows] == shape.decode_tokens  # where prompts are looked for
        assert first[-1] <= len(frame.inputs.tokens)

    monkeypatch.setattr(Phases, "prepare", prepare)
    runs = engine(hf, tokenizer, **SIZES | MTP, graphs=True)
    shown: list[tuple[int, int]] = []
    runs.runner.capture(runs._accepts, lambda done, total: shown.append((done, total)))
    assert shown[-1] == (len(shown) - 1, len(shown) - 1)
    captured = runs.runner._captured
    assert captured is not None
    known = set(captured._graphs._captured)
    seen.clear()
    for temperature in (0.0, 0.8):
        served(runs, prompts, SamplingParams(temperature, max_tokens=9, ignore_eos=True, seed=1))
    assert seen == {
        frozenset({"verify_and_accept", "draft"}), frozenset({"verify", "accept", "draft"}),
    }  # fmt: skip
    assert set(captured._graphs._captured) == known


@pytest.mark.parametrize("layout", ["replay", "columns"])
def test_nothing_of_an_earlier_step_is_left_in_passes_that_are_captured(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Its checkpoints would make kernels share out tokens that padded rows do not have."""
    runs = engine(hf, tokenizer, **SIZES | MTP, state_layout=layout, graphs=True)
    ended = runs.submit(text(18, seed=2), SamplingParams(max_tokens=1, ignore_eos=True))
    while not runs.idle:
        runs.step()
    cuts = runs.manager.positions.cuts
    assert ended.error is None
    assert cuts is not None
    assert cuts.after.any()
    passes = 0
    verify = Phases.verify

    def checked(phases: Phases, frame: Frame) -> None:
        nonlocal passes
        passes += 1
        positions = runs.manager.positions
        assert not torch.stack([cuts.after, positions.read_offset]).any()
        assert (torch.stack([positions.read_column, positions.write_column]) == -1).all()
        for part, idle in zip(positions.replay or (), IDLE, strict=False):
            assert (part == idle).all()
        verify(phases, frame)

    monkeypatch.setattr(Phases, "verify", checked)
    runs.capture()
    assert passes


def test_a_size_that_does_not_fit_is_named(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"max_prompt_tokens": 600, "max_tokens_per_step": 620}
    runs = engine(hf, tokenizer, **SIZES | MTP | wide, graphs=True)
    forward = runs.model.forward

    def small(tokens: Tensor, *more: Any) -> Tensor:
        if len(tokens) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tokens, *more)

    monkeypatch.setattr(runs.model, "forward", small)
    with pytest.raises(torch.OutOfMemoryError, match="5 decoding rows and 640 prompt tokens"):
        runs.capture()


class Plugged:
    """A target that cannot run few layers."""

    def __init__(self, model: NemotronH) -> None:
        self._model = model

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        hidden: Tensor = self._model(tokens, batch, positions, caches)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


@pytest.mark.parametrize("plugged", [False, True])
def test_only_passes_that_warm_up_run_few_layers(plugged: bool) -> None:
    """And those only behind a whole pass, of a target that can."""
    config = NemotronHConfig.from_dict(random_config("M-M-M-M*-M-"))
    model = NemotronH(config, "cpu", torch.float32)
    randomise(model, seed=2)
    options: dict[str, Any] = SIZES | {"max_model_len": 128, "block_size": 16, "graphs": True}
    runs = Engine(model, EngineConfig(drafter="ngram", num_speculative_tokens=3, **options))
    if plugged:
        runs.runner._phases.target = Plugged(model)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(0))
    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda *_: passes.append(passes.pop() + 1))
    runs.capture()
    whole, few = len(config.pattern), len("M-M*-")
    assert passes[0] == whole
    assert len(passes) > 10
    assert set(passes[1:]) == {whole if plugged else few}
    passes.clear()
    runs.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4, ignore_eos=True))
    assert set(passes) == {whole}
