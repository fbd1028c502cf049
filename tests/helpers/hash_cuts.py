"""Checkpoints inside prompt rows, in the rolling-hash model of `hash_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.hash_request import Request, Row, store_state

if TYPE_CHECKING:
    from helpers.hash_model import HashRunner


def loses(runner: HashRunner, row: Row) -> bool:
    """Whether a row passes a wanted position of which it leaves no checkpoint."""
    slot, certain, drafts, _ = row
    if slot < 0 or runner.requests[slot].dead:
        return False
    request = runner.requests[slot]
    cut, end = cut_of(runner, request, certain, drafts), request.computed + certain
    passed = runner.passes(request, certain)
    return passed[0] < cut if cut else bool(passed) and passed[-1] != end


def cut_of(runner: HashRunner, request: Request, certain: int, drafts: list[int]) -> int:
    """The position inside a row at which it leaves a checkpoint; 0: none."""
    end, block = request.computed + certain, runner.layout.block_size
    inside = [b for b in runner.passes(request, certain) if b < end]
    if drafts or not (runner.prompt_cuts and inside):
        return 0
    # In the columns layout at the last boundary only.
    cuts = runner.layout.replays or inside[-1] == (end - 1) // block * block
    return inside[-1] if cuts else 0


def leave_cut(
    runner: HashRunner,
    request: Request,
    certain: int,
    checkpoints: set[int],
    after: int,
    column: int,
) -> None:
    """Check where a row of the columns layout leaves a checkpoint, and store it as kernels do.
    checkpoints: boundaries of which the step may leave some."""
    inside = [b for b in checkpoints if b < request.computed + certain]
    if not inside:
        assert (after, column) == (0, -1)
        return
    (cut,) = inside
    assert (after, column) == (cut - request.computed, cut // runner.layout.block_size - 1)
    for layer, (window, ssm) in runner.states.items():
        block = request.blocks[runner.group_of[layer]][column]
        inputs = runner.layout.positions_first(window)[block]
        store_state(inputs, ssm[block], request.tokens[:cut])
