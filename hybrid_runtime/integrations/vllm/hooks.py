"""Which calls of vLLM the adapter knows, decided once, when the model is built.

vLLM's runner calls a model state by the signatures of vLLM's own class. They tell what will come
before anything runs, so a call that we do not know never reaches us: a vLLM that makes one keeps
its own class, from the first step to the last.

To take such calls in the hooks (`*args, **kwargs`) and hand them on would be no safer. An argument
of unknown meaning may say which rows to copy, or where a request starts; vLLM's copies would follow
it, ours, and the bounds that rule rows out, would not, and states would be wrong in silence.
"""

from __future__ import annotations

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
"""Methods of `MambaHybridModelState` that are replaced, added to or called; 0.25.1 to 0.33.0."""

EITHER = ("_ensure_align_ctx", "initialize_kv_cache")
"""Of these a release has one: the first up to 0.31. By it `versions` tells them apart."""

FIELDS = {
    "InputBatch": (
        "num_reqs idx_mapping idx_mapping_np num_scheduled_tokens num_draft_tokens_per_req "
        "num_computed_tokens_np prefill_len_np query_start_loc"
    ),
    "NewRequestData": "num_computed_tokens",
}
"""What is read of the dataclasses that the hooks are handed."""


def unknown() -> str | None:
    """What of the installed vLLM's hooks is not as listed above, or None."""
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


def unknown_method(state: type) -> str | None:
    """The first method of vLLM's model state that is missing or takes other arguments."""
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
    """The fields that are read of the dataclass `handed` and that it lacks."""
    found = getattr(handed, "__dataclass_fields__", ())
    missing = [name for name in FIELDS[handed.__name__].split() if name not in found]
    return f"{handed.__name__} has no {', '.join(missing)}" if missing else None


def signature(method: Any) -> str:
    """`(a, b=None)`: a method's parameters without `self` and types."""
    _, *parameters = inspect.signature(method).parameters.values()
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))
