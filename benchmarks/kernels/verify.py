"""GPU time of the Mamba state update of decode and verify rows, and the floor of what it must move.

128 heads x 64 x 128, 8 groups, bf16 inputs, as in Nemotron-3-Super and Nemotron-H-8B: a row of T
tokens reads one state and writes T in the columns layout; in the replay layout it folds in what the
state lacks (rows at different places between two writes, all guesses accepted), and every so many
steps writes one. Launches rotate over the state of at least 12 layers, more of it than four times
the L2 cache. Beside both stands `baseline.py`, the plain form of the first, at the launch that is
its best for so many rows of 4 tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from baseline import LAUNCHES, baseline
from record import copy_bandwidth, graph_us, save, show

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update
from hybrid_runtime.kernels.mamba2.window_cache import WindowCache
from hybrid_runtime.kernels.replay.ring import SHORT_WINDOW
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.state import StateLayout

HEADS, DIM, GROUPS, STATE, TAPS, BLOCK = 128, 64, 8, 128, 4, 4336
INNER, OUTER = HEADS * DIM, GROUPS * STATE
CHANNELS = INNER + 2 * OUTER
ROTATE = 256 << 20  # bytes of state that the launches of one graph work on, at least


class Bench:
    """Rows of `tokens` tokens in steady decode inside one block: of the columns that are written,
    the last step's third token's (or the last) is read."""

    def __init__(self, rows: int, tokens: int, dtype: torch.dtype) -> None:
        layout = StateLayout(
            CHANNELS, TAPS, (HEADS, DIM, STATE), tokens - 1, BLOCK, torch.bfloat16, dtype
        )
        state = INNER * STATE * dtype.itemsize
        count = rows * tokens
        layers = max(12, math.ceil(ROTATE / (count * state)))
        self.layers = [layout.allocate(count, "cuda") for _ in range(layers)]
        for pair in self.layers:
            for tensor in pair:
                tensor.normal_()
        self.mixed = torch.randn(count, CHANNELS + HEADS, device="cuda").bfloat16()
        self.weight = torch.randn(CHANNELS, TAPS, device="cuda").bfloat16()
        ones = torch.ones(rows, dtype=torch.int32, device="cuda")
        self.rows = StateRows(
            block_table=torch.randperm(count, device="cuda").int().view(rows, tokens),
            slot=torch.arange(rows, dtype=torch.int32, device="cuda"),
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device="cuda") * tokens,
            draft=ones * (tokens - 1),
            read_column=ones * 0,
            read_offset=ones * min(2, tokens - 1),
            write_column=ones * 0,
        )
        self.vectors = torch.randn(3, HEADS, device="cuda")
        small = 2 * count * (2 * INNER + 2 * OUTER + HEADS)
        self.shape = rows, tokens
        self.cycle = replace(layout, kind="replay").steps_per_write(tokens)
        writes = sum(row % self.cycle == self.cycle - 1 for row in range(rows))
        self.replay_bytes = (rows + writes) * state + small
        self.ssm_bytes = rows * (1 + tokens) * state + small
        self.conv_bytes = 2 * CHANNELS * (rows * (2 * (TAPS - 1) + tokens - 1) + 2 * count)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        x, B, C, dt = self.mixed.split([INNER, OUTER, OUTER, HEADS], dim=1)
        A_log, D, dt_bias = self.vectors
        return (
            x.unflatten(1, (HEADS, DIM)), dt, A_log, B.unflatten(1, (GROUPS, STATE)),
            C.unflatten(1, (GROUPS, STATE)), D, dt_bias,
        )  # fmt: skip

    def ssm(self) -> list[Callable[[], object]]:
        inputs = self.inputs()
        rows, tokens = self.rows, self.shape[1]
        return [
            lambda s=s: selective_state_update(*inputs, s, rows, tokens) for _, s in self.layers
        ]

    def baseline(self, launch: tuple[int, int]) -> list[Callable[[], object]]:
        inputs = self.inputs()
        rows, tokens = self.rows, self.shape[1]
        return [lambda s=s: baseline(*inputs, s, launch, rows, tokens) for _, s in self.layers]

    def replay(self) -> list[Callable[[], object]]:
        """Each column of the block tables is the live one in turn: as much state as `ssm` has."""
        num_rows, tokens = self.shape
        shape = HEADS, DIM, STATE
        window_cache = WindowCache.allocate(
            1, num_rows, tokens - 1, SHORT_WINDOW, shape, GROUPS, torch.bfloat16, "cuda"
        ).layer(0)
        for part in window_cache:
            part.uniform_(0.001, 0.1)
        zero = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        table, slot, start, draft, *_ = self.rows
        inputs = self.inputs()
        pending = (tokens - 1 + tokens * (slot % self.cycle)).int()

        def rows_of(column: int) -> ReplayRows:
            positions = ReplayPositions(
                read_column=zero + column,
                offset=draft,
                pending=pending,
                cursor=slot % window_cache.length,
                write_column=zero + column,
                writes=(pending + tokens > SHORT_WINDOW).int(),
                snapshot_column=zero - 1,
                snapshot_after=zero,
                certain=zero,
            )
            return ReplayRows(table, slot, start, draft, positions)

        columns = [rows_of(column) for column in range(tokens)]
        return [
            lambda s=s, rows=rows: replay_update(*inputs, s, window_cache, rows, tokens)
            for _, s in self.layers
            for rows in columns
        ]

    def conv(self) -> list[Callable[[], object]]:
        x = self.mixed[:, :CHANNELS]
        rows, tokens = self.rows, self.shape[1]
        return [
            lambda w=w: conv1d_update(x, self.weight, None, w, rows, tokens) for w, _ in self.layers
        ]


def best_launch(rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of `baseline` for rows of 4 tokens."""
    bench = Bench(rows, 4, dtype)
    swept = {
        launch: statistics.median(graph_us(bench.baseline(launch), repeats=3))
        for launch in LAUNCHES
    }
    return min(swept, key=lambda launch: swept[launch])


def measure(repeats: int, lengths: list[int]) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    results = []
    for dtype in (torch.float32, torch.float16):
        for rows in (1, 16, 64, 128):
            launch = best_launch(rows, dtype)
            for tokens in lengths:
                bench = Bench(rows, tokens, dtype)
                times = graph_us(bench.ssm(), repeats=repeats)
                conv = graph_us(bench.conv(), repeats=repeats)
                row: dict[str, Any] = {
                    "state": str(dtype).removeprefix("torch."),
                    "rows": rows,
                    "tokens": tokens,
                    "floor": bench.ssm_bytes / bandwidth * 1e6,
                    "update": statistics.median(times),
                }
                row["ratio"] = row["update"] / row["floor"]
                row["TB/s"] = bench.ssm_bytes / row["update"] / 1e6
                row["conv floor"] = bench.conv_bytes / bandwidth * 1e6
                row["conv"] = statistics.median(conv)
                plain = graph_us(bench.baseline(launch), repeats=repeats)
                row["baseline"] = statistics.median(plain)
                hidden = {
                    "repeats": times,
                    "conv repeats": conv,
                    "baseline repeats": plain,
                    "baseline launch": launch,
                    "bandwidth": bandwidth,
                }
                row |= dict.fromkeys(("replay floor", "replay", "replay ÷ update", "replay TB/s"))
                if tokens > 1:  # without guesses the layouts are one
                    replay = graph_us(bench.replay(), repeats=repeats)
                    row["replay floor"] = bench.replay_bytes / bandwidth * 1e6
                    row["replay"] = statistics.median(replay)
                    row["replay ÷ update"] = row["replay"] / row["update"]
                    row["replay TB/s"] = bench.replay_bytes / row["replay"] / 1e6
                    hidden["replay repeats"] = replay
                results.append(row | hidden)
                del bench
                torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--tokens", type=lambda s: [int(t) for t in s.split(",")], default=list(range(1, 7))
    )
    parser.add_argument("--out", type=Path, help="JSON file; default under benchmarks/results/")
    args = parser.parse_args()
    results = measure(args.repeats, args.tokens)
    hidden = ("repeats", "bandwidth", "launch")
    rows = [{k: v for k, v in row.items() if not k.endswith(hidden)} for row in results]
    show("state update of decode and verify rows, GPU us per layer", rows)
    shape = [HEADS, DIM, STATE]
    print(save("verify", {"shape": shape, "unit": "us", "gpu": results}, args.out))


if __name__ == "__main__":
    main()
