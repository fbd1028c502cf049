"""What the adapter touches in vLLM: the tables that compat.py looks up in each release."""

from hybrid_runtime.integrations.vllm import checker, hooks

STATE = "v1/worker/gpu/model_states/mamba_hybrid.py"
RUNNER = "v1/worker/gpu/model_runner.py"
UTILS = "v1/worker/mamba_utils.py"
SPECS = "v1/kv_cache_interface.py"
REGISTRY = "model_executor/models/registry.py"
LAYERS = {
    known.module.removeprefix("vllm.").replace(".", "/") + ".py": known
    for known in (hooks.MAMBA2, hooks.GDN)
}
"""Layers that replay, by file."""
MIXER, GDN = LAYERS
GDN_BASE = "model_executor/layers/mamba/gdn/base.py"
GDN_METADATA = "v1/attention/backends/gdn_attn.py"
CONV = "model_executor/layers/mamba/ops/causal_conv1d.py"
MANAGER = "v1/core/single_type_kv_cache_manager.py"
CUSTOM_OP = "model_executor/custom_op.py"

METHODS = {
    (UTILS, "MambaSpecDecodeGPUContext", "run_fused_precopy"): (
        "num_reqs state_idx_gpu src_col_gpu token_bias_gpu idx_mapping"
    ),
    (UTILS, "MambaSpecDecodeGPUContext", "run_fused_postprocess_align"): (
        "num_reqs num_accepted_tokens_gpu state_idx_gpu new_num_computed_tokens_gpu idx_mapping"
    ),
    (UTILS, None, "preprocess_mamba_align_fused_kernel"): (
        "idx_mapping_ptr state_idx_ptr num_computed_tokens_ptr query_start_loc_ptr "
        "num_accepted_tokens_ptr src_col_ptr src_off_ptr num_reqs BLOCK_SIZE MAMBA_BLOCK_SIZE"
    ),
    (REGISTRY, "_ModelRegistry", "register_model"): "model_arch model_cls",
    ("model_executor/layers/mamba/mamba_utils.py", None, "is_conv_state_dim_first"): "",
    ("logger.py", None, "init_logger"): "name",
    ("config/vllm.py", "VllmConfig", "use_v2_model_runner"): "",
    ("config/vllm.py", "VllmConfig", "num_speculative_tokens"): "",
    ("forward_context.py", None, "get_forward_context"): "",
    (CUSTOM_OP, "PluggableLayer", "register_oot"): "cls _decorated_layer_cls name",
    (CONV, None, "causal_conv1d_update"): (
        "x conv_state weight bias activation conv_state_indices num_accepted_tokens "
        "query_start_loc max_query_len"
    ),
    ("v1/kv_cache_spec_registry.py", None, "register_kv_cache_spec"): (
        "manager_class uniform_type_base_spec"
    ),
}
"""Parameters, `self` left out; a release may have more behind them if those have defaults. The
model state's hooks, which may not, stand in `hooks.SIGNATURES`."""

FIELDS = {
    ("v1/worker/gpu/input_batch.py", "InputBatch"): hooks.FIELDS["InputBatch"],
    ("v1/core/sched/output.py", "NewRequestData"): hooks.FIELDS["NewRequestData"],
    (UTILS, "MambaSpecDecodeGPUContext"): " ".join(checker.PER_STATE),
    (SPECS, "KVCacheConfig"): "kv_cache_groups",
    (SPECS, "KVCacheGroupSpec"): "layer_names kv_cache_spec",
    (SPECS, "KVCacheSpec"): "block_size",
    (SPECS, "MambaSpec"): "mamba_type mamba_cache_mode num_speculative_blocks",
    ("v1/attention/backends/mamba_attn.py", "BaseMambaAttentionMetadata"): hooks.MAMBA2.fields,
    (GDN_METADATA, "GDNAttentionMetadata"): hooks.GDN.fields,
    ("v1/attention/backends/registry.py", "MambaAttentionBackendEnum"): "MAMBA1 MAMBA2 GDN_ATTN",
    (REGISTRY, "_LazyRegisteredModel"): "module_name class_name",
    ("config/vllm.py", "VllmConfig"): (
        "cache_config parallel_config scheduler_config compilation_config speculative_config "
        "kv_transfer_config model_config device_config mamba_config"
    ),
    ("config/cache.py", "CacheConfig"): "block_size mamba_block_size mamba_cache_mode",
    ("config/parallel.py", "ParallelConfig"): (
        "rank pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "enable_dbo tensor_parallel_size"
    ),
    ("config/scheduler.py", "SchedulerConfig"): "async_scheduling max_num_seqs",
    ("config/compilation.py", "CompilationConfig"): "static_forward_context",
}

ATTRIBUTES = {
    (STATE, "MambaHybridModelState"): (
        "cache_config num_accepted_tokens_gpu _mamba_state_idx_gpu _mamba_ctx _align_mode"
    ),
    ("v1/worker/gpu/model_states/interface.py", "ModelState"): "vllm_config max_num_reqs model",
    (MIXER, "MambaMixer2"): (
        "num_heads n_groups tp_size head_dim ssm_state_size A D dt_bias conv1d activation num_spec "
        "prefix kv_cache tped_intermediate_size tped_conv_size tped_dt_size "
        "split_hidden_states_B_C_fn"
    ),
    (GDN_BASE, "GatedDeltaNetAttention"): "prefix tp_size activation",
    (GDN, "QwenGatedDeltaNetAttention"): (
        "num_k_heads num_v_heads head_k_dim head_v_dim key_dim value_dim conv1d A_log dt_bias"
    ),
    ("v1/worker/gpu/block_table.py", "BlockTables"): "block_tables input_block_tables",
    ("v1/worker/gpu/buffer_utils.py", "StagedWriteTensor"): "gpu",
}

NAMES = {
    REGISTRY: "_VLLM_MODELS ModelRegistry",
    "plugins/__init__.py": "DEFAULT_PLUGINS_GROUP load_general_plugins",
    "__init__.py": "__version__",
    "envs.py": "VLLM_LOG_STATS_INTERVAL",
    CUSTOM_OP: "op_registry_oot",
    GDN: "fused_sigmoid_gating_delta_rule_update",
}

CALLS = {
    "the runner prepares the tables, then calls preprocess_state with the exact counts": (
        RUNNER,
        "execute_model",
        "preprocess_state",
        ["input_batch", "block_tables", "self.kv_cache_config",
         "self.req_states.num_computed_tokens.gpu"],
    ),
    "the runner then prepares the attention of the same batch": (
        RUNNER,
        "execute_model",
        "prepare_attn",
        ["input_batch", "batch_desc.cg_mode", "block_tables"],
    ),
    "the runner ends a step with its exact counts": (
        RUNNER,
        "postprocess_sampled",
        "postprocess_state",
        ["idx_mapping", "num_sampled", "self.req_states.num_computed_tokens.gpu"],
    ),
    "a step ends with the tensor of rows that it began with": (
        RUNNER,
        "sample_tokens",
        "postprocess_sampled",
        ["input_batch.idx_mapping"],
    ),
}  # fmt: skip
