"""`hybrid-runtime demo`: text from the shipped checkpoint, then what drafts and strategies do."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hybrid_runtime.engine import Engine, EngineStats, SamplingParams
from hybrid_runtime.engine.config import EngineOptions
from hybrid_runtime.state.checks import Strategy

SHIPPED = Path(__file__).parent / "checkpoints" / "python-small"
"""The small checkpoint that comes with the package."""

PROMPT = '''import os
import sys

def read_lines(path):
    """Return the lines of a file."""
    with open(path) as f:
'''
# Beginnings in the style of what the model was trained on, of different lengths.
PROMPTS = [
    PROMPT,
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def main(argv=None):\n    parser = argparse.ArgumentParser(\n",
    "import unittest\n\nclass TestCase(unittest.TestCase):\n\n    def test_empty(self):\n",
]
TOKENS = 96


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table: tokens per second over the batch, ITL in ms, counters of the run."""

    tps: float
    itl_p50: float
    itl_p99: float
    steps: int
    length: float
    skipped: int
    waits: int


def measure(engine: Engine) -> Measured:
    """Complete `PROMPTS` as one batch."""
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4))  # first-use costs are not the run's
    before = _counters(engine.stats())
    start = time.perf_counter()
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    seconds = time.perf_counter() - start
    steps, skipped, waits = (
        now - then for now, then in zip(_counters(engine.stats()), before, strict=True)
    )
    itl = np.concatenate([a.itl for a in answers]) * 1e3
    return Measured(
        tps=sum(len(a.tokens) for a in answers) / seconds,
        itl_p50=float(np.percentile(itl, 50)),
        itl_p99=float(np.percentile(itl, 99)),
        steps=steps,
        length=engine.stats().mean_acceptance_length,
        skipped=skipped,
        waits=waits,
    )


def _counters(stats: EngineStats) -> tuple[int, int, int]:
    return stats.state.steps, stats.state.skipped, stats.state.waits


def device_name(device: torch.device) -> str:
    """What the user knows the device as."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} thread)"


def run(model: str | Path, device: str | None) -> None:
    """Stream a completion, then print the table."""
    console = Console()
    # Operations this small gain nothing from a second thread, and wait at its barriers for long
    # when another program keeps a core busy.
    torch.set_num_threads(1)
    with Engine.from_pretrained(model, device=device) as engine:
        block = engine.manager.layout.block_size
        console.print(f"[bold]{Path(model).name}[/] on {device_name(engine.model.device)}\n")
        console.out(PROMPT, end="", style="dim", highlight=False)
        for piece in engine.stream(PROMPT, SamplingParams(max_tokens=160)):
            console.out(piece, end="", highlight=False)
    console.print("\n")

    runs: list[tuple[str, EngineOptions]] = [
        ("no drafts", EngineOptions(drafter=None)),
        ("n-gram", EngineOptions(drafter="ngram")),
        ("EAGLE", EngineOptions(drafter="eagle")),
        *((f"MTP, {s}", EngineOptions(drafter="mtp", strategy=s)) for s in get_args(Strategy)),
    ]
    table = Table(
        title=f"{len(PROMPTS)} prompts x {TOKENS} tokens, 3 drafts, block of "
        f"{block} tokens, ITL in ms",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for name in ("tok/s", "ITL p50", "p99", "steps", "accepted", "skipped", "waits"):
        table.add_column(name, justify="right", no_wrap=True)
    with Progress(console=console, transient=True) as progress:
        for name, options in progress.track(runs, description="measuring"):
            with Engine.from_pretrained(model, device=device, **options) as engine:
                m = measure(engine)
            accepted = "-" if np.isnan(m.length) else f"{m.length:.2f}"
            table.add_row(
                name,
                f"{m.tps:.0f}",
                f"{m.itl_p50:.2f}",
                f"{m.itl_p99:.2f}",
                str(m.steps),
                accepted,
                str(m.skipped),
                str(m.waits),
            )
    console.print(table)
    console.print(
        "accepted: tokens per verified step, the bonus token included. skipped: steps in which no "
        "block boundary could be crossed, so that no state had to be saved. waits: times the host "
        "asked for a count before going on; tokens, which every step hands out, are not counted."
    )
