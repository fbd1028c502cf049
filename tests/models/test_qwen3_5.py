"""Logits of random Qwen3-Next, Qwen3.5 and Qwen3.5-MoE models against transformers on the CPU, in
fp32: whole prompts, chunks, decoding, verifying, and what becomes of refused drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interpreter import elsewhere, kernels, plain, run_in_interpreter
from helpers.qwen import hf_model, ours, save
from helpers.replayed_model import ReplayedModel
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_runtime.models.qwen3_5 import Qwen35

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("next", {}),
    "next, unnormalised": ("next", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "dense": ("dense", {}),
    "dense, tied": ("dense", {"tie_word_embeddings": True}),
    "dense, as published": ("dense", {"head_dim": 256, "linear_num_value_heads": 6}),
    "moe": ("moe", {"layer_types": ["full_attention", *["linear_attention"] * 3]}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Qwen35]:
    kind, changes = CASES[request.param]
    model, directory = hf_model(kind, 1, **changes), tmp_path_factory.mktemp("qwen")
    save(model, directory)
    return model, ours(directory, DEVICE)


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(tokens[None], use_cache=False).logits[0]
    return found


def distance(ours: Tensor, theirs: Tensor, start: int = 0) -> float:
    """Largest difference over the text's largest logit. ours: of tokens from `start` on."""
    part = theirs[start : start + len(ours)]
    return float((ours - part).abs().max() / theirs.abs().max())


def text(length: int, seed: int) -> Tensor:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed))


@plain
@pytest.mark.parametrize("chunks", [[97], [1, 33, 63], [1] * 7], ids=["whole", "chunks", "single"])
@torch.inference_mode()
def test_prompts_equal_transformers(
    pair: tuple[PreTrainedModel, Qwen35], chunks: list[int]
) -> None:
    theirs, model = pair
    tokens, runs = text(sum(chunks), 2), ReplayedModel(model, 0)
    got = [runs.step((1, part, -1, 0))[0] for part in tokens.split(chunks)]
    assert distance(torch.cat(got), logits(theirs, tokens)) < TOLERANCE


@plain
@pytest.mark.parametrize("verified", [1, 4, 8])
@torch.inference_mode()
def test_decoding_equals_transformers(pair: tuple[PreTrainedModel, Qwen35], verified: int) -> None:
    """Steps of so many tokens, all drafts but one of which are accepted in turn: nothing that is
    refused may leave a trace. Beside it a prompt in chunks, and a row that starts later."""
    theirs, model = pair
    drafts, runs = verified - 1, ReplayedModel(model, verified - 1)
    whole, other = text(80, 3), text(60, 4)
    want, want_other = logits(theirs, whole), logits(theirs, other)
    runs.step((0, whole[:9], -1, 0))
    n, m, turn = 9, 0, 0
    while n + verified <= 60:
        accepted = turn % verified
        wrong = (whole[n + 1 + accepted : n + verified] + 1) % 96
        given = torch.cat([whole[n : n + 1 + accepted], wrong])
        rows = [(0, given, drafts, accepted)]
        if m + 7 <= 60:
            rows.append((2, other[m : m + 7], -1, 0))
        got = runs.step(*rows)
        sure = slice(n, n + accepted + 1)
        assert distance(got[0][: accepted + 1], want[sure]) < TOLERANCE, (n, accepted)
        if len(rows) > 1:
            assert distance(got[1], want_other, m) < TOLERANCE
            m += 7
        # Refused tokens were computed right, too.
        if wrong.numel() and turn < 4:
            seen = torch.cat([whole[:n], given])
            assert distance(got[0], logits(theirs, seen), n) < TOLERANCE
        n, turn = n + 1 + accepted, turn + 1
    assert m > 0
    assert turn > 3


@kernels
@pytest.mark.parametrize("kind", ["next", "moe"])
@torch.inference_mode()
def test_kernels_equal_transformers(kind: str, tmp_path: Path) -> None:
    """All of them together: a prompt, steps of four tokens beside another one, and a single one."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    theirs = hf_model(kind, 1, **layers, linear_value_head_dim=16)
    save(theirs, tmp_path)
    runs = ReplayedModel(ours(tmp_path, DEVICE), 3)
    tokens = text(40, 3)
    want, at = logits(theirs, tokens), 20
    got = [runs.step((1, tokens[:at], -1, 0))[0]]
    for accepted in (0, 3, 1):
        right = at + 1 + accepted
        given = torch.cat([tokens[at:right], (tokens[right : at + 4] + 1) % 96])
        both = runs.step((1, given, 3, accepted), (2, tokens[runs.computed[2] :][:5], -1, 0))
        assert distance(both[1], want, runs.computed[2] - 5) < TOLERANCE
        got.append(both[0][: accepted + 1])
        at = right
    got.append(runs.step((1, tokens[at : at + 1], 0, 0))[0])
    assert distance(torch.cat(got), want) < TOLERANCE


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
