"""For `itl.py`: figures of a peer beside ours, and results of several runs made into one.

vLLM's are the JSON lines of `vllm/lockstep.py`, taken on the same machine in the same call.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybrid_runtime.bench.measure import aggregate

Row = dict[str, Any]

# Figures of a run of the peer that are kept.
KEPT = (
    "step_ms_mean", "step_ms_median", "step_ms_p10", "step_ms_p90", "step_ms_max", "itl_ms",
    "itl_ms_wall", "mean_acceptance_length", "output_tok_s", "decode_tok_s", "ttft_ms_mean",
    "timed_steps", "tokens_scheduled_per_step",
)  # fmt: skip
ENGINE = (
    "vllm", "torch", "gpu", "attn", "mode", "eager", "async_scheduling", "mamba_block_size",
    "block_size", "max_model_len", "cudagraph_mode", "pattern", "mtp_pattern", "hidden",
)  # fmt: skip
LOAD = ("batch", "drafts", "isl", "osl", "ssm_dtype", "acceptance")
LAYOUT = "state_layout"
OURS = (*LOAD, "lengths", "strategy", LAYOUT)
"""What an entry of vLLM has in common with rows of ours, and rows with each other."""


def read(path: Path) -> list[Row]:
    """One entry per runner and load of vLLM, with all its repeats.

    Raises:
        ValueError: a line that is no JSON object, or tells of an error.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if "error" in line:
            raise ValueError(f"{path}:{number}: the peer failed: {line['error'][:300]}")
        if "step_ms_mean" in line:
            entry = _entry(line)
            known = found.setdefault(tuple(entry[k] for k in ("runner", *LOAD)), entry)
            known["repeats"].append({name: line[name] for name in KEPT if name in line})
    return list(found.values())


def entries(before: Row) -> list[Row]:
    """Rows of an older checkout's result as a peer's."""
    return [
        {k: row[k] for k in (*OURS, "repeats")} | {"runner": "before"} for row in before["rows"]
    ]


def attach(result: Row, peers: Iterable[Row]) -> Row:
    """The result with these peers, and in each row with the same load, by runner: `peers` (step_ms,
    itl_ms, ratio and itl_ratio of ours to it); `peer_ratio` is that to the last of them. vLLM's
    prompts have equal lengths; rows of staggered ones stand beside them all the same.

    Raises:
        ValueError: vLLM ran another model.
    """
    peers = list(peers)
    ours = {"pattern": "pattern", "mtp_pattern": "mtp_pattern", "hidden": "hidden_size"}
    for entry in peers:
        for name, own in ours.items():
            its, known = entry.get("engine", {}).get(name), result["config"][own]
            if its not in (None, known):
                raise ValueError(f"the peer's {name} is {its!r}; it must be the shape's, {known!r}")
    rows = [_beside(row, peers) for row in result["rows"]]
    return result | {"rows": rows, "peer": peers}


def merge(results: Sequence[Row]) -> Row:
    """One result with the repeats of all; its environment is the first one's.

    Raises:
        ValueError: results of different models.
    """
    first = results[0]
    rows: dict[tuple[Any, ...], Row] = {}
    for result in results:
        for name in ("config", "dtype"):
            if result[name] != first[name]:
                raise ValueError(
                    f"{name} is {result[name]!r} in one result and {first[name]!r} in another; "
                    "they must be of the same model"
                )
        for row in result["rows"]:
            known = rows.setdefault(tuple(row[k] for k in OURS), {**row, "repeats": []})
            known["repeats"] += row["repeats"]
    runs = [run for result in results for run in result["runs"]]
    return {**first, "runs": runs, "rows": [aggregate(row) for row in rows.values()]}


def _entry(line: Row) -> Row:
    options = line["options"]
    drafts = options["num_spec"]
    dtype = str(options.get("ssm_dtype", "float32")).removeprefix("torch.")
    length = options["synthetic_len"]
    return {
        "runner": options["runner"],
        "batch": line["batch"],
        "drafts": drafts,
        "isl": line["isl"],
        "osl": line["osl"],
        # What vLLM takes for NemotronH when nothing is said.
        "ssm_dtype": "float32" if dtype == "auto" else dtype,
        "acceptance": "real" if length is None or not drafts else min(length, drafts + 1.0),
        "engine": {name: options[name] for name in ENGINE if name in options},
        "repeats": [],
    }


def _beside(row: Row, entries: list[Row]) -> Row:
    peers: Row = {}
    for entry in entries:
        # Without drafts an older checkout has the same states by another name.
        same = (row[k] == entry[k] for k in OURS if k in entry and (row["drafts"] or k != LAYOUT))
        if row["step_ms"] is None or not all(same):
            continue
        step, itl = (
            statistics.fmean(r[n] for r in entry["repeats"]) for n in ("step_ms_mean", "itl_ms")
        )
        peers[entry["runner"]] = {
            "step_ms": step,
            "itl_ms": itl,
            "repeats": len(entry["repeats"]),
            "ratio": row["step_ms"] / step,
            "itl_ratio": row["itl_ms"] / itl,
        }
    if not peers:
        return row
    return {**row, "peers": peers, "peer_ratio": list(peers.values())[-1]["ratio"]}
