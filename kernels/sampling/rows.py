"""How the rows of a step sample."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters, one line per slot (or per row, where `slot` is None).

    Attributes:
        temperature: float32 [lines], 0 = greedy.
        top_k: int32 [lines], 0 = off.
        top_p: float32 [lines], 1 = off.
        min_p: float32 [lines], 0 = off.
        seed: int64 [lines], key of the random numbers.
        slot: int32 [rows], the line of each row; a negative one is padding and takes line 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    slot: Tensor | None = None

    def of(self, slot: Tensor) -> SamplingTensors:
        """The same lines, for rows of these slots."""
        return self._replace(slot=slot)

    def select(self, index: Tensor) -> SamplingTensors:
        """Lines of the rows `index`, int [n]; a negative one is padding and gets row 0's."""
        index = index.clamp(min=0)
        if self.slot is not None:
            index = self.slot[index].clamp(min=0)
        return SamplingTensors(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seed[index],
        )

    def by_row(self) -> SamplingTensors:
        """One line per row."""
        return self if self.slot is None else self._replace(slot=None).select(self.slot)

    def seeds(self) -> Tensor:
        """int64 [rows]."""
        return self.seed if self.slot is None else self.seed[self.slot.clamp(min=0)]
