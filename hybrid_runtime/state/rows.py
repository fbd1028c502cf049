"""What the host knows of a step before it runs: one row per request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(slots=True)
class StepRows:
    """Rows of one step, int32 `[rows]` each, all in tokens except `slot`.

    slot: row of the persistent batch, -1 for a padded row or one whose step is to be discarded.
    computed_min, computed_max: bounds on the tokens computed before the step; equal when exact.
    scheduled: tokens run, of which the last `draft` are guesses.
    reads_offset: whether the kernel that will run the row can read its state at an offset within
    the running column (plain-decode and prefill kernels of other engines often cannot); only
    in-place runners need to say so. None: all can.
    """

    slot: NDArray[np.int32]
    computed_min: NDArray[np.int32]
    computed_max: NDArray[np.int32]
    scheduled: NDArray[np.int32]
    draft: NDArray[np.int32]
    reads_offset: NDArray[np.bool_] | None = None

    @classmethod
    def exact(
        cls, slot: ArrayLike, computed: ArrayLike, scheduled: ArrayLike, draft: ArrayLike
    ) -> StepRows:
        """Rows whose computed counts are known exactly (nothing in flight)."""
        n = np.asarray(computed, np.int32)
        return cls(
            np.asarray(slot, np.int32),
            n,
            n,
            np.asarray(scheduled, np.int32),
            np.asarray(draft, np.int32),
        )

    def __len__(self) -> int:
        return len(self.slot)

    def key(self) -> tuple[bytes, ...]:
        """Equal for rows that differ in nothing but their counts."""
        return self.slot.tobytes(), self.scheduled.tobytes(), self.draft.tobytes()

    @property
    def padded(self) -> bool:
        """Some row is padded or to be discarded."""
        return bool(len(self.slot)) and bool(self.slot.min() < 0)

    @property
    def exact_counts(self) -> bool:
        """Both bounds are one array, as `exact` makes them."""
        return self.computed_min is self.computed_max
