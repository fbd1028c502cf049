"""Runs of one load under its strategies, interleaved, and the figures made of them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from hybrid_runtime.bench.drive import drive, summarize
from hybrid_runtime.bench.floor import Head, step_bytes
from hybrid_runtime.bench.load import Lengths, Load
from hybrid_runtime.bench.trace import profile_steady
from hybrid_runtime.engine import Engine, EngineConfig
from hybrid_runtime.engine.memory_plan import Planner
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import StateLayout

Row = dict[str, Any]

# The figures of a row that are means over its repeats, by the name they have in a repeat.
MEANS = {
    "step_ms": "step_ms_mean",
    "itl_ms": "itl_ms",
    "itl_ms_p50": "itl_ms_p50",
    "itl_ms_p99": "itl_ms_p99",
    "token_ms_p50": "token_ms_p50",
    "token_ms_p99": "token_ms_p99",
    "tok_s": "output_tok_s",
    "decode_tok_s": "decode_tok_s",
    "ttft_ms": "ttft_ms_mean",
    "acceptance_length": "mean_acceptance_length",
}
_SPARE = 10 << 30
"""Bytes left for activations, graphs and the profiler when engines are kept side by side."""


class Engines:
    """Engines of one load by strategy: all kept while their caches fit, else made again in turn.

    order: the strategies in the order in which they will be asked for; whichever is needed last is
    given up first.
    """

    def __init__(
        self, model: HybridModel, head: Head | None, load: Load, order: list[Strategy]
    ) -> None:
        self.model, self.head, self.load = model, head if load.drafts else None, load
        self.layout = load.layout(model)
        self._order = order
        self._kept: dict[Strategy, Engine] = {}
        self._warm = False

    def next(self) -> Engine:
        """The engine of the next turn, warmed up.

        Raises:
            ValueError: its caches would not fit even alone.
        """
        strategy = self._order.pop(0)
        engine = self._kept.get(strategy)
        if engine is None:
            self._make_room()
            engine = self._kept[strategy] = Engine(
                self.model, self._config(strategy), head=self.head
            )
            engine.capture()
            self._warm_up(engine)
        return engine

    def close(self) -> None:
        self._kept.clear()
        _give_back()

    @property
    def cache_bytes(self) -> int:
        """Of one engine: keys and values, and states."""
        plan = Planner(self._config("auto"), self.layout, self.model, self.head, self.model.device)
        needed = plan.needed(self.load.batch)
        return needed.kv + needed.state

    def _make_room(self) -> None:
        while not self._fits():
            if not self._kept:
                raise ValueError(
                    f"batch is {self.load.batch}; its caches take {self.cache_bytes / 1e9:.1f} GB, "
                    "which must fit beside the weights"
                )
            ahead = {s: self._order.index(s) if s in self._order else 1 << 30 for s in self._kept}
            del self._kept[max(ahead, key=ahead.__getitem__)]
            _give_back()

    def _fits(self) -> bool:
        if self.model.device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info()[0]
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused > self.cache_bytes + _SPARE

    def _config(self, strategy: Strategy) -> EngineConfig:
        load, block = self.load, self.layout.block_size
        return EngineConfig(
            drafter="auto" if load.drafts else None,
            num_speculative_tokens=load.drafts,
            strategy=strategy,
            max_requests=load.batch,
            max_model_len=max(load.max_model_len, load.longest(block)),
            max_tokens_per_step=load.max_tokens_per_step,
            block_size=load.block_size,
            num_blocks=load.blocks(self.layout),
            ssm_dtype=load.state_dtype,
            stochastic_rounding=load.stochastic_rounding,
            synthetic_acceptance=load.synthetic_acceptance,
            graphs=load.graphs,
            state_layout=load.state_layout,
            window=load.window,
        )

    def _warm_up(self, engine: Engine) -> None:
        # Kernels are compiled and library algorithms chosen once per process: only the first
        # engine of a load needs prompts of full length.
        vocabulary = engine.model.vocab_size
        for lengths in self.load.lengths:
            prompts = self.load.prompts(lengths, self.layout.block_size, vocabulary, 10**6)
            if self._warm:
                prompts = [p[:32] for p in prompts]
            drive(engine, prompts, min(self.load.warmup_osl, self.load.osl))
        self._warm = True


def measure(
    model: HybridModel,
    head: Head | None,
    load: Load,
    bandwidth: float | None,
    ran: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """One row per strategy and kind of lengths; see `aggregate` for its figures.

    head: the draft head; None = drafts are looked up in the text. bandwidth: copy bandwidth of the
    device in bytes per second; None = no floor. ran: told of each run that has ended.
    """
    turns = load.turns()
    engines = Engines(model, head, load, [s for s, _ in turns + load.profile_turns()])
    block, vocabulary = engines.layout.block_size, model.vocab_size
    rows = {turn: _row(*turn, load, engines.layout) for turn in dict.fromkeys(turns)}
    for turn, row in rows.items():
        context = statistics.fmean(load.prompt_lengths(turn[1], block)) + load.osl / 2
        accepted = load.synthetic_acceptance or 1.0  # real drafts: those of the worst
        moved = step_bytes(model, engines.head, engines.layout, load.batch, context, accepted)
        row["bytes"] = asdict(moved) | {"total": moved.total}
        row["bandwidth"] = bandwidth
    try:
        for number, turn in enumerate(turns):
            repeat = number // len(rows)
            prompts = load.prompts(turn[1], block, vocabulary, 1000 * repeat + load.batch)
            # No name for the engine: it would outlive its turn and keep its memory from the next.
            run = drive(engines.next(), prompts, load.osl, nvtx=load.nvtx)
            rows[turn]["repeats"].append(summarize(run))
            ran(f"{', '.join(turn)}, repeat {repeat + 1}")
        for turn in load.profile_turns():
            prompts = load.prompts(turn[1], block, vocabulary, 777)
            rows[turn]["profile"] = profile_steady(engines.next(), load, prompts)
            ran(f"{', '.join(turn)}, traced")
    finally:
        engines.close()
    return [aggregate(row) for row in rows.values()]


def _row(strategy: Strategy, lengths: Lengths, load: Load, layout: StateLayout) -> Row:
    block = layout.block_size
    ends = [(n, n + load.osl) for n in load.prompt_lengths(lengths, block)]
    crossings = statistics.fmean(end // block - start // block for start, end in ends)
    key: Row = {"strategy": strategy, "lengths": lengths} | load.key
    return key | {"block_size": block, "crossings_per_row": crossings, "repeats": []}


def aggregate(row: Row) -> Row:
    """The row with its figures made anew from its repeats.

    Means over the repeats (`MEANS`), step_ms_low and _high among them; per steady step: waits,
    undeclared_waits, starved_waits, implicit_syncs (see `HostWaits`), candidates, copied_bytes;
    skip_rate: steady steps without a candidate row; floor_ms: `bytes` over `bandwidth`, floor_ratio
    step_ms over that; idle_share, operations and busy_ms per step from the profile.
    """
    repeats = row["repeats"]
    made: Row = {name: _mean([r[of] for r in repeats]) for name, of in MEANS.items()}
    steps = [r["step_ms_mean"] for r in repeats if r["step_ms_mean"] is not None]
    made["step_ms_low"], made["step_ms_high"] = min(steps, default=None), max(steps, default=None)
    timed = sum(r["timed_steps"] for r in repeats)
    for name, of in (
        ("waits", "count"),
        ("undeclared_waits", "undeclared"),
        ("starved_waits", "starved"),
        ("implicit_syncs", "implicit"),
        ("wait_ms", "seconds"),
    ):
        total = sum(r["waits"][of] for r in repeats) * (1e3 if of == "seconds" else 1)
        made[name] = total / timed if timed else None
    counted = sum(r["state"].get("steps", 0) for r in repeats)
    for name, of in (
        ("skip_rate", "skipped"),
        ("candidates", "candidate_rows"),
        ("copied_bytes", "bytes_copied"),
        ("copy_launches", "copy_launches"),
    ):
        total = sum(r["state"].get(of, 0) for r in repeats)
        made[name] = total / counted if counted else None
    floor = 1e3 * row["bytes"]["total"] / row["bandwidth"] if row["bandwidth"] else None
    made["floor_ms"] = floor
    made["floor_ratio"] = made["step_ms"] / floor if floor and made["step_ms"] else None
    profile = row.get("profile")
    if profile:
        made["idle_share"] = profile["idle_share"]
        made["operations"] = profile["operations_per_step"]
        made["busy_ms"] = profile["busy_us_per_step"] / 1e3
    last = {name: row[name] for name in ("bytes", "bandwidth", "profile", "repeats") if name in row}
    kept = {n: v for n, v in row.items() if n not in last and n not in made}
    return kept | made | last


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
