"""What does it cost the host to know that nothing has to be saved?

python benchmarks/kernels/predicate.py
Compares the candidate list of `state.align` (post-copy alone, and with the pre-copy's) with a
Python loop over requests, the form that the predicate of vllm-project/vllm#42574 has.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import numpy as np
from record import arguments, host_us, plain, save, show

from hybrid_runtime.state import boundaries
from hybrid_runtime.state.align import arithmetic

BLOCK, DRAFTS = 4336, 3


def loop(computed: list[int], scheduled: list[int], draft: list[int]) -> bool:
    """The plain form: any request that may cross a boundary ends the search."""
    for n, s, d in zip(computed, scheduled, draft, strict=True):
        certain = n + s - d
        if d and (certain + d) // BLOCK * BLOCK >= certain:
            return False
    return True


def main() -> None:
    args = arguments(__doc__).parse_args()
    rng = np.random.default_rng(0)
    rows = []
    for n in (1, 16, 64, 256, 512, 1024):
        # Away from boundaries, so that the loop has to look at every request, as it mostly does.
        computed = rng.integers(100, BLOCK - 100, n).astype(np.int32)
        scheduled = np.full(n, DRAFTS + 1, np.int32)
        draft = np.full(n, DRAFTS, np.int32)
        retention = boundaries.RetentionRule(BLOCK)
        held = (computed - 1) // BLOCK

        def post(
            computed=computed, scheduled=scheduled, draft=draft, retention=retention
        ) -> np.ndarray:
            certain = computed + scheduled - draft
            return arithmetic.postcopy_candidates(certain, certain, draft, retention).nonzero()[0]

        def both(
            computed=computed, scheduled=scheduled, held=held, post=post
        ) -> tuple[np.ndarray, np.ndarray]:
            column = arithmetic.running_column(computed + scheduled, BLOCK)
            moving = arithmetic.precopy_candidates(column, column, held, held, None)
            return post(), moving.nonzero()[0]

        lists = computed.tolist(), scheduled.tolist(), draft.tolist()
        assert loop(*lists)
        assert not len(post())
        assert not len(both()[1])
        times = {
            "python loop": host_us(lambda lists=lists: loop(*lists)),
            "post-copy list": host_us(post),
            "with pre-copy": host_us(both),
        }
        rows.append({"rows": n} | {k: statistics.median(v) for k, v in times.items()})
        rows[-1]["repeats"] = times
    show("predicate, microseconds on the host", plain(rows, "repeats"))
    print(
        save("predicate", {"block": BLOCK, "drafts": DRAFTS, "unit": "us", "rows": rows}, args.out)
    )


if __name__ == "__main__":
    main()
