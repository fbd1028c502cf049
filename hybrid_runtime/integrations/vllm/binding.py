"""vLLM's Mamba state tensors and block tables as one `StateTable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hybrid_runtime.integrations.vllm.config import Unhandled
from hybrid_runtime.kernels.step.state_table import StateTable


def bind(
    kv_cache_config: Any,
    groups: Sequence[int],
    forward_context: Mapping[str, Any],
    tables: Sequence[Tensor],
    channels_first: bool,
    drafts: int | None = None,
) -> StateTable:
    """Every Mamba layer's window and state, with its cache group's block table.

    groups: indices of the Mamba cache groups; tables: one int32 table for each of them.
    channels_first: the window's layout is `[channels, positions]` (vLLM's DS).
    drafts: guesses that a window has room for; None: as many as there are blocks for guesses.
    """
    windows, states, chosen = [], [], []
    room = drafts or 0
    for group, table in zip(groups, tables, strict=True):
        spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
        spare = _speculative_blocks(spec)
        room = spare if drafts is None else drafts
        for name in kv_cache_config.kv_cache_groups[group].layer_names:
            parts = list(forward_context[name].kv_cache)
            if len(parts) != 2 or parts[0].dim() != 3 or not parts[1][0].is_contiguous():
                shapes = [tuple(part.shape) for part in parts]
                raise Unhandled(f"layer {name} keeps {shapes}, not one window and one state")
            windows.append(parts[0].transpose(1, 2) if channels_first else parts[0])
            states.append(parts[1])
            chosen.append(table)
    for kind, tensors in (("windows", windows), ("states", states)):
        if len({(t.dtype, t.shape[1:], t.stride()[1:]) for t in tensors}) != 1:
            raise Unhandled(f"the {kind} of its Mamba layers differ in shape or type")
    taps = windows[0].shape[1] - room
    if taps < 1:
        raise Unhandled(f"its windows of {windows[0].shape[1]} inputs hold none besides the drafts")
    return StateTable.build(windows, states, chosen, taps)


def _speculative_blocks(spec: Any) -> int:
    """Speculative columns of a group whose states roll back as ours do: the window by an offset,
    the state by a column."""
    kind = getattr(getattr(spec, "mamba_type", None), "name", "?")
    drafts = int(getattr(spec, "num_speculative_blocks", 0))
    if kind in ("MAMBA2", "GDN_ATTN") or (kind == "MAMBA1" and not drafts):
        return drafts
    raise Unhandled(f"a cache group of type {kind} with {drafts} drafts")
