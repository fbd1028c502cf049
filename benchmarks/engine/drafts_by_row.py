"""Is it worth giving rows different numbers of drafts? Simulated, from measured steps: no GPU.

    python benchmarks/engine/drafts_by_row.py

The choice is the engine's own (`DraftLength`); what a step takes comes from `drafts.py`'s fixed
numbers on a GPU, by its tokens, between them along a line. A pass of the drafter is taken to cost
`--passes` ms, the rest of a step is verifying. `--uneven` is how many times as much verifying takes
where rows differ: a guess, as are the passes, until `drafts.py --curves mixed` has run on a GPU.
Results come one step late. Requests emit `--tokens` tokens; one of the same kind follows, of which
nothing is known. Beside the best of the fixed numbers for the same requests.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import numpy as np
import workload
from numpy.typing import NDArray
from record import RESULTS, arguments, environment, numbers, save, show

from hybrid_runtime.specdecode.draft_length import DraftLength, Drafts, StepCost

Row = dict[str, Any]
MOST = 7
QWEN, HALF = workload.acceptance("qwen3.5", MOST), tuple(0.5**j for j in range(1, MOST + 1))
assert QWEN is not None
LOADS = {"half and half": (QWEN, HALF), "all as Qwen3.5": (QWEN,), "all a half": (HALF,)}
"""Kinds of requests, which take turns, as survival by position."""


class Device(NamedTuple):
    """What steps of so many rows take.

    tokens, ms: of verifying, without the passes.
    one_pass: ms.
    uneven: as of the options.
    """

    rows: int
    tokens: NDArray[np.float64]
    ms: NDArray[np.float64]
    one_pass: float
    uneven: float

    @classmethod
    def of(cls, steps: list[Row], rows: int, one_pass: float, uneven: float) -> Device:
        """From rows of a result of `drafts.py`."""
        fixed = {r["fixed"]: r["step_ms"] for r in steps if r["requests"] == rows}
        known = sorted(k for k in fixed if isinstance(k, int))
        ms = np.array([fixed[k] - k * one_pass for k in known])
        tokens = np.array([rows * (k + 1.0) for k in known])
        # Along the first line, to steps without drafts.
        none = max(ms[0] - (ms[1] - ms[0]) * (tokens[0] - rows) / (tokens[1] - tokens[0]), 0.0)
        return cls(rows, np.array([rows, *tokens]), np.array([none, *ms]), one_pass, uneven)

    def cost(self, drafts: Drafts) -> StepCost:
        """In seconds."""
        ms = np.interp(self.rows * (drafts.mean + 1), self.tokens, self.ms)
        ms *= self.uneven if drafts.most > drafts.mean else 1.0
        return StepCost(float(ms) / 1e3, drafts.most * self.one_pass / 1e3)


def simulate(
    device: Device,
    kinds: Sequence[Sequence[float]],
    tokens: int,
    steps: int,
    differ: bool,
    fixed: int | None = None,
) -> tuple[float, float]:
    """Tokens per second that are expected of the steps chosen, and the share of steps whose rows
    differ. tokens: of a request, 0: it never ends. differ: rows may. fixed: this number for all."""
    rows, position = device.rows, np.arange(MOST)
    drafts = DraftLength(MOST, adaptive=True, first=3, slots=rows)
    every = [*map(Drafts.alike, drafts.levels), *(drafts.uneven() if differ else ())]
    drafts.measured({(rows, one): device.cost(one) for one in every})
    luck, slots = np.random.default_rng(0), np.arange(rows)
    survival = np.array([kinds[row % len(kinds)] for row in range(rows)])
    left = luck.integers(1, tokens + 1, rows) if tokens else np.full(rows, sys.maxsize)
    results: deque[tuple[Any, ...]] = deque()
    got = seconds = uneven = 0.0
    for step in range(-steps // 8, steps):
        plan = drafts.plan(slots, prompts=False)
        drafts.queued(plan)
        verify, propose = plan.verify, plan.propose
        if fixed is not None:
            verify, propose = Drafts.alike(fixed), fixed
        differs = verify.most > verify.mean
        number = (
            drafts.numbers(slots, verify, MOST * rows) if differs else np.full(rows, verify.mean)
        )
        made = position < number[:, None]
        accepted = ((luck.random(rows)[:, None] < survival) & made).sum(1)
        took = device.cost(verify).verify + propose * device.one_pass / 1e3
        results.append((number, accepted, verify, propose, took))
        if len(results) > 1:
            before = results.popleft()
            drafts.acceptance.learn(slots, *before[:2])
            drafts.took(rows, *before[2:])
        if step >= 0:
            got, seconds = got + rows + (survival * made).sum(), seconds + took
            uneven += differs
        left -= accepted + 1
        for slot in (left <= 0).nonzero()[0].tolist():
            left[slot] = tokens
            drafts.acceptance.admit(slot)
    return got / seconds, uneven / steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--costs", type=Path, default=RESULTS / "h100" / "drafts-8b.json")
    add("--rows", type=numbers, default=[32, 64, 128])
    add("--passes", type=floats, default=[0.3, 0.45], help="ms of a pass")
    add("--uneven", type=floats, default=[1.0, 1.02])
    add("--tokens", type=numbers, default=[64, 256, 0], help="of a request; 0: it never ends")
    add("--steps", type=int, default=1500)
    args = parser.parse_args(argv)
    measured = json.loads(args.costs.read_text())
    steps = [row for row in measured["rows"] if row["curve"] == measured["options"]["curves"][0]]
    rows: list[Row] = []
    for count in args.rows:
        for one_pass, uneven in zip(args.passes, args.uneven, strict=True):
            device = Device.of(steps, count, one_pass, uneven)
            for name, kinds in LOADS.items():
                fixed = {
                    k: simulate(device, kinds, 0, 1, False, k)[0]
                    for k in measured["options"]["numbers"]
                }
                best = max(fixed, key=fixed.__getitem__)
                for tokens in args.tokens:
                    alike, _ = simulate(device, kinds, tokens, args.steps, False)
                    found, share = simulate(device, kinds, tokens, args.steps, True)
                    rows.append(
                        {
                            "requests": count, "pass_ms": one_pass, "uneven_cost": uneven,
                            "load": name, "tokens": tokens, "best": best, "best_tok_s": fixed[best],
                            "alike_of_best": alike / fixed[best], "of_best": found / fixed[best],
                            "uneven": share,
                        }
                    )  # fmt: skip
    about = {"environment": environment(), "costs": args.costs.name, "of": measured["environment"]}
    about["options"] = {k: v for k, v in vars(args).items() if k not in ("out", "costs")}
    path = save("drafts-by-row", about | {"rows": rows}, args.out)
    show("drafts by row, simulated", rows)
    print(path)
    return 0


def floats(text: str) -> list[float]:
    """Numbers of an option, separated by commas."""
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
