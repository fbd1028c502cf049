"""What Mamba-2 records of a token: the inputs by which it changes a state."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Records(NamedTuple):
    """Rings of one layer, one for each slot and head, or group; or of all layers, layers first. The
    token at position t (the first of a request is 0) lies at index t % L; `ring_length` is L.

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

    def layer(self, index: int) -> Records:
        """The rings of one of several layers."""
        return Records(*(part[index] for part in self))
