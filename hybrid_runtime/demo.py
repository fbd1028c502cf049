"""`hybrid-runtime demo`: code from the shipped checkpoint, then what drafts and layouts change."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import get_args

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.config import EngineOptions, state_group
from hybrid_runtime.state.checks import Strategy

SHIPPED = Path(__file__).parent / "checkpoints" / "python-small"
"""The small checkpoint that comes with the package."""

CLASS = """class File:
    def __init__(self, fp):
        self._fp = fp
        self._closed = False

    def read(self, size=-1):
        return self._fp.read(size)

"""
METHODS = [
    "    def readline(self, size=-1):\n",
    "    def readlines(self, hint=-1):\n",
    "    def write(self, data):\n",
    "    def close(self):\n",
]
"""What the model completes, each behind `CLASS` and in a request of its own."""
METHOD = SamplingParams(max_tokens=64, stop=("\n\n",))

PROMPTS = [
    '''import os
import sys

def read_lines(path):
    """Return the lines of a file."""
    with open(path) as f:
''',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def main(argv=None):\n    parser = argparse.ArgumentParser(\n",
    "import unittest\n\nclass TestCase(unittest.TestCase):\n\n    def test_empty(self):\n",
]
"""A batch in the style of what the model was trained on, of different lengths."""
TOKENS = 96

RUNS: list[tuple[str, EngineOptions]] = [
    ("no drafts", EngineOptions(drafter=None)),
    ("n-gram, replay", EngineOptions(drafter="ngram")),
    ("EAGLE, replay", EngineOptions(drafter="eagle")),
    ("MTP, replay", EngineOptions(drafter="mtp")),
    *(
        (f"MTP, columns, {s}", EngineOptions(drafter="mtp", state_layout="columns", strategy=s))
        for s in get_args(Strategy)
    ),
]
"""Lines of the table."""


def counted(engine: Engine) -> list[str]:
    """Complete `PROMPTS` as one batch; the cells of a line of the table."""
    engine.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    stats, layout = engine.stats(), engine.manager.layout
    accepted = stats.mean_acceptance_length if layout.num_speculative_tokens else 1.0
    return [
        f"{stats.steps}",
        f"{accepted:.2f}",
        f"{layout.states_per_step(accepted) - 1:.2f}",  # less the one that it reads
        f"{stats.state.copy_launches}",
        f"{stats.state.waits}",
        f"{layout.bytes_per_request(len(state_group(engine.model).layers)) / 2**10:.0f}",
    ]


def device_name(device: torch.device) -> str:
    """What the user knows the device as."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} thread)"


def write_methods(engine: Engine, console: Console) -> None:
    """A class, whose methods the model writes; its lines have a bar in front, as colours may be
    missing."""

    def show(text: str, bar: str, style: str) -> None:
        for line in text.splitlines():
            console.out(f"{bar} {line}".rstrip(), style=style, highlight=False)

    show(CLASS, " ", "dim")
    for method in METHODS:
        request = engine.submit(CLASS + method, METHOD)
        while request.finish_reason is None:
            engine.step()
        show(method, " ", "dim")
        show(request.text, "┃", "bold green")
        console.out()
    console.print(
        f"┃ is what the model wrote, one request a method. The last one found {request.hit.tokens} "
        f"of its {len(request.prompt)} prompt tokens in the prefix cache.\n"
    )


def run(model: str | Path, device: str | None) -> None:
    """Code from the model, then the table."""
    console = Console()
    # Operations this small gain nothing from a second thread, and wait at its barriers for long
    # when another program keeps a core busy.
    torch.set_num_threads(1)
    with Engine.from_pretrained(model, device=device) as engine:
        console.print(f"[bold]{Path(model).name}[/] on {device_name(engine.model.device)}\n")
        write_methods(engine, console)

    table = Table(title=f"{len(PROMPTS)} prompts at once, {TOKENS} tokens each", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("steps", "accepted", "written", "launches", "waits", "KiB"):
        table.add_column(name, justify="right", no_wrap=True)
    with Progress(console=console, transient=True) as progress:
        for name, options in progress.track(RUNS, description="counting"):
            # A step is queued before the results of the last one are read, as on a GPU: who must
            # wait for counts then, shows.
            ahead: EngineOptions = {**options, "steps_ahead": 1}
            with Engine.from_pretrained(model, device=device, **ahead) as engine:
                table.add_row(name, *counted(engine))
    console.print(table)
    console.print(
        "Drafts make steps fewer. What they cost is up to the layout of the states. `columns`, as "
        "in vLLM, writes a state for every draft and copies states at block boundaries: for that "
        "`blocking` waits in each step for the accepted counts, `defer` a step later where no "
        "boundary can be crossed, `always` launches a kernel in each step, and `auto` only where "
        "one can be crossed. `replay` keeps one state and the inputs of the last tokens, writes "
        "the state every few steps, and copies none.\n\n"
        "accepted: tokens that a step emits per request. written: states per request, step and "
        "Mamba layer, computed. launches: of kernels that copy states. waits: of the host for "
        "accepted counts. KiB: of states per request, without those saved for the prefix cache."
    )
