"""Shapes of Gated DeltaNet with random inputs, and many steps of its replay layout beside the
recurrence, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers.state_rows import Rows
from helpers.tensors import DEVICE, ints, noise
from torch import Tensor

from hybrid_runtime.kernels.gdn.naive import advance_state, gates, inverse_norm, normalised
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

BIG: dict[str, Any] = {"heads": 32, "key_heads": 16, "key": 128, "value": 128}


@dataclass(frozen=True)
class Gdn:
    """One configuration; each test changes some things of the base."""

    x: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    drafts: int = 3
    tokens: int = 4
    ring_tokens: int = 15
    heads: int = 2
    key_heads: int = 1
    key: int = 16
    value: int = 16
    kda: bool = False
    transposed: bool = False  # matrices lie as [K, V]
    pad: int = 0  # elements behind each block's state
    rounding: bool = False

    @property
    def fine(self) -> torch.dtype:
        """What u, g and rk are recorded in."""
        return torch.promote_types(self.x, torch.float32)

    def vectors(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Heads from slow to fast: they keep 0.999 of a state at a token, or 0.1."""
        channels = (self.heads, self.key) if self.kda else (self.heads,)
        return {
            "A_log": torch.linspace(-7, 1, self.heads, device=DEVICE).to(self.fine),
            "dt_bias": noise(generator, *channels, dtype=self.fine),
        }

    def inputs(self, generator: torch.Generator, tokens: int) -> dict[str, Tensor]:
        """Of views of one tensor, as a model has them; keys resemble each other."""
        sizes = [
            self.key_heads * self.key, self.key_heads * self.key, self.heads * self.value,
            self.heads * (self.key if self.kda else 1), self.heads,
        ]  # fmt: skip
        mixed = noise(generator, tokens, sum(sizes), dtype=self.x)
        mixed[:, : sizes[0] + sizes[1]] += 0.7
        q, k, v, a, b = mixed.split(sizes, dim=1)
        return {
            "q": q.unflatten(1, (self.key_heads, self.key)),
            "k": k.unflatten(1, (self.key_heads, self.key)),
            "v": v.unflatten(1, (self.heads, self.value)),
            "a": a.unflatten(1, (self.heads, self.key)) if self.kda else a,
            "b": b + 0.5,
        }

    def records(self, generator: torch.Generator, slots: int) -> Records:
        length = ring_length(self.drafts, self.ring_tokens)
        channels = (self.key,) if self.kda else ()
        g = torch.rand(slots, self.heads, length, *channels, generator=generator, device=DEVICE).to(
            self.fine
        )
        k = noise(generator, slots, self.key_heads, length, self.key, dtype=self.x) + 0.7
        return Records(
            u=noise(generator, slots, self.heads, length, self.value, dtype=self.fine),
            k=k,
            g=-2 * g.square(),
            rk=inverse_norm(k.to(self.fine)),
        )

    def pool(self, blocks: int, fill: float = float("nan")) -> Tensor:
        """States `[blocks, H, V, K]`, as `transposed` and `pad` say."""
        size = self.heads * self.value * self.key
        pages = torch.full((blocks, size + self.pad), fill, dtype=self.states, device=DEVICE)
        inner = (self.heads, self.key, self.value) if self.transposed else self.matrix
        states = pages[:, :size].unflatten(1, inner)
        return states.mT if self.transposed else states

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.heads, self.value, self.key

    def prompts(self, rows: Rows, seed: int) -> tuple[dict[str, Any], Tensor]:
        """Arguments of a scan, and states; NaN where nobody may read."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        given = self.inputs(generator, rows.tokens)
        for part in given.values():
            part[~rows.owned] = float("nan")
        states = self.pool(rows.blocks)
        for _, slot, _, read, offset, _ in rows.active:
            if read >= 0:
                states[rows.block(slot, read + offset)] = noise(
                    generator, *self.matrix, dtype=self.states
                )
        return given | self.vectors(generator) | rows.arguments, states


def token_inputs(shape: Gdn, given: dict[str, Tensor]) -> list[Tensor]:
    """Normalised q, k, then v, g and beta of every value head in fp64, `[tokens, H, ...]`."""
    q, k, v = (given[name].double() for name in ("q", "k", "v"))
    k, q = normalised(q, k, shape.heads // shape.key_heads)
    return [q, k, v, *gates(*(given[n] for n in ("a", "b", "A_log", "dt_bias")), torch.float64)]


class History:
    """Steps with random acceptance, beside them the recurrence in fp64.

    Each slot has a live block (column 0) and a checkpoint's (column 1). A boundary lies after every
    `block` tokens.
    """

    def __init__(self, shape: Gdn, slots: int, seed: int, block: int = 1 << 30) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.pick = torch.Generator().manual_seed(seed)
        self.shape, self.slots, self.block = shape, slots, block
        self.states = shape.pool(2 * slots)
        order = torch.randperm(2 * slots, generator=self.pick)
        self.table = order.view(slots, 2).int().to(DEVICE)
        self.records = shape.records(self.generator, slots)
        self.vectors = shape.vectors(self.generator)
        self.exact: list[list[Tensor]] = [
            [torch.zeros(shape.matrix, dtype=torch.float64, device=DEVICE)] for _ in range(slots)
        ]
        """Of each slot the states after the certain tokens of its last step, and after the drafts
        that were accepted."""
        self.certain = [0] * slots
        self.written = [0] * slots  # tokens in the live state
        self.kept: dict[int, Tensor] = {}  # what the live block should hold
        self.checkpoints: dict[int, Tensor] = {}

    def below(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.pick))

    def final(self, slot: int) -> int:
        """Tokens that the slot has computed."""
        return self.certain[slot] + len(self.exact[slot]) - 1

    def step(self, update: Any) -> tuple[Tensor, Tensor]:
        """One step of some of the slots in any order; its outputs, and the true ones in fp64."""
        shape, length = self.shape, self.records.length
        slots = torch.randperm(self.slots, generator=self.pick).tolist()
        slots = slots[: 1 + self.below(self.slots)]
        cases, scheduled, draft = [], [], []
        for slot in slots:
            d = self.below(min(shape.drafts, shape.tokens - 1) + 1)
            s = d + 1 + self.below(shape.tokens - d)
            final = self.final(slot)
            boundary = (final + s - d) // self.block * self.block
            crosses = boundary > self.certain[slot]
            lacks = final - self.written[slot]
            read = 0 if self.written[slot] else -1
            cases.append(
                {
                    "read_column": read, "offset": len(self.exact[slot]) - 1, "pending": lacks,
                    "cursor": self.written[slot] % length, "write_column": 0,
                    "writes": int(crosses or read < 0 or lacks + s > shape.ring_tokens),
                    "checkpoint_column": 1 if crosses else -1,
                    "checkpoint_after": boundary - final if crosses else 0,
                    "certain": final + s - d,
                }
            )  # fmt: skip
            scheduled.append(s)
            draft.append(d)
        starts = torch.tensor([0, *scheduled]).cumsum(0).int().to(DEVICE)
        inputs = shape.inputs(self.generator, int(starts[-1])) | self.vectors
        positions = ReplayPositions(
            **{name: ints(*(case[name] for case in cases)) for name in ReplayPositions._fields}
        )
        y = update(
            **inputs,
            states=self.states,
            records=self.records,
            rows=ReplayRows(self.table, ints(*slots), starts, ints(*draft), positions),
            max_scheduled=shape.tokens,
        )
        want = torch.zeros(y.shape, dtype=torch.float64, device=DEVICE)
        every = token_inputs(shape, inputs)
        for i, slot in enumerate(slots):
            own = slice(int(starts[i]), int(starts[i + 1]))
            q, k, v, g, beta = (part[own] for part in every)
            states = self.exact[slot][:]
            for t in range(scheduled[i]):
                states.append(advance_state(states[-1], k[t], v[t], g[t], beta[t])[0])
                want[own.start + t] = (states[-1] * q[t, :, None]).sum(-1)
            first, end = self.certain[slot], cases[i]["certain"]
            if cases[i]["checkpoint_column"] > 0:
                at = self.final(slot) + cases[i]["checkpoint_after"]
                self.checkpoints[slot] = states[at - first]
            if cases[i]["writes"]:
                self.written[slot], self.kept[slot] = end, states[end - first]
            accepted = self.below(draft[i] + 1)
            self.exact[slot] = states[end - first : end - first + accepted + 1]
            self.certain[slot] = end
        return y, want

    def errors(self) -> list[float]:
        """Of the states in memory: root of mean squares, relative."""
        found = []
        for column, wanted in ((0, self.kept), (1, self.checkpoints)):
            for slot, want in wanted.items():
                got = self.states[int(self.table[slot, column])].double()
                found.append(float(((got - want).square().sum() / want.square().sum()).sqrt()))
        return found


def relative(got: Tensor, want: Tensor) -> float:
    """Error, root of mean squares."""
    return float(((got.double() - want).square().sum() / want.square().sum()).sqrt())
