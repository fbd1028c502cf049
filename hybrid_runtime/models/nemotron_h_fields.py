"""What the fields of a Nemotron-H config.json may be."""

import torch

from hybrid_runtime.models.json_fields import (
    COUNT,
    FLAG,
    SIZE,
    Kind,
    integer,
    one_of,
    only,
    or_list_of,
    positive,
)

SYMBOLS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What SSM states may be kept in, by the names of config files."""

# Other spellings of fields, met in published Nemotron-H files or accepted by transformers.
ALIASES = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
    "num_query_groups": "num_key_value_heads",
    "rms_norm_eps": "layer_norm_epsilon",
    "torch_dtype": "dtype",
}

_DTYPES = one_of(*STATE_DTYPES, *(str(dtype) for dtype in STATE_DTYPES.values()))
_TOKEN = integer(0, 2**31 - 1)
_MOST_LAYERS = 4096


def _layers(least: int) -> Kind:
    """Characters, one per layer."""
    return Kind(
        f"a text of {least} to {_MOST_LAYERS} layers, each one of M * - E",
        lambda value: (
            isinstance(value, str)
            and least <= len(value) <= _MOST_LAYERS
            and set(value) <= set(SYMBOLS.values())
        ),
    )


def _layer_list(least: int) -> Kind:
    return Kind(
        f"a list of {least} to {_MOST_LAYERS} layers, each one of {', '.join(SYMBOLS)}",
        lambda value: (
            isinstance(value, list)
            and least <= len(value) <= _MOST_LAYERS
            and all(isinstance(layer, str) and layer in SYMBOLS for layer in value)
        ),
    )


_LIMITS = Kind(
    "[low, high], 0 <= low <= high",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(limit) in (int, float) for limit in value)
        and 0 <= value[0] <= value[1]
    ),
)

# What each field must be, by our names; those with one implemented value stand first.
KINDS: dict[str, Kind] = {
    "model_type": only("nemotron_h"),
    "attention_bias": only(False),
    "hidden_act": only("relu2"),
    "mamba_hidden_act": only("silu"),
    "mlp_hidden_act": only("relu2"),
    "sliding_window": only(None),
    "mamba_proj_bias": FLAG,
    "n_shared_experts": integer(0, COUNT),
    "num_hidden_layers": integer(1, COUNT),
    "hybrid_override_pattern": _layers(1),
    "mtp_hybrid_override_pattern": _layers(0),
    "layers_block_type": _layer_list(1),
    "layer_types": _layer_list(1),
    "mtp_layers_block_type": _layer_list(0),
    "mtp_layer_types": _layer_list(0),
    "pattern": _layers(1),
    "mtp_pattern": _layers(0),
    "vocab_size": integer(1, SIZE),
    "hidden_size": integer(1, SIZE),
    "intermediate_size": integer(1, SIZE),
    "num_attention_heads": integer(1, COUNT),
    "num_key_value_heads": integer(1, COUNT),
    "head_dim": integer(1, COUNT),
    "mamba_num_heads": integer(1, COUNT),
    "mamba_head_dim": integer(1, COUNT),
    "n_groups": integer(1, COUNT),
    "ssm_state_size": integer(1, COUNT),
    "conv_kernel": integer(2, COUNT),
    "chunk_size": integer(1, SIZE),
    "time_step_limit": _LIMITS,
    "mamba_ssm_cache_dtype": _DTYPES,
    "n_routed_experts": integer(1, COUNT),
    "num_experts_per_tok": integer(1, COUNT),
    "moe_intermediate_size": integer(1, SIZE),
    "moe_shared_expert_intermediate_size": integer(1, SIZE),
    "moe_latent_size": integer(1, SIZE),
    "n_group": integer(1, COUNT),
    "topk_group": integer(1, COUNT),
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": positive(1e9),
    "num_nextn_predict_layers": integer(0, COUNT),
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "mlp_bias": FLAG,
    "residual_in_fp32": FLAG,
    "tie_word_embeddings": FLAG,
    "layer_norm_epsilon": positive(1),
    "max_position_embeddings": integer(1, 2**31 - 1),
    "bos_token_id": _TOKEN,
    "eos_token_id": or_list_of(_TOKEN, "such"),
    "pad_token_id": _TOKEN,
    "dtype": _DTYPES,
}
KINDS |= {alias: KINDS[name] for alias, name in ALIASES.items() if name in KINDS}

# Fields that cannot change the logits of a given checkpoint at inference. No implementation of
# the family uses a rotary embedding, so the fields that would shape one are here too.
# fmt: off
HARMLESS = frozenset([
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "expand",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min", "mamba_expand", "max_length",
    "min_length", "moe_router_force_load_balancing", "moe_shared_expert_overlap", "name_or_path",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_logits_to_keep",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "partial_rotary_factor", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "rescale_prenorm_residual", "return_dict",
    "return_dict_in_generate", "rope_parameters", "rope_scaling", "rope_theta",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "time_step_floor", "time_step_max",
    "time_step_min", "time_step_rank", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers_version", "typical_p", "use_bfloat16", "use_cache", "use_mamba_kernels",
])
# fmt: on
