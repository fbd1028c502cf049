"""Shapes of Qwen's models with Gated DeltaNet, as vLLM 0.25.1 can run them on text alone.

It has Qwen3.5 only with pictures, so all are built as Qwen3-Next, of which every layer type is the
same but for the order of a projection's rows. That class wants a layer with experts in the model
and in its MTP head. In a dense shape these are layer 0 of both, with two experts of half the width
that every token goes through: the same weights are read as in a dense layer.

`modelinfos/` holds what vLLM 0.25.1 finds when it inspects the two classes; copied into
`$VLLM_CACHE_ROOT/modelinfos` they save it two processes.
"""

from __future__ import annotations

from typing import Any

DENSE: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
        **DENSE,
    },
    "qwen3.5-27b": {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
        **DENSE,
    },
    "qwen3.5-35b-a3b": {
        "num_hidden_layers": 40, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    **DENSE,
}  # fmt: skip
"""Of no checkpoint, for texts in fp32 (`serve.py`): tokens are bytes, and states so small that a
request passes several blocks."""
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 248320,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_nextn_predict_layers": 1,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


def config(name: str, layers: int | None = None) -> dict[str, Any]:
    """A checkpoint's config.json of that shape, the first `layers` layers alone if given. Each
    fourth layer is one of attention."""
    return _config(SHAPES[name], layers)


def small() -> dict[str, Any]:
    """The same of `SMALL`."""
    return _config(SMALL)


def _config(sizes: dict[str, Any], layers: int | None = None) -> dict[str, Any]:
    shape = COMMON | sizes
    depth = layers or shape["num_hidden_layers"]
    kinds = ["linear_attention", "full_attention"]
    shape |= {"num_hidden_layers": depth}
    shape["layer_types"] = [kinds[index % 4 == 3] for index in range(depth)]
    if "moe_intermediate_size" not in shape:
        shape["moe_intermediate_size"] = shape["intermediate_size"] // shape["num_experts"]
        shape["mlp_only_layers"] = list(range(1, depth))
    return shape


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
