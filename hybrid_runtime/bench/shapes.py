"""Shapes of published models, to be measured with random weights where there is no checkpoint."""

from typing import Any

import torch
from torch import nn

from hybrid_runtime.models.formats import ROUNDED_TO
from hybrid_runtime.models.linear import join, place
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.quantization import Quantization
from hybrid_runtime.models.random_weights import draw
from hybrid_runtime.models.registry import FAMILIES

_VOCABULARY = {"vocab_size": 248320, "mtp_num_hidden_layers": 1}
_DENSE = {"model_type": "qwen3_5_text", "num_key_value_heads": 4} | _VOCABULARY
_EXPERTS = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": _DENSE | {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 16,
    },
    "qwen3.5-27b": _DENSE | {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 24, "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": _EXPERTS | _VOCABULARY | {"num_hidden_layers": 40},
    "qwen3-next-80b-a3b": _EXPERTS | {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "vocab_size": 151936,
    },
    "qwen-tiny": _DENSE | {  # of no checkpoint
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}  # fmt: skip
"""By name, the fields of config.json that are no defaults."""


def config(name: str, layers: int | None = None) -> Any:
    """The family's config of a shape; with `layers`, of its first layers only."""
    fields = SHAPES[name]
    if layers is not None:
        fields = fields | {"num_hidden_layers": layers}
    return FAMILIES[fields["model_type"]].read_config(fields)


def build(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
    layers: int | None = None,
    seed: int = 0,
) -> tuple[HybridModel, nn.Module]:
    """Model and draft head of a shape, with random weights.

    quantization: what they are rounded to, as of `Engine.from_pretrained`.
    """
    family, sizes = FAMILIES[SHAPES[name]["model_type"]], config(name, layers)
    model: Any = family.build(sizes, device if quantization is None else "meta", dtype)
    if quantization is not None:
        formats = Quantization(quantization, ROUNDED_TO[quantization], rounded=True)
        formats.store(model, family.head_prefix)
        place(model, device)
    assert family.build_head is not None
    head = family.build_head(model)
    generator = torch.Generator(device).manual_seed(seed)
    for part in (model, head):
        draw(part, model.num_layers, generator)
    join(model)
    return model, head
