"""What Gated DeltaNet records of a token: the change that it made to a state."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Records(NamedTuple):
    """Rings of one layer, one for each slot and value or key head; or of all layers, layers first.
    The token at position t (the first of a request is 0) lies at index t % L; `ring_length` is L.

    With u and not v a state is rebuilt by sums alone; to find u anew would need the state itself.

    u: `[slots, Hv, L, V]` in fp32 (fp64 beside fp64), what is added to the state along the key.
    k: `[slots, Hk, L, K]` in the dtype of the activations, before its normalisation.
    g: `[slots, Hv, L]` in u's dtype, logarithm of the decay; of KDA `[slots, Hv, L, K]`.
    rk: `[slots, Hk, L]` in u's dtype, 1 / norm of k.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    rk: Tensor

    @property
    def length(self) -> int:
        """L."""
        return self.rk.shape[-1]

    def layer(self, index: int) -> Records:
        """The rings of one of several layers."""
        return Records(*(part[index] for part in self))
