"""The bytes that a decode step has to move, however it is computed.

Left out: activations, logits, and anything that a cache might hold between two uses. Weights count
once per pass that needs them, because a pass's weights exceed every cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hybrid_runtime.engine.config import state_group
from hybrid_runtime.kernels.sampling.narrow_head import narrow_bytes
from hybrid_runtime.models.linear import Embedding
from hybrid_runtime.models.moe import MoE
from hybrid_runtime.specdecode.drafter import narrowed_weight
from hybrid_runtime.state.layout import StateLayout

Model = Any
"""A `HybridModel` made of torch modules."""
Head = Any
"""A draft head made of torch modules."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Of one step: `weights` of the verify pass, `draft` of the draft passes with the output head
    in each, `state` and `window` (one read and drafts + 1 states written per row; in the replay
    layout one written, and the guesses' records), `kv` read and written by verify and drafts."""

    weights: float
    draft: float
    state: float
    window: float
    kv: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def step_bytes(
    model: Model,
    head: Head | None,
    layout: StateLayout,
    rows: int,
    context: float,
    accepted: float,
) -> StepBytes:
    """For `rows` decode rows with `context` tokens each, of which every step emits `accepted`;
    drafts as `layout` has them.

    Experts count as far as uniformly spread routing would touch them.
    """
    drafts = layout.num_speculative_tokens
    tokens = rows * (drafts + 1)
    head_bytes = model.output_weight.nbytes
    looked_up = [part.weight for part in model.modules() if isinstance(part, Embedding)]
    body = _weights(model, tokens)
    body -= sum(weight.nbytes for weight in looked_up if weight is not model.output_weight)
    # Each draft pass computes one token per row; the first one stores keys and values of all tokens
    # of the verify pass. Experts stand behind the last attention layer in all published heads.
    passes = [tokens, *[rows] * (drafts - 1)] if head is not None and drafts else []
    narrowed = narrowed_weight(head, False, model.device)
    drafted_bytes = head_bytes if narrowed is None else narrow_bytes(narrowed)
    draft = 0.0 if head is None else len(passes) * (_weights(head, rows) + drafted_bytes)
    window, ssm = layout.components
    channel = layout.conv_channels * window.dtype.itemsize
    read = layout.conv_width - 1
    layers = len(state_group(model).layers)
    kv = _per_token(model) * (rows * context + tokens)
    if head is not None:
        kv += _per_token(head) * sum(rows * context + n for n in passes)
    # What a state lacks is read from the window cache, the step's own tokens are written there.
    pending = accepted - 1 + accepted * (layout.steps_per_write(accepted) - 1) / 2
    cached = layout.window_cache_bytes / layout.ring * (pending + drafts + 1)
    states = layout.states_per_step(accepted) * ssm.nbytes
    return StepBytes(
        weights=body,
        draft=draft,
        state=rows * layers * (states + cached),
        window=rows * layers * (read + read + drafts) * channel,
        kv=kv * model.dtype.itemsize,
    )


def _per_token(network: Any) -> int:
    """Elements of a token's keys and values, all layers."""
    heads, size = network.kv_shape
    return 2 * heads * size * len(network.kv_layers)


def _weights(module: nn.Module, tokens: int) -> float:
    """Bytes of all parameters, of routed experts those that `tokens` tokens touch."""
    total = float(sum(p.nbytes for p in module.parameters()))
    for part in module.modules():
        if isinstance(part, MoE):
            missed = (1 - part.gate.routing.top_k / part.experts.count) ** tokens
            total -= missed * part.experts.nbytes
    return total
