"""The cache spec and manager of a replaying layer in vLLM 0.25 and 0.26.

With asynchronous scheduling these releases free a request's blocks by a count that takes all drafts
in flight as accepted, less the blocks for drafts, of which a replaying layer has none. This manager
subtracts the drafts. vLLM finds it by the class of the spec, in every process that unpickles one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

# vLLM fills the registry only while it is empty, so its own entries must come first.
KVCacheSpecRegistry._ensure_registered()


class ReplayManager(MambaManager):
    """Frees blocks by the count that is left if every draft in flight is rejected."""

    def remove_skipped_blocks(
        self, request_id: str, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        certain = max(0, num_computed_tokens - self.kv_cache_spec.rejectable)
        super().remove_skipped_blocks(request_id, certain, *args, **kwargs)


@register_kv_cache_spec(manager_class=ReplayManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True)
class ReplaySpec(MambaSpec):
    """rejectable: most drafts of a step."""

    rejectable: int = 0


def replay_spec(spec: Any) -> ReplaySpec:
    """`spec` without blocks for drafts, managed by `ReplayManager`."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    drafts = values["num_speculative_blocks"]
    return ReplaySpec(**values | {"num_speculative_blocks": 0}, rejectable=drafts)
