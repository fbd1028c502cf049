"""Random histories on the scheduler, cache manager and block pool of one vLLM release.

    PYTHONPATH=unpacked python benchmarks/vllm/histories.py --count 2000

`unpacked` holds the Python files of a release; docs/vllm.md says how to get them. No GPU is needed.
What `tests/vllm_release` runs, with replay, is counted here, synchronous and asynchronous. A
release's figures join those of the others in the same JSON file. Exits with 1 if there is a hole: a
wrong state read, or a write to a block of somebody else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm_release"))

from record import RESULTS, arguments, environment, save


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=2000, help="of histories, of each kind")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from test_scheduler import histories

    out = args.out or RESULTS / "cpu" / "vllm-histories.json"
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"releases": {}}
    found: dict[str, Any] = {"commit": environment()["commit"]}
    for asynchronous in (False, True):
        start = time.perf_counter()
        counts, holes = histories(0, args.count, "replay", asynchronous)
        kind = "asynchronous" if asynchronous else "synchronous"
        found[kind] = {
            "histories": args.count,
            "holes": holes,
            **{name: counts[name] for name in sorted(counts)},
            "seconds": time.perf_counter() - start,
        }
        print(vllm.__version__, kind, found[kind], flush=True)
    result["releases"][vllm.__version__] = found
    result["environment"] = environment()
    save("vllm-histories", result, out)
    return int(any(found[kind]["holes"] for kind in ("synchronous", "asynchronous")))


if __name__ == "__main__":
    sys.exit(main())
