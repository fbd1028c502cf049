"""What each drafter reaches in the project's own engine, greedy, on the left-out files.

``python -m training.measure DIRECTORY`` (about a minute on two CPU cores). Prints a table and
writes JSON, a row per drafter: mean acceptance length (tokens per verified step, the target's own
included), how many texts equal those without drafts, seconds.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.common.record import save, show
from hybrid_runtime.engine import Engine, SamplingParams

from .corpus import default_root, read_files, windows


def left_out_prompts(root: Path, count: int, length: int) -> list[str]:
    """``count`` pieces of ``length`` bytes of the left-out files, evenly spread, as text."""
    rows = windows(read_files(root)[1], length, count)
    return [bytes(t for t in row if t < 256).decode("utf-8", "ignore") for row in rows.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stdlib", type=Path, default=default_root())
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-bytes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON; default under benchmarks/results/")
    args = parser.parse_args()
    prompts = left_out_prompts(args.stdlib, args.prompts, args.prompt_bytes)
    expected: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for name in track((None, "mtp", "eagle", "ngram"), description="decoding"):
        drafts = args.drafts if name else 0
        with Engine.from_pretrained(
            args.checkpoint, dtype="float32", drafter=name, num_speculative_tokens=drafts
        ) as engine:
            start = time.perf_counter()
            answers = engine.generate(prompts, SamplingParams(max_tokens=args.tokens))
            seconds = time.perf_counter() - start
            length = engine.stats().mean_acceptance_length
        texts = [list(a.tokens) for a in answers]
        expected = expected or texts
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        rows.append(
            {
                "drafter": name or "none",
                "length": length if drafts else 1.0,
                "same text": same,
                "texts": len(texts),
                "seconds": seconds,
            }
        )
    show("acceptance on left-out files", rows)
    result = {"drafts": args.drafts, "tokens": args.tokens, "rows": rows}
    print(save("acceptance", result, args.out))


if __name__ == "__main__":
    main()
