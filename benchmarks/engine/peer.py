"""For `itl.py`: vLLM's figures beside ours, and results of several runs made into one.

The peer's are the JSON lines of `run_nemotron.py`, taken on the same machine in the same call, with
`HYBRID_RUNTIME_VLLM=0`: vLLM would otherwise find our plug-in, because this package is installed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
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
_ROW_KEY = (
    "strategy",
    "lengths",
    "batch",
    "drafts",
    "isl",
    "osl",
    "ssm_dtype",
    "state_layout",
    "acceptance",
)
_PEER_KEY = ("runner", "batch", "drafts", "isl", "osl", "ssm_dtype", "acceptance")


def read(paths: Sequence[Path]) -> list[Row]:
    """One entry per runner and load, with all its repeats.

    Raises:
        ValueError: a line that is no JSON object, or tells of an error.
    """
    found: list[Row] = []
    for path in paths:
        latest: Row | None = None
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from error
            if "error" in line:
                raise ValueError(f"{path}:{number}: the peer failed: {line['error'][:300]}")
            if line.get("profile"):
                if latest is not None:
                    names = ("steps", "wall_ms_per_step", "gpu_us_per_step", "kernels_per_step")
                    latest["profile"] = {n: line[n] for n in names} | {"top": line["top"][:20]}
            elif "step_ms_mean" in line:
                latest = _entry(line)
                found.append(latest)
    return combine([], found)


def combine(first: list[Row], second: list[Row]) -> list[Row]:
    """Entries of both, those of equal keys with the repeats of both; a repeat that is there twice
    counts once, so that a file may be given more than once."""
    out = {tuple(e[k] for k in _PEER_KEY): dict(e) for e in first}
    for entry in second:
        known = out.setdefault(tuple(entry[k] for k in _PEER_KEY), {**entry, "repeats": []})
        known["repeats"] = _joined(known["repeats"], entry["repeats"])
        if "profile" in entry:
            known.setdefault("profile", entry["profile"])
    return list(out.values())


def attach(result: Row, entries: list[Row]) -> Row:
    """The result with these peers, and in each row with the same load, by runner: `peers` (step_ms,
    itl_ms, ratio and itl_ratio of ours to it); `peer_ratio` is that to the V1 runner, or else to
    the only one. The peer's prompts have equal lengths; rows of staggered ones stand beside them
    all the same.

    Raises:
        ValueError: the peer ran another model.
    """
    for entry in entries:
        for ours, theirs in (
            ("pattern", "pattern"),
            ("mtp_pattern", "mtp_pattern"),
            ("hidden_size", "hidden"),
        ):
            if (its := entry["engine"].get(theirs)) not in (None, result["config"][ours]):
                raise ValueError(
                    f"the peer's {theirs} is {its!r}; it must be that of the shape, "
                    f"{result['config'][ours]!r}"
                )
    entries = combine(result.get("peer", []), entries)
    rows = [_beside(row, entries) for row in result["rows"]]
    return {**result, "rows": rows, "peer": entries}


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
            known = rows.setdefault(tuple(row[k] for k in _ROW_KEY), {**row, "repeats": []})
            known["repeats"] = _joined(known["repeats"], row["repeats"])
            known["profile"] = known.get("profile") or row.get("profile")
    runs = _joined([], [run for result in results for run in result["runs"]])
    peers: list[Row] = []
    for result in results:
        peers = combine(peers, result.get("peer", []))
    merged = {**first, "runs": runs, "rows": [aggregate(row) for row in rows.values()]}
    return attach({**merged, "peer": []}, peers) if peers else merged


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
        "repeats": [{name: line[name] for name in KEPT if name in line}],
    }


def _beside(row: Row, entries: list[Row]) -> Row:
    peers = {}
    for entry in entries:
        if any(row[k] != entry[k] for k in _PEER_KEY if k != "runner") or row["step_ms"] is None:
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
    row = {name: value for name, value in row.items() if name not in ("peers", "peer_ratio")}
    if not peers:
        return row
    chosen = peers.get("v1") or next(iter(peers.values()))
    return {**row, "peers": peers, "peer_ratio": chosen["ratio"]}


def _joined(first: list[Row], second: list[Row]) -> list[Row]:
    out = list(first)
    for row in second:
        if row not in out:
            out.append(row)
    return out
