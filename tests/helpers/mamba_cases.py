"""Configurations of the columns layout's kernels for decode rows and for prompts, with random
inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers import replay_cases
from helpers.state_rows import Rows, prefill_rows, update_rows
from helpers.tensors import DEVICE, noise
from torch import Tensor


def rows_of(shape: Conv | Ssm, seed: int) -> Rows:
    if shape.lengths is None:
        return update_rows(shape.drafts + 1, seed, shape.table_pad)
    drafts = shape.drafts if isinstance(shape, Conv) else 0
    return prefill_rows(shape.lengths, seed, drafts, shape.padded, shape.table_pad)


@dataclass(frozen=True)
class Conv:
    """One configuration; each in a test changes one thing of a base."""

    lengths: tuple[int, ...] | None = None  # of prompts; None: rows that decode
    padded: bool = True  # padded rows among the prompts
    drafts: int = 3
    x: torch.dtype = torch.bfloat16
    window: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    layout: str = "SD"
    channels: int = 40
    taps: int = 4
    bias: bool = True
    pad: int = 0  # elements behind each block's window
    wide: int = 24  # channels of x that belong to others
    table_pad: int = 0
    tiling: Any = None

    def inputs(self, rows: Rows, seed: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Arguments, conv_states, and the pages they lie in; NaN where nobody may read."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        history, length = self.taps - 1, self.taps - 1 + self.drafts
        x = noise(generator, rows.tokens, self.channels + self.wide, dtype=self.x)[:, self.wide :]
        x[~rows.owned] = float("nan")
        weight = noise(generator, self.channels, 1, self.taps, dtype=self.weight)[:, 0]
        bias = noise(generator, self.channels, dtype=self.weight) if self.bias else None
        size = length * self.channels
        pages = torch.full((rows.blocks, size + self.pad), float("nan"), device=DEVICE)
        pages = pages.to(self.window)
        if self.layout == "SD":
            conv_states = pages[:, :size].unflatten(1, (length, self.channels))
        else:
            conv_states = pages[:, :size].unflatten(1, (self.channels, length)).transpose(1, 2)
        for _, slot, _, read, offset, _ in rows.active:
            if read >= 0:
                conv_states[rows.block(slot, read), offset : offset + history] = noise(
                    generator, history, self.channels, dtype=self.window
                )
        return {"x": x, "weight": weight, "bias": bias, **rows.arguments}, conv_states, pages


@dataclass(frozen=True)
class Ssm(replay_cases.Ssm):
    """One configuration; each in a test changes one thing of a base."""

    lengths: tuple[int, ...] | None = None  # of prompts; None: rows that decode
    padded: bool = True  # padded rows among the prompts
    mixed: bool = False  # dimensions of a state's block are strided
    strong: float = 1.0  # factor of raw time steps
    table_pad: int = 0
    tiling: Any = None

    def arguments(self, rows: Rows, seed: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Arguments, states, and the memory they lie in; NaN where nobody may read."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        given = self.inputs(generator, rows.tokens)
        given["dt"] = self.strong * given["dt"]
        for part in given.values():
            part[~rows.owned] = float("nan")
        shape = (self.heads, self.dim, self.state)
        size = self.heads * self.dim * self.state
        memory = torch.full((self.skew + rows.blocks * (size + self.pad),), float("nan"))
        memory = memory.to(DEVICE, self.states)
        pages = memory[self.skew :].view(rows.blocks, -1)[:, :size]
        states = pages.unflatten(1, shape)
        if self.mixed:
            states = pages.unflatten(1, (self.state, *shape[:2])).permute(0, 2, 3, 1)
        for _, slot, _, read, offset, _ in rows.active:
            if read >= 0:
                states[rows.block(slot, read + offset)] = noise(
                    generator, *shape, dtype=self.states
                )
        return given | self.vectors(generator, torch.float32) | rows.arguments, states, memory
