"""Calls and fields of vLLM that the adapter knows, checked once, when the model is built.

vLLM's runner calls a model state by the signatures of vLLM's own class, so these show every call
that will come. Where one of them differs, vLLM keeps its own class from the first step to the last.

Accepting unknown calls (`*args, **kwargs`) and passing them on would be no safer: a new argument
may say which rows to copy, or where a request starts. vLLM's copies would follow it; ours and the
bounds would not, and states would silently be wrong.
"""

import importlib
import inspect
from typing import Any, NamedTuple

SIGNATURES = {
    "add_request": "(req_index, new_req_data)",
    "initialize_kv_cache": "(kv_cache_config, block_tables)",
    "preprocess_state": "(input_batch, block_tables, kv_cache_config, num_computed_tokens)",
    "postprocess_state": "(idx_mapping, num_sampled, num_computed_tokens=None)",
    "_get_mamba_group_info": "(kv_cache_config)",
    "_ensure_align_ctx": "(kv_cache_config, mamba_group_ids, block_tables)",
}
"""Methods of `MambaHybridModelState` that are overridden, extended or called; 0.25.1 to 0.33.0."""

EITHER = ("_ensure_align_ctx", "initialize_kv_cache")
"""A release has one of these: the first up to 0.31, the second from 0.32 on."""

FIELDS = {
    "InputBatch": (
        "num_reqs idx_mapping idx_mapping_np num_scheduled_tokens num_draft_tokens_per_req "
        "num_computed_tokens_np prefill_len_np query_start_loc"
    ),
    "NewRequestData": "num_computed_tokens",
}
"""Fields that are read, by dataclass that vLLM passes to the hooks."""


class LayerHooks(NamedTuple):
    """A layer of vLLM's that replays, 0.25.1 to 0.33.0.

    module, name: of its class.
    methods: those that are overridden, and what they take.
    later: of those, the ones that not all releases have: with which method they came.
    paths: beginning of the names of methods that run a step's rows, and all such names that are
        known. Another one might bypass ours.
    metadata: module and name of the class of its metadata.
    fields: of the metadata, that are read or replaced.
    """

    module: str
    name: str
    methods: dict[str, str]
    metadata: tuple[str, str]
    fields: str
    later: tuple[tuple[str, str], ...] = ()
    paths: tuple[str, str] = ("", "")


MAMBA2 = LayerHooks(
    module="vllm.model_executor.layers.mamba.mamba_mixer2",
    name="MambaMixer2",
    methods={
        "conv_ssm_forward": "(projected_states, output)",
        "get_kv_cache_spec": "(vllm_config)",
    },
    metadata=("vllm.v1.attention.backends.mamba2_attn", "Mamba2AttentionMetadata"),
    fields=(
        "num_prefills num_prefill_tokens num_decodes num_decode_tokens query_start_loc_d "
        "num_accepted_tokens state_indices_tensor_d"
    ),
)

GDN = LayerHooks(
    module="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    name="QwenGatedDeltaNetAttention",
    methods={
        "_forward_core": "(mixed_qkv, b, a, core_attn_out)",
        "_can_use_fused_gdn_mtp_decode": "(attn_metadata)",
        "get_kv_cache_spec": "(vllm_config)",
    },
    metadata=("vllm.v1.attention.backends.gdn_attn", "GDNAttentionMetadata"),
    fields=(
        "num_prefills num_spec_decodes num_spec_decode_tokens num_actual_tokens "
        "spec_query_start_loc spec_state_indices_tensor spec_sequence_masks spec_token_indx "
        "non_spec_token_indx num_accepted_tokens"
    ),
    # From 0.28 on.
    later=(("_can_use_fused_gdn_mtp_decode", "_forward_core_fused_norm"),),
    paths=(
        "_forward_core",
        "_forward_core _forward_core_rocm _forward_core_decode_aiter "
        "_forward_core_decode_non_spec _forward_core_decode_spec_fused_norm "
        "_forward_core_decode_spec_post_conv_fused_norm _forward_core_fused_norm_packed "
        "_forward_core_fused_norm",
    ),
)

PREPARE = "input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config"
"""First parameters of the model state's `prepare_attn`, which replay reads."""


def unknown() -> str | None:
    """The first hook of the installed vLLM that is not as listed above, or None."""
    import vllm

    try:
        from vllm.v1.core.sched.output import NewRequestData
        from vllm.v1.worker.gpu.input_batch import InputBatch
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    except ImportError as error:
        return f"vLLM {vllm.__version__} is not as known ({error})"
    why = unknown_method(MambaHybridModelState)
    why = why or unknown_field(InputBatch) or unknown_field(NewRequestData)
    return why and f"in vLLM {vllm.__version__} {why}"


def unknown_layer(known: LayerHooks) -> str | None:
    """The first method or field of the installed layer that is not as above, or None."""
    import vllm
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    where = f"in vLLM {vllm.__version__}"
    layer = getattr(importlib.import_module(known.module), known.name)
    for name, wanted in known.methods.items():
        method = getattr(layer, name, None)
        came_with = dict(known.later).get(name, "__init__")
        if method is None and not hasattr(layer, came_with):
            continue
        if (found := method and signature(method)) != wanted:
            return f"{where} {layer.__name__}.{name} takes {found}, known is {wanted}"
    start, paths = known.paths
    more = [name for name in dir(layer) if start and name.startswith(start)]
    if unknown_paths := sorted(set(more) - set(paths.split())):
        return f"{where} {layer.__name__} has {', '.join(unknown_paths)}"
    metadata = getattr(importlib.import_module(known.metadata[0]), known.metadata[1])
    fields = metadata.__dataclass_fields__
    if missing := [name for name in known.fields.split() if name not in fields]:
        return f"{where} {metadata.__name__} has no {', '.join(missing)}"
    taken = list(inspect.signature(MambaHybridModelState.prepare_attn).parameters)[1:7]
    if taken != PREPARE.split():
        return f"{where} prepare_attn takes {', '.join(taken)}"
    return None


def unknown_method(state: type) -> str | None:
    """The first method of vLLM's model state that is missing or takes other arguments, or None."""
    if sum(hasattr(state, name) for name in EITHER) != 1:
        return f"{state.__name__} has not one of {' and '.join(EITHER)}"
    for name, known in SIGNATURES.items():
        method = getattr(state, name, None)
        if method is None and name not in EITHER:
            return f"{state.__name__} has no {name}{known}"
        if method is not None and (found := signature(method)) != known:
            return f"{state.__name__}.{name} takes {found}, known is {known}"
    return None


def unknown_field(handed: Any) -> str | None:
    """Fields that are read of the dataclass `handed` and that it does not have, or None."""
    found = getattr(handed, "__dataclass_fields__", ())
    missing = [name for name in FIELDS[handed.__name__].split() if name not in found]
    return f"{handed.__name__} has no {', '.join(missing)}" if missing else None


def signature(method: Any) -> str:
    """`(a, b=None)`: a method's parameters without `self` and types."""
    _, *parameters = inspect.signature(method).parameters.values()
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))
