"""vLLM's Gated DeltaNet layers (Qwen3-Next, Qwen3.5 and later) with replay. Projections,
convolution, norm, sharding, quantised weights and prompts stay vLLM's.

Which rows of a batch decode is vLLM's choice: those of `spec_sequence_masks`, which need not come
first. All others run through vLLM's own code, and so must start from a state that lacks nothing.
Up to 0.31 there are decode rows without drafts among them, which vLLM then starts from a state
without the drafts that were accepted before. With replay those are folded first (`ReplayStates`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import hooks, versions
from hybrid_runtime.integrations.vllm.replay_checker import Reference
from hybrid_runtime.integrations.vllm.replay_layers import Kind, ReplayLayer, layer_class
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.gdn.recurrence import gdn
from hybrid_runtime.kernels.gdn.replay_update import replay_update
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.kernels.step.vllm_rows import StepRows

OURS = "HybridRuntimeGatedDeltaNet"
"""The name of our class."""

MOST_CHANNELS = 128
"""Most rows and columns of a head's matrix; with more the kernel has not been tried."""


class ReplayGdn(ReplayLayer):
    """Mixed in before vLLM's class."""

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        """vLLM's fused kernel of 0.28 and later takes a state per draft; without it
        `_forward_core` runs, and then the norm."""
        if self.replay is not None:
            return False
        return bool(super()._can_use_fused_gdn_mtp_decode(attn_metadata))

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        from vllm.forward_context import get_forward_context

        every = get_forward_context().attn_metadata
        metadata = every.get(self.prefix) if every else None
        if self.replay is None or metadata is None or metadata.spec_sequence_masks is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        rows = metadata.num_spec_decodes
        if not metadata.num_prefills:
            mixed, b, a, out = (
                part[: metadata.num_actual_tokens] for part in (mixed_qkv, b, a, core_attn_out)
            )
            self._verify(mixed, b, a, out, metadata, self.replay.rows.first(rows))
            return
        own, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        every[self.prefix] = dataclasses.replace(
            metadata,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=len(others),
            spec_sequence_masks=None,
        )
        out = core_attn_out.new_empty((len(others), *core_attn_out.shape[1:]))
        try:
            super()._forward_core(
                *(part.index_select(0, others) for part in (mixed_qkv, b, a)), out
            )
        finally:
            every[self.prefix] = metadata
        core_attn_out.index_copy_(0, others, out)
        out = core_attn_out.new_empty((len(own), *core_attn_out.shape[1:]))
        step = self.replay.rows.where(metadata.spec_sequence_masks, rows)
        # With the strides of batches that are not mixed, so that no other kernel is compiled.
        mixed = mixed_qkv.new_empty((len(own), mixed_qkv.stride(0)))[:, : mixed_qkv.shape[1]]
        torch.index_select(mixed_qkv, 0, own, out=mixed)
        self._verify(mixed, b.index_select(0, own), a.index_select(0, own), out, metadata, step)
        core_attn_out.index_copy_(0, own, out)

    def _verify(
        self, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, metadata: Any, step: StepRows
    ) -> None:
        """Run the decode rows of a step: vLLM's convolution, then our state update.

        mixed `[tokens, channels]`, b and a `[tokens, Hv]`, out `[tokens, Hv, V]`: of these rows.
        """
        replay = self.replay
        assert replay is not None
        rows = metadata.num_spec_decodes
        start = metadata.spec_query_start_loc[: rows + 1]
        blocks = metadata.spec_state_indices_tensor[:rows, 0]
        mixed = self._convolve(mixed, self.conv1d.weight.squeeze(1), blocks, start, metadata)
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q = q.unflatten(-1, (-1, self.head_k_dim))
        k = k.unflatten(-1, (-1, self.head_k_dim))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        expected, checker = None, replay.checker
        if checker is not None:
            expected = checker.expect(self, step, start, _theirs(self, q, k, v, a, b, start))
        replay_update(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            states=self.kv_cache[1],
            records=Records(*replay.records[self.replay_index]),
            rows=replay.replay_rows(self.replay_index, step, start),
            max_scheduled=1 + replay.drafts,
            rounding=replay.rounding(self.replay_index),
            out=out,
        )
        if expected is not None:
            checker.compare(self, expected, out, start)


def _theirs(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, start: Tensor
) -> Reference:
    """vLLM's own update of these rows."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    def run(states: Tensor, columns: Tensor, accepted: Tensor) -> Tensor:
        out, _ = qwen_gdn_linear_attn.fused_sigmoid_gating_delta_rule_update(
            A_log=layer.A_log,
            a=a,
            b=b,
            dt_bias=layer.dt_bias,
            q=q.contiguous()[None],
            k=k.contiguous()[None],
            v=v.contiguous()[None],
            initial_state=states,
            inplace_final_state=True,
            cu_seqlens=start,
            ssm_state_indices=columns,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0]

    return run


def _recurrence(layer: Any, dtype: torch.dtype) -> Recurrence:
    heads, keys = layer.num_v_heads // layer.tp_size, layer.num_k_heads // layer.tp_size
    width = layer.conv1d.weight.shape[-1]
    return gdn(heads, keys, layer.head_k_dim, layer.head_v_dim, width, dtype)


def _sizes(layer: Any) -> tuple[int, ...]:
    return layer.num_v_heads, layer.num_k_heads, layer.head_k_dim, layer.head_v_dim


def _unhandled(layer: Any) -> str | None:
    key, value = layer.head_k_dim, layer.head_v_dim
    if max(key, value) <= MOST_CHANNELS:
        return None
    return f"its heads are {key} x {value}, the kernel takes {MOST_CHANNELS} x {MOST_CHANNELS}"


GDN = Kind(
    hooks=hooks.GDN,
    mixin=ReplayGdn,
    ours=OURS,
    recurrence=_recurrence,
    params=lambda layer: (),
    sizes=_sizes,
    unhandled=_unhandled,
    flushes_plain_rows=versions.plain_rows_run_as_prompts,
)


def __getattr__(name: str) -> Any:
    if name == OURS:
        return layer_class(GDN)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
