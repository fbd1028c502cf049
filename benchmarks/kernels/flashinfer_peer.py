"""FlashInfer's `checkpointing_ssu`, called as `window.py` calls our kernel."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WINDOW = 16


class Ring(NamedTuple):
    """FlashInfer's window cache: x `[slots, H, L, P]`, B `[slots, G, L, N]`, dt `[slots, H, L]`."""

    x: Tensor
    B: Tensor
    dt: Tensor


class Form(NamedTuple):
    """One way to launch it: in one kernel or two, and how they divide the work."""

    two: bool
    stages: int = 0
    programs: int = 0
    heads: int = 0
    split: int = 1


FORMS = [Form(False, split=split) for split in (1, 2)] + [
    Form(True, stages, programs, heads, split)
    for split, stages, programs, heads in itertools.product(
        (1, 2), (1, 2), (2, 4, 8, 16, 32), (4, 8, 16)
    )
]


@functools.cache
def flashinfer_side(state: str, tokens: int) -> type[FlashInfer] | None:
    """The class to time; None: there is no module for such states and tokens.

    Modules built beforehand are taken from the folder FLASHINFER_MODULES. Otherwise
    flashinfer-python compiles its own, and chooses the form by itself.
    """
    folder = os.environ.get("FLASHINFER_MODULES")
    if folder is None:
        ssu = importlib.import_module("flashinfer.mamba.checkpointing_ssu").checkpointing_ssu
        return type("Installed", (FlashInfer,), {"module": None, "public": staticmethod(ssu)})
    path = Path(folder) / f"{state}_T{tokens}_W{WINDOW}.so"
    if not path.exists():
        return None
    sys.path.append(str(path.parents[1] / "site"))
    loaded = importlib.import_module("tvm_ffi").load_module(str(path)).checkpointing_ssu
    return type("Built", (FlashInfer,), {"module": staticmethod(loaded)})


class FlashInfer:
    """Its arguments, in the order of flashinfer/mamba/checkpointing_ssu.py (0.7.2)."""

    window, late = WINDOW, 0
    module: Any
    public: Any

    def __init__(self, case: Any, form: Form | None = None) -> None:
        self.case, self.form = case, form or Form(False)
        rows, tokens = case.rows, case.tokens
        heads, dim, state = case.A_log.shape[0], 64, 128
        self.A = (-torch.exp(case.A_log))[:, None, None].expand(heads, dim, state)
        self.D = case.D[:, None].expand(heads, dim)
        self.bias = case.dt_bias[:, None].expand(heads, dim)
        new = functools.partial(torch.empty, device=case.device)
        self.out = new(rows, tokens, heads, dim, dtype=torch.bfloat16)
        padded = (tokens + 15) // 16 * 16
        self.scratch = (
            new(rows, heads, 32, padded // 2, dtype=torch.bfloat16),
            new(rows, heads, padded, dtype=torch.float32),
            new(rows, heads, 32, WINDOW // 2, dtype=torch.bfloat16),
        )

    def forms(self) -> list[FlashInfer]:
        return [type(self)(self.case, form) for form in FORMS] if self.module else [self]

    def cache(self) -> Ring:
        case = self.case
        length, heads = WINDOW + case.tokens, len(case.A_log)
        new = functools.partial(torch.zeros, device=case.device)
        return Ring(
            x=new(case.rows, heads, length, 64, dtype=torch.bfloat16),
            B=new(case.rows, 8, length, 128, dtype=torch.bfloat16),
            dt=new(case.rows, heads, length, dtype=torch.float32),
        )

    def positions(self, places: Any) -> tuple[Tensor, Tensor]:
        start = places.start % (WINDOW + self.case.tokens)
        return start.int().to(self.case.device), places.pending.int().to(self.case.device)

    def run(self, states: Tensor, cache: Ring, at: tuple[Tensor, Tensor], mixed: Tensor) -> Tensor:
        case, form = self.case, self.form
        x, dt, B, C = (
            part.unflatten(0, (case.rows, case.tokens)) for part in case.inputs(mixed).values()
        )
        dt = dt[..., None].expand(*dt.shape, x.shape[-1])
        if self.module is None:
            self.public(
                states, *cache, *at, x, dt, self.A, B, C, self.out, D=self.D, dt_bias=self.bias,
                dt_softplus=True, state_batch_indices=case.slot, cb_scaled=self.scratch[0],
                cumAdt_vec=self.scratch[1], cb_old=self.scratch[2],
            )  # fmt: skip
            return self.out
        self.module(
            states, x, dt, self.A, B, C, self.out, *cache, *at, self.D, None, self.bias, True,
            case.slot, -1, None, None, form.split, None,
            *(self.scratch if form.two else (None, None, None)),
            form.heads, form.stages, form.programs,
        )  # fmt: skip
        return self.out
