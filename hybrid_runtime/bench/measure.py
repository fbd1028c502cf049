"""Measure loads, one engine after the other, and the figures made of their repeats."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybrid_runtime.bench.drive import drive, summarize
from hybrid_runtime.bench.load import Load
from hybrid_runtime.engine import Engine
from hybrid_runtime.models.model import HybridModel

Row = dict[str, Any]

# The figures of a row, by the name that they have in a repeat: means over the repeats.
MEANS = {
    "step_ms": "step_ms_mean",
    "itl_ms": "itl_ms",
    "itl_ms_p50": "itl_ms_p50",
    "itl_ms_p99": "itl_ms_p99",
    "tok_s": "output_tok_s",
    "decode_tok_s": "decode_tok_s",
    "ttft_ms": "ttft_ms_mean",
    "acceptance_length": "mean_acceptance_length",
}
WARM_UP = 48
"""Output tokens of the run before the timed ones."""


def measure_all(
    model: HybridModel, head: Any, loads: Sequence[Load], save: Callable[[list[Row]], object]
) -> None:
    """Measure all loads, and tell standard error; of several, those that do not fit are left out.

    save: called with all rows so far after each load, so that whatever ends this early costs only
        the load that runs.

    Raises:
        ValueError: a load that makes no sense, or none that could be run.
    """
    rows: list[Row] = []
    for load in loads:
        name = " ".join(f"{n}={v}" for n, v in load.key.items() if _differs(n, loads)) or "run"
        start = time.perf_counter()

        def say(text: str, name: str = name, start: float = start) -> None:
            print(f"{name}: {text}, {time.perf_counter() - start:.1f} s", file=sys.stderr)

        try:
            rows.append(measure(model, head, load, say))
        except (ValueError, torch.OutOfMemoryError) as error:
            if len(loads) == 1:
                raise
            say(f"left out: {error}")
            continue
        save(rows)
    if not rows:
        raise ValueError("none of the loads could be run")


def measure(
    model: HybridModel, head: Any, load: Load, say: Callable[[str], object] = lambda _: None
) -> Row:
    """A row with the load's key, its repeats and their means; see `summarize`.

    head: the draft head; None = drafts are looked up in the text. say: told of each repeat.
    """
    config = load.config
    layout = config.layout(model)
    block = layout.block_size
    longest = max(load.prompt_lengths(block)) + load.osl
    config = replace(config, max_model_len=max(config.max_model_len, longest))
    vocabulary, repeats = model.vocab_size, []
    try:
        with Engine(model, config, head=head if load.drafts else None) as engine:
            engine.capture()
            drive(engine, load.prompts(block, vocabulary, 10**6), min(WARM_UP, load.osl))
            for number in range(load.repeats):
                prompts = load.prompts(block, vocabulary, 1000 * number + load.batch)
                repeats.append(summarize(drive(engine, prompts, load.osl)))
                say(f"repeat {number + 1}, {load.repeats - number - 1} left")
    finally:
        give_back()
    key = load.key | {"state_layout": layout.kind, "block_size": block}
    return aggregate(key | {"repeats": repeats})


def aggregate(row: Row) -> Row:
    """The row with its figures made anew from its repeats."""
    repeats = row["repeats"]
    made = {name: _mean([repeat[of] for repeat in repeats]) for name, of in MEANS.items()}
    return row | made | {"repeats": repeats}


def give_back() -> None:
    """Memory of engines that are gone, to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _differs(name: str, loads: Sequence[Load]) -> bool:
    return len({str(load.key[name]) for load in loads}) > 1


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
