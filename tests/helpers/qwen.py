"""Tiny random Qwen3-Next, Qwen3.5 and Qwen3.5-MoE models by transformers, and ours from their
checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.models.checkpoint import Checkpoint, load_model
from hybrid_runtime.models.qwen3_5 import Qwen35

KINDS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "dense": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}
VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
OF_EXPERTS = {name for name in SIZES if "expert" in name or name.startswith("moe")}


def hf_model(kind: str, seed: int, **changes: Any) -> PreTrainedModel:
    """transformers' model in fp32 with every parameter random."""
    make_config, make_model = KINDS[kind]
    unknown = OF_EXPERTS if kind == "dense" else {"intermediate_size"} if kind == "moe" else set()
    sizes = {name: value for name, value in SIZES.items() if name not in unknown}
    model = make_model(make_config(**sizes | changes)).eval().float()
    fill(model, seed)
    return model


def fill(module: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Random values. Those of convolutions and embeddings are large enough for no norm to magnify
    rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("A_log"):
            noise = torch.log(0.1 + 4 * torch.rand(value.shape, generator=generator))
        elif name.endswith("dt_bias"):
            noise = noise - 1
        elif name.endswith("linear_attn.norm.weight"):
            noise = 1 + 0.2 * noise
        elif name.endswith(("conv1d.weight", "embed_tokens.weight")):
            noise = 0.7 * noise
        else:
            noise = noise * (0.2 if "norm" in name else scale)
        value.data.copy_(noise)


def head_layer(kind: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model whose one layer attends, as that of an MTP head does."""
    return hf_model(kind, seed, layer_types=["full_attention"], num_hidden_layers=1, **changes)


def head_tensors(kind: str, seed: int, **changes: Any) -> dict[str, Tensor]:
    """Random values of an MTP head, by published names; its layer is that of `head_layer`."""
    layer = head_layer(kind, seed, **changes)
    own = {
        name.replace("model.layers.0.", "mtp.layers.0."): value
        for name, value in layer.state_dict().items()
        if ".layers.0." in name
    }
    generator = torch.Generator().manual_seed(seed)
    hidden = layer.config.hidden_size
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        own[f"mtp.{name}.weight"] = 0.2 * torch.randn(hidden, generator=generator)
    own["mtp.fc.weight"] = 0.15 * torch.randn((hidden, 2 * hidden), generator=generator)
    return own


def save(
    model: PreTrainedModel,
    directory: Path,
    head: dict[str, Tensor] | None = None,
    **fields: Any,
) -> None:
    """A checkpoint as transformers writes it, besides with a head and further fields of config."""
    model.save_pretrained(directory)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    if head is not None:
        config["mtp_num_hidden_layers"] = 1
        weights = directory / "model.safetensors"
        save_file(load_file(weights) | head, weights, metadata={"format": "pt"})
    file.write_text(json.dumps(config))


def small_checkpoint(directory: Path) -> PreTrainedModel:
    """A checkpoint of a dense model with an MTP head and the shipped tokenizer, and transformers'
    model of it."""
    layers = ["linear_attention", "full_attention"]
    model = hf_model("dense", 1, vocab_size=320, num_hidden_layers=2, layer_types=layers)
    save(model, directory, head_tensors("dense", 2, vocab_size=320))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, directory / name)
    return model


def ours(directory: Path, device: str = "cpu") -> Qwen35:
    """Our model of a checkpoint."""
    model = load_model(Checkpoint(directory), device, torch.float32)
    assert isinstance(model, Qwen35)
    return model
