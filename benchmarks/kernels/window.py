"""GPU time and error of the replay layout's state update in steady decode, beside FlashInfer's.

128 heads x 64 x 128, 8 groups, bf16 inputs, rows of T tokens of which all but one are drafts. What
is pending in a row's window follows from how many drafts it had accepted: rows are walked for 200
steps in which each draft is accepted with the same chance if all before it were, `--accept` tokens
a step on average; then consecutive steps are timed, each with the positions that it would have.
Launches rotate over at least 256 MiB of state, each with a window cache of its own.

`--peer` times FlashInfer's `checkpointing_ssu` in the same call, at the best of its forms and with
the steps of its own rule, with programmatic launches (as ours) and without. It needs
flashinfer-python (0.7.2), or modules that were built from it beforehand: FLASHINFER_MODULES is the
folder of their `.so` files, named f32_T4_W16 and f32_T4_W16_pdl and so on.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from flashinfer_peer import flashinfer_side
from record import arguments, copy_bandwidth, graph_us, numbers, plain, save, show
from torch import Tensor

from hybrid_runtime.kernels.mamba2.naive import advance_state
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.ring import default_ring_tokens, ring_length
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

HEADS, DIM, GROUPS, STATE = 128, 64, 8, 128
INNER, OUTER = HEADS * DIM, GROUPS * STATE
WIDTH = INNER + 2 * OUTER + HEADS
ROTATE = 256 << 20  # bytes of state that the launches of one graph work on, at least
DTYPES = {"float32": torch.float32, "float16": torch.float16}


class Places(NamedTuple):
    """Where the rows are before a step, int64 `[rows]` each.

    start: tokens in the state. pending: tokens computed since. writes: the step writes the state.
    """

    start: Tensor
    pending: Tensor
    writes: Tensor


def chance(mean: float, tokens: int) -> float:
    """Of a draft being accepted, if `mean` tokens of a step are."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        more = sum(middle**i for i in range(tokens)) < mean
        low, high = (middle, high) if more else (low, middle)
    return low


def walk(rows: int, tokens: int, mean: float, steps: int, seed: int, side: Any) -> list[Places]:
    """Consecutive steps of rows that have decoded for 200. side.window: most tokens that a state
    may lack. side.late: a step that writes does so after its certain token (ours);
    otherwise before its own (FlashInfer's)."""
    window, late = side.window, side.late
    generator = torch.Generator().manual_seed(seed)
    p = chance(min(mean, tokens * 0.999), tokens)
    start, pending = torch.zeros(2, rows, dtype=torch.int64)
    found = []
    for i in range(200 + steps):
        writes = pending + tokens > window
        if i >= 200:
            found.append(Places(start, pending, writes))
        draws = torch.rand(rows, tokens - 1, generator=generator) < p
        accepted = 1 + draws.long().cumprod(1).sum(1)
        start = torch.where(writes, start + pending + late, start)
        pending = torch.where(writes, accepted - late, pending + accepted)
    return found


def steady(rows: int, tokens: int, mean: float, steps: int, side: Any) -> list[Places]:
    """Of 64 walks the one in which as many rows write as in the long run."""
    share = _share(walk(2048, tokens, mean, 100, 12345, side))
    walks = (walk(rows, tokens, mean, steps, seed, side) for seed in range(64))
    return min(walks, key=lambda path: abs(_share(path) - share))


def _share(path: list[Places]) -> float:
    return torch.stack([places.writes for places in path]).float().mean().item()


class Case:
    """Rows of `tokens` tokens, and inputs at which states neither vanish nor blow up."""

    def __init__(self, rows: int, tokens: int, dtype: torch.dtype, device: str = "cuda") -> None:
        self.rows, self.tokens, self.dtype, self.device = rows, tokens, dtype, device
        self.mixed = torch.randn(rows * tokens, WIDTH, device=device).bfloat16()
        self.A_log = torch.rand(HEADS, device=device) * 2.7
        self.D = torch.randn(HEADS, device=device)
        self.dt_bias = torch.rand(HEADS, device=device) * 3.7 - 6.0
        ones = torch.ones(rows, dtype=torch.int32, device=device)
        self.slot = torch.arange(rows, dtype=torch.int32, device=device)
        self.ones, self.table = ones, self.slot[:, None].contiguous()
        self.cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens

    def states(self) -> list[Tensor]:
        """Of each launch that is timed."""
        size = self.rows * INNER * STATE * self.dtype.itemsize
        shape = self.rows, HEADS, DIM, STATE
        count = max(3, math.ceil(ROTATE / size))
        return [torch.randn(shape, device=self.device).to(self.dtype) for _ in range(count)]

    def inputs(self, mixed: Tensor) -> dict[str, Tensor]:
        x, B, C, dt = mixed.split([INNER, OUTER, OUTER, HEADS], dim=1)
        B, C = (part.unflatten(1, (GROUPS, STATE)) for part in (B, C))
        return {"x": x.unflatten(1, (HEADS, DIM)), "dt": dt, "B": B, "C": C}

    def floor_bytes(self, path: list[Places], side: Any) -> float:
        pending = torch.stack([places.pending for places in path]).float().mean().item()
        state = INNER * STATE * self.dtype.itemsize
        kept = 2 * (INNER + OUTER) + 4 * HEADS
        own = 2 * (2 * INNER + 2 * OUTER + HEADS) + kept
        states = 1 + _share(path)
        return self.rows * (states * state + pending * kept + self.tokens * own)


class Ours:
    """`replay_update`, with the window that so many tokens get by default.

    window, late: see `walk`.
    """

    late = 1

    def __init__(self, case: Case) -> None:
        self.case, self.window = case, default_ring_tokens(case.tokens - 1)

    def cache(self) -> Records:
        case = self.case
        recurrence = mamba2(HEADS, DIM, STATE, GROUPS, 4, torch.bfloat16)
        length = ring_length(case.tokens - 1, self.window)
        return Records(*recurrence.allocate_records(1, case.rows, length, case.device)).layer(0)

    def positions(self, places: Places) -> ReplayRows:
        case = self.case
        zero = case.ones * 0
        ints: dict[str, Any] = {"dtype": torch.int32, "device": case.device}
        positions = ReplayPositions(
            read_column=zero,
            offset=zero,
            pending=places.pending.to(**ints),
            cursor=(places.start % (self.window + case.tokens)).to(**ints),
            write_column=zero,
            writes=places.writes.to(**ints),
            checkpoint_column=zero - 1,
            checkpoint_after=zero,
            certain=zero,
        )
        draft = case.ones * (case.tokens - 1)
        return ReplayRows(case.table, case.slot, case.cu_seqlens, draft, positions)

    def run(self, states: Tensor, cache: Any, at: ReplayRows, mixed: Tensor) -> Tensor:
        case = self.case
        return replay_update(
            **case.inputs(mixed),
            A_log=case.A_log,
            D=case.D,
            dt_bias=case.dt_bias,
            states=states,
            records=cache,
            rows=at,
            max_scheduled=case.tokens,
        )

    def forms(self) -> list[Any]:
        return [self]


def times(side: Any, case: Case, mean: float, repeats: int) -> tuple[list[float], float, Any]:
    """Microseconds a launch, the bytes that a launch has to move, and the side's best form."""
    states = case.states()
    caches = [side.cache() for _ in states]
    for cache in caches:
        for part in cache:
            part.uniform_(0.001, 0.1)
    path = steady(case.rows, case.tokens, mean, max(6, 48 // len(states)), side)
    at = [side.positions(places) for places in path]

    def calls(form: Any) -> list[Callable[[], object]]:
        return [
            lambda s=s, c=c, a=a: form.run(s, c, a, case.mixed)
            for a in at
            for s, c in zip(states, caches, strict=True)
        ]

    forms = side.forms()
    best = forms[0]
    if len(forms) > 1:
        swept = {form: min(graph_us(calls(form), repeats=2, number=1)) for form in forms}
        best = min(swept, key=lambda form: swept[form])
    us = graph_us(calls(best), repeats=repeats, number=2)
    return us, case.floor_bytes(path, side), best


def errors(side: Any, case: Case, steps: int = 24) -> tuple[float, float]:
    """Relative errors (root of mean squares) of outputs and of written states, against fp64."""
    generator = torch.Generator(case.device).manual_seed(7)
    cpu = torch.Generator().manual_seed(7)
    shape = case.rows, HEADS, DIM, STATE
    states = torch.randn(shape, generator=generator, device=case.device).mul(0.3).to(case.dtype)
    exact, cache, rate = states.double(), side.cache(), -torch.exp(case.A_log.double())
    start, pending = torch.zeros(2, case.rows, dtype=torch.int64)
    sums = torch.zeros(4, dtype=torch.float64, device=case.device)
    for _ in range(steps):
        mixed = torch.randn(
            case.rows * case.tokens, WIDTH, generator=generator, device=case.device
        ).bfloat16()
        writes = pending + case.tokens > side.window
        y = side.run(states, cache, side.positions(Places(start, pending, writes)), mixed)
        x, dt, B, C = (
            part.double().unflatten(0, (case.rows, case.tokens))
            for part in case.inputs(mixed).values()
        )
        step = torch.nn.functional.softplus(dt + case.dt_bias.double())
        each = [exact]
        for t in range(case.tokens):
            each.append(advance_state(each[-1], x[:, t], B[:, t], step[:, t], rate))
            wide = C[:, t].repeat_interleave(HEADS // GROUPS, 1)
            want = (each[-1] * wide[:, :, None]).sum(-1) + case.D.double()[:, None] * x[:, t]
            got = y.view(case.rows, case.tokens, HEADS, DIM)[:, t].double()
            sums[0] += (got - want).square().sum()
            sums[1] += want.square().sum()
        for row in writes.nonzero()[:, 0].tolist():
            want = each[side.late][row]
            sums[2] += (states[row].double() - want).square().sum()
            sums[3] += want.square().sum()
        accepted = torch.randint(1, case.tokens + 1, (case.rows,), generator=cpu)
        exact = torch.stack([each[int(a)][row] for row, a in enumerate(accepted)])
        start = torch.where(writes, start + pending + side.late, start)
        pending = torch.where(writes, accepted - side.late, pending + accepted)
    outputs, written = (sums[0::2] / sums[1::2]).sqrt().tolist()
    return outputs, written


def measure(args: Any) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    results = []
    for dtype in (DTYPES[name] for name in args.states.split(",")):
        for tokens in args.tokens:
            sides: dict[str, type[Any]] = {"ours": Ours}
            if args.peer and (peer := flashinfer_side(dtype, tokens)):
                sides["flashinfer"] = peer
            precise = {}
            for name, side in sides.items():
                case = Case(2, tokens, dtype)
                precise[name] = errors(side(case), case)
            for rows in args.rows:
                row: dict[str, Any] = {
                    "state": str(dtype).removeprefix("torch."), "rows": rows, "tokens": tokens,
                    "window": default_ring_tokens(tokens - 1),
                }  # fmt: skip
                for name, side in sides.items():
                    case = Case(rows, tokens, dtype)
                    us, size, best = times(side(case), case, args.accept, args.repeats)
                    row[name] = statistics.median(us)
                    row[f"{name} floor"] = size / bandwidth * 1e6
                    row[f"{name} repeats"] = us
                    row[f"{name} output error"], row[f"{name} state error"] = precise[name]
                    torch.cuda.empty_cache()
                if "flashinfer" in row:
                    row["flashinfer form"] = best.form._asdict()
                    row["ours ÷ flashinfer"] = row["ours"] / row["flashinfer"]
                results.append(row)
                save("window", result(args, results, bandwidth), args.out)
    return results


def result(args: Any, rows: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    return {
        "shape": [HEADS, DIM, STATE],
        "groups": GROUPS,
        "accepted tokens a step": args.accept,
        "unit": "us",
        "bandwidth": bandwidth,
        "gpu": rows,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64, 128])
    parser.add_argument("--tokens", type=numbers, default=[2, 4, 6, 8, 16])
    parser.add_argument("--states", default="float32,float16")
    parser.add_argument(
        "--accept", type=float, default=3.0, help="accepted tokens a step, on average"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="FlashInfer's beside it")
    args = parser.parse_args()
    rows = measure(args)
    title = "state update of the replay layout, GPU us per layer"
    show(title, plain(rows, "repeats", "floor"))


if __name__ == "__main__":
    main()
