"""The target and the EAGLE head that tests of draft heads share."""

from typing import Any

from helpers.oracle import hf_model, our_model, random_config

from hybrid_runtime.models.nemotron_h import NemotronH

EAGLE: dict[str, Any] = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": 96,
    "hidden_act": "silu",
}
"""A checkpoint's config."""


def target_model(seed: int = 0, **changes: object) -> NemotronH:
    """A Mamba and an attention layer with random weights."""
    config = random_config("M*", **changes)
    return our_model(config, hf_model(config, seed))
