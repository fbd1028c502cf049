"""What `debug=True` checks before a step is placed: mistakes of a runner that would otherwise lose
prefix hits or give wrong text without an error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import allowed
from hybrid_runtime.state.boundaries import lost_checkpoints
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.placement import LayoutPolicy
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step


def check_accepted(step: Step, num_accepted: Tensor, ledger: Ledger, ends_texts: bool) -> None:
    """Wait, and raise `ValueError` for a count that the step cannot have, or that ends its request.

    num_accepted: int32 `[rows]` or longer, on the device. ends_texts: negative ones are counts too.
    """
    with allowed("debug=True: accepted counts"):
        accepted = num_accepted[: len(step.rows)].cpu().numpy()
    current = step.current(ledger.generation, ledger.live)
    draft = step.rows.draft
    count = np.abs(accepted) if ends_texts else accepted
    bad = (count < 0) | (count > draft + 1) | ((count == 0) & (draft > 0))
    for i in np.flatnonzero(bad & current):
        lost = ": 0 with drafts means that the row is lost, and releases its slot"
        raise ValueError(
            f"num_accepted[{i}] is {accepted[i]} (slot {step.rows.slot[i]}, generation "
            f"{step.generation[i]}, step {step.number}); it must be in "
            f"{int(draft[i] > 0)}..{draft[i] + 1}{'' if accepted[i] else lost}"
        )


def check_step(
    number: int,
    rows: StepRows,
    ledger: Ledger,
    policy: LayoutPolicy,
    cuts: bool,
    lines: Tensor,
    previous: tuple[Tensor, Tensor],
    block_tables: Sequence[Tensor],
    queued: Sequence[Step],
) -> None:
    """Place a step into copies, wait, and raise `ValueError` if what it would read and write is
    wrong, that names request, step, what it was and what it must be.

    number: of the step that is about to begin.
    cuts: prompt kernels leave checkpoints inside rows.
    lines: its packed lines, on the host or on the device.
    previous: what the pending step placed, and its counts; where there is none, any such tensors.
    queued: steps whose counts the host has not read, oldest first.
    """
    slots = type(policy.slots)(*(t.clone() for t in policy.slots))
    outputs = type(policy.nowhere)(*(t.clone() for t in policy.nowhere))
    placed = torch.empty_like(previous[0])
    with allowed("debug=True: exact counts and block tables"):
        entries = lines.to(placed.device)
        policy.advance(entries, len(lines), len(rows), *previous, placed, slots, outputs)
        computed = slots.computed.cpu().numpy()
        tables = [table.cpu().numpy() for table in block_tables]
        exact = np.where(rows.slot >= 0, computed[rows.slot], 0).astype(np.int64)
        reads, writes = policy.touched(rows, exact, outputs)
    fewest, largest = _counted(ledger, queued)
    rule, end = policy.kept(rows), exact + rows.certain
    inside = policy.inside(exact, end, rows.draft, rule) if cuts else 0
    lost = lost_checkpoints(exact, end, rule, inside)
    for i in np.flatnonzero(writes[:, 0] >= 0):  # the others do not run
        slot, low, high = int(rows.slot[i]), rows.computed_min[i], rows.computed_max[i]
        request = f"slot {slot}, generation {ledger.generation[slot]}, step {number}"
        if not fewest[slot] <= exact[i] <= largest[slot]:
            raise ValueError(
                f"manager.computed[{slot}] is {exact[i]} ({request}), which a caller wrote; by the "
                f"counts that were read it must be {fewest[slot]}..{largest[slot]}"
            )
        if not low <= exact[i] <= high:
            raise ValueError(
                f"rows.computed_min..max[{i}] is {low}..{high} ({request}); "
                f"it must include the exact count, {exact[i]}"
            )
        for verb, columns in (("reads", reads[i]), ("writes", writes[i])):
            for group, table in enumerate(tables):
                bad = [c for c in columns.tolist() if c >= 0 and table[slot, c] < 0]
                if bad:
                    raise ValueError(
                        f"block_tables[{group}][{slot}, {bad[0]}] is {table[slot, bad[0]]} "
                        f"({request}), which {verb} that column; it must be a block"
                    )
        if lost[i]:
            raise ValueError(
                f"rows.scheduled[{i}] is {rows.scheduled[i]} ({request}), which passes the "
                f"wanted position {lost[i]} and ends on {end[i]}; it must end on {lost[i]}, "
                f"{'or pass no wanted position behind it, ' if cuts else ''}or there is no "
                "checkpoint to hit"
            )


def _counted(ledger: Ledger, queued: Sequence[Step]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Least and most tokens computed, `[max_requests]`, after the queued steps."""
    least = ledger.computed.astype(np.int64)
    most = least.copy()
    for step in queued:
        rows = np.flatnonzero(step.current(ledger.generation, ledger.live))
        slot = step.rows.slot[rows]
        least[slot] += step.rows.certain[rows]
        most[slot] += step.rows.scheduled[rows]
    return least, most
