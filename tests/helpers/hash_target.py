"""A target for the whole engine whose text shows any wrong byte of its caches.

Each matrix is a rolling hash of all tokens, or that of another `Rule`, each conv_state holds the
last tokens, each key is its token and each value its position. The next token is a function of all
of them as they are found *in the caches*: a state or block that is stale, mixed up or misplaced
changes the text from there on. `true_text` is the same function of the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from helpers.hash_request import PRIME
from helpers.toy_recurrences import HASH, TAPS, Rule, load_records, store_records
from torch import Tensor

from hybrid_runtime.kernels.conv.spec import ConvLayout, conv_state_spec
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.model import StateGroup
from hybrid_runtime.specdecode.drafter import VerifyOutput

VOCABULARY = 251
WINDOW = TAPS
STATE_LAYERS = (0, 1)
KV_LAYER = 2
GARBAGE = 250
"""Token that a row computes, and key that it leaves, if its state is not there."""


def attended(keys: Sequence[int], values: Sequence[int]) -> int:
    """What attention makes of keys (tokens) and values (positions): each must be in its inputs."""
    pairs = zip(keys, values, strict=True)
    return sum(at * (key + 1) * (value + 1) for at, (key, value) in enumerate(pairs, 1)) % PRIME


def chosen(states: Sequence[int], window: Sequence[int], context: int) -> int:
    """The next token."""
    weighed = [(2 + i) * value for i, value in enumerate([*states, *window])]
    return (sum(weighed) + context) % VOCABULARY


def true_states(tokens: Sequence[int], rule: Rule = HASH) -> list[Any]:
    """The state of each layer after these tokens."""
    return [rule.after(tuple(tokens), layer) for layer in STATE_LAYERS]


def true_values(tokens: Sequence[int], rule: Rule = HASH) -> list[int]:
    """What each layer's output is after these tokens."""
    states = enumerate(true_states(tokens, rule))
    return [rule.value(state, tokens[-1], layer) for layer, state in states]


def true_window(tokens: Sequence[int]) -> list[int]:
    """The last inputs: tokens plus one, and 0 before the first."""
    return [*[0] * WINDOW, *(token + 1 for token in tokens)][-WINDOW:]


@cache
def true_token(tokens: tuple[int, ...], rule: Rule = HASH) -> int:
    """What follows these tokens."""
    context = attended(tokens, range(len(tokens)))
    return chosen(true_values(tokens, rule), true_window(tokens), context)


def true_text(prompt: Sequence[int], count: int, rule: Rule = HASH) -> list[int]:
    """The `count` tokens that follow a prompt."""
    text = tuple(prompt)
    for _ in range(count):
        text += (true_token(text, rule),)
    return list(text[len(prompt) :])


class HashTarget:
    """What the engine asks of a model, on the CPU. fails: raise in the middle of the next pass."""

    vocab_size, hidden_size, max_positions = VOCABULARY, 1, None
    device, dtype = torch.device("cpu"), torch.float32
    kv_layers, kv_shape = (KV_LAYER,), (1, 1)
    kv_dtype: torch.dtype | None = None
    fails = False

    def __init__(self, rule: Rule = HASH) -> None:
        self.rule = rule
        self.state_params = rule.params(len(STATE_LAYERS))
        params = tuple(tuple(param) for param in self.state_params)
        self.groups = (StateGroup(self._recurrence, STATE_LAYERS, torch.float32, params),)

    def _recurrence(
        self, dtype: torch.dtype, matrix_dtype: torch.dtype, conv_layout: ConvLayout
    ) -> Recurrence:
        one = self.rule.recurrence
        conv_state = conv_state_spec(1, TAPS + 1, torch.float32, conv_layout)
        return replace(one, checkpoint=one.checkpoint._replace(conv_state=conv_state))

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        """The next token after each of `tokens`, as `[T, 1]`."""
        found = []
        starts = batch.cu_seqlens.tolist()
        for row, slot in enumerate(batch.slot.tolist()):
            run = tokens[starts[row] : starts[row + 1]].tolist()
            if slot < 0:  # padding
                found += [0] * len(run)
                continue
            if int(positions.write_column[row]) < 0:  # its text has ended
                self._attend([GARBAGE] * len(run), slot, int(batch.computed[row]), caches)
                found += [GARBAGE] * len(run)
                continue
            contexts = self._attend(run, slot, int(batch.computed[row]), caches)
            mixed = [
                self._mix(run, row, slot, layer, row < batch.num_update_rows, positions, caches)
                for layer in STATE_LAYERS
            ]
            for at, context in enumerate(contexts):
                states = [values[at] for values, _ in mixed]
                # Windows of all layers are the same: each position is taken from another one.
                window = [mixed[i % len(mixed)][1][at + i] for i in range(WINDOW)]
                found.append(chosen(states, window, context))
            if self.fails:
                self.fails = False
                raise RuntimeError("no pass today")
        found += [0] * (len(tokens) - len(found))
        return torch.tensor(found, dtype=torch.float32)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """So much in favour of one token that sampling takes it at any temperature."""
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCABULARY) * 1e4

    def _attend(self, run: list[int], slot: int, first: int, caches: Caches) -> list[int]:
        keys, values = caches.kv[KV_LAYER]
        end, size = first + len(run), keys.shape[1]
        blocks = caches.kv_block_table[slot, : -(-end // size)].long()
        assert (blocks >= 0).all()
        where = blocks[torch.arange(first, end) // size], torch.arange(first, end) % size
        keys[where] = torch.tensor(run, dtype=torch.float32)[:, None, None]
        values[where] = torch.arange(first, end, dtype=torch.float32)[:, None, None]
        seen = [part[blocks].flatten()[:end].int().tolist() for part in (keys, values)]
        return [
            attended(*(part[: position + 1] for part in seen)) for position in range(first, end)
        ]

    def _mix(
        self,
        run: list[int],
        row: int,
        slot: int,
        layer: int,
        update: bool,
        positions: StatePositions,
        caches: Caches,
    ) -> tuple[list[int], list[int]]:
        """The layer's output after each token, and the conv_state's inputs, of which the first
        `WINDOW` are those that it holds after the first token."""
        rule, params = self.rule, [param[layer].numpy() for param in self.state_params]
        conv_states, matrices = caches.states[layer]
        table = caches.state_block_table[slot].tolist()
        draft = int(positions.draft[row])
        certain = len(run) - draft
        read, offset = int(positions.read_column[row]), int(positions.read_offset[row])
        write = int(positions.write_column[row])
        replay = positions.replay if update else None
        if positions.replay is not None and replay is None:  # a scan can't fold, and writes
            assert (int(positions.replay.pending[row]), int(positions.replay.writes[row])) == (0, 1)
        past: list[Any] = []
        if replay is not None:
            assert (read, offset) == (int(replay.read_column[row]), int(replay.offset[row]))
            rings = [part[slot] for part in caches.records[layer]]
            length = rings[0].shape[rule.recurrence.records[0].token_axis or 0]
            assert positions.ring_length == length
            cursor, pending = int(replay.cursor[row]), int(replay.pending[row])
            past = load_records(rule, rings, (cursor + torch.arange(pending)) % length)
        state, before = rule.after((), layer), [0] * WINDOW
        if read >= 0:
            source = table[read]
            state = rule.load(matrices[source if replay is not None else table[read + offset]])
            before = conv_states[source, : WINDOW + offset, 0].int().tolist()
        first = len(before) - WINDOW  # tokens that this pass only repeats
        states = [state]
        for record in past:
            states.append(rule.fold(states[-1], record, params))
        fresh = []
        for token in run:
            fresh.append(rule.record(states[-1], token, layer))
            states.append(rule.fold(states[-1], fresh[-1], params))
        inputs = [*before, *(token + 1 for token in run)]

        def store(column: int, state: Any, window: list[int]) -> None:
            block = table[column]
            assert min(block, column) >= 0
            if state is not None:
                rule.store(matrices[block], state)
            conv_states[block, : len(window)] = torch.tensor(window).float()[:, None]

        if replay is None:
            for j in reversed(range(draft + 1)):
                store(write + j, states[certain + j], inputs[first + certain :] if not j else [])
            cuts = None if update else positions.cuts
            if cuts is not None and (cut := int(cuts.after[row])):
                kept = inputs[first + cut : first + cut + WINDOW]
                store(int(cuts.column[row]), states[cut], kept)
        else:
            end, writes = len(past) + certain, bool(replay.writes[row])
            if replay.checkpoint_column[row] >= 0:
                after = int(replay.checkpoint_after[row])
                kept = inputs[first + after : first + after + WINDOW]
                store(int(replay.checkpoint_column[row]), states[len(past) + after], kept)
            store(write, states[end] if writes else None, inputs[first + certain :])
            news = fresh[certain if writes else 0 :]
            start = cursor + pending + (certain if writes else 0)
            store_records(rule, rings, (start + torch.arange(len(news))) % length, news)
        found = zip(states[len(past) + 1 :], run, strict=True)
        values = [rule.value(state, token, layer) for state, token in found]
        return values, inputs[first + 1 :]


class HashDrafter:
    """Drafts what comes, and errs, or has no draft, where a hash of the text says so."""

    def __init__(self, num_draft: int, rule: Rule = HASH) -> None:
        self.num_draft, self.rule = num_draft, rule

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        k, drafts = self.num_draft, []
        text = output.sequences
        for slot, emits in zip(
            output.inputs.slot.tolist(), output.inputs.emits.tolist(), strict=True
        ):
            known = text.history[slot, : int(text.length[slot])].tolist()
            right = HASH.after(known, 0) % (k + 2)
            if not emits or right > k:
                drafts.append([-1] * k)
                continue
            guesses = true_text(known, k, self.rule)
            drafts.append([t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(guesses)])
        return torch.tensor(drafts, dtype=torch.int32)[:, :count], None
