"""MTP and EAGLE heads against dense re-implementations made of transformers' own pieces."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.heads import EAGLE, target_model
from helpers.oracle import (
    hf_model,
    make_caches,
    random_config,
    randomise,
    row_batch,
)
from helpers.qwen import KINDS as QWEN
from helpers.qwen import head_layer, head_tensors, save
from helpers.qwen import hf_model as hf_qwen
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from hybrid_runtime.models.attention import FEW_TOKENS
from hybrid_runtime.models.checkpoint import Checkpoint, load_head, load_model
from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.forward_batch import Caches, WantedTokens
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH

BLOCK_SIZE, HIDDEN = 8, 32


class DenseMTP:
    """Whole sequences at once, layers taken from a transformers model with the head's pattern."""

    def __init__(self, head: MTPHead, target: NemotronH, pattern: str, seed: int):
        self.blocks = hf_model(random_config(pattern), seed).model.layers
        self.weights = head.state_dict()
        self.last = len(pattern) - 1
        for i, block in enumerate(self.blocks):
            for name, value in block.state_dict().items():
                own = re.sub(r"(experts\.\w+)$", r"\1.weight", name)  # stacked, ours are modules
                self.weights[f"mtp.layers.{i}.{own}"].copy_(value)
        self.embedding = target.backbone.embeddings.weight

    def norm(self, name: str, x: Tensor) -> Tensor:
        theirs = NemotronHRMSNorm(HIDDEN, eps=1e-5)
        theirs.weight.data = self.weights[f"mtp.layers.{name}.weight"]
        return theirs(x)

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.norm("0.enorm", self.embedding[tokens])
        other = self.norm("0.hnorm", hidden)
        joined = torch.cat([embedded, other], -1)
        x = (joined @ self.weights["mtp.layers.0.eh_proj.weight"].T)[None]
        for block in self.blocks:
            x = block(x)
        return self.norm(f"{self.last}.final_layernorm", x[0])


class DenseEagle:
    """fc, then transformers' Llama layer without its first norm."""

    def __init__(self, head: EagleHead, target: NemotronH):
        given = {k: v for k, v in EAGLE.items() if k not in ("architectures", "rope_theta")}
        given["rope_parameters"] = {"rope_type": "default", "rope_theta": EAGLE["rope_theta"]}
        given["attn_implementation"] = "sdpa"
        config = LlamaConfig(**given)
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layer: nn.Module = layer.eval()
        self.layer.load_state_dict(head.layers[0].state_dict())
        self.rotary = LlamaRotaryEmbedding(config)
        self.head = head
        own = head.embed_tokens
        self.embedding = target.backbone.embeddings.weight if own is None else own.weight

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.head.fc(torch.cat([self.embedding[tokens], hidden], -1))[None]
        positions = torch.arange(len(tokens))[None]
        y = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return (y[0] if isinstance(y, tuple) else y).reshape(len(tokens), -1)


def mtp_pair(pattern: str, seed: int) -> tuple[NemotronH, MTPHead, DenseMTP]:
    target = target_model(
        num_nextn_predict_layers=1,
        mtp_layers_block_type=[
            {"*": "attention", "E": "moe", "-": "mlp"}[kind] for kind in pattern
        ],
    )
    head = MTPHead(target)
    randomise(head, seed)
    return target, head, DenseMTP(head, target, pattern, seed)


class DenseQwenMTP:
    """fc over both norms, then transformers' layer and the last norm."""

    def __init__(self, kind: str, target: HybridModel, seed: int):
        self.model: Any = head_layer(kind, seed).model
        self.weights = head_tensors(kind, seed)
        self.embedding = target.output_weight

    def norm(self, name: str, x: Tensor) -> Tensor:
        theirs = Qwen3NextRMSNorm(HIDDEN)
        theirs.weight.data = self.weights[f"mtp.{name}.weight"]
        normed: Tensor = theirs(x)
        return normed

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.norm("pre_fc_norm_embedding", self.embedding[tokens])
        joined = torch.cat([embedded, self.norm("pre_fc_norm_hidden", hidden)], -1)
        x = (joined @ self.weights["mtp.fc.weight"].T)[None]
        place = torch.arange(len(tokens))
        positions = place.expand(3, 1, -1) if "3_5" in type(self.model).__name__ else place[None]
        mask = torch.full((len(tokens),) * 2, float("-inf")).triu(1)[None, None]
        x = self.model.layers[0](
            x, position_embeddings=self.model.rotary_emb(x, positions), attention_mask=mask
        )
        return self.norm("norm", x[0])


def qwen_pair(kind: str, directory: Path) -> tuple[HybridModel, nn.Module, DenseQwenMTP]:
    """Target, head and oracle. Embedding and output head are one."""
    tied = {"tie_word_embeddings": True}
    save(hf_qwen(kind, 3, **tied), directory, head_tensors(kind, 4))
    checkpoint = Checkpoint(directory)
    target = load_model(checkpoint, "cpu", torch.float32)
    return target, load_head(checkpoint, target), DenseQwenMTP(kind, target, 4)


def check_passes(
    head: Any,
    dense: DenseMTP | DenseEagle | DenseQwenMTP,
    target: HybridModel,
    caches: Caches,
    seed: int,
) -> None:
    """Pass 1 over prompts in chunks, then passes on the head's own output, several rows at once.

    After two such passes only some drafts are accepted: the next pass 1 starts below the
    positions that were drafted and must overwrite them.
    """
    torch.manual_seed(seed)
    slots, prompts, tail = (2, 0, 1), (11, 6, 17), 4
    tokens = [torch.randint(0, 96, (n + tail,)) for n in prompts]
    hidden = [torch.randn(n + tail, HIDDEN) for n in prompts]
    want = [dense(t, h) for t, h in zip(tokens, hidden, strict=True)]

    def run(parts: list[slice]) -> list[Tensor]:
        rows = [(slot, p.start, p.stop - p.start) for slot, p in zip(slots, parts, strict=True)]
        padded = [*rows[:1], (-1, 3, 2), *rows[1:]]
        t = [t[p] for t, p in zip(tokens, parts, strict=True)]
        h = [h[p] for h, p in zip(hidden, parts, strict=True)]
        t.insert(1, torch.zeros(2, dtype=torch.int64))
        h.insert(1, torch.zeros(2, HIDDEN))
        y = head(torch.cat(t), torch.cat(h), row_batch(padded), caches)
        sizes = [row[2] for row in padded]
        pieces: list[Tensor] = list(y.split(sizes))
        del pieces[1]
        return pieces

    half = [slice(0, n // 2) for n in prompts]
    rest = [slice(n // 2, n) for n in prompts]
    for parts in (half, rest):
        for got, all_of_it, part in zip(run(parts), want, parts, strict=True):
            torch.testing.assert_close(got, all_of_it[part], rtol=1e-5, atol=1e-5)
    last = [w[n - 1] for w, n in zip(want, prompts, strict=True)]
    saved = [h.clone() for h in hidden]
    for step in range(2):
        drafted = [torch.randint(0, 96, ()) for _ in prompts]
        own = []
        for i, n in enumerate(prompts):
            keep = n + step
            tokens[i] = torch.cat([tokens[i][:keep], drafted[i][None], tokens[i][keep + 1 :]])
            hidden[i] = torch.cat([hidden[i][:keep], last[i][None], hidden[i][keep + 1 :]])
            own.append(dense(tokens[i][: keep + 1], hidden[i][: keep + 1])[-1])
        outputs = run([slice(n + step, n + step + 1) for n in prompts])
        for output, w in zip(outputs, own, strict=True):
            torch.testing.assert_close(output[0], w, rtol=1e-5, atol=1e-5)
        last = own
    hidden = saved
    torch.testing.assert_close(head.logits(last[0]), target.logits(last[0]))
    verified = [slice(n, n + tail) for n in prompts]
    for rows, t, h, part in zip(run(verified), tokens, hidden, verified, strict=True):
        torch.testing.assert_close(rows, dense(t, h)[part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", ["*E", "*", "*-", "E*", "**E"])
@torch.inference_mode()
def test_mtp(pattern: str) -> None:
    target, head, dense = mtp_pair(pattern, 3)
    assert head.kv_layers == tuple(2 + i for i, kind in enumerate(pattern) if kind == "*")
    assert head.kv_shape == (2, 8)
    caches = make_caches(target, 3, BLOCK_SIZE, 40, heads=[head])
    check_passes(head, dense, target, caches, 4)


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
@torch.inference_mode()
def test_eagle(own_embedding: bool, fc_bias: bool) -> None:
    target = target_model()
    config = EagleConfig.from_dict(EAGLE)
    head = EagleHead(config, target, fc_bias=fc_bias, own_embedding=own_embedding)
    randomise(head, 5)
    assert head.kv_layers == (2,)
    assert head.kv_shape == (2, 16)
    caches = make_caches(target, 3, BLOCK_SIZE, 40, heads=[head])
    check_passes(head, DenseEagle(head, target), target, caches, 6)


@pytest.mark.parametrize("kind", QWEN)
@torch.inference_mode()
def test_mtp_of_qwen(kind: str, tmp_path: Path) -> None:
    target, head, dense = qwen_pair(kind, tmp_path)
    assert head.kv_layers == (4,)
    assert head.kv_shape == (2, 16)
    caches = make_caches(target, 3, BLOCK_SIZE, 40, heads=[head])
    check_passes(head, dense, target, caches, 4)


def check_wanted(head: Any, target: HybridModel, prompt: int) -> None:
    """A first pass over rows that decode and a padded one, then two prompts, the second of which
    goes on after it: what is wanted is that of a pass over all tokens, and so are keys and values.

    prompt: tokens of either.
    """
    context, decoding, last = 9, 4, (0, 1, 2, 3, 0, prompt - 1, prompt - 1)
    rows = [*((slot, context + slot, decoding) for slot in range(4)), (-1, 0, decoding)]
    rows += [(4, 0, prompt), (5, 5, prompt)]
    batch = row_batch(rows, num_update_rows=5)
    full = make_caches(target, 6, BLOCK_SIZE, prompt + 16, heads=[head])
    generator = torch.Generator().manual_seed(7)

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 96, (count,), generator=generator, dtype=torch.int32)
        return tokens, torch.randn(count, HIDDEN, generator=generator)

    earlier = [(slot, 0, computed) for slot, computed, _ in rows if slot >= 0 and computed]
    head(*inputs(sum(count for _, _, count in earlier)), row_batch(earlier), full)
    kv = {i: (k.clone(), v.clone()) for i, (k, v) in full.kv.items()}
    narrow = replace(full, kv=kv)

    given = inputs(sum(count for _, _, count in rows))
    at = batch.cu_seqlens[:-1] + torch.tensor(last, dtype=torch.int32)
    at[4] = 0  # of a padded row, anything
    drafts = [(s, n + i, 1) for (s, n, _), i in zip(rows, last, strict=True)]
    drafts[-1] = (-1, *drafts[-1][1:])
    found = head(*given, batch, narrow, WantedTokens(at, row_batch(drafts)))
    everything = head(*given, batch, full)[at]
    live = [i for i, (slot, _, _) in enumerate(drafts) if slot >= 0]
    torch.testing.assert_close(found[live], everything[live], rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()
    for i in head.kv_layers:
        for mine, all_of_them in zip(narrow.kv[i], full.kv[i], strict=True):
            torch.testing.assert_close(mine, all_of_them, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("prompt", [7, FEW_TOKENS])
@pytest.mark.parametrize("pattern", ["*", "*E", "*-*E", "E*", "-E"])
@torch.inference_mode()
def test_wanted_tokens_of_mtp(pattern: str, prompt: int) -> None:
    target, head, _ = mtp_pair(pattern, 8)
    check_wanted(head, target, prompt)


@pytest.mark.parametrize("prompt", [7, FEW_TOKENS])
@torch.inference_mode()
def test_wanted_tokens_of_qwen(prompt: int, tmp_path: Path) -> None:
    target, head, _ = qwen_pair("moe", tmp_path)
    check_wanted(head, target, prompt)


@pytest.mark.parametrize("prompt", [7, FEW_TOKENS])
@torch.inference_mode()
def test_wanted_tokens_of_eagle(prompt: int) -> None:
    target = target_model()
    head = EagleHead(EagleConfig.from_dict(EAGLE), target)
    randomise(head, 9)
    check_wanted(head, target, prompt)


def test_heads_own_only_their_own_parameters() -> None:
    target, head, _ = mtp_pair("*E", 0)
    assert all(name.startswith("mtp.layers.") for name, _ in head.named_parameters())
    eagle = EagleHead(EagleConfig.from_dict(EAGLE), target)
    assert {name.split(".")[0] for name, _ in eagle.named_parameters()} == {"fc", "layers"}


def test_mtp_is_refused_where_the_config_has_none() -> None:
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        MTPHead(target_model())
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 2"):
        MTPHead(target_model(num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters: .* rope_type is",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_size": None}, "hidden_size is missing, must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, must be a multiple"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
    ],
)
def test_eagle_config_errors(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagleConfig.from_dict({**EAGLE, **change})


def test_eagle_must_fit_its_target() -> None:
    config = EagleConfig.from_dict({**EAGLE, "hidden_size": 64})
    with pytest.raises(ValueError, match="hidden_size is 64, must be the target's 32"):
        EagleHead(config, target_model())
