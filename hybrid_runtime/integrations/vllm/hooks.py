"""Calls and fields of vLLM that the adapter knows, checked once, when the model is built.

vLLM's runner calls a model state by the signatures of vLLM's own class, so these show every call
that will come. Where one of them differs, vLLM keeps its own class from the first step to the last.

Accepting unknown calls (`*args, **kwargs`) and passing them on would be no safer: a new argument
may say which rows to copy, or where a request starts. vLLM's copies would follow it; ours and the
bounds would not, and states would silently be wrong.
"""

import inspect
from typing import Any

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

LAYER = {
    "conv_ssm_forward": "(projected_states, output)",
    "get_kv_cache_spec": "(vllm_config)",
}
"""Methods of `MambaMixer2` that a replaying layer overrides; 0.25.1 to 0.33.0."""

LAYER_FIELDS = (
    "num_prefills num_prefill_tokens num_decodes num_decode_tokens query_start_loc_d "
    "num_accepted_tokens state_indices_tensor_d"
)
"""Fields of `Mamba2AttentionMetadata` that it reads or replaces."""

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


def unknown_layer() -> str | None:
    """The first method or field of the installed Mamba-2 layer that is not as above, or None."""
    import vllm
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    where = f"in vLLM {vllm.__version__}"
    for name, known in LAYER.items():
        if (found := signature(getattr(MambaMixer2, name))) != known:
            return f"{where} {MambaMixer2.__name__}.{name} takes {found}, known is {known}"
    fields = Mamba2AttentionMetadata.__dataclass_fields__
    if missing := [name for name in LAYER_FIELDS.split() if name not in fields]:
        return f"{where} {Mamba2AttentionMetadata.__name__} has no {', '.join(missing)}"
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
