"""Two recurrences that nothing outside tests knows: a rolling hash, whose state shows any wrong
token exactly, and a gated delta rule, whose records depend on the state.

A `Rule` says how a token changes a matrix. What a runner of the replay layout does with it is here,
too: it reads a matrix, folds pending records, records its own tokens. `after` is another way to
the same state, from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from helpers.hash_request import PRIME
from torch import Tensor

from hybrid_runtime.kernels.conv.spec import ConvLayout, conv_state_spec
from hybrid_runtime.kernels.recurrence import CheckpointSpec, Recurrence, TensorSpec
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable

TAPS = 3
MULTIPLIER = 31


class Rule(Protocol):
    """States are what `load` makes of a matrix, records what it has of a ring: any Python value."""

    recurrence: Recurrence

    def params(self, layers: int) -> tuple[Tensor, ...]:
        """Of all layers, as `Recurrence.params` says."""

    def load(self, matrix: Tensor) -> Any:
        """A block's state."""

    def store(self, matrix: Tensor, state: Any) -> None:
        """The opposite."""

    def record(self, state: Any, token: int, layer: int) -> tuple[Any, ...]:
        """What a token leaves in the ring, a value for each of `recurrence.records`; state: the one
        before it."""

    def fold(self, state: Any, record: tuple[Any, ...], params: Sequence[Any]) -> Any:
        """The state after the token of a record. params: of the layer."""

    def after(self, tokens: Sequence[int], layer: int) -> Any:
        """The state after all these tokens, from the first on."""

    def value(self, state: Any, token: int, layer: int) -> int:
        """What a layer's output is after a token."""


def load_records(rule: Rule, rings: Sequence[Tensor], at: Tensor) -> list[tuple[Any, ...]]:
    """Records of a slot's tokens at indices `at` of its ring. rings: of one slot and layer."""
    parts = []
    for ring, spec in zip(rings, rule.recurrence.records, strict=True):
        assert spec.token_axis is not None
        parts.append(ring.movedim(spec.token_axis, 0)[at].numpy())
    return list(zip(*parts, strict=True))


def store_records(
    rule: Rule, rings: Sequence[Tensor], at: Tensor, records: Sequence[tuple[Any, ...]]
) -> None:
    """The opposite."""
    if not records:
        return
    columns = zip(*records, strict=True)
    for ring, spec, column in zip(rings, rule.recurrence.records, columns, strict=True):
        assert spec.token_axis is not None
        ring.movedim(spec.token_axis, 0)[at] = torch.as_tensor(np.stack(column)).to(ring.dtype)


def _flush(
    rule: Rule,
    table: StateTable,
    records: tuple[Tensor, ...],
    params: tuple[Tensor, ...],
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None,
) -> None:
    assert rounding is None
    for row in listed.tolist():
        at = int(slot[row])
        if at < 0:
            continue
        source, target = int(positions.read_column[row]), int(positions.write_column[row])
        pending = torch.arange(int(positions.pending[row])) + int(positions.cursor[row])
        offset = int(positions.offset[row])
        layers = zip(table.conv_states, table.matrices, table.tables, strict=True)
        for layer, (conv_states, matrices, blocks) in enumerate(layers):
            rings = [part[layer, at] for part in records]
            axis = rule.recurrence.records[0].token_axis
            assert axis is not None
            state = rule.load(matrices[blocks[at, source]])
            for record in load_records(rule, rings, pending % rings[0].shape[axis]):
                state = rule.fold(state, record, [param[layer].numpy() for param in params])
            rule.store(matrices[blocks[at, target]], state)
            kept = conv_states[blocks[at, source], offset : offset + TAPS].clone()
            conv_states[blocks[at, target], :TAPS] = kept


class HashRule:
    """A matrix is one number all over: a rolling hash of all tokens. A record is a token, and the
    factor that it is multiplied by a parameter of the layer."""

    def __init__(
        self,
        channels: int = 1,
        matrix: tuple[int, ...] = (1, 1, 1),
        dtype: torch.dtype = torch.float32,
        matrix_dtype: torch.dtype = torch.float32,
        conv_layout: ConvLayout = "SD",
    ) -> None:
        self.recurrence = Recurrence(
            CheckpointSpec(
                conv_state_spec(channels, TAPS + 1, dtype, conv_layout),
                TensorSpec("matrix", matrix, matrix_dtype),
            ),
            records=(TensorSpec("token", (1,), torch.int32, token_axis=0),),
            params=(TensorSpec("multiplier", (1,), torch.float32),),
            flush=partial(_flush, self),
        )

    def params(self, layers: int) -> tuple[Tensor, ...]:
        return (torch.full((layers, 1), float(MULTIPLIER)),)

    def load(self, matrix: Tensor) -> int:
        return int(matrix.flatten()[0])

    def store(self, matrix: Tensor, state: int) -> None:
        matrix.fill_(state)

    def record(self, state: int, token: int, layer: int) -> tuple[int]:
        return (token,)

    def fold(self, state: int, record: tuple[Any, ...], params: Sequence[Any]) -> int:
        return (state * int(params[0][0]) + int(record[0]) + 1) % PRIME

    def after(self, tokens: Sequence[int], layer: int) -> int:
        """Layers begin with values of their own."""
        value = 1 + layer
        for token in tokens:
            value = (value * MULTIPLIER + token + 1) % PRIME
        return value

    def value(self, state: int, token: int, layer: int) -> int:
        return state


class DeltaRule:
    """Of two heads with values of 3 numbers and one key of 4:

        S' = e^g S;  u = beta (v - S' k);  S = S' + u k^T

    u depends on the state, so that it is recorded with k and g, and nothing else is needed to fold.
    """

    VOCABULARY, LAYERS = 251, 2

    def __repr__(self) -> str:
        return "delta"  # the same in every process, for the names of tests

    def __init__(self) -> None:
        heads, dim, size = 2, 3, 4
        self._shape = heads, dim, size
        f8 = torch.float64
        self.recurrence = Recurrence(
            CheckpointSpec(
                conv_state_spec(1, TAPS + 1, torch.float32),
                TensorSpec("matrix", self._shape, f8),
            ),
            records=(
                TensorSpec("u", (heads, 1, dim), f8, token_axis=1),
                TensorSpec("k", (1, size), f8, token_axis=0),
                TensorSpec("g", (heads, 1), f8, token_axis=1),
            ),
            params=(),
            flush=partial(_flush, self),
        )
        draw = np.random.default_rng(7)
        many = self.LAYERS, self.VOCABULARY
        keys = draw.standard_normal((*many, size)) + 0.7
        self._k = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        self._q = draw.standard_normal((*many, size))
        self._v = draw.standard_normal((*many, heads, dim))
        self._g = -0.01 - draw.random((*many, heads))
        self._beta = 0.2 + 0.7 * draw.random((*many, heads))
        self.after = cache(self._after)

    def params(self, layers: int) -> tuple[Tensor, ...]:
        return ()

    def load(self, matrix: Tensor) -> Any:
        return matrix.numpy().copy()

    def store(self, matrix: Tensor, state: Any) -> None:
        matrix.copy_(torch.from_numpy(state))

    def record(self, state: Any, token: int, layer: int) -> tuple[Any, ...]:
        k, g = self._k[layer, token], self._g[layer, token]
        read = np.exp(g)[:, None] * (state @ k)
        return self._beta[layer, token][:, None] * (self._v[layer, token] - read), k, g

    def fold(self, state: Any, record: tuple[Any, ...], params: Sequence[Any]) -> Any:
        u, k, g = record
        return np.exp(g)[:, None, None] * state + u[:, :, None] * k

    def _after(self, tokens: tuple[int, ...], layer: int) -> Any:
        """In its other form, S = e^g S (1 - beta k k^T) + beta v k^T."""
        if not tokens:
            return np.zeros(self._shape)
        at = layer, tokens[-1]
        k, beta = self._k[at], self._beta[at][:, None, None]
        state = np.exp(self._g[at])[:, None, None] * self.after(tokens[:-1], layer)
        return state @ (np.eye(len(k)) - beta * np.outer(k, k)) + beta * self._v[at][..., None] * k

    def value(self, state: Any, token: int, layer: int) -> int:
        """Rounded so coarsely that it does not show in which order sums are formed."""
        output = (state @ self._q[layer, token]).sum()
        return int(np.floor(1000 * output)) % PRIME


HASH, DELTA = HashRule(), DeltaRule()
