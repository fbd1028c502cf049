"""What the host knows of a step before it runs: one row per request, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

    def check(self, max_requests: int, num_speculative_tokens: int) -> None:
        """Raise `ValueError` for rows that no step can have."""
        n = len(self.slot)
        for name in ("slot", "computed_min", "computed_max", "scheduled", "draft", "reads_offset"):
            value: Any = getattr(self, name)
            if value is not None and value.shape != (n,):
                raise ValueError(
                    f"rows.{name} has shape {value.shape}; it must be [{n}] like rows.slot"
                )
        if n > max_requests:
            raise ValueError(f"rows has {n} rows; at most max_requests ({max_requests}) fit")
        if not n:
            return
        slot, draft, scheduled = self.slot, self.draft, self.scheduled
        bad = (draft < 0) | (draft > num_speculative_tokens) | (draft >= scheduled)
        bad |= (self.computed_min < 0) | (self.computed_max < self.computed_min)
        bad |= (slot < -1) | (slot >= max_requests)
        if bad.any():
            self._explain(max_requests, num_speculative_tokens)
        used = np.bincount(slot + 1)
        if used[1:].max(initial=0) > 1:
            twice = int(used[1:].argmax())
            raise ValueError(f"rows.slot has slot {twice} twice; once is the most")

    def _explain(self, max_requests: int, num_speculative_tokens: int) -> None:
        live = self.slot >= 0
        for name, bad, must in (
            ("slot", (self.slot >= max_requests) | (self.slot < -1), f"in -1..{max_requests - 1}"),
            ("computed_min", live & (self.computed_min < 0), "at least 0"),
            ("computed_max", live & (self.computed_max < self.computed_min), ">= computed_min"),
            ("scheduled", live & (self.scheduled < 1), "at least 1"),
            (
                "draft",
                live & ((self.draft < 0) | (self.draft > num_speculative_tokens)),
                f"in 0..{num_speculative_tokens}",
            ),
            ("draft", live & (self.draft >= self.scheduled), "smaller than rows.scheduled"),
        ):
            if bad.any():
                i = int(bad.argmax())
                raise ValueError(f"rows.{name}[{i}] is {getattr(self, name)[i]}; it must be {must}")
