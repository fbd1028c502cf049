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
NAMES = {torch.float32: "f32", torch.float16: "f16"}


class Ring(NamedTuple):
    """FlashInfer's window cache: x `[slots, H, L, P]`, B `[slots, G, L, N]`, dt `[slots, H, L]`."""

    x: Tensor
    B: Tensor
    dt: Tensor


class Form(NamedTuple):
    """One way to launch it: in one kernel or two, and how they divide the work; pdl: as a
    programmatic launch, which may begin before the kernel ahead of it ends."""

    two: bool
    stages: int = 0
    programs: int = 0
    heads: int = 0
    split: int = 1
    pdl: bool = False


FORMS = [Form(False, split=split) for split in (1, 2)] + [
    Form(True, stages, programs, heads, split)
    for split, stages, programs, heads in itertools.product(
        (1, 2), (1, 2), (2, 4, 8, 16, 32), (4, 8, 16)
    )
]
"""Each with a programmatic launch and without."""


@functools.cache
def flashinfer_side(state: torch.dtype, tokens: int) -> type[FlashInfer] | None:
    """The class to time; None: there is no module for such states and tokens.

    Modules built beforehand are taken from the folder FLASHINFER_MODULES. Otherwise
    flashinfer-python compiles them, which takes nvcc and a minute or two each.
    """
    folder = os.environ.get("FLASHINFER_MODULES")
    kinds = (False, True)
    if folder is None:
        made = importlib.import_module("flashinfer.jit.mamba.checkpointing_ssu")
        modules = {
            pdl: made.gen_checkpointing_ssu_module(
                state_dtype=state, input_dtype=torch.bfloat16, dt_dtype=torch.bfloat16,
                weight_dtype=torch.float32, matrixA_dtype=torch.float32,
                stateIndex_dtype=torch.int32, state_scale_dtype=None, dim=64, dstate=128,
                npredicted=tokens, max_window=WINDOW, heads_per_group=16, num_groups=8,
                enable_pdl=pdl,
            ).build_and_load()
            for pdl in kinds
        }  # fmt: skip
    else:
        name = f"{NAMES[state]}_T{tokens}_W{WINDOW}"
        paths = {pdl: Path(folder) / f"{name}{'_pdl' if pdl else ''}.so" for pdl in kinds}
        sys.path.append(str(Path(folder).parent / "site"))
        found = {pdl: path for pdl, path in paths.items() if path.exists()}
        load = importlib.import_module("tvm_ffi").load_module if found else None
        modules = {pdl: load(str(path)) for pdl, path in found.items() if load}
    calls = {pdl: module.checkpointing_ssu for pdl, module in modules.items()}
    return type("Built", (FlashInfer,), {"calls": calls}) if calls else None


class FlashInfer:
    """Its arguments, in the order of flashinfer/mamba/checkpointing_ssu.py (0.7.2)."""

    window, late = WINDOW, 0
    calls: dict[bool, Any]

    def __init__(self, case: Any, form: Form | None = None) -> None:
        self.case, self.form = case, form or Form(False, pdl=False not in self.calls)
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
        forms = [form._replace(pdl=pdl) for pdl in self.calls for form in FORMS]
        return [type(self)(self.case, form) for form in forms]

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
        self.calls[form.pdl](
            states, x, dt, self.A, B, C, self.out, *cache, *at, self.D, None, self.bias, True,
            case.slot, -1, None, None, form.split, None,
            *(self.scratch if form.two else (None, None, None)),
            form.heads, form.stages, form.programs,
        )  # fmt: skip
        return self.out
