"""Gated DeltaNet's own recurrence as a `Rule` of the toy recurrences' tests: its tensors, records
and flush, with states in fp64, so that no rounding hides a wrong token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from helpers.hash_request import PRIME
from helpers.toy_recurrences import TAPS
from torch import Tensor

from hybrid_runtime.kernels.gdn.naive import advance_state, fold_token
from hybrid_runtime.kernels.gdn.recurrence import MatrixLayout, gdn


class GdnRule:
    """Of four value heads and two key heads. A token's q, k, v, a and b are drawn once."""

    VOCABULARY, LAYERS = 251, 2

    def __init__(self, matrix_layout: MatrixLayout) -> None:
        heads, key_heads, key, value = 4, 2, 4, 3
        made = gdn(heads, key_heads, key, value, TAPS + 1, matrix_layout=matrix_layout)
        matrix = made.checkpoint.matrix
        self.recurrence = replace(
            made,
            checkpoint=made.checkpoint._replace(matrix=matrix._replace(dtype=torch.float64)),
            records=tuple(spec._replace(dtype=torch.float64) for spec in made.records),
        )
        self._transposed = matrix_layout == "KV"
        self._shape, self._group = (heads, value, key), heads // key_heads
        draw = np.random.default_rng(7)
        many = self.LAYERS, self.VOCABULARY
        self._k = draw.standard_normal((*many, key_heads, key)) + 0.7
        self._rk = 1 / np.sqrt(np.square(self._k).sum(-1) + 1e-6)
        self._q = draw.standard_normal((*many, heads, key))
        self._v = draw.standard_normal((*many, heads, value))
        self._g = -np.exp(draw.normal(-2, 1, heads)) * np.log1p(
            np.exp(draw.standard_normal((*many, heads)))
        )
        self._beta = 1 / (1 + np.exp(-draw.standard_normal((*many, heads))))
        self.after = cache(self._after)

    def params(self, layers: int) -> tuple[Tensor, ...]:
        return ()

    def load(self, matrix: Tensor) -> Any:
        return (matrix.mT if self._transposed else matrix).numpy().copy()

    def store(self, matrix: Tensor, state: Any) -> None:
        (matrix.mT if self._transposed else matrix).copy_(torch.from_numpy(state))

    def _key(self, k: Any, rk: Any) -> Any:
        return np.repeat(k * rk[:, None], self._group, 0)

    def record(self, state: Any, token: int, layer: int) -> tuple[Any, ...]:
        at = layer, token
        inputs = self._key(self._k[at], self._rk[at]), self._v[at], self._g[at], self._beta[at]
        _, u = advance_state(torch.from_numpy(state), *map(torch.from_numpy, inputs))
        return u.numpy(), self._k[at], self._g[at], self._rk[at]

    def fold(self, state: Any, record: tuple[Any, ...], params: Sequence[Any]) -> Any:
        u, k, g, rk = record
        parts = map(torch.from_numpy, (state, u, self._key(k, rk), g))
        return fold_token(*parts).numpy()

    def _after(self, tokens: tuple[int, ...], layer: int) -> Any:
        """In its other form, S = e^g S (1 - beta k k^T) + beta v k^T."""
        if not tokens:
            return np.zeros(self._shape)
        at = layer, tokens[-1]
        k, beta = self._key(self._k[at], self._rk[at]), self._beta[at][:, None, None]
        state = np.exp(self._g[at])[:, None, None] * self.after(tokens[:-1], layer)
        kk = k[:, :, None] * k[:, None, :]
        return state @ (np.eye(k.shape[-1]) - beta * kk) + beta * (
            self._v[at][:, :, None] * k[:, None, :]
        )

    def value(self, state: Any, token: int, layer: int) -> int:
        """Rounded so coarsely that it does not show in which order sums are formed."""
        output = (state * self._q[layer, token][:, None]).sum()
        return int(np.floor(1000 * output)) % PRIME


GDN, TRANSPOSED_GDN = GdnRule("VK"), GdnRule("KV")
"""With matrices as vLLM has them, and as transformers has."""
