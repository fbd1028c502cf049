"""GPU time and error of Gated DeltaNet's state update of the replay layout, beside vLLM's.

16 key heads, 32, 48 or 64 value heads, states of 128 x 128 in float32, bf16 inputs, rows of one
certain token and K drafts. Drafts are accepted as published for Qwen3.5's MTP layer: rows are
walked for 200 steps, then consecutive steps are timed, each with the tokens pending that it would
have. Launches rotate over at least 256 MiB of state, each with rings of its own.

`window`: ours as the engine runs it, which writes a state only when the ring is full; `every step`:
one write in every step, with the last step's accepted drafts pending. `--sweep` times each by
one launch and by two. `--peer` times the kernel that vLLM verifies with (0.25.1;
it writes a state for each token), where it can be imported.

`--shape tiny` runs the same calls once on a CPU, and checks them.
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
from record import arguments, copy_bandwidth, graph_us, numbers, plain, save, show
from torch import Tensor

from hybrid_runtime.kernels.gdn.naive import advance_state, gates, inverse_norm
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.gdn.recurrence import gdn
from hybrid_runtime.kernels.gdn.replay_update import replay_update
from hybrid_runtime.kernels.replay.ring import default_ring_tokens, ring_length
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

ACCEPTED = (0.93, 0.8, 0.66, 0.58, 0.44, 0.39, 0.24)
"""Chance that so many drafts and one more are accepted: Qwen3.5's MTP layer."""
ROTATE = 256 << 20  # bytes of state that the launches of one graph work on, at least


class Shape(NamedTuple):
    heads: int
    key_heads: int = 16
    dim: int = 128


class Places(NamedTuple):
    """Where the rows are before a step, int64 `[rows]` each: tokens in the state, tokens computed
    since, and whether the step writes the state."""

    start: Tensor
    pending: Tensor
    writes: Tensor


def walk(rows: int, drafts: int, window: int, steps: int, seed: int) -> list[Places]:
    """Consecutive steps of rows that have decoded for 200. window: most tokens that a state may
    lack after a step; 0: every step writes."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.tensor(ACCEPTED[:drafts])
    start, pending = torch.zeros(2, rows, dtype=torch.int64)
    found = []
    for i in range(200 + steps):
        writes = pending + drafts + 1 > window
        if i >= 200:
            found.append(Places(start, pending, writes))
        accepted = 1 + (torch.rand(rows, 1, generator=generator) < chances).long().sum(1)
        start = torch.where(writes, start + pending + 1, start)
        pending = torch.where(writes, accepted - 1, pending + accepted)
    return found


def steady(rows: int, drafts: int, window: int, steps: int) -> list[Places]:
    """Of 64 walks the one in which as many rows write as in the long run."""
    share = _share(walk(2048, drafts, window, 100, 12345))
    walks = (walk(rows, drafts, window, steps, seed) for seed in range(64))
    return min(walks, key=lambda path: abs(_share(path) - share))


def _share(path: list[Places]) -> float:
    return torch.stack([places.writes for places in path]).float().mean().item()


class Case:
    """Rows with K drafts each, and inputs of heads from slow to fast."""

    def __init__(self, shape: Shape, rows: int, drafts: int, device: str) -> None:
        self.shape, self.rows, self.drafts, self.device = shape, rows, drafts, device
        self.tokens = drafts + 1
        self.ones = torch.ones(rows, dtype=torch.int32, device=device)
        self.slot = torch.arange(rows, dtype=torch.int32, device=device)
        self.cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device) * self.tokens
        self.A_log = torch.linspace(-4, 1, shape.heads, device=device)
        self.dt_bias = torch.randn(shape.heads, device=device)
        self.inputs = self.draw()

    def draw(self) -> dict[str, Tensor]:
        """Inputs of a step, q, k and v views of the convolution's one output."""
        heads, key_heads, dim = self.shape
        sizes = [key_heads * dim, key_heads * dim, heads * dim]
        count = self.rows * self.tokens
        mixed = torch.randn(count, sum(sizes), device=self.device).bfloat16()
        gate = torch.randn(2, count, heads, device=self.device).bfloat16()
        q, k, v = (part.unflatten(1, (-1, dim)) for part in mixed.split(sizes, dim=1))
        return {"q": q, "k": k, "v": v, "a": gate[0], "b": gate[1]}

    @property
    def state_bytes(self) -> int:
        return self.shape.heads * self.shape.dim**2 * 4

    @property
    def copies(self) -> int:
        """Launches of a graph, on states of their own."""
        return max(3, math.ceil(ROTATE / (self.rows * self.state_bytes)))

    def states(self, per_row: int = 1) -> Tensor:
        dim = self.shape.dim
        size = self.rows * per_row, self.shape.heads, dim, dim
        return torch.randn(size, device=self.device)


class Ours:
    """`replay_update`. window: see `walk`."""

    def __init__(self, case: Case, window: int, prepared: bool | None = None) -> None:
        self.case, self.window, self.prepared = case, window, prepared
        self.length = ring_length(case.drafts, window)

    def records(self) -> Records:
        heads, key_heads, dim = self.case.shape
        made = gdn(heads, key_heads, dim, dim, 4, torch.bfloat16)
        rings = made.allocate_records(1, self.case.rows, self.length, self.case.device)
        records = Records(*rings).layer(0)
        records.u.normal_()
        records.k.normal_()
        records.g.uniform_(-0.2, 0.0)
        records.rk.copy_(inverse_norm(records.k.float()))
        return records

    def place(self, places: Places) -> ReplayRows:
        case, zero = self.case, self.case.ones * 0
        ints: dict[str, Any] = {"dtype": torch.int32, "device": case.device}
        positions = ReplayPositions(
            read_column=zero, offset=zero, pending=places.pending.to(**ints),
            cursor=(places.start % self.length).to(**ints), write_column=zero,
            writes=places.writes.to(**ints), checkpoint_column=zero - 1, checkpoint_after=zero,
            certain=zero,
        )  # fmt: skip
        draft = case.ones * case.drafts
        return ReplayRows(case.slot[:, None], case.slot, case.cu_seqlens, draft, positions)

    def run(
        self, states: Tensor, records: Records, at: ReplayRows, inputs: dict[str, Tensor]
    ) -> Tensor:
        case = self.case
        return replay_update(
            **inputs, A_log=case.A_log, dt_bias=case.dt_bias, states=states, records=records,
            rows=at, max_scheduled=case.tokens, prepared=self.prepared,
        )  # fmt: skip

    def calls(self) -> tuple[list[Callable[[], object]], float]:
        """Launches of consecutive steps, and the bytes that one has to move."""
        case = self.case
        pairs = [(case.states(), self.records()) for _ in range(case.copies)]
        path = steady(case.rows, case.drafts, self.window, max(6, 48 // case.copies))
        found: list[Callable[[], object]] = [
            lambda s=s, c=c, a=a: self.run(s, c, a, case.inputs)
            for a in map(self.place, path)
            for s, c in pairs
        ]
        heads, key_heads, dim = case.shape
        record = heads * (4 * dim + 4) + key_heads * (2 * dim + 4)
        token = 2 * (2 * key_heads * dim + 2 * heads * dim + 2 * heads) + record
        pending = torch.stack([places.pending for places in path]).float().mean().item()
        states = (1 + _share(path)) * case.state_bytes
        return found, case.rows * (states + pending * record + case.tokens * token)


def errors(side: Ours, steps: int = 24) -> tuple[float, float]:
    """Relative errors (root of mean squares) of outputs and of written states, against fp64."""
    case = side.case
    group = case.shape.heads // case.shape.key_heads
    states, records = case.states() * 0.3, side.records()
    exact = states.double()
    start, pending = torch.zeros(2, case.rows, dtype=torch.int64)
    sums = torch.zeros(4, dtype=torch.float64, device=case.device)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = case.draw()
        writes = pending + case.tokens > side.window
        y = side.run(states, records, side.place(Places(start, pending, writes)), inputs)
        q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
        q = (q * inverse_norm(q)[..., None] * q.shape[-1] ** -0.5).repeat_interleave(group, 1)
        k = (k * inverse_norm(k)[..., None]).repeat_interleave(group, 1)
        g, beta = gates(inputs["a"], inputs["b"], case.A_log, case.dt_bias, torch.float64)
        parts = [x.unflatten(0, (case.rows, case.tokens)) for x in (q, k, v, g, beta, y.double())]
        each = [exact]
        for t in range(case.tokens):
            q_t, *token, got = (part[:, t] for part in parts)
            each.append(advance_state(each[-1], *token)[0])
            want = (each[-1] * q_t[:, :, None]).sum(-1)
            sums[0] += (got - want).square().sum()
            sums[1] += want.square().sum()
        for row in writes.nonzero()[:, 0].tolist():
            sums[2] += (states[row].double() - each[1][row]).square().sum()
            sums[3] += each[1][row].square().sum()
        accepted = torch.randint(1, case.tokens + 1, (case.rows,), generator=generator)
        exact = torch.stack([each[int(a)][row] for row, a in enumerate(accepted)])
        start = torch.where(writes, start + pending + 1, start)
        pending = torch.where(writes, accepted - 1, pending + accepted)
    outputs, written = (sums[0::2] / sums[1::2]).sqrt().tolist()
    return outputs, written


def vllm_calls(case: Case) -> tuple[list[Callable[[], object]], float]:
    """As `Ours.calls`, of vLLM's verify."""
    from vllm.model_executor.layers.fla.ops import fused_sigmoid_gating

    update = fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update
    inputs, rows, tokens = case.inputs, case.rows, case.tokens
    q, k, v = (inputs[name][None].contiguous() for name in ("q", "k", "v"))
    pool = torch.zeros(case.copies * rows * tokens + 1, *case.states().shape[1:], device="cuda")
    blocks = torch.randperm(len(pool) - 1, device="cuda").int() + 1
    indices = blocks.view(case.copies, rows, tokens)
    accepted = 1 + steady(rows, case.drafts, 0, 1)[0].pending.int().cuda()
    calls: list[Callable[[], object]] = [
        lambda at=at: update(
            A_log=case.A_log, a=inputs["a"], b=inputs["b"], dt_bias=case.dt_bias, q=q, k=k, v=v,
            initial_state=pool, inplace_final_state=True, cu_seqlens=case.cu_seqlens,
            ssm_state_indices=at, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
        )
        for at in indices
    ]  # fmt: skip
    return calls, rows * (1 + tokens) * case.state_bytes


def measure(args: Any) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    for heads in args.heads:
        for drafts in args.drafts:
            window = default_ring_tokens(drafts)
            forms = {"window": window, "every step": 0}
            probe = Case(Shape(heads), 2, drafts, "cuda")
            precise = {name: errors(Ours(probe, most)) for name, most in forms.items()}
            for rows in args.rows:
                case = Case(Shape(heads), rows, drafts, "cuda")
                row: dict[str, Any] = {
                    "heads": heads, "drafts": drafts, "rows": rows, "ring tokens": window,
                }  # fmt: skip
                if args.peer:
                    calls, size = vllm_calls(case)
                    us = graph_us(calls, repeats=args.repeats, number=2)
                    row |= {"vllm": statistics.median(us), "vllm repeats": us}
                    row["vllm floor"] = size / bandwidth * 1e6
                    del calls
                    torch.cuda.empty_cache()
                for name, most in forms.items():
                    swept: dict[int, float] = {}
                    if args.sweep:
                        for launches in (1, 2):
                            calls, _ = Ours(case, most, launches == 2).calls()
                            swept[launches] = min(graph_us(calls, 3, number=1))
                            del calls
                            torch.cuda.empty_cache()
                        row[f"{name} swept"] = swept
                    calls, size = Ours(case, most).calls()
                    us = graph_us(calls, repeats=args.repeats, number=2)
                    row |= {name: statistics.median(us), f"{name} repeats": us}
                    row[f"{name} floor"] = size / bandwidth * 1e6
                    row[f"{name} output error"], row[f"{name} state error"] = precise[name]
                    if args.peer:
                        row[f"{name} ÷ vllm"] = row[name] / row["vllm"]
                    if swept:
                        row[f"{name} best"] = min(swept, key=lambda form: swept[form])
                    del calls
                    torch.cuda.empty_cache()
                results.append(row)
                print({k: v for k, v in row.items() if not k.endswith("repeats")}, flush=True)
                save("gdn", result(args, results, bandwidth), args.out)
    return results


def result(args: Any, rows: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    return {
        "key heads": 16, "state": [128, 128], "state dtype": "float32", "acceptance": ACCEPTED,
        "unit": "us", "bandwidth": bandwidth, "gpu": rows,
    }  # fmt: skip


def rehearse() -> None:
    """Each call once, in a small shape on a CPU."""
    torch.manual_seed(0)
    for window in (15, 0):
        case = Case(Shape(4, 2, 16), 3, 3, "cpu")
        found = errors(Ours(case, window), steps=12)
        print(f"ring of {window}: outputs and states off by {found}")
        if not (found[0] < 5e-3 and found[1] < 1e-6):
            raise SystemExit("the update is not what the recurrence gives")
        side = Ours(case, window)
        states, records = case.states(), side.records()
        for places in steady(case.rows, case.drafts, window, 3):
            side.run(states, records, side.place(places), case.inputs)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=["full", "tiny"], default="full")
    parser.add_argument("--heads", type=numbers, default=[32, 48, 64])
    parser.add_argument("--drafts", type=numbers, default=[3, 7])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="by one launch and by two")
    parser.add_argument("--peer", action="store_true", help="vLLM's beside it")
    args = parser.parse_args()
    if args.shape == "tiny":
        rehearse()
        return
    rows = measure(args)
    title = "Gated DeltaNet, state update of the replay layout, GPU us per layer"
    show(title, plain(rows, "repeats", "floor", "swept"))


if __name__ == "__main__":
    main()
