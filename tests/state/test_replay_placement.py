"""The replay layout's manager: what it refuses, which columns it needs, what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.replay_model import ReplayRunner
from helpers.toy_recurrences import HASH

from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.state import HybridStateManager, StateLayout, StepRows
from hybrid_runtime.state.replay.flush import FlushInputs

K, SLOTS, COLUMNS, BLOCK = 3, 4, 6, 8
LIVE = COLUMNS - 1
LAYOUT = StateLayout(HASH.recurrence, K, BLOCK, kind="replay")


def manager(columns: int = COLUMNS, **options: Any) -> HybridStateManager:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu", **options)
    table = torch.arange(SLOTS * columns, dtype=torch.int32).view(SLOTS, columns)
    made.bind({0: LAYOUT.allocate(SLOTS * columns, "cpu")}, table)
    return made


def run(
    made: HybridStateManager, n: list[int], s: list[int], d: list[int], a: list[int]
) -> dict[str, list[int]]:
    """One step of slots 0 .., and where its rows were placed."""
    step = made.begin_step(StepRows.exact(range(len(n)), n, s, d))
    found = {k: v.tolist()[: len(n)] for k, v in made._policy.outputs._asdict().items()}
    made.end_step(step, torch.tensor(a, dtype=torch.int32))
    return found


def needed(made: HybridStateManager, n: int, s: int, d: int) -> tuple[int, int]:
    """First and last column that is read or written."""
    demand = made.block_demand(StepRows.exact([0], [n], [s], [d]))
    return int(demand.first[0]), int(demand.kept[0])


# refused


def test_unknown_kinds_and_in_place_runners_are_refused() -> None:
    kind: Any = "rows"
    with pytest.raises(ValueError, match="kind is 'rows'; it must be 'columns' or 'replay'"):
        StateLayout(HASH.recurrence, K, BLOCK, kind=kind)
    with pytest.raises(ValueError, match="in_place is True; it must be False in the replay"):
        HybridStateManager(LAYOUT, SLOTS, K, "cpu", in_place=True)


def test_a_chunk_after_drafts_is_refused_and_changes_nothing() -> None:
    """A scan over many tokens starts from a state in memory: it cannot fold what that lacks."""
    made = manager()
    made.admit(0)
    run(made, [0], [5], [0], [1])
    run(made, [5], [4], [3], [1])
    held = [t.clone() for t in (*made._policy.outputs, *made._policy.slots)]
    for s, d in ((2, 0), (5, 3)):
        with pytest.raises(ValueError, match=rf"rows.scheduled\[0\] is {s}; it must be draft \+ 1"):
            made.begin_step(StepRows.exact([0], [6], [s], [d]))
    for now, then in zip((*made._policy.outputs, *made._policy.slots), held, strict=True):
        assert torch.equal(now, then)
    run(made, [6], [1], [0], [1])
    run(made, [7], [4], [0], [1])  # nothing is recorded any more


def test_only_checkpoints_need_columns() -> None:
    made = manager()
    made.admit(0)
    longest = COLUMNS * BLOCK - 1
    message = rf"rows.computed_max \+ rows.scheduled - rows.draft\[0\] is {longest + 1}; it must"
    run(made, [0], [longest], [0], [1])
    with pytest.raises(ValueError, match=message):
        made.begin_step(StepRows.exact([0], [longest], [4], [3]))
    made.retain(0, 0)
    for n in range(longest, longest + 40, 4):
        found = run(made, [n], [4], [3], [4])
        assert (found["write_column"], found["checkpoint_column"]) == ([LIVE], [-1])
    with pytest.raises(ValueError, match="hit_column is 6"):
        made.admit(1, 8, COLUMNS)


def test_a_table_of_one_column_serves_who_keeps_nothing() -> None:
    made = manager(columns=1)
    made.admit(0)
    made.retain(0, 0)
    run(made, [0], [100], [0], [1])
    for n in range(100, 140, 2):
        assert needed(made, n, 4, 3) == (0, -1)
        assert run(made, [n], [4], [3], [2])["write_column"] == [0]


@pytest.mark.parametrize("kind", ["columns", "replay"])
def test_more_drafts_than_the_kernels_take_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 16; it must be in 0\.\.15"):
        StateLayout(HASH.recurrence, 16, 32, kind=kind)


# where rows read and write


def test_what_is_pending_follows_the_slot_not_the_step() -> None:
    made = manager()
    for slot in (0, 1):
        made.admit(slot)
    assert run(made, [0, 0], [3, 4], [0, 0], [1, 1])["writes"] == [1, 1]
    found = run(made, [3, 4], [4, 4], [3, 3], [3, 2])
    assert (found["pending"], found["writes"]) == ([0, 0], [0, 0])
    found = run(made, [6], [4], [3], [1])  # slot 1 pauses
    assert (found["pending"], found["cursor"], found["offset"]) == ([3], [3], [2])
    assert (found["certain"], found["writes"]) == ([7], [0])
    found = run(made, [7, 6], [4, 1], [3, 0], [1, 1])
    assert (found["pending"], found["cursor"]) == ([4, 2], [3, 4])
    assert (found["offset"], found["checkpoint_column"]) == ([0, 1], [0, -1])
    assert (found["read_column"], found["write_column"]) == ([LIVE] * 2, [LIVE] * 2)
    assert found["writes"] == [1, 1]  # a checkpoint is stored; no drafts


def test_a_boundary_among_the_drafts_or_at_the_end_is_stored_on_the_way() -> None:
    made = manager()
    for slot in (0, 1, 2):
        made.admit(slot)
    run(made, [0] * 3, [4, 6, 6], [0] * 3, [1] * 3)
    found = run(made, [4, 6, 6], [4, 4, 2], [3, 3, 0], [4, 2, 1])
    assert found["checkpoint_column"] == [-1, -1, -1]
    assert found["write_column"] == [LIVE, LIVE, 0]  # the chunk ends on 8: that is the checkpoint
    found = run(made, [8, 8, 8], [4, 1, 4], [3, 0, 3], [1, 1, 1])
    assert found["checkpoint_column"] == [0, 0, -1]
    assert found["checkpoint_after"] == [0, 0, 0]
    assert found["writes"] == [1, 1, 1]  # the last one moves the state to the live column
    assert found["read_column"] == [LIVE, LIVE, 0]
    assert found["write_column"] == [LIVE] * 3
    assert found["certain"] == [9] * 3


def test_a_checkpoint_is_published_by_the_step_that_writes_it() -> None:
    made = manager()
    made.admit(0)
    run(made, [0], [6], [0], [1])
    steps = []
    for n, d in ((6, 3), (9, 0)):
        step = made.begin_step(StepRows.exact([0], [n], [d + 1], [d]))
        made.end_step(step, torch.tensor([3 if d else 1], dtype=torch.int32))
        steps.append(step)
    assert [made.published(step) for step in steps] == [[], [(0, 0, 8, 0)]]
    assert made.stats().rows_copied == 1


def test_columns_are_asked_for_while_a_boundary_may_be_stored_or_is_read() -> None:
    made = manager()
    made.admit(0)
    assert needed(made, 0, 7, 0) == (0, -1)
    assert needed(made, 0, 8, 0) == (0, 0)
    assert needed(made, 0, 40, 0) == (4, 4)  # boundaries within a chunk are not stored
    run(made, [0], [8], [0], [1])
    assert needed(made, 8, 3, 0) == (0, 0)  # read
    assert needed(made, 8, 16, 0) == (0, 2)  # read, and written
    run(made, [8], [6], [0], [1])
    assert needed(made, 14, 4, 3) == (0, -1)  # 15 certain
    run(made, [14], [4], [3], [3])
    assert needed(made, 17, 4, 3) == (1, 1)  # 16 is among the drafts accepted
    run(made, [17], [4], [3], [1])
    assert needed(made, 18, 4, 3) == (0, -1)
    made.retain(0, 16)
    assert needed(made, 18, 14, 0)[1] == 3
    nothing = made.block_demand(StepRows.exact([-1], [0], [1], [0]))
    assert [int(column[0]) for column in nothing] == [0, 0, -1, -1]


def test_a_row_killed_in_flight_is_never_run_again() -> None:
    made = manager()
    for slot in (0, 1):
        made.admit(slot)
    run(made, [0, 0], [5, 5], [0, 0], [1, 1])
    run(made, [5, 5], [4, 4], [3, 3], [0, 4])
    found = run(made, [6, 9], [4, 4], [3, 3], [1, 1])
    assert (found["write_column"], found["read_column"]) == ([-1, LIVE], [-1, LIVE])
    assert (found["checkpoint_column"], found["checkpoint_after"]) == ([-1, 0], [0, -1])


# whole runs through the hash model, which checks each state that is read, folded and stored


def test_drafts_behind_a_chunk() -> None:
    """The first step of a request may end in drafts, and its certain tokens on a boundary."""
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=3)
    for slot, prompt in enumerate((5, 8, 11)):
        runs.admit(slot, list(range(prompt)))
    runs.step([(0, 5, [1, 2, 3], 4), (1, 8, [1, 2, 3], 2), (2, 11, [1], 2)])
    assert [s[:3] for s in runs.recent] == [(1, 0, 8)]
    for i in range(20):
        runs.step([(slot, 1, [i, slot], 1 + (i + slot) % 3) for slot in (2, 0, 1)])
    assert (0, 0, 8, 0) in runs.recent
    assert runs.direct == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_released_request_leaves_what_its_last_drafts_reached(depth: int) -> None:
    """To be folded where no step is queued behind them, by that step where one is."""
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=1, depth=depth)
    for i in range(4 * BLOCK):
        runs.admit(0, list(range(5 + i % BLOCK)))
        first = min(5 + i % BLOCK, BLOCK)
        runs.step([(0, first, [], int(first == 5 + i % BLOCK))])
        if first < 5 + i % BLOCK:
            runs.step([(0, 5 + i % BLOCK - first, [], 1)])
        for accepted in (4, 1 + i // BLOCK):
            runs.step([(0, 1, [1, 2, 3], accepted)])
        runs.release(0)
    assert bool(runs.last_folded) == (depth == 0)
    assert bool(runs.last_stored) == (depth == 1)


def test_flush_inputs_must_fit_the_layout() -> None:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu")
    table = torch.zeros(SLOTS, COLUMNS, dtype=torch.int32)
    inputs: Any
    records, params = LAYOUT.allocate_records(1, SLOTS, "cpu"), HASH.params(1)
    for inputs, message in (
        (
            FlushInputs((records[0][0],), params),
            r"flush_inputs.records.token is torch.int32 \[4, 19\]; "
            r"it must be torch.int32 \[1, 4, 19\]",
        ),
        (
            FlushInputs(records, HASH.params(2)),
            r"flush_inputs.params.multiplier is torch.float32 \[2, 1\]; "
            r"it must be torch.float32 \[1, 1\]",
        ),
        (FlushInputs(records, (params[0].int(),)), "flush_inputs.params.multiplier is torch.int32"),
        (records, "flush_inputs is a tuple; it must be FlushInputs"),
        (FlushInputs(records[0], params), r"flush_inputs.records is a Tensor; .* \(token\)"),
        (FlushInputs((), params), r"flush_inputs.records is 0 tensors; .* \(token\)"),
        (FlushInputs(records, (None,)), "flush_inputs.params.multiplier is a NoneType"),
        (FlushInputs(records, ()), r"flush_inputs.params is 0 tensors; .* \(multiplier\)"),
        (FlushInputs(records, params, table[0, :2]), r"flush_inputs.seed is torch.int32 \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            made.bind({0: LAYOUT.allocate(9, "cpu")}, table, flush_inputs=inputs)
    made.bind({0: LAYOUT.allocate(9, "cpu")}, table)
    with pytest.raises(ValueError, match="slot is 2, which holds no request"):
        made.last_checkpoint(2)


@pytest.mark.parametrize("part", ["x", "B", "dt"])
def test_each_record_must_fit_the_layout(part: str) -> None:
    """Of fewer slots, another ring or other numbers, it would be read wrongly when a request ends:
    it is refused when it is bound, and the manager can still be bound to the right one."""
    recurrence = mamba2(1, 1, 4, 1, 4, torch.bfloat16)
    layout = StateLayout(recurrence, K, BLOCK, kind="replay")
    made = HybridStateManager(layout, SLOTS, K, "cpu")
    table = torch.zeros(SLOTS, COLUMNS, dtype=torch.int32)
    records = Records(*layout.allocate_records(1, SLOTS, "cpu"))
    good = getattr(records, part)
    ring = 3
    for bad in (
        good[:, :-1],
        good.narrow(ring, 0, layout.ring_length - 1),
        good.int(),
        good.double(),
        good.to("meta"),
        torch.cat([good, good], ring).narrow(ring, 0, layout.ring_length),
    ):
        inputs = FlushInputs(records._replace(**{part: bad}), (torch.zeros(1, 1),))
        with pytest.raises(ValueError, match=rf"^flush_inputs\.records\.{part} "):
            made.bind({0: layout.allocate(9, "cpu")}, table, flush_inputs=inputs)
    with pytest.raises(ValueError, match=r"not bound"):
        made.begin_step(StepRows.exact([], [], [], []))
    inputs = FlushInputs(records, (torch.zeros(1, 1),))
    made.bind({0: layout.allocate(9, "cpu")}, table, flush_inputs=inputs)


@pytest.mark.parametrize("late", range(4))
def test_steps_may_end_late_and_out_of_turn(late: int) -> None:
    """As on a stage of a pipeline: other slots' steps begin before a step's counts exist."""
    runs = ReplayRunner(max_requests=6, depth=8, columns=20, own_all=True, layers=1)
    for slot in range(6):
        runs.admit(slot, list(range(1 + slot)))
    waiting = []
    for number in range(60):
        slot = number % 6
        row = (slot, 1 + slot, [], 1) if number < 6 else (slot, 1, [5, 6, 7], 1 + number % 4)
        waiting.append(runs.begin([row]))
        runs.forward(waiting[-1])
        if len(waiting) > late:
            runs.end(waiting.pop(number % 2 if late else 0))
        while len(runs.outstanding) > 8 and runs.outstanding[0].step.ended:
            runs.read_oldest()
    for opened in waiting:
        runs.end(opened)
    while runs.outstanding:
        runs.read_oldest()
    assert runs.copies


def test_blocks_per_request_are_bounded() -> None:
    """The live block, and at most a checkpoint's that is being written or read beside it."""
    runs = ReplayRunner(num_draft=K, max_requests=1, block_size=BLOCK, columns=40)
    runs.admit(0, list(range(20)))
    for certain in (8, 8, 4):
        runs.step([(0, certain, [], int(certain == 4))])
        assert len(runs.requests[0].blocks[0]) <= 3
    for i in range(60):
        runs.step([(0, 1, [1] * (i % (K + 1)), 1 + i % (i % (K + 1) + 1))])
        assert len(runs.requests[0].blocks[0]) <= 2
    assert runs.copies
    assert runs.direct


@pytest.mark.parametrize("ring", ["none", "shortest", "longest"])
@pytest.mark.parametrize("k", [0, 1, 2, 8, 15])
@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
def test_any_number_of_drafts(k: int, conv_layout: ConvLayout, ring: str) -> None:
    runs = ReplayRunner(
        num_draft=k, block_size=k + 1 + k % 2, conv_layout=conv_layout, columns=90,
        ring_tokens={"none": 0, "shortest": min(k + 1, 15), "longest": 15}[ring],
    )  # fmt: skip
    runs.admit(0, [1, 2, 3])
    runs.step([(0, 3, [], 1)])
    for i in range(40):
        d = k if i % 3 else i % (k + 1)
        runs.step([(0, 1, [i] * d, 1 + i % (d + 1))])


def test_a_prefix_deep_in_the_table_is_resumed_in_every_group() -> None:
    runs = ReplayRunner(groups=3, layers=3, columns=40, max_requests=3)
    runs.admit(0, list(range(200)))
    for _ in range(25):
        runs.step([(0, 8, [], 0)])
        for checkpoint in runs.recent:
            runs.keep(checkpoint)
        runs.recent.clear()
    for slot, kept in ((1, runs.kept[23]), (2, runs.kept[0])):
        runs.admit(slot, [*kept.tokens, 1, 2, 3], kept)
    runs.step([(2, 3, [], 1), (1, 3, [], 1)])
    for _ in range(12):
        runs.step([(1, 1, [1, 2, 3], 3), (2, 1, [1, 2, 3], 2)])


# memory


def test_a_request_needs_less_than_half_the_bytes() -> None:
    """Nemotron-3 Super's layers, 3 drafts, one checkpoint: 1 + 1 states and the records."""
    sizes = {
        kind: StateLayout(mamba2(128, 64, 128, 8, 4, torch.bfloat16), 3, 4336, kind=kind)
        for kind in ("columns", "replay")
    }
    ratio = {k: layout.bytes_per_request(40, checkpoints=1) for k, layout in sizes.items()}
    assert 0.4 < ratio["replay"] / ratio["columns"] < 0.45
    assert sizes["columns"].record_bytes == 0
    assert sizes["replay"].record_bytes == 19 * ((128 * 64 + 8 * 128) * 2 + 128 * 4)
