"""Check mode of replay: vLLM's own state update runs beside ours, for a few requests.

These have shadow columns, a state for every draft as in vLLM's layout, which start from our state
when the prompt has run. In every step vLLM's kernel gets the inputs that ours gets. Compared are
the states after the certain token, the outputs, and every boundary that is written, each by its
largest difference over its largest entry. All of this runs on the device, in captured graphs too;
only reading the counts waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid_runtime.kernels.step.vllm_rows import RUNNING, FlushRows, StepRows

if TYPE_CHECKING:
    from hybrid_runtime.integrations.vllm.replay_layers import ReplayLayers

WATCHED = 4
"""Request slots that are checked."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}
"""Largest difference, by the state's dtype. vLLM rounds a state once per token, replay per step."""
PER_TOKEN = 1e-7
"""Added to the tolerance for each token that both have run: vLLM rounds every token's decay, and in
heads whose decay is close to 1 those roundings add up."""
STATES, OUTPUTS, BOUNDARIES = range(3)
LOGGED = 10
"""Most lines about differences that are logged."""


Reference: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""vLLM's update of a step's decode rows. Takes states, changed in place, int32 `[rows, 1 + K]`, the
columns of each row (0 = not of interest), and int32 `[rows]`, its accepted tokens, which say the
column to start from. Returns the outputs."""


class Expected(NamedTuple):
    """What vLLM's kernel made of a layer's decode rows.

    out: `[tokens, H, P]`, its outputs.
    watched: bool `[rows]`, the row's request is checked.
    first: `[rows]`, first shadow column of the row's request; 0 = not checked.
    block: `[rows]`, the block of its running column in vLLM's cache.
    limit: float `[rows]`, the largest difference allowed.
    """

    out: Tensor
    watched: Tensor
    first: Tensor
    block: Tensor
    limit: Tensor


class ReplayChecker:
    """Compares for the request slots below `WATCHED`.

    layers: what the model's layers share.
    slots: request slots.
    logger: takes the differences.

    compared, different: int64 `[3]`, comparisons of states, outputs and boundaries, and those
        beyond the tolerance.
    worst: float32 `[3]`, their largest differences.
    """

    def __init__(self, layers: ReplayLayers, slots: int, logger: Any) -> None:
        one, device = layers.layers[0], layers.rings[0].device
        shape = layers.recurrence.checkpoint.matrix.shape
        self._layers, self._logger, self._logged = layers, logger, 0
        self._columns, self._watched = 1 + layers.drafts, min(WATCHED, slots)
        dtype = one.get_state_dtype()[1]
        self._tolerance = TOLERANCE[dtype]
        # Block 0 is the null block, as in vLLM.
        blocks = 1 + self._watched * self._columns
        self._shadows = [
            torch.zeros((blocks, *shape), dtype=dtype, device=device) for _ in layers.layers
        ]

        def ints(value: int) -> Tensor:
            # The last one is for rows without a slot.
            return torch.full((slots + 1,), value, dtype=torch.int32, device=device)

        self._accepted, self._ran, self._verified = ints(1), ints(0), ints(-1)
        self._tokens = ints(0)
        self._fresh = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self.compared = torch.zeros(3, dtype=torch.int64, device=device)
        self.different = torch.zeros(3, dtype=torch.int64, device=device)
        self.worst = torch.zeros(3, dtype=torch.float32, device=device)

    def admit(self, slot: int) -> None:
        """A request takes the slot."""
        self._verified[slot : slot + 1] = -1

    def begin(self, slot: Tensor) -> None:
        """A step of the requests in these slots begins. A slot that was no decode row in its last
        step starts from our state."""
        at = slot.long()
        self._fresh[at] = self._verified[at] != self._ran[at]
        self._tokens[at] = torch.where(self._fresh[at], 0, self._tokens[at] + self._accepted[at])
        self._number += 1
        self._ran[at] = self._number

    def end(self, slot: Tensor, sampled: Tensor | int) -> None:
        """The sampler has accepted `sampled` tokens of each slot; slot -1 = a padded row."""
        sampled = torch.as_tensor(sampled, device=slot.device).expand(len(slot))
        self._accepted[slot.long()] = sampled.clamp(min=1).int()
        found = self.different.tolist()
        if any(found) and self._logged < LOGGED:
            self._logged += 1
            self._logger.error("hybrid-runtime differs from vLLM's kernel: %s", self.statistics())

    def expect(self, layer: Any, step: StepRows, start: Tensor, theirs: Reference) -> Expected:
        """Run vLLM's update of a layer's decode rows on the shadow, before ours."""
        index, states = layer.replay_index, layer.kv_cache[1]
        shadow, nobody = self._shadows[index], len(self._fresh) - 1
        watched = (step.slot >= 0) & (step.slot < self._watched)
        at = torch.where(watched, step.slot, nobody).long()
        first = torch.where(watched, 1 + at * self._columns, 0)
        tables = self._layers.tables[index]
        block = tables[at.clamp(max=len(tables) - 1), RUNNING].long()
        fresh = watched & self._fresh[at]
        shadow[torch.where(fresh, first, 0)] = states[torch.where(fresh, block, 0)]
        self._verified[at] = self._number
        columns = torch.arange(self._columns, device=at.device)
        columns = torch.where(watched[:, None], first[:, None] + columns, 0).int()
        out = theirs(shadow, columns, torch.where(fresh, 1, self._accepted[at]).int())
        return Expected(out, watched, first, block, self._limit(at))

    def compare(self, layer: Any, expected: Expected, output: Tensor, start: Tensor) -> None:
        """Compare our states and outputs with vLLM's, after our update."""
        shadow = self._shadows[layer.replay_index]
        runs = expected.watched & (start[1:] > start[:-1])
        ours, limit = layer.kv_cache[1][expected.block], expected.limit
        self._count(STATES, ours, shadow[expected.first], runs, limit)
        token = torch.arange(len(output), device=start.device, dtype=start.dtype)
        row = torch.searchsorted(start[1:].contiguous(), token, right=True)
        runs = runs[row.clamp(max=len(runs) - 1)] & (row < len(runs))
        limit = limit[row.clamp(max=len(limit) - 1)]
        self._count(OUTPUTS, output.view(expected.out.shape), expected.out, runs, limit)

    def compare_boundaries(self, flush: FlushRows, count: int) -> None:
        """Compare boundaries that have just been written with vLLM's states there."""
        positions = flush.positions
        slot = flush.slot[:count].long()
        acts = (slot < self._watched) & (positions.write_column[:count] >= 0)
        slot = torch.where(acts, slot, 0)
        column = torch.where(acts, positions.write_column[:count], 0).long()
        own = torch.where(acts, 1 + slot * self._columns + positions.pending[:count], 0)
        for index, layer in enumerate(self._layers.layers):
            block = self._layers.tables[index][slot, column].long()
            # A boundary at a prompt's last token has not been through vLLM's kernel.
            known = acts & (self._verified[slot] == self._ran[slot])
            shadow = self._shadows[index]
            ours, limit = layer.kv_cache[1][block], self._limit(slot)
            self._count(BOUNDARIES, ours, shadow[own], known, limit)

    def statistics(self) -> dict[str, Any]:
        """Steps; by kind, comparisons, those that differed, and the worst. Waits for the device."""
        found: dict[str, Any] = {"checked_steps": int(self._number)}
        for index, what in enumerate(("states", "outputs", "boundaries")):
            found[f"checked_{what}"] = int(self.compared[index])
            found[f"different_{what}"] = int(self.different[index])
            found[f"worst_{what}"] = float(self.worst[index])
        return found

    def _limit(self, slot: Tensor) -> Tensor:
        return self._tolerance + PER_TOKEN * self._tokens[slot]

    def _count(
        self, what: int, ours: Tensor, theirs: Tensor, chosen: Tensor, limit: Tensor
    ) -> None:
        ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
        largest = theirs.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        error = (ours - theirs).abs().amax(1) / largest
        self.compared[what] += chosen.sum()
        # Not `error > limit`: NaN must count as different.
        self.different[what] += (chosen & ~(error <= limit)).sum()
        worst = torch.where(chosen, error, 0).nan_to_num(nan=torch.inf).amax()
        self.worst[what] = torch.maximum(self.worst[what], worst)
