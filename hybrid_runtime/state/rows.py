"""What the host knows of a step before it runs: one row per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Rows of one step, int32 `[rows]` and in tokens where a field says nothing else.

    The fields are read-only copies, so a runner may reuse its own arrays while the step is in
    flight. Lists and other integer arrays are converted. Raises `ValueError` for a field of
    another shape, range or type.

    slot: row of the persistent batch, -1 for a padded row or one whose step is to be discarded.
    computed_min, computed_max: bounds on the tokens computed before the step; equal when exact.
    scheduled: tokens run, of which the last `draft` are drafts.
    decodes: bool `[rows]`. Replay: the kernels for decoding rows run the row, which fold what is
        pending and record the row's tokens. None: those with drafts; the others write their state.
        Columns, in-place runners only: the row's kernel reads a state at an offset within the
        running column, as plain-decode and prefill kernels of other engines often cannot. None:
        all do.
    save_at: replay only: int32 `[rows, 2]`, positions at which a checkpoint is wanted, more than K
        tokens apart; 0: none. Stored is one that the last step's drafts have passed or that the
        row's certain tokens end on, and with `prompt_cuts` the last one inside a prompt's row. The
        others mean nothing. Name a position from the step on whose drafts may reach it, until one
        has begun whose certain tokens reach it (`certain_min`).
    save_to: replay only: int32 `[rows, 2]`, the columns of the block table that they go to. None
        may be the live one, or hold the state that the row starts from.

    Derived once, because a step asks for them many times:

    saves: `save_at` and `save_to`, or None.
    certain: scheduled tokens that are no drafts.
    certain_min, certain_max: bounds on the tokens computed once these have run.
    index: `slot` as NumPy indexes fastest.
    key: equal for rows that differ in nothing but their counts.
    exact_counts: both bounds are one array, as `exact` makes them.
    padded: some row is padded or to be discarded.
    chunked: some row runs more than one certain token.
    """

    slot: NDArray[np.int32]
    computed_min: NDArray[np.int32]
    computed_max: NDArray[np.int32]
    scheduled: NDArray[np.int32]
    draft: NDArray[np.int32]
    decodes: NDArray[np.bool_] | None = None
    save_at: NDArray[np.int32] | None = None
    save_to: NDArray[np.int32] | None = None
    saves: tuple[NDArray[np.int32], NDArray[np.int32]] | None = field(init=False, repr=False)
    certain: NDArray[np.int32] = field(init=False, repr=False)
    certain_min: NDArray[np.int32] = field(init=False, repr=False)
    certain_max: NDArray[np.int32] = field(init=False, repr=False)
    index: NDArray[np.intp] = field(init=False, repr=False)
    key: bytes = field(init=False, repr=False)
    exact_counts: bool = field(init=False, repr=False)
    padded: bool = field(init=False, repr=False)
    chunked: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        both = self.computed_max is self.computed_min
        slot = _ints("slot", self.slot)
        low = _ints("computed_min", self.computed_min, slot)
        high = low if both else _ints("computed_max", self.computed_max, slot)
        scheduled = _ints("scheduled", self.scheduled, slot)
        draft = _ints("draft", self.draft, slot)
        n, put = len(slot), object.__setattr__
        # Bytes cannot change, and are the fastest copy.
        key = slot.tobytes() + scheduled.tobytes() + draft.tobytes()
        copies = np.frombuffer(key, INT32)
        if self.decodes is not None:
            decodes = _own_flags(self.decodes, slot)
            put(self, "decodes", decodes)
            key += decodes.tobytes()
        if self.save_at is not None or self.save_to is not None:
            pairs = (_pairs("save_at", self.save_at, slot), _pairs("save_to", self.save_to, slot))
            raw = b"".join(pair.tobytes() for pair in pairs)
            at, to = np.frombuffer(raw, INT32).reshape(2, n, 2)
            put(self, "save_at", at)
            put(self, "save_to", to)
            put(self, "saves", (at, to))
            key += raw
        else:
            put(self, "saves", None)
        slot, scheduled, draft = copies[:n], copies[n : 2 * n], copies[2 * n :]
        low = np.frombuffer(low.tobytes(), INT32)
        high = low if both else np.frombuffer(high.tobytes(), INT32)
        certain, index = scheduled - draft, slot.astype(np.intp)
        put(self, "key", key)
        put(self, "exact_counts", both)
        put(self, "slot", slot)
        put(self, "scheduled", scheduled)
        put(self, "draft", draft)
        put(self, "computed_min", low)
        put(self, "computed_max", high)
        put(self, "certain", certain)
        certain_min = low + certain
        put(self, "certain_min", certain_min)
        put(self, "certain_max", certain_min if both else high + certain)
        put(self, "index", index)
        put(self, "padded", np.count_nonzero(slot < 0) > 0)
        put(self, "chunked", np.count_nonzero(certain > 1) > 0)

    @property
    def folds(self) -> NDArray[np.bool_]:
        """Replay: rows that fold what is pending and record their own tokens, bool `[rows]`."""
        return self.draft > 0 if self.decodes is None else self.decodes

    @classmethod
    def exact(
        cls,
        slot: ArrayLike,
        computed: ArrayLike,
        scheduled: ArrayLike,
        draft: ArrayLike,
        decodes: ArrayLike | None = None,
        save_at: ArrayLike | None = None,
        save_to: ArrayLike | None = None,
    ) -> StepRows:
        """Rows whose computed counts are known exactly (nothing in flight)."""
        make: Any = cls
        rows: StepRows = make(slot, computed, computed, scheduled, draft, decodes, save_at, save_to)
        return rows

    def __len__(self) -> int:
        return len(self.slot)


def _ints(
    name: str, value: NDArray[np.int32], like: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """`value` as an int32 row as long as `like`."""
    if type(value) is not np.ndarray or value.dtype != INT32:
        value = _converted(name, value)
    if value.ndim != 1 or (like is not None and len(value) != len(like)):
        must = "[rows]" if like is None else f"[{len(like)}] like rows.slot"
        raise ValueError(f"rows.{name} has shape {value.shape}; it must be {must}")
    return value


def _converted(name: str, value: Any) -> NDArray[np.int32]:
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rows.{name} is {value!r}; it must be int32 [rows]") from error
    if given.dtype.kind not in "iu" and given.size:
        raise ValueError(f"rows.{name} is {given.dtype} {given.shape}; it must be int32 [rows]")
    ints = given.astype(np.int32)
    if given.size and np.count_nonzero(ints != given):
        raise ValueError(f"rows.{name} is {given}; it must be in the range of int32")
    return ints


def _pairs(name: str, value: Any, slot: NDArray[np.int32]) -> NDArray[np.int32]:
    if type(value) is not np.ndarray or value.dtype != INT32:
        value = _converted(name, value)
    if value.shape != (len(slot), 2):
        raise ValueError(f"rows.{name} has shape {value.shape}; it must be [{len(slot)}, 2]")
    pairs: NDArray[np.int32] = value
    return pairs


def _own_flags(value: Any, slot: NDArray[np.int32]) -> NDArray[np.bool_]:
    flags = np.array(value)
    if (flags.dtype != np.bool_ and flags.size) or flags.shape != slot.shape:
        raise ValueError(
            f"rows.decodes is {flags.dtype} and has shape {flags.shape}; "
            f"it must be bool [{len(slot)}] like rows.slot"
        )
    flags.setflags(write=False)
    return flags
