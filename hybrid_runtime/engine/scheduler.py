"""Who runs in the next step, and how much of each: continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_runtime.engine import ledger
from hybrid_runtime.engine.block_pool import BlockTable
from hybrid_runtime.engine.ledger import Ints, Ledger
from hybrid_runtime.engine.prefix_cache import PrefixCache
from hybrid_runtime.engine.request import Hit, Request
from hybrid_runtime.engine.state_blocks import StateBlocks
from hybrid_runtime.engine.wanted import Wanted
from hybrid_runtime.specdecode.draft_length import DraftLength, StepDrafts
from hybrid_runtime.specdecode.shape import PROMPT_ROWS, StepShape
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.placement import BlockDemand
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of one step; rows that decode (one certain token and its drafts) come first.

    requests: of the rows.
    epochs: of their slots, int `[rows]`, by which to know rows whose request has left meanwhile.
    rows: what runs.
    shape: of the step.
    drafts: how many it verifies and proposes.
    wants: what some row wants, bits as of `ledger.SAMPLED`.
    samples: some row brings a token.
    has_logprobs: its log-probability comes with it.
    pooled: rows whose embedding is complete after the step.
    prompt_logprobs: rows of whose prompts log-probabilities are wanted, and the positions from and
        to (exclusive) whose hidden states give those of the tokens behind them.
    """

    requests: list[Request]
    epochs: Ints
    rows: StepRows
    shape: StepShape
    drafts: StepDrafts
    wants: int
    samples: bool
    has_logprobs: bool
    pooled: list[int]
    prompt_logprobs: list[tuple[int, int, int]]


class Scheduler:
    """Waiting queue, running set, and the blocks of both caches.

    Requests are admitted in the order in which they came. Their prompts then share the steps'
    tokens: shortest remaining prompt first, with ageing. A short prompt overtakes a long one, but
    not once as many prompt tokens have run since the long one was admitted as that has itself.

    A request is admitted when there are blocks for all tokens that it and those who run are known
    to need. Where blocks run out later, the youngest gives its own back and waits again, in front
    of the queue: what it has computed is computed again, from its last checkpoint that is still
    there, and its text goes on as if nothing had happened. The oldest always comes through, because
    `check` refuses requests that could need more than there is.
    """

    def __init__(
        self,
        manager: HybridStateManager,
        kv: BlockTable,
        state: StateBlocks,
        max_requests: int,
        max_tokens_per_step: int,
        max_prompt_tokens: int,
        max_length: int,
        steps_ahead: int,
        cache: PrefixCache | None,
        max_waiting: int | None,
        kv_block: int,
        drafts: DraftLength,
    ) -> None:
        """kv_block: tokens of a KV block. drafts: says how many drafts a step has. The other
        arguments are the engine's."""
        self.manager, self.kv, self.state = manager, kv, state
        self.block_size, self.kv_block = manager.layout.block_size, kv_block
        self.num_draft, self.drafts = manager.num_speculative_tokens, drafts
        self.steps_ahead, self.cache = steps_ahead, cache
        self._state_budget = manager.layout.block_budget(steps_ahead)
        self.preemptions = 0
        self.ledger = Ledger(max_requests, max_length)
        # Prompt tokens run so far: the clock of `Ledger.turn`.
        self._prompt_tokens = 0
        self.max_tokens_per_step, self.max_length = max_tokens_per_step, max_length
        self.max_prompt_tokens = max_prompt_tokens
        self._max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        # By age, and their slots.
        self.running: list[Request] = []
        self._running = np.zeros(0, np.intp)
        self._slots = list(range(max_requests - 1, -1, -1))

    def reset(self, requests: Iterable[Request]) -> None:
        """After an exception anywhere: `requests` wait, in this order, to be computed again, and
        no others are known. The device must have run all that was launched."""
        self.manager.reset()
        self.kv.reset()
        self.state.reset()
        if self.cache is not None:
            self.cache.reset()
        for request in self.running:  # their slots will be others'
            request.line = request.line.copy()
        self.running.clear()
        self._running = np.zeros(0, np.intp)
        self._slots = list(range(self.manager.max_requests - 1, -1, -1))
        self.waiting = deque(requests)
        for request in self.waiting:
            request.forget()

    def footprint(self, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
        """The most KV blocks and state blocks that such a request can own at once."""
        longest = min(prompt_tokens + max_tokens, self.max_length)
        longest += overshoot(self.num_draft, self.steps_ahead)
        return int(self._blocks(longest)), self._state_budget.most

    @property
    def full(self) -> bool:
        """As many requests wait as may."""
        return self._max_waiting is not None and len(self.waiting) >= self._max_waiting

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that can never run."""
        kv, state = self.footprint(len(request.prompt), request.max_tokens)
        if len(request.prompt) + bool(request.max_tokens) > self.max_length:
            one = "with at least one of output " if request.max_tokens else ""
            raise ValueError(
                f"prompt has {len(request.prompt)} tokens; {one}it must fit max_model_len "
                f"({self.max_length})"
            )
        for name, need, have in (
            ("KV", kv, self.kv.pool.size),
            ("state", state, self.state.pool.size),
        ):
            if need > have:
                raise ValueError(
                    f"prompt of {len(request.prompt)} tokens with max_tokens="
                    f"{request.max_tokens} needs {need} {name} blocks; it must need at most "
                    f"{have}, all that there are"
                )

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests into free slots, in order, while there is room for them."""
        admitted = []
        while self.waiting and self._slots:
            request = self.waiting[0]
            hit = Hit() if self.cache is None else self.cache.find(request)
            if self.running and not self._room(request, hit):
                break
            self.waiting.popleft()
            if self.cache is not None:
                hit = self.cache.promote(request, hit)
            request.slot, request.hit, request.turn_end = self._slots.pop(), hit, 0
            blocks = hit.tokens // self.block_size
            turn = self._prompt_tokens + request.length - hit.tokens
            self.ledger.admit(request, hit.tokens, blocks, turn)
            self.drafts.acceptance.admit(request.slot)
            wanted = Wanted(0)
            if self.cache is not None:
                self.cache.adopt(request)
                wanted = self.cache.wanted(request)
            self.state.admit(self.manager, request.slot, hit, wanted)
            self.running.append(request)
            self._running = np.append(self._running, request.slot)
            admitted.append(request)
        return admitted

    @property
    def keeps_turn_ends(self) -> bool:
        """Whether the state at the end of a text can be found."""
        return self.cache is not None and self.manager.ends_texts

    def close(self, requests: list[Request], turns: bool = False) -> None:
        """Before these requests are retired: file what no later results will bring, the tokens that
        queued steps run for certain and the checkpoints behind the last drafts. turns: their texts
        have ended, so that the next turn may go on there."""
        if self.cache is None or not requests:
            return
        cache, folded = self.cache, list[Checkpoint]()
        last, ends = dict[int, Checkpoint](), dict[int, Checkpoint]()
        for request in requests:
            slot, end = request.slot, None
            if not self.manager.has_ended(slot):  # or the queued step does nothing
                request.computed = request.computed_min
            if turns and self.keeps_turn_ends:
                end = self.manager.last_state(slot, request.length - request.cut)
                if end is None:
                    cache.note_lost_turn_end()
                else:
                    ends[slot] = end
                    if cache.has_state(request, end.position):
                        end = None
            checkpoint = self.manager.last_checkpoint(slot)
            if checkpoint is not None and end is not None and checkpoint.column == end.column:
                checkpoint = None  # there is one block for both; the turn's end is deeper
            if checkpoint is not None and cache.is_unfiled(request, checkpoint):
                last[slot] = checkpoint
            found = last.get(slot) if end is None else end
            if found is not None:
                folded.append(found)
        self.manager.flush(folded)
        for request in requests:
            cache.file(request, [last[request.slot]] if request.slot in last else [])
            if request.slot in ends:
                cache.file_turn_end(request, ends[request.slot])

    def retire(self, request: Request) -> None:
        """Take a request out of its slot, or out of the queue; what it owned is free again."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._running = self._running[self._running != request.slot]
        # An abandoned step has released its slots.
        if self.manager.holds(request.slot):
            self.manager.release(request.slot)
        if self.cache is not None:
            self.cache.leaving(request)
        for table in (self.kv, self.state):
            table.free(request.slot)
        self.ledger.leave(request)
        self._slots.append(request.slot)
        request.slot = -1
        if self.cache is not None:
            self.cache.retired(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and let it begin again when there is room. Steps that are
        queued may still write them; later owners are launched later on the same stream."""
        self.close([request])
        self._begin_again(request)
        self.preemptions += 1

    def resume(self, request: Request) -> None:
        """Let a running request that the device holds back go on: from where it is."""
        self.close([request], turns=True)
        self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        self.retire(request)
        request.forget()
        self.waiting.appendleft(request)

    def _room(self, request: Request, hit: Hit) -> bool:
        """Blocks for a request beside those who run, and what these may need any time."""
        slots = self._running
        keys = self._blocks(request.length + bool(request.max_tokens)) - len(hit.keys)
        found = hit.keys if hit.partial is None else (*hit.keys, hit.partial)
        keys += self.kv.pool.unowned(found) + self._owed(slots)
        # Those admitted a moment ago have not taken theirs yet.
        table = self.ledger
        not_yet_allocated = np.count_nonzero(table.computed_max[slots] == table.hit[slots])
        state = self._state_budget.admission * (1 + not_yet_allocated)
        if hit.state is not None:
            state += self.state.pool.unowned([hit.state])
        return bool(keys <= self.kv.pool.free and state <= self.state.pool.free)

    def _owed(self, slots: Ints) -> int:
        """KV blocks that running requests may take any time: for the tokens that each is known to
        need, the one that follows in a text among them, and for `block_size` more, as far as it can
        get that long."""
        table = self.ledger
        have = self._blocks(table.computed_max[slots])
        follows = table.most[slots] > table.prompt[slots]
        known = np.maximum(self._blocks(table.prefill[slots] + follows), have)
        most = self._blocks(table.most[slots] + overshoot(self.num_draft, self.steps_ahead))
        more = np.clip(most - known, 0, self.block_size // self.kv_block)
        return int((known - have + more).sum())

    def _blocks(self, tokens: Any) -> Any:
        """KV blocks for so many tokens."""
        return -(-tokens // self.kv_block)

    def schedule(self) -> Schedule | None:
        """Rows of the next step, with their blocks handed out; None when no request can run.

        Positions are bounds as long as results are in flight. A request that may have ended, but
        is not known to, runs on: at worst one row is wasted. Where blocks are short, chunks end at
        save positions and cross none, and then the youngest requests give way.
        """
        while True:
            for crosses in (True, False):
                chosen, scheduled, drafts, num_decoding = self._choose(crosses)
                if not len(chosen):
                    return None
                schedule = self._with_blocks(chosen, scheduled, drafts, num_decoding)
                if schedule is not None:
                    self.drafts.queued(drafts)
                    return schedule
            if len(self.running) == 1:
                raise RuntimeError("a request needs more blocks than check() lets it")
            self.preempt(self.running[-1])

    def _choose(self, crosses: bool) -> tuple[Ints, Ints, StepDrafts, int]:
        """Who runs, as indices into `running`, and how many tokens each; those that decode first,
        their drafts, and how many do. crosses: as of `_chunk`."""
        slots, table = self._running, self.ledger
        low = table.computed_min[slots]
        left = table.prefill[slots] - low
        # Tokens emitted, and the fewest that queued steps will emit, are not yet all.
        decodes = (left <= 0) & (np.maximum(table.length[slots], low + 1) < table.most[slots])
        prefilling = (left > 0).nonzero()[0]
        decoding = decodes.nonzero()[0]
        drafts = self.drafts.plan(slots[decoding], len(prefilling) > 0)
        width = drafts.verify.mean + 1
        decoding = decoding[: self.max_tokens_per_step // width]
        if drafts.verify.most < width:
            scheduled = np.full(len(decoding), width)
        else:
            limit = self.max_tokens_per_step - len(decoding)
            scheduled = self.drafts.numbers(slots[decoding], drafts.verify, limit) + 1
        if not len(prefilling):
            return decoding, scheduled, drafts, len(decoding)
        budget = min(self.max_tokens_per_step - width * len(decoding), self.max_prompt_tokens)
        turn = table.turn[slots[prefilling]].argsort(kind="stable")
        chunks: list[int] = []
        for at in prefilling[turn][:PROMPT_ROWS].tolist():
            if budget <= 0:
                break
            chunks.append(self._chunk(self.running[at], min(int(left[at]), budget), crosses))
            budget -= chunks[-1]
        chosen = np.concatenate([decoding, prefilling[turn][: len(chunks)]])
        return chosen, np.concatenate([scheduled, np.array(chunks, int)]), drafts, len(decoding)

    def _chunk(self, request: Request, most: int, crosses: bool) -> int:
        """Prompt tokens to run: capped so that the chunk crosses at most one save position and ends
        at most a block behind it and at the next one, or, unless it `crosses`, at the first."""
        if self.cache is None:
            return most
        start, wanted = request.computed_min, self.cache.wanted(request)
        end = wanted.next(start)
        if crosses:
            end = min(wanted.next(end), end + self.block_size)
        return min(most, end - start)

    def _with_blocks(
        self, chosen: Ints, scheduled: Ints, drafts: StepDrafts, num_decoding: int
    ) -> Schedule | None:
        """What was chosen, with its blocks handed out; None if there are too few."""
        running, slots, table = self.running, self._running[chosen], self.ledger
        low, high = table.computed_min[slots], table.computed_max[slots]
        draft = np.zeros(len(slots), np.int32)
        draft[:num_decoding] = scheduled[:num_decoding] - 1
        bound = low.astype(np.int32)
        rows = StepRows(
            slots.astype(np.int32),
            bound,
            high.astype(np.int32) if np.count_nonzero(low != high) else bound,
            scheduled.astype(np.int32),
            draft,
            np.arange(len(slots)) < num_decoding,
        )
        # What columns are freed by: tokens computed as of the last results. In a prompt no drafts
        # have been accepted, so that everything up to there has been filed.
        known = table.computed[slots]
        known[num_decoding:] += self.num_draft
        if not self._allocate(rows, known):
            return None
        rows = self.state.named(rows)
        shape = StepShape.decoding(num_decoding, drafts.verify)
        if shape.longest:
            shape = shape._replace(decode_tokens=int(scheduled.sum()))
        if len(chosen) > num_decoding:
            prompt_tokens = int(scheduled[num_decoding:].sum())
            shape = shape._replace(
                prompt_rows=len(chosen) - num_decoding, prompt_tokens=prompt_tokens
            )
            self._prompt_tokens += prompt_tokens
        requests = [running[at] for at in chosen.tolist()]
        return self._schedule_of(requests, rows, shape, drafts)

    def _schedule_of(
        self, requests: list[Request], rows: StepRows, shape: StepShape, drafts: StepDrafts
    ) -> Schedule:
        """Of requests that none of this has been queued for yet."""
        samples, pooled, spans = shape.decode_rows > 0, [], []
        for row in range(shape.decode_rows, len(requests)):
            request, scheduled = requests[row], int(rows.scheduled[row])
            if request.prompt_left == scheduled:
                if request.max_tokens:
                    samples = True
                elif request.pooled_from is not None:
                    pooled.append(row)
            if request.wants_prompt_logprobs:
                first = max(request.computed_min, len(request.prompt_logprobs))
                last = min(request.computed_min + scheduled, len(request.prompt) - 1)
                if first < last:
                    spans.append((row, first, last))
        wants = int(np.bitwise_or.reduce(self.ledger.wants[rows.index]))
        epochs = self.ledger.epoch[rows.index]
        has_logprobs = samples and wants & ledger.LOGPROBS > 0
        return Schedule(
            requests, epochs, rows, shape, drafts, wants, samples, has_logprobs, pooled, spans
        )

    def _allocate(self, rows: StepRows, known: Ints) -> bool:
        """Give a step's rows their blocks; False, and nothing happens, where there are too few.
        known: tokens computed as far as results have been read, `[rows]`."""
        state = self.state.changes(self.manager, rows, known)
        kv = self.kv.changes(rows.index, self._kv_demand(rows))
        if not (self.kv.can_allocate(kv) and self.state.can_allocate(state)):
            return False
        new_state, new_kv = self.state.allocate(state), self.kv.allocate(kv)
        if self.cache is not None:
            self.cache.order_reuse(new_kv, new_state)
        self.kv.tables.upload()  # the state's table among them
        return True

    def _kv_demand(self, rows: StepRows) -> BlockDemand:
        """All blocks up to where the drafter looks: its own passes reach K - 1 tokens further than
        the step."""
        end = rows.computed_max + rows.scheduled + max(self.num_draft - 1, 0)
        last = (end - 1) // self.kv_block
        zero = np.zeros(len(rows), np.int64)
        return BlockDemand(zero, zero, last, last)


def overshoot(num_draft: int, steps_ahead: int) -> int:
    """Positions beyond a request's last token that may be written: by drafts of its last step and
    of those that were queued before it was known to be the last, and by the drafter after them."""
    return num_draft * (steps_ahead + 2)
