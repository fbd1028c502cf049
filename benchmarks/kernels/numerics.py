"""How far states and outputs drift from exact arithmetic in both layouts, over many tokens.

python benchmarks/kernels/numerics.py [--tokens 10000] [--device cpu]
Verify steps of one certain token and 3 drafts, accepted at random, of 8 heads x 64 x 128 whose
time steps and decay rates are those that Mamba-2 is initialised with (and longer: time steps of
0.001 to 0.1, a state forgets in 1 to 10,000 tokens); x, B and C are noise behind the SiLU that they
have in the model, so their means are not 0, in bfloat16. Every track gets the same inputs, narrow
states in that dtype, which then is that of their outputs too; the exact track is the columns layout
in fp64. An error is the largest difference of a head over that head's
largest entry, of all outputs (without D x, in which there is no state) and of the state at the end;
the worst head of the worst sequence stands in the table, and the root mean square over all heads.
On a GPU the Triton kernels run, on a CPU their references.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, plain, save, show
from torch import Tensor
from torch.nn.functional import silu

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba2.naive import fold_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update
from hybrid_runtime.kernels.replay.ring import SHORT_RING_TOKENS, ring_length
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

HEADS, DIM, GROUPS, STATE, DRAFTS = 8, 64, 2, 128, 3


class Inputs(NamedTuple):
    """Of one step of all sequences, with the heads' constants; as the kernels take them."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor


class Heads(NamedTuple):
    """Constants `[H]`: the rate at which the state decays and the bias of the time step."""

    A_log: Tensor
    dt_bias: Tensor
    decay: Tensor

    @classmethod
    def spread(cls, heads: int, device: str) -> Heads:
        """From those that remember 10,000 tokens to those that forget in one."""
        share = torch.linspace(0, 1, heads, dtype=torch.float64)
        step = 0.001 * 100**share
        decay = 1e-4 * 1.6e4**share
        bias = step + torch.log(-torch.expm1(-step))  # softplus turned round
        rate = torch.log(decay / step)
        return cls(*(part.float().to(device) for part in (rate, bias, decay)))


class Track:
    """One layout in one dtype: its states, and its errors so far."""

    def __init__(
        self, layout: str, dtype: torch.dtype, stochastic: bool, shape: tuple[int, int, int],
        sequences: int, device: str,
    ) -> None:  # fmt: skip
        def ints(value: int) -> Tensor:
            return torch.full((sequences,), value, dtype=torch.int32, device=device)

        self.layout, self.dtype, self.stochastic = layout, dtype, stochastic
        each = DRAFTS + 1 if layout == "columns" else 1
        self.states = torch.zeros((sequences * each, *shape), dtype=dtype, device=device)
        self.table = torch.arange(sequences * each, dtype=torch.int32, device=device)
        self.table = self.table.view(sequences, each)
        self.zero, self.none, self.draft = ints(0), ints(-1), ints(DRAFTS)
        self.slot = torch.arange(sequences, dtype=torch.int32, device=device)
        self.starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * (DRAFTS + 1)
        self.offset, self.computed, self.written = ints(0), ints(0), ints(0)
        # Narrow states lie beside bfloat16 in the model, and take another path of the kernel there.
        values = dtype if dtype.itemsize >= 4 else torch.bfloat16
        length = ring_length(DRAFTS, SHORT_RING_TOKENS)
        rings = mamba2(*shape, GROUPS, 4).allocate_records(1, sequences, length, device)
        x, B, dt = Records(*rings).layer(0)
        fine = torch.promote_types(values, dt.dtype)
        self.records = Records(x.to(values), B.to(values), dt.to(fine))
        self.pending, self.A_log = ints(0), torch.zeros(shape[0], device=device)
        self.worst = torch.zeros(sequences, shape[0], dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.worst)

    def step(self, inputs: Inputs, accepted: Tensor) -> Tensor:
        """Outputs `[sequences, K + 1, H, P]` in fp64."""
        if self.dtype == torch.float64:
            inputs = Inputs(*(part.double() for part in inputs))
        elif self.dtype != torch.float32:
            inputs = inputs._replace(
                x=inputs.x.bfloat16(), B=inputs.B.bfloat16(), C=inputs.C.bfloat16()
            )
        where = self.table, self.slot, self.starts, self.draft
        if self.layout == "columns":
            # The first step reads a state of zeros.
            rows = StateRows(*where, self.zero, self.offset, self.zero)
            y = selective_state_update(*inputs, self.states, rows, DRAFTS + 1)
        else:
            rounding = Rounding(self.slot * 7919, layer=0) if self.stochastic else None
            positions = self._positions(self.computed - self.written, self.computed + 1)
            rows = ReplayRows(*where, positions)
            y = replay_update(*inputs, self.states, self.records, rows, DRAFTS + 1, rounding)
            certain, self.A_log = positions.certain, inputs.A_log
            self.written = torch.where(positions.writes > 0, certain, self.written)
            self.pending = certain - self.written
            self.computed = certain + accepted - 1
        self.offset = accepted - 1
        return y.double().view(len(accepted), DRAFTS + 1, *y.shape[1:])

    def _positions(self, pending: Tensor, certain: Tensor) -> ReplayPositions:
        return ReplayPositions(
            read_column=self.zero,
            offset=self.offset,
            pending=pending,
            cursor=self.written % self.records.length,
            write_column=self.zero,
            writes=(pending + DRAFTS + 1 > SHORT_RING_TOKENS).int(),
            checkpoint_column=self.none,
            checkpoint_after=self.zero,
            certain=certain,
        )

    def certain_state(self) -> Tensor:
        """`[sequences, H, P, N]` in fp64, after the certain token of the last step; in the replay
        layout what the state in memory and the window cache make together, in fp32."""
        if self.layout == "columns":
            return self.states[self.table[:, 0].long()].double()
        states = self.states.to(torch.float32, copy=True)
        positions = self._positions(self.pending, self.computed)
        fold_reference(states, self.records, self.A_log, self.table, self.slot, positions)
        return states[self.table[:, 0].long()].double()


class Trial:
    """All tracks over the same tokens."""

    def __init__(self, heads: int, sequences: int, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sequences, self.device = sequences, device
        self.heads = Heads.spread(heads, device)
        self.shape = (heads, DIM, STATE)

        def track(layout: str, dtype: torch.dtype, stochastic: bool = False) -> Track:
            return Track(layout, dtype, stochastic, self.shape, sequences, device)

        self.exact = track("columns", torch.float64)
        narrow = torch.float16, torch.bfloat16
        self.tracks = [
            *(
                track(kind, d)
                for d in (torch.float32, *narrow)
                for kind in ("columns", "replay")
            ),
            *(track("replay", d, stochastic=True) for d in narrow),
        ]  # fmt: skip
        self.largest = torch.zeros(sequences, heads, dtype=torch.float64, device=device)
        self.energy = torch.zeros_like(self.largest)
        self.apart = torch.zeros_like(self.largest)
        self.steps = 0

    def run(self, tokens: int) -> int:
        """Steps until every sequence has that many tokens; how many the shortest has."""
        counts = torch.zeros(self.sequences, dtype=torch.int64)
        while int(counts.min()) < tokens:
            accepted = torch.randint(
                1, DRAFTS + 2, (self.sequences,), generator=self.generator, dtype=torch.int32
            )
            self.step(accepted.to(self.device))
            counts += accepted
        return int(counts.min())

    def step(self, accepted: Tensor) -> None:
        inputs = self._inputs()
        exact = self.exact.step(inputs, accepted)
        self.steps += 1
        self.largest = torch.maximum(self.largest, exact.abs().amax((1, 3)))
        self.energy += exact.square().sum((1, 3))
        outputs = []
        for track in self.tracks:
            outputs.append(track.step(inputs, accepted))
            error = (outputs[-1] - exact).abs()
            track.worst = torch.maximum(track.worst, error.amax((1, 3)))
            track.squares += error.square().sum((1, 3))
        columns, replay, *_ = outputs
        self.apart = torch.maximum(self.apart, (replay - columns).abs().amax((1, 3)))

    def results(self) -> list[dict[str, Any]]:
        """One row per track; heads, in order, in its lists."""
        truth = self.exact.certain_state()
        rows = []
        for track in self.tracks:
            outputs = track.worst / self.largest
            state = relative(track.certain_state(), truth)
            rows.append(
                {
                    "state": str(track.dtype).removeprefix("torch."),
                    "layout": track.layout,
                    "rounding": "by chance" if track.stochastic else "to nearest",
                    "outputs": float(outputs.max()),
                    "outputs rms": float((track.squares.sum() / self.energy.sum()).sqrt()),
                    "final state": float(state.max()),
                    "outputs by head": outputs.amax(0).tolist(),
                    "final state by head": state.amax(0).tolist(),
                }
            )
        return rows

    def difference(self) -> dict[str, float]:
        """Of replay from columns, both in fp32: over the largest entry of the head where it is, and
        over the largest of all."""
        columns, replay = (track.certain_state() for track in self.tracks[:2])
        outputs = self.apart / self.largest
        return {
            "outputs": float(outputs.max()),
            "final state": float(relative(replay, columns).max()),
            "outputs of all heads": float(self.apart.max() / self.largest.max()),
            "final state of all heads": float((replay - columns).abs().max() / columns.abs().max()),
        }

    def _inputs(self) -> Inputs:
        tokens, heads = self.sequences * (DRAFTS + 1), self.shape[0]

        def noise(*shape: int) -> Tensor:
            return torch.randn(tokens, *shape, generator=self.generator).to(self.device)

        def activation(*shape: int) -> Tensor:
            return silu(noise(*shape)).bfloat16().float()

        return Inputs(
            activation(heads, DIM), noise(heads) / 2, self.heads.A_log,
            activation(GROUPS, STATE), activation(GROUPS, STATE),
            torch.zeros_like(self.heads.A_log), self.heads.dt_bias,
        )  # fmt: skip


def relative(got: Tensor, want: Tensor) -> Tensor:
    """`[sequences, H]`: largest difference over largest entry of `[sequences, H, P, N]`."""
    return (got - want).abs().amax((2, 3)) / want.abs().amax((2, 3))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--sequences", type=int, default=3, help="with inputs of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    trial = Trial(HEADS, args.sequences, args.seed, args.device)
    reached = trial.run(args.tokens)
    rows = trial.results()
    show(f"error against fp64 after {reached} tokens", plain(rows, "by head"))
    result = {
        "shape": [HEADS, DIM, STATE], "drafts": DRAFTS, "tokens": reached, "steps": trial.steps,
        "sequences": args.sequences, "seed": args.seed, "decay": trial.heads.decay.tolist(),
        "rows": rows, "fp32 replay against columns": trial.difference(),
    }  # fmt: skip
    print(save("numerics", result, args.out))


if __name__ == "__main__":
    main()
