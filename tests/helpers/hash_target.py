"""A target for the whole engine whose text shows any wrong byte of its caches.

Each state is a rolling hash of all tokens, each window holds the last tokens, each key is its token
and each value its position. The next token is a function of all of them as they are found *in the
caches*: a state or block that is stale, mixed up or misplaced changes the text from there on.
`true_text` is the same function of the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from helpers.hash_request import PRIME
from torch import Tensor

from hybrid_runtime.kernels.mamba2.window_cache import WindowCache
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.model import Mamba2Shape, StateGroup
from hybrid_runtime.specdecode.drafter import VerifyOutput

VOCABULARY = 251
WINDOW = 3
STATE_LAYERS = (0, 1)
KV_LAYER = 2


def rolled(value: int, token: int) -> int:
    """The hash after one more token; state layers begin with values of their own."""
    return (value * 31 + token + 1) % PRIME


def attended(keys: Sequence[int], values: Sequence[int]) -> int:
    """What attention makes of keys (tokens) and values (positions): each must be in its inputs."""
    pairs = zip(keys, values, strict=True)
    return sum(at * (key + 1) * (value + 1) for at, (key, value) in enumerate(pairs, 1)) % PRIME


def chosen(states: Sequence[int], window: Sequence[int], context: int) -> int:
    """The next token."""
    weighed = [(2 + i) * value for i, value in enumerate([*states, *window])]
    return (sum(weighed) + context) % VOCABULARY


def true_states(tokens: Sequence[int]) -> list[int]:
    """The state of each layer after these tokens."""
    states = [1 + layer for layer in STATE_LAYERS]
    for token in tokens:
        states = [rolled(value, token) for value in states]
    return states


def true_window(tokens: Sequence[int]) -> list[int]:
    """The last inputs: tokens plus one, and 0 before the first."""
    return [*[0] * WINDOW, *(token + 1 for token in tokens)][-WINDOW:]


@cache
def true_token(tokens: tuple[int, ...]) -> int:
    """What follows these tokens."""
    context = attended(tokens, range(len(tokens)))
    return chosen(true_states(tokens), true_window(tokens), context)


def true_text(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt."""
    text = tuple(prompt)
    for _ in range(count):
        text += (true_token(text),)
    return list(text[len(prompt) :])


class HashTarget:
    """What the engine asks of a model, on the CPU. fails: raise in the middle of the next pass."""

    vocab_size, hidden_size, max_positions = VOCABULARY, 1, None
    device, dtype = torch.device("cpu"), torch.float32
    kv_layers, kv_shape = (KV_LAYER,), (1, 1)
    groups = (
        StateGroup(
            Mamba2Shape(heads=1, head_dim=1, state_size=1, groups=1, conv_width=WINDOW + 1),
            STATE_LAYERS,
            torch.float32,
            {"A_log": (torch.zeros(1),) * len(STATE_LAYERS)},
        ),
    )
    fails = False

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
        """State after each token, and the window's inputs, of which the first `WINDOW` are those
        that the window holds after the first token."""
        windows, ssm = caches.states[layer]
        table = caches.state_block_table[slot].tolist()
        draft = int(positions.draft[row])
        certain = len(run) - draft
        read, offset = int(positions.read_column[row]), int(positions.read_offset[row])
        write = int(positions.write_column[row])
        replay = positions.replay if update else None
        past: list[int] = []
        if replay is not None:
            assert (read, offset) == (int(replay.read_column[row]), int(replay.offset[row]))
            ring = caches.window_cache[layer].x[slot, 0, :, 0]
            cursor, pending = int(replay.cursor[row]), int(replay.pending[row])
            past = ring[(cursor + torch.arange(pending)) % len(ring)].int().tolist()
        value, before = 1 + layer, [0] * WINDOW
        if read >= 0:
            source = table[read]
            value = int(ssm[source if replay is not None else table[read + offset]])
            before = windows[source, : WINDOW + offset, 0].int().tolist()
        first = len(before) - WINDOW  # tokens that this pass only repeats
        values = [value]
        for token in [*past, *run]:
            values.append(rolled(values[-1], token))
        inputs = [*before, *(token + 1 for token in run)]

        def store(column: int, state: int | None, window: list[int]) -> None:
            block = table[column]
            assert min(block, column) >= 0
            if state is not None:
                ssm[block] = state
            windows[block, : len(window)] = torch.tensor(window).float()[:, None]

        if replay is None:
            for j in reversed(range(draft + 1)):
                store(write + j, values[certain + j], inputs[first + certain :] if not j else [])
            cuts = None if update else positions.cuts
            if cuts is not None and (cut := int(cuts.after[row])):
                kept = inputs[first + cut : first + cut + WINDOW]
                store(int(cuts.column[row]), values[cut], kept)
        else:
            end, writes = len(past) + certain, bool(replay.writes[row])
            if replay.snapshot_column[row] >= 0:
                after = int(replay.snapshot_after[row])
                kept = inputs[first + after : first + after + WINDOW]
                store(int(replay.snapshot_column[row]), values[len(past) + after], kept)
            store(write, values[end] if writes else None, inputs[first + certain :])
            news = torch.tensor(run[certain if writes else 0 :]).float()
            start = cursor + pending + (certain if writes else 0)
            ring[(start + torch.arange(len(news))) % len(ring)] = news
        return values[len(past) + 1 :], inputs[first + 1 :]


def fold_records(
    table: StateTable,
    window_cache: WindowCache,
    A_log: Tensor,
    rows: Tensor,
    slot: Tensor,
    replay: ReplayPositions,
    rounding: Rounding | None,
) -> None:
    """`replay_flush` of this model: its states are hashes, its records tokens."""
    for row in rows.tolist():
        at, offset = int(slot[row]), int(replay.offset[row])
        past = (int(replay.cursor[row]) + torch.arange(int(replay.pending[row]))).long()
        past %= window_cache.length
        layers = zip(table.windows, table.ssm, table.tables, strict=True)
        for layer, (windows, ssm, blocks) in enumerate(layers):
            source, target = (
                int(blocks[at, int(column[row])])
                for column in (replay.read_column, replay.write_column)
            )
            value = int(ssm[source])
            for token in window_cache.x[layer, at, 0, past, 0].int().tolist():
                value = rolled(value, token)
            ssm[target] = value
            windows[target, :WINDOW] = windows[source, offset : offset + WINDOW].clone()


class HashDrafter:
    """Guesses what comes, and errs, or has no guess, where a hash of the text says so."""

    def __init__(self, num_draft: int) -> None:
        self.num_draft = num_draft

    def propose(self, output: VerifyOutput) -> tuple[Tensor, Tensor | None]:
        k, drafts = self.num_draft, []
        text = output.sequences
        for slot, emits in zip(
            output.inputs.slot.tolist(), output.inputs.emits.tolist(), strict=True
        ):
            known = text.history[slot, : int(text.length[slot])].tolist()
            right = true_states(known)[0] % (k + 2)
            if not emits or right > k:
                drafts.append([-1] * k)
                continue
            guesses = true_text(known, k)
            drafts.append([t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(guesses)])
        return torch.tensor(drafts, dtype=torch.int32), None
