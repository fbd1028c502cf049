"""Prompts of Gated DeltaNet: the specification of their scan against the recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gdn_cases import Gdn, token_inputs
from helpers.interpreter import plain
from helpers.state_rows import Rows, prefill_rows
from helpers.tensors import ints, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.gdn.naive import CHUNK, chunk_scan_reference, delta_rule_reference


def cuts_of(rows: Rows, after: tuple[int, ...]) -> Cuts:
    """Cuts after so many tokens of the row of each slot. Some checkpoints go to the column that is
    read."""
    found = [
        after[row[1]] if row[0] > 0 and min(row[1], row[5]) >= 0 else 0 for row in rows.spec
    ]  # fmt: skip
    columns = [
        row[1] % 3 // 2 * 2 if cut else -1 for row, cut in zip(rows.spec, found, strict=True)
    ]
    return Cuts(ints(*found), ints(*columns))


def walked(
    shape: Gdn, rows: Rows, cuts: Cuts | None, arguments: dict[str, Any], states: Tensor
) -> Tensor:
    """Outputs in fp64, token by token; `states` are changed as a scan must."""
    every = token_inputs(shape, arguments)
    y = torch.zeros(arguments["v"].shape, dtype=torch.float64, device=states.device)
    before = states.clone()
    for i, (own, scheduled, slot, _, read, offset, write) in enumerate(rows):
        if scheduled == 0 or min(slot, write) < 0:
            continue
        after = 0 if cuts is None else int(cuts.after[i])
        parts = [(own.start, own.start + after, int(cuts.column[i]))] if cuts and after else []
        state = torch.zeros(shape.matrix, dtype=torch.float64, device=states.device)
        if read >= 0:
            state = before[rows.block(slot, read + offset)].double()
        for start, end, column in [*parts, (own.start + after, own.stop, write)]:
            given = (part[start:end] for part in every)
            y[start:end], _, state = delta_rule_reference(state, *given)
            states[rows.block(slot, column)] = state.to(states.dtype)
            state = state.to(states.dtype).double()
    return y


EDGES = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 5, 9, 9)
AFTER = (0, CHUNK - 2, 1, CHUNK, CHUNK + 3, 4, 0, 8)


@plain
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"kda": True}, {"heads": 6, "key_heads": 2, "key": 3, "value": 7, "transposed": True}],
    ids=["gdn", "kda", "odd"],
)
def test_reference_follows_the_recurrence(changes: dict[str, Any], cut: bool) -> None:
    """In fp64: rows of any length, some from nothing, among padded ones; nothing else changes."""
    shape = Gdn(x=torch.float64, states=torch.float64, key=5, value=3)
    shape = Gdn(**vars(shape) | changes)
    rows = prefill_rows(EDGES, 0, 0, padded=True)
    cuts = cuts_of(rows, AFTER) if cut else None
    arguments, states = shape.prompts(rows, 0)
    want_states = states.clone()
    y = chunk_scan_reference(states=states, cuts=cuts, **arguments)
    want = walked(shape, rows, cuts, arguments, want_states)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, want_states, rtol=1e-11, atol=1e-11, equal_nan=True)
    assert not y[~rows.owned].any()


@plain
def test_states_at_cuts_go_on_as_they_were_stored() -> None:
    """16-bit states are rounded there, and only there and at the end."""
    shape = Gdn(x=torch.float32, states=torch.bfloat16)
    rows = prefill_rows(EDGES, 1, 0, padded=True)
    cuts = cuts_of(rows, AFTER)
    arguments, states = shape.prompts(rows, 1)
    want_states = states.clone()
    y = chunk_scan_reference(states=states, cuts=cuts, **arguments)
    want = walked(shape, rows, cuts, arguments, want_states)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    different = (states != want_states) & ~want_states.isnan()
    assert different.float().mean() < 1e-3  # the last place of a few
    assert same_bytes(states.isnan(), want_states.isnan())
