"""Inputs of the last step's guesses, which the next step folds into the state if accepted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.kernels.mamba.naive import check_ssm_shapes


class WindowCache(NamedTuple):
    """Inputs of the guesses of each slot's last step, of one layer; or of all, layers first.

    The first dimension is the turn: a step reads one half of a slot and writes the other, because
    several programs of a row read what one of them stores.

    x: `[2, slots, K, H, P]` in the dtype of the activations.
    B: `[2, slots, K, G, N]` in the dtype of the activations.
    dt: `[2, slots, K, H]` in fp32 (fp64 beside fp64), after bias, softplus and clamp.
    """

    x: Tensor
    B: Tensor
    dt: Tensor

    @classmethod
    def allocate(
        cls,
        layers: int,
        slots: int,
        num_speculative_tokens: int,
        ssm_shape: tuple[int, int, int],
        groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WindowCache:
        """The caches of all layers in one; `ssm_shape` is (H, P, N), `dtype` the activations'."""
        heads, dim, state = ssm_shape
        lead = (layers, 2, slots, num_speculative_tokens)
        fine = torch.promote_types(dtype, torch.float32)
        return cls(
            x=torch.zeros(*lead, heads, dim, dtype=dtype, device=device),
            B=torch.zeros(*lead, groups, state, dtype=dtype, device=device),
            dt=torch.zeros(*lead, heads, dtype=fine, device=device),
        )

    def layer(self, index: int) -> WindowCache:
        """The cache of one of several layers."""
        return WindowCache(*(part[index] for part in self))


def check_window_cache(x: Tensor, B: Tensor, states: Tensor, cache: WindowCache) -> int:
    """Check shapes of states and of a layer's cache against the inputs'; heads per group.

    x: [..., H, P]. B: [..., G, N]. states: [blocks, H, P, N].

    Raises:
        ValueError: H is no multiple of G, or states or cache have another shape.
    """
    heads_per_group = check_ssm_shapes(x, B, states)
    (heads, dim), (groups, state) = x.shape[-2:], B.shape[-2:]
    lead = tuple(cache.x.shape[:3])
    own = ((heads, dim), (groups, state), (heads,))
    for name, part, shape in zip(cache._fields, cache, own, strict=True):
        if lead[0] != 2 or tuple(part.shape) != (*lead, *shape):
            must = ", ".join(map(str, shape))
            raise ValueError(
                f"window_cache.{name} is {tuple(part.shape)}, must be [2, slots, drafts, {must}]"
            )
    return heads_per_group


def check_contiguous(states: Tensor, cache: WindowCache, dtype: torch.dtype) -> None:
    """Check what the kernels take for granted when they compute addresses.

    Raises:
        ValueError: a block of states or a part of the cache is not contiguous, or the cache's x or
            B is not of the inputs' `dtype`, or its dt not fp32.
    """
    if not states[:1].is_contiguous():
        raise ValueError(f"states has strides {states.stride()}, each block must be contiguous")
    for name, part, must in zip(cache._fields, cache, (dtype, dtype, torch.float32), strict=True):
        if not part.is_contiguous() or part.dtype != must:
            raise ValueError(
                f"window_cache.{name} is {part.dtype} with strides {part.stride()}, must be {must} "
                "and contiguous"
            )
