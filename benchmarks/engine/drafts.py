"""As many drafts as pay, beside each number of drafts fixed: tokens/s by requests that decode.

    python benchmarks/engine/drafts.py --rows 1,8,16,32,64,128 --curves qwen3.5
    python benchmarks/engine/drafts.py --rows 32,64,128 --curves mixed --no-ramp
    python benchmarks/engine/drafts.py --shape tiny --isl 16 --rows 1,2 --steps 8 --curves mixed

One engine, and the same requests throughout: the numbers take turns (ABBA) while they decode, so
that nothing but the drafts changes. Prompts run before; steps that change the number count. Tokens
are those that the curve gives steps of so many drafts in the mean: what a few steps happen to get
says less. Of "mixed", every second request accepts as Qwen3.5 does, the others half of the drafts
at each position. What is learnt while a number is fixed is kept from the engine. Then the load
ramps: requests come until there are as many as given, and leave again, and what steps get is set
against the number that was best for so many, fixed, right behind it. What is done is saved after
each number of requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import numpy as np
import torch
import workload
from record import arguments, environment, numbers, save, show
from shapes import NAMES, QUANTIZATIONS, measured

from hybrid_runtime.engine import Engine, EngineConfig, Request, SamplingParams
from hybrid_runtime.specdecode.draft_length import DraftLength
from hybrid_runtime.specdecode.row_acceptance import RowAcceptance

Row = dict[str, Any]
MOST = 7
RATES = [
    *(workload.acceptance(name, MOST) or () for name in workload.CURVES),
    tuple(0.5**position for position in range(1, MOST + 1)),
]
"""Survival by position, of each kind of request."""
KINDS = {name: [kind] for kind, name in enumerate(workload.CURVES)} | {"mixed": [0, len(RATES) - 1]}
"""Kinds of requests, by the name of a curve; they take turns."""


class Decoding:
    """An engine in which any number of requests decode for as long as one wants."""

    def __init__(self, engine: Engine, isl: int, seed: int) -> None:
        self.engine, self._isl, self._rng = engine, isl, random.Random(seed)
        # By kind, tokens of a row with 0, 1, ... drafts.
        self._tokens = 1 + np.pad(np.cumsum(RATES, 1), ((0, 0), (1, 0)))
        self._kinds = KINDS["mixed"]
        self._requests: list[Request] = []
        self.adaptive = engine.scheduler.drafts

    def take(self, curve: str) -> None:
        """No request is left, and the next ones are of that curve."""
        self.become(0)
        self._kinds = KINDS[curve]
        self.adaptive.acceptance = RowAcceptance(MOST, self.engine.config.max_requests)

    def become(self, rows: int) -> None:
        """Have so many requests decode: submit more and run their prompts, or end some."""
        vocabulary = self.engine.model.vocab_size
        while len(self._requests) > rows:
            self.engine.abort(self._requests.pop())
        new = []
        while len(self._requests) < rows:
            prompt = [self._rng.randrange(10, vocabulary - 10) for _ in range(self._isl)]
            number = len(self._requests)
            params = SamplingParams(
                max_tokens=self.engine.config.max_model_len,
                ignore_eos=True,
                seed=number * len(RATES) + self._kinds[number % len(self._kinds)],
            )
            new.append(self.engine.submit(prompt, params))
            self._requests.append(new[-1])
        while not all(request.output for request in new):
            self.engine.step()

    def measure(self, steps: int, fixed: int | None) -> Row:
        """So many steps, with that number of drafts or, None, with what pays."""
        drafts, rows = self.adaptive, len(self._requests)
        if fixed is not None:  # which never learns what steps cost
            drafts = DraftLength(MOST, True, fixed, self.engine.config.max_requests)
        self._use(drafts)
        for _ in range(3 if fixed is not None else 1):  # a number rises by one level a step
            self.engine.step()
        slots = np.array([request.slot for request in self._requests])
        kinds = np.resize(self._kinds, rows)
        verified: list[np.ndarray[Any, Any]] = []
        uneven, start = 0, time.perf_counter()
        for _ in range(steps):
            # Queued behind the step whose results are read now, and as long as it.
            verify = drafts.plan(slots, prompts=False).verify
            if verify.most > verify.mean:
                uneven += 1
                verified.append(drafts.numbers(slots, verify, MOST * rows))
            else:
                verified.append(np.full(rows, verify.mean))
            self.engine.step()
        seconds = time.perf_counter() - start
        self._use(self.adaptive)
        return {
            "tok_s": float(self._tokens[kinds, np.stack(verified)].sum()) / seconds,
            "step_ms": 1e3 * seconds / steps,
            "drafts": float(np.mean(verified)),
            "uneven": uneven / steps,
        }

    def _use(self, drafts: DraftLength) -> None:
        self.engine.scheduler.drafts = self.engine.runner.drafts = drafts


def decoding(args: argparse.Namespace) -> Decoding:
    """An engine whose graphs are captured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, head = measured(args.shape, args.layers).build(device, dtype, args.quantization)
    turns = len(args.rows) * (args.repeats + 1) * (len(args.numbers) + 1) + 4 * len(args.rows)
    length = args.isl + (args.steps + 3) * (MOST + 1) * turns
    options = EngineConfig(
        drafter="mtp",
        num_speculative_tokens=MOST,
        synthetic_acceptance=tuple(RATES),
        max_requests=max(args.rows),
        max_model_len=length,
        num_blocks=None if device.type == "cuda" else (4 * length // 16, 64),
        block_size=None if device.type == "cuda" else 16,
        max_tokens_per_step=8192 if device.type == "cuda" else 64,
        graphs=True,
        ssm_dtype=args.ssm_dtype,
        prefix_caching=False,
    )
    engine = Engine(model, options, head=head, eos_token_ids=())
    engine.capture()
    return Decoding(engine, args.isl, args.seed)


def measure(args: argparse.Namespace, runs: Decoding, curve: str) -> Iterator[list[Row]]:
    """Rows of one acceptance curve, more and more of them."""
    ways, rows = [None, *args.numbers], list[Row]()
    runs.take(curve)
    for count in args.rows:
        runs.become(count)
        found: dict[int | None, list[Row]] = {way: [] for way in ways}
        for repeat in range(-1, args.repeats):
            for way in ways if repeat % 2 else reversed(ways):
                one = runs.measure(args.steps if repeat >= 0 else args.steps // 2, way)
                if repeat >= 0:
                    found[way].append(one)
        for way, repeats in found.items():
            means = {k: statistics.fmean(one[k] for one in repeats) for k in repeats[0]}
            rows.append(
                {"curve": curve, "requests": count, "fixed": way} | means | {"repeats": repeats}
            )
        best = max(
            row["tok_s"] for row in rows if row["requests"] == count and row["fixed"] is not None
        )
        for row in rows:
            if row["requests"] == count:
                row["best"], row["of_best"] = best, row["tok_s"] / best
            if row["requests"] == count and row["fixed"] is None:
                expected = runs.adaptive.stats().tokens_per_second
                row["expected"] = {str(drafts): speed for drafts, speed in expected.items()}
        yield rows
    best_of = {row["requests"]: row["fixed"] for row in rows if row["tok_s"] == row["best"]}
    for count in [*args.rows, *reversed(args.rows[:-1])] if args.ramp else []:
        runs.become(count)
        one, fixed = runs.measure(args.steps, None), runs.measure(args.steps, best_of[count])
        of_best = {"best": fixed["tok_s"], "of_best": one["tok_s"] / fixed["tok_s"]}
        rows.append({"curve": curve, "requests": count, "fixed": "ramp"} | one | of_best)
        yield rows


def curves(text: str) -> list[str]:
    """Names of an option, separated by commas."""
    names = text.split(",")
    if unknown := {*names} - {*KINDS}:
        raise argparse.ArgumentTypeError(f"{unknown} must be of {', '.join(KINDS)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--shape", choices=NAMES, default="8b")
    add("--layers", type=int, help="the first so many only")
    add("--quantization", choices=QUANTIZATIONS, help="of the weights; none")
    add("--rows", type=numbers, default=[1, 8, 16, 32, 64, 128], help="requests that decode")
    add("--numbers", type=numbers, default=[1, 3, 5, 7], help="of drafts, fixed; of 0, 1, 3, 5, 7")
    add("--curves", type=curves, default=["qwen3.5"], help=", ".join(KINDS))
    add("--no-ramp", dest="ramp", action="store_false", help="no load that ramps")
    add("--isl", type=int, default=1024, help="prompt tokens")
    add("--steps", type=int, default=32, help="of each turn")
    add("--repeats", type=int, default=2)
    add("--ssm-dtype", default="float32")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    about = {"shape": args.shape, "name": measured(args.shape).title, "environment": environment()}
    about["options"] = {k: v for k, v in vars(args).items() if k != "out"}
    runs, done = decoding(args), list[Row]()
    for curve in args.curves:
        rows: list[Row] = []
        for rows in measure(args, runs, curve):
            path = save(f"drafts-{args.shape}", about | {"rows": [*done, *rows]}, args.out)
        done += rows
    shown = [{k: v for k, v in row.items() if k not in ("repeats", "expected")} for row in done]
    show(f"drafts by load, {about['name']}", shown)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
