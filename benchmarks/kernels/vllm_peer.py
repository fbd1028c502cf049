"""vLLM's Mamba-2 state update of decode rows with guesses, called as `window.py` calls our kernel.

It writes the state after every token into a block of its own; the next step reads the one that the
last accepted token left. Its launch shape is the one that vLLM ships for the GPU.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


@functools.cache
def vllm_side() -> type[VLLM]:
    """The class to time. Raises `ImportError` without vLLM."""
    ops = importlib.import_module("vllm.model_executor.layers.mamba.ops.mamba_ssm")
    return type("Imported", (VLLM,), {"update": staticmethod(ops.selective_state_update)})


class VLLM:
    """Arguments as of `MambaMixer2.conv_ssm_forward` (0.25.1). Block 0 is vLLM's null block."""

    window, late = 0, 1
    update: Any

    def __init__(self, case: Any) -> None:
        rows, tokens = case.rows, case.tokens
        self.case, self.written, self.blocks = case, tokens, 1 + rows * tokens
        blocks = torch.arange(1, self.blocks, dtype=torch.int32, device=case.device)
        self.indices = blocks.view(rows, tokens)
        heads, dim, state = case.A_log.shape[0], 64, 128
        self.A = (-torch.exp(case.A_log))[:, None, None].expand(heads, dim, state)
        self.D = case.D[:, None].expand(heads, dim)
        self.bias = case.dt_bias[:, None].expand(heads, dim)
        shape = rows * tokens, heads, dim
        self.out = torch.empty(shape, dtype=torch.bfloat16, device=case.device)

    def live(self, states: Tensor) -> Tensor:
        return states[1 :: self.case.tokens]

    def forms(self) -> list[VLLM]:
        return [self]

    def cache(self) -> tuple[()]:
        return ()

    def positions(self, places: Any) -> Tensor:
        """Tokens accepted in the step before."""
        accepted: Tensor = places.pending.int() + 1
        return accepted.to(self.case.device)

    def run(self, states: Tensor, cache: tuple[()], at: Tensor, mixed: Tensor) -> Tensor:
        given = self.case.inputs(mixed)
        dt = given["dt"][..., None].expand(*given["dt"].shape, given["x"].shape[-1])
        self.update(
            states, given["x"], dt, self.A, given["B"], given["C"], self.D, self.bias,
            dt_softplus=True, state_batch_indices=self.indices, out=self.out,
            num_accepted_tokens=at, cu_seqlens=self.case.cu_seqlens,
        )  # fmt: skip
        return self.out
