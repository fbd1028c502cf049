"""A worker of vLLM's V2 runner that computes with symbols, in the order of the GPU's stream.

A block of memory holds either attention tokens or a Mamba state, and a state is the tuple of the
tokens that went into it. A token is drawn from the state that was read, so that a wrong read
changes the text; besides, every read is compared and every write must go to a block of the
request's own.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers.vllm_scheduler import Setting, has_checkpoints
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from hybrid_runtime.integrations.vllm.bounds import Bounds

TAPS, VOCABULARY = 3, 50
KV, MAMBA = 0, 1
"""Cache groups."""


class HoleError(Exception):
    """A state that was read is not what it must be, or a block was written that is another's."""


class CutShort(Exception):
    """vLLM has scheduled a request for less than one token; what follows is undefined."""


def next_token(tokens: tuple[int, ...]) -> int:
    return hash(tokens) % VOCABULARY


def window(tokens: list[int], spare: int) -> list[Any]:
    """A convolution's inputs after `tokens`, and room for drafts."""
    return ([0] * TAPS + tokens)[-TAPS:] + [None] * spare


@dataclass
class Running:
    """A request in its slot.

    index: the slot.
    tokens: known so far.
    computed: tokens whose state is final.
    tables: block table of each cache group.
    lead: tokens known before its next step.
    column, accepted: vLLM's own counts.
    records: drafts of its last step, as replay keeps them.
    drafts: for its next step.
    """

    index: int
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    lead: int
    column: int
    accepted: int = 1
    records: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


@dataclass
class Row:
    """A request's part of a step."""

    name: str
    request: Running
    scheduled: int
    draft: int
    column: int
    tokens: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def certain(self) -> int:
        return self.request.computed + self.scheduled - self.draft


class Worker:
    """mode: `columns`, vLLM's own; `replay`; `lazy`, replay that leaves a boundary to the next
    step. hits: how often a draft is right."""

    def __init__(
        self, scheduler: Any, setting: Setting, mode: str, rng: random.Random, hits: float
    ) -> None:
        self.scheduler, self.setting, self.mode = scheduler, setting, mode
        self.rng, self.hits = rng, hits
        self.memory: dict[int, Any] = {}
        self.running: dict[str, Running] = {}
        self.owners: dict[int, set[str]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.bounds = Bounds(setting.requests + 1, setting.block, setting.asynchronous)
        self.bounds.retain(None)

    def note_owners(self) -> None:
        """Whose the blocks are, right after a step was scheduled."""
        self.owners = collections.defaultdict(set)
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for name, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    if not block.is_null:
                        self.owners[block.block_id].add(name)

    def write(self, row: Row, group: int, column: int, value: Any, what: str) -> None:
        block = row.request.tables[group][column]
        owners = self.owners.get(block, set())
        if not block or not owners or (group == MAMBA and owners - {row.name}):
            raise HoleError(f"{what}: {row.name} writes block {block} of {owners or 'nobody'}")
        self.memory[block] = value

    def state(self, row: Row, column: int) -> Any:
        block = row.request.tables[MAMBA][column]
        found = self.memory.get(block)
        if not isinstance(found, tuple):
            raise HoleError(f"state: column {column} of {row.name}, block {block}, is {found}")
        return found

    def step(self, output: Any) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        self._update(output)
        rows = [self._row(name, output) for name in output.num_scheduled_tokens]
        listed = self._candidates(rows, output)
        for row in rows:
            self._precopy(row, listed[0])
        for row in rows:
            self._attend(row)
            self._forward(row)
        for row in rows:
            self._post(row, listed[1])
        self.counts["steps"] += bool(rows)
        return self._result(rows)

    def _update(self, output: Any) -> None:
        """What the runner does before a step: requests leave, come, and get blocks."""
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self.running.pop(name, None)
        for new in output.scheduled_new_reqs:
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            computed = new.num_computed_tokens
            slots = {request.index for request in self.running.values()}
            free = min(set(range(self.setting.requests + 1)) - slots)
            column = (computed - 1) // self.setting.block
            tables = [list(group) for group in new.block_ids]
            self.running[new.req_id] = Running(
                free, list(known), computed, tables, len(known), column
            )
            self.bounds.admit(free, computed)
            self.counts["hit tokens"] += computed
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, more in zip(self.running[name].tables, blocks or (), strict=False):
                table += more
        for block in getattr(output, "new_block_ids_to_zero", None) or ():
            self.memory[block] = None
        for source, target in getattr(output, "kv_cache_block_copies", None) or ():
            self.memory[target] = self.memory.get(source)

    def _row(self, name: str, output: Any) -> Row:
        request = self.running[name]
        scheduled = output.num_scheduled_tokens[name]
        if scheduled < 1:
            raise CutShort
        draft = len(output.scheduled_spec_decode_tokens.get(name, ()))
        column = -(-(request.computed + scheduled) // self.setting.block) - 1
        return Row(name, request, scheduled, draft, column)

    def _candidates(self, rows: list[Row], output: Any) -> tuple[set[str], set[str]]:
        """Rows that the plug-in would look at, by what the scheduler tells the worker."""
        if not rows:
            return set(), set()
        cached = output.scheduled_cached_reqs
        told = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        told |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        found = self.bounds.candidates(
            np.array([row.request.index for row in rows]),
            np.array([told[row.name] for row in rows], np.int32),
            np.array([row.scheduled for row in rows], np.int32),
            np.array([row.draft for row in rows], np.int32),
            np.array([row.request.lead for row in rows], np.int32),
        )
        if self.bounds.lost.any():
            raise HoleError("bounds: a count outside")
        pre, post = ({rows[i].name for i in part} for part in found[:2])
        return pre, post

    def _precopy(self, row: Row, listed: set[str]) -> None:
        request, held = row.request, row.request.column
        if held != row.column and row.name not in listed:
            raise HoleError(f"bounds: the pre-copy of {row.name} is not listed")
        if held not in (-1, row.column):
            tokens, inputs = self.state(row, held)
            if self.mode == "columns":
                offset = request.accepted - 1
                tokens, _ = self.state(row, held + offset)
                inputs, request.accepted = inputs[offset:] + [None] * offset, 1
            self.write(row, MAMBA, row.column, (tokens, list(inputs)), "pre-copy")
            self.counts["pre-copies"] += 1
        request.column = row.column

    def _attend(self, row: Row) -> None:
        request, block = row.request, self.setting.block
        known = request.tokens[request.computed : row.certain]
        # A draft that the scheduler only pads with is never accepted.
        row.tokens = known + (request.drafts + [-1] * row.draft)[: row.draft]
        if len(row.tokens) != row.scheduled:
            raise HoleError(f"step: {row.name} has {len(row.tokens)} of {row.scheduled} tokens")
        for place, token in enumerate(row.tokens, request.computed):
            held = self.memory.get(request.tables[KV][place // block])
            held = dict(held) if isinstance(held, dict) else {}
            self.write(row, KV, place // block, held | {place % block: token}, "attention")
        for place in range(request.computed):
            held = self.memory.get(request.tables[KV][place // block])
            if not isinstance(held, dict) or held.get(place % block) != request.tokens[place]:
                raise HoleError(f"attention: {row.name} reads {held} at {place}")

    def _read(self, row: Row, decodes: bool) -> tuple[tuple[int, ...], list[int]]:
        """State and inputs that a row starts from."""
        request, offset = row.request, row.request.accepted - 1
        if not request.computed:
            return (), [0] * TAPS
        tokens, inputs = self.state(row, row.column)
        if self.mode == "columns":
            tokens, _ = self.state(row, row.column + offset)
        else:
            tokens += tuple(request.records[:offset])
        if offset and not decodes:
            raise HoleError(f"state: {row.name} runs a prompt after drafts")
        expected = request.tokens[: request.computed]
        inputs = inputs[offset : offset + TAPS]
        if tokens != tuple(expected) or inputs != window(expected, 0):
            raise HoleError(f"state: {row.name} has {len(tokens)} of {request.computed} tokens")
        return tokens, inputs

    def _forward(self, row: Row) -> None:
        request, drafts = row.request, self.setting.drafts
        decodes = row.scheduled == row.draft + 1 and request.computed > 0
        if self.setting.plain and not row.draft:
            decodes = False
            self._flush(row)
        before, inputs = self._read(row, decodes)
        if decodes:
            rolled: list[Any] = inputs[1:] + row.tokens
            rolled += [None] * (TAPS + drafts - len(rolled))
            if self.mode == "columns":
                for j in range(row.draft + 1):
                    after = before + tuple(row.tokens[: 1 + j])
                    self.write(row, MAMBA, row.column + j, (after, rolled), "state")
            else:
                after = (*before, row.tokens[0])
                self.write(row, MAMBA, row.column, (after, rolled), "state")
                if self.mode == "lazy":
                    self._passed(row, before, after)
            request.records = row.tokens[1:]
        else:
            after = before + tuple(row.tokens)
            self._checkpoint(row, after)
            self.write(row, MAMBA, row.column, (after, window(list(after), drafts)), "prompt")
            request.records = []
        state = before + tuple(row.tokens[: row.scheduled - row.draft])
        if row.certain >= request.lead:
            row.emitted = [next_token(state)]
            offered = row.tokens[row.scheduled - row.draft :]
            while (
                len(row.emitted) <= row.draft and offered[len(row.emitted) - 1] == row.emitted[-1]
            ):
                row.emitted.append(next_token(state + tuple(row.emitted)))

    def _flush(self, row: Row) -> None:
        """Fold the accepted drafts of a row that code without records runs."""
        request, offset = row.request, row.request.accepted - 1
        if offset:
            tokens, inputs = self.state(row, row.column)
            value = (tokens + tuple(request.records[:offset]), inputs[offset:] + [None] * offset)
            self.write(row, MAMBA, row.column, value, "flush")
            request.accepted = 1
            self.counts["flushes"] += 1

    def _passed(self, row: Row, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """What our own engine does: boundaries are stored by the step that folds past them."""
        request, block = row.request, self.setting.block
        folded = request.computed - (request.accepted - 1)
        for boundary in {request.computed // block * block, row.certain // block * block}:
            if boundary > folded and boundary // block - 1 != row.column:
                tokens = after[:boundary]
                value = (tokens, window(list(tokens), self.setting.drafts))
                self.write(row, MAMBA, boundary // block - 1, value, "checkpoint")

    def _checkpoint(self, row: Row, after: tuple[int, ...]) -> None:
        """vLLM's own: a prompt's kernels store a boundary inside of the step."""
        if not self.setting.checkpoints or row.draft:
            return
        assert has_checkpoints()
        from vllm.v1.kv_cache_interface import (
            get_mamba_prefill_checkpoint_position,
            is_mamba_prefill_checkpoint_valid,
        )

        computed, block = row.request.computed, self.setting.block
        end = computed + row.scheduled
        place = get_mamba_prefill_checkpoint_position(end, block, self.setting.eagle)
        if is_mamba_prefill_checkpoint_valid(computed, end, place, block, block, 1):
            column = -(-end // block) - 2
            value = (after[:place], window(list(after[:place]), self.setting.drafts))
            if row.request.tables[MAMBA][column]:
                self.write(row, MAMBA, column, value, "checkpoint")

    def _post(self, row: Row, listed: set[str]) -> None:
        """After the sampler: counts, and the boundary that was passed."""
        request, block, certain = row.request, self.setting.block, row.certain
        request.accepted = max(len(row.emitted), 1)
        if row.emitted:
            request.tokens = request.tokens[:certain] + row.emitted
            request.lead = len(request.tokens)
            request.drafts = self._drafts(request.tokens)
        request.computed = certain + request.accepted - 1
        boundary = request.computed // block * block
        if boundary < max(certain, 1):
            return
        fold, source, target = boundary - certain, row.column, boundary // block - 1
        if fold or source != target:
            if row.name not in listed:
                raise HoleError(f"bounds: the boundary of {row.name} is not listed")
            if self.mode != "lazy" or source == target:
                tokens, inputs = self.state(row, source)
                if self.mode == "columns":
                    tokens, _ = self.state(row, source + fold)
                else:
                    tokens += tuple(request.records[:fold])
                value = (tokens, inputs[fold:] + [None] * fold)
                self.write(row, MAMBA, target, value, "boundary")
                self.counts["boundaries"] += 1
        if source == target:
            request.accepted = 1

    def _drafts(self, tokens: list[int]) -> list[int]:
        made: list[int] = []
        if self.rng.random() < 0.05:  # a drafter that finds nothing
            return made
        for _ in range(self.setting.drafts):
            right = self.rng.random() < self.hits
            token = next_token((*tokens, *made)) if right else self.rng.randrange(VOCABULARY)
            made.append(token)
        return made

    def _result(self, rows: list[Row]) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        names = [row.name for row in rows]
        given: dict[str, Any] = {
            "req_ids": names,
            "req_id_to_index": {name: index for index, name in enumerate(names)},
            "sampled_token_ids": [list(row.emitted) for row in rows],
        }
        fields = ModelRunnerOutput.__dataclass_fields__
        empty: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        given |= {name: value for name, value in empty.items() if name in fields}
        sampled = [row for row in rows if row.emitted]
        drafts = DraftTokenIds(
            req_ids=[row.name for row in sampled],
            draft_token_ids=[list(row.request.drafts) for row in sampled],
        )
        return ModelRunnerOutput(**given), drafts
