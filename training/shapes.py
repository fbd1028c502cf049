"""The shapes of the shipped checkpoint, and the configuration files that state them."""

from typing import Any

PATTERN = "MEM*M-M*"
MTP_PATTERN = "*E"
END_OF_TEXT = 256
PAD = 257

#: ``config.json`` of the checkpoint: the field names of public Nemotron-H checkpoints.
TARGET: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 192,
    "num_hidden_layers": len(PATTERN),
    "hybrid_override_pattern": PATTERN,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": MTP_PATTERN,
    "max_position_embeddings": 8192,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PAD,
    "residual_in_fp32": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "mamba_num_heads": 6,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "chunk_size": 64,
    "expand": 2,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "use_bias": False,
    # transformers clamps the time step to time_step_min in its chunked form and not in its
    # one-token form; a bound that softplus never reaches makes the two agree.
    "time_step_min": 1e-9,
    "time_step_max": 0.1,
    "time_step_floor": 1e-9,
    "mamba_ssm_cache_dtype": "float32",
    "intermediate_size": 768,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "routed_scaling_factor": 2.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_cache": True,
}

#: ``eagle/config.json``: an EAGLE-1 draft head with one llama decoder layer.
EAGLE: dict[str, Any] = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": TARGET["vocab_size"],
    "hidden_size": TARGET["hidden_size"],
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": TARGET["max_position_embeddings"],
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PAD,
}


def block_size(num_drafts: int, kv_bytes: int = 2, window_bytes: int = 2) -> int:
    """Tokens per cache block: a Mamba layer's fp32 state over a layer's KV, rounded up to 16."""
    channels = mamba_channels()
    state = TARGET["mamba_num_heads"] * TARGET["mamba_head_dim"] * TARGET["ssm_state_size"] * 4
    window = (TARGET["conv_kernel"] - 1 + num_drafts) * channels * window_bytes
    per_token = 2 * TARGET["num_key_value_heads"] * TARGET["head_dim"] * kv_bytes
    return -(-(state + window) // (per_token * 16)) * 16


def mamba_channels() -> int:
    """Channels that pass through the causal convolution."""
    inner = TARGET["mamba_num_heads"] * TARGET["mamba_head_dim"]
    return int(inner + 2 * TARGET["n_groups"] * TARGET["ssm_state_size"])
