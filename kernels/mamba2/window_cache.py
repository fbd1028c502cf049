"""The window of the replay layout: inputs of the last tokens, which the state may not hold yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.kernels.mamba2.naive import check_ssm_shapes
from hybrid_runtime.kernels.replay.ring import ring_length


class WindowCache(NamedTuple):
    """Inputs of each slot's last tokens, of one layer; or of all, layers first.

    A ring for each slot and head, or group: the token at position t (the first of a request is 0)
    lies at index t % L. `ring_length` is L.

    x: `[slots, H, L, P]` in the dtype of the activations.
    B: `[slots, G, L, N]` in the dtype of the activations.
    dt: `[slots, H, L]` in fp32 (fp64 beside fp64), after bias, softplus and clamp.
    """

    x: Tensor
    B: Tensor
    dt: Tensor

    @property
    def length(self) -> int:
        """L."""
        return self.dt.shape[-1]

    @classmethod
    def allocate(
        cls,
        layers: int,
        slots: int,
        num_speculative_tokens: int,
        window: int,
        ssm_shape: tuple[int, int, int],
        groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WindowCache:
        """The caches of all layers in one; `ssm_shape` is (H, P, N), `dtype` the activations'."""
        heads, dim, state = ssm_shape
        length = ring_length(num_speculative_tokens, window)
        fine = torch.promote_types(dtype, torch.float32)
        return cls(
            x=torch.zeros(layers, slots, heads, length, dim, dtype=dtype, device=device),
            B=torch.zeros(layers, slots, groups, length, state, dtype=dtype, device=device),
            dt=torch.zeros(layers, slots, heads, length, dtype=fine, device=device),
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
    slots, length = cache.x.shape[0], cache.x.shape[2]
    own = ((heads, length, dim), (groups, length, state), (heads, length))
    for name, part, shape in zip(cache._fields, cache, own, strict=True):
        if length < 1 or tuple(part.shape) != (slots, *shape):
            must = ", ".join(["slots", str(shape[0]), "length", *map(str, shape[2:])])
            raise ValueError(
                f"window_cache.{name} is {tuple(part.shape)}, must be [{must}], with the same "
                "slots and length in all"
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
