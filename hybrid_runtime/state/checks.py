"""Checks on what a runner hands over: each raises `ValueError` that names the argument, what it was
and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.state.boundaries import LONGEST
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint

Strategy = Literal["blocking", "defer", "always", "auto"]


def check_options(
    layout: StateLayout,
    max_requests: int,
    max_rows: int,
    num_speculative_tokens: int,
    strategy: str,
    in_place: bool,
    prompt_cuts: bool,
    steps_in_flight: int,
    readback: bool,
) -> None:
    """Refuse a manager that cannot be."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy is {strategy!r}; it must be one of {get_args(Strategy)}")
    if max_requests < 1:
        raise ValueError(f"max_requests is {max_requests}; it must be at least 1")
    if max_rows < max_requests:
        raise ValueError(f"max_rows is {max_rows}; it must be at least {max_requests}")
    if num_speculative_tokens != layout.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens}; it must be the layout's "
            f"({layout.num_speculative_tokens}), which sizes the conv_state"
        )
    if in_place and layout.replays:
        raise ValueError(
            "in_place is True; it must be False in the replay layout, whose kernels read and write "
            "separate columns"
        )
    if in_place and prompt_cuts:
        raise ValueError(
            "prompt_cuts is True with in_place=True; it must be False for kernels that write one "
            "column"
        )
    if not 0 <= steps_in_flight <= 8:
        raise ValueError(f"steps_in_flight is {steps_in_flight}; it must be in 0..8")
    if strategy in ("blocking", "defer") and not readback:
        raise ValueError(f"readback is False; strategy {strategy!r} decides on counts it reads")


def check_states(
    layout: StateLayout,
    states: Mapping[int, tuple[Tensor, Tensor]],
    groups: Mapping[int, int] | None,
    num_groups: int,
    device: torch.device,
) -> None:
    """Refuse states that don't have the layout's parts, and unknown groups."""
    if not states:
        raise ValueError("states is empty; it must hold one (conv_state, matrix) pair per layer")
    for layer, pair in states.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = f"a {type(pair).__name__}"
            raise ValueError(f"states[{layer}] is {got}; it must be a (conv_state, matrix) pair")
        for part, tensor in zip(layout.checkpoint, pair, strict=True):
            name = f"states[{layer}].{part.name}"
            _check_device(name, tensor, device)
            fits = tuple(tensor.shape[1:]) == part.shape and len(tensor) > 0
            if tensor.dtype != part.dtype or not fits:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be "
                    f"{part.dtype} [blocks, {', '.join(map(str, part.shape))}]"
                )
            if not tensor[0].is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; blocks must be dense")
        group = 0 if groups is None else groups.get(layer, -1)
        if not 0 <= group < num_groups:
            raise ValueError(f"groups[{layer}] is {group}; it must be in 0..{num_groups - 1}")


def check_tables(tables: Sequence[Tensor], max_requests: int, device: torch.device) -> None:
    """Refuse block tables that are not dense int32 rows, one per slot."""
    if not tables:
        raise ValueError("block_tables is empty; it must hold one table per cache group")
    for i, table in enumerate(tables):
        _check_device(f"block_tables[{i}]", table, device)
        fits = table.dim() == 2 and table.shape[0] >= max_requests and table.shape[1] > 0
        if table.dtype != torch.int32 or not fits:
            raise ValueError(
                f"block_tables[{i}] is {table.dtype} {tuple(table.shape)}; it must be int32 "
                f"[>= {max_requests}, >= 1], one row per slot"
            )
        if table.stride(1) != 1:
            raise ValueError(f"block_tables[{i}] has strides {table.stride()}; rows must be dense")


def check_flush_inputs(
    inputs: FlushInputs, layout: StateLayout, layers: int, slots: int, device: torch.device
) -> None:
    """Refuse what does not fit so many layers and slots of this layout."""
    if not isinstance(inputs, FlushInputs):
        raise ValueError(f"flush_inputs is a {type(inputs).__name__}; it must be FlushInputs")
    records, params, seed = inputs
    recurrence = layout.recurrence
    ring = recurrence.ring(layout.ring_length)
    given = (("records", records, ring), ("params", params, recurrence.params))
    for field, tensors, specs in given:
        if not isinstance(tensors, tuple) or len(tensors) != len(specs):
            got = f"a {type(tensors).__name__}"
            got = f"{len(tensors)} tensors" if isinstance(tensors, tuple) else got
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(f"flush_inputs.{field} is {got}; it must be the tuple ({names})")
    for record, spec in zip(records, ring, strict=True):
        name, must = f"flush_inputs.records.{spec.name}", [layers, slots, *spec.shape]
        _check_device(name, record, device)
        if record.dtype != spec.dtype or list(record.shape) != must:
            raise ValueError(
                f"{name} is {record.dtype} {list(record.shape)}; it must be {spec.dtype} {must}"
            )
        if not record.is_contiguous():
            raise ValueError(f"{name} has strides {record.stride()}; it must be contiguous")
    for param, spec in zip(params, recurrence.params, strict=True):
        name, must = f"flush_inputs.params.{spec.name}", [layers, *spec.shape]
        _check_device(name, param, device)
        dtype = param.dtype if param.dtype.is_floating_point else spec.dtype
        if param.dtype != dtype or list(param.shape) != must:
            raise ValueError(
                f"{name} is {param.dtype} {list(param.shape)}; it must be {dtype} {must}"
            )
    if seed is None:
        return
    _check_device("flush_inputs.seed", seed, device)
    if seed.dtype != torch.int32 or seed.dim() != 1 or len(seed) < slots:
        raise ValueError(
            f"flush_inputs.seed is {seed.dtype} {list(seed.shape)}; it must be int32 [>= {slots}]"
        )


def _check_device(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a tensor on {device}")
    if tensor.device.type != device.type:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")


def check_counts(counts: Tensor, rows: int, device: torch.device) -> None:
    """Refuse accepted counts that are not contiguous int32 `[>= rows]` on the manager's device."""
    fits = getattr(counts, "dtype", None) == torch.int32 and counts.dim() == 1
    fits = fits and len(counts) >= rows and counts.is_contiguous()
    if fits and counts.device.type == device.type:
        return
    got = f"a {type(counts).__name__}"
    if isinstance(counts, Tensor):
        got = f"{counts.dtype} {tuple(counts.shape)} on {counts.device}"
    raise ValueError(f"num_accepted is {got}; it must be contiguous int32 [>= {rows}] on {device}")


def check_resolved(accepted: Any, rows: int) -> NDArray[np.int32]:
    """Counts that a runner fetched itself, as a copy; refused unless integers `[>= rows]`."""
    given = np.asarray(accepted)
    if given.ndim != 1 or len(given) < rows or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(
            f"accepted is {given.dtype} {given.shape}; it must be integers [>= {rows}]"
        )
    counts = np.array(given[:rows], np.int32)
    if np.count_nonzero(counts != given[:rows]):
        raise ValueError(f"accepted is {given[:rows]}; it must be in the range of int32")
    return counts


def check_checkpoints(
    checkpoints: Sequence[Checkpoint],
    ledger: Ledger,
    last_checkpoint: Callable[[int], Checkpoint | None],
    last_state: Callable[[int, int], Checkpoint | None],
) -> None:
    """Refuse all but what these two give for slots whose requests still hold them."""
    if not isinstance(checkpoints, Sequence):
        raise ValueError(f"checkpoints is {checkpoints!r}; it must be a sequence of Checkpoint")
    seen = set[int]()
    for i, checkpoint in enumerate(checkpoints):
        if not isinstance(checkpoint, Checkpoint):
            raise ValueError(f"checkpoints[{i}] is {checkpoint!r}; it must be a Checkpoint")
        ledger.require_slot(checkpoint.slot)
        if not ledger.holds(checkpoint.slot, checkpoint.generation):
            raise ValueError(
                f"checkpoints[{i}] is {checkpoint}, whose request has left the slot; it must be "
                "flushed before its slot is released"
            )
        slot, position = checkpoint.slot, checkpoint.position
        if slot in seen or checkpoint not in (last_checkpoint(slot), last_state(slot, position)):
            raise ValueError(
                f"checkpoints[{i}] is {checkpoint}; it must be what last_checkpoint(slot) or "
                "last_state(slot, position) gives now, once"
            )
        seen.add(checkpoint.slot)


def check_rows(rows: StepRows, ledger: Ledger, num_speculative_tokens: int) -> None:
    """Refuse rows that no step can have, whatever its slots hold."""
    n, max_requests = len(rows), ledger.max_requests
    if n > ledger.max_rows:
        raise ValueError(f"rows has {n} rows; at most max_rows ({ledger.max_rows}) fit")
    if not n:
        return
    # As unsigned integers negative ones are too large, so one comparison finds both.
    high, scheduled = rows.computed_max.view(np.uint32), rows.scheduled.view(np.uint32)
    bad = rows.draft.view(np.uint32) > num_speculative_tokens
    bad |= rows.certain < 1
    bad |= (high | scheduled) >= LONGEST
    if not rows.exact_counts:
        bad |= rows.computed_min.view(np.uint32) > high
    places = rows.index + 1
    bad |= places.view(np.uint64) > max_requests
    if np.count_nonzero(bad):
        _explain_rows(rows, max_requests, num_speculative_tokens)
    used = np.bincount(places)[1:]
    if np.count_nonzero(used > 1):
        raise ValueError(f"rows.slot has slot {int(used.argmax())} twice; once is the most")


def _explain_rows(rows: StepRows, max_requests: int, num_speculative_tokens: int) -> None:
    slot, draft, live = rows.slot, rows.draft, rows.slot >= 0
    for name, bad, must in (
        ("slot", (slot >= max_requests) | (slot < -1), f"in -1..{max_requests - 1}"),
        ("computed_min", live & (rows.computed_min < 0), "at least 0"),
        ("computed_max", live & (rows.computed_max < rows.computed_min), ">= computed_min"),
        ("computed_max", live & (rows.computed_max >= LONGEST), f"below {LONGEST}"),
        ("scheduled", live & (rows.scheduled < 1), "at least 1"),
        ("scheduled", live & (rows.scheduled >= LONGEST), f"below {LONGEST}"),
        (
            "draft",
            live & ((draft < 0) | (draft > num_speculative_tokens)),
            f"in 0..{num_speculative_tokens}",
        ),
        ("draft", live & (draft >= rows.scheduled), "smaller than rows.scheduled"),
    ):
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"rows.{name}[{i}] is {getattr(rows, name)[i]}; it must be {must}")


class Refusal(NamedTuple):
    """Rows that no step may have.

    bad: bool `[rows]`. values: what they have, `[rows]`. name: of these values, behind "rows.".
    must: what they must be.
    """

    bad: NDArray[np.bool_]
    values: NDArray[Any]
    name: str
    must: str


def refuse(ledger: Ledger, rows: StepRows, known: NDArray[np.int32], *refusals: Refusal) -> None:
    """Raise for the first refusal with a bad row, padded ones aside; rows whose slots hold no
    request or an unfinished step come first."""
    gone = ~ledger.live.take(rows.index, mode="wrap")
    busy = known[:, Ledger.OPEN_STEP] >= 0
    bad = gone | busy
    for refusal in refusals:
        bad |= refusal.bad
    live = rows.slot >= 0
    if not np.count_nonzero(bad & live if rows.padded else bad):
        return
    flushed = known[:, Ledger.OPEN_STEP] == Ledger.FLUSHED
    for which, values, name, must in (
        Refusal(gone, rows.slot, "slot", "a slot that has been admitted"),
        Refusal(flushed, rows.slot, "slot", "a slot that was not flushed; release it"),
        Refusal(busy, rows.slot, "slot", "a slot whose last step has ended"),
        *refusals,
    ):
        if (which & live).any():
            i = int((which & live).argmax())
            raise ValueError(f"rows.{name}[{i}] is {values[i]}; it must be {must}")
