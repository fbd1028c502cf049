"""Shapes of Qwen's models with Gated DeltaNet, as vLLM 0.25.1 can run them on text alone. Sizes are
those of `hybrid_runtime/bench/shapes.py`, which this engine runs.

vLLM has Qwen3.5 only with pictures, so all are built as Qwen3-Next, of which every layer type is
the same but for the order of a projection's rows. That class wants a layer with experts in the
model and in its MTP head. In a dense shape these are layer 0 of both, with two experts of half the
width that every token goes through: the same weights are read as in a dense layer, which this
engine has there, but by a router and kernels of experts.

`vllm/modelinfos/` holds what vLLM 0.25.1 finds when it inspects the two classes; copied into
`$VLLM_CACHE_ROOT/modelinfos` they save it two processes.
"""

from __future__ import annotations

from typing import Any

from hybrid_runtime.bench import shapes
from hybrid_runtime.models.qwen3_5_config import Qwen35Config

SMALL: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "rope_theta": 10_000_000.0,
}  # fmt: skip
"""Of no checkpoint, for texts in fp32 (`vllm/serve.py`): tokens are bytes, and states so small that
a request passes several blocks."""
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "num_nextn_predict_layers": 1, "decoder_sparse_step": 1, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
SIZES = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "norm_topk_prob", "tie_word_embeddings",
    "rms_norm_eps",
)  # fmt: skip
EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
"""Fields that config.json and `Qwen35Config` have under one name; the latter of experts."""


def config(name: str, layers: int | None = None) -> dict[str, Any]:
    """A checkpoint's config.json of that shape, the first `layers` layers alone if given."""
    return _config(shapes.config(name, layers))


def small() -> dict[str, Any]:
    """The same of `SMALL`."""
    return _config(Qwen35Config.from_dict(SMALL))


def _config(sizes: Qwen35Config) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    found = COMMON | {name: getattr(sizes, name) for name in SIZES}
    found["layer_types"] = [kinds[attends] for attends in sizes.attends]
    found["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": sizes.rotary.theta,
        "partial_rotary_factor": sizes.rotary.size / sizes.head_dim,
    }
    if any(sizes.sparse):
        return found | {name: getattr(sizes, name) for name in EXPERTS}
    return found | {
        "intermediate_size": sizes.intermediate_size,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.intermediate_size // 2,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": list(range(1, sizes.num_hidden_layers)),
    }


def draftable(worker: Any, seed: int = 1) -> None:
    """Random weights by which the MTP head is often right, though nothing was trained: the next
    token depends on the one before it above all, and the head looks at that one alone. Contexts
    change it often enough that a wrong state changes the text."""
    import torch

    runner = worker.model_runner
    for part in (runner.model, runner.speculator.model):
        for name, weight in part.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                # Whether or not model and head share them.
                generator = torch.Generator(weight.device).manual_seed(seed + ("head" in name))
                weight.data.normal_(0, 1, generator=generator)
            elif name.endswith("fc.weight"):
                weight.data.zero_()
                weight.data[:, : len(weight)].fill_diagonal_(1)
