"""Tables of replay inside vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from markdown import markdown
from source import RESULTS, load, where
from vllm_tables import alike

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import qwen

from hybrid_runtime.kernels.gdn.recurrence import gdn
from hybrid_runtime.kernels.replay.ring import ring_length

MENDED, PRESENT = "mended", "present"
TEXTS = (
    ("sync3", "3 drafts, synchronous", MENDED),
    ("async3", "3 drafts", MENDED),
    ("graphs3-mended", "3 drafts, graphs", MENDED),
    ("ds3-graphs", "3 drafts, graphs, DS windows", MENDED),
    ("tp2", "3 drafts, two GPUs", MENDED),
    ("tp2-graphs", "3 drafts, graphs, two GPUs", MENDED),
    ("async5", "5 drafts, replay with graphs", MENDED),
    ("graphs1", "1 draft, graphs", MENDED),
    ("none", "no drafts: our copies, graphs", "none"),
    ("async1", "1 draft", PRESENT),
    ("graphs3", "3 drafts, graphs", PRESENT),
    ("ds3", "3 drafts, synchronous, DS windows", PRESENT),
    ("vllm", "vLLM beside itself", MENDED),
    ("vllm-unmended", "vLLM beside itself", PRESENT),
)
"""Comparisons of texts, vLLM : replay and vLLM with itself, and vLLM's own fault in them."""
COUNTED = ("prefix_cache_hits", "spec_decode_num_accepted_tokens", "num_preemptions")
STEPS = (
    ("vllm_replay_steps", "Nemotron-H-8B"),
    ("vllm_replay_steps-house", "Nemotron-H-8B"),
    ("vllm_replay_steps-k5", "Nemotron-H-8B"),
    ("vllm_replay_steps-nano", "Nemotron-3-Nano-30B"),
)
POISONED = {
    "poisoned": "NaN in what is free",
    "dummies": "a dummy run",
    "captures": "a capture",
}
"""Runs of a result of `poison.py`, and what was done between steps."""
SERVED = (
    ("output_throughput", "tokens/s", ".0f"),
    ("mean_ttft_ms", "TTFT, ms", ".0f"),
    ("mean_tpot_ms", "TPOT, ms", ".2f"),
    ("p50_itl_ms", "ITL p50, ms", ".1f"),
    ("p99_itl_ms", "ITL p99, ms", ".1f"),
)
"""Figure of vLLM's client, its name, its format; each with the plug-in and without, and the
ratio."""


QWEN_STEPS = (
    ("vllm_replay_steps-qwen9b", "Qwen3.5-9B"),
    ("vllm_replay_steps-qwen9b-k7", "Qwen3.5-9B"),
    ("vllm_replay_steps-qwen27b", "Qwen3.5-27B"),
    ("vllm_replay_steps-qwen35b", "Qwen3.5-35B-A3B"),
)


def steps() -> str:
    """Steps with replay beside vLLM's own, and requests that run at once in the same cache."""
    table, notes = _steps(STEPS)
    notes.insert(0, _fit(load("h200", "vllm_replay_requests")))
    return f"{table}\n\n{' '.join(dict.fromkeys(notes))}"


def qwen_steps() -> str:
    """The same of Qwen's shapes, as far as they have been measured."""
    known = [pair for pair in QWEN_STEPS if (RESULTS / "h200" / f"{pair[0]}.json").exists()]
    if not known:
        return "Not run on a GPU yet."
    table, notes = _steps(known)
    notes.insert(0, "Random weights; built [as Qwen3-Next](benchmarks.md#vllm).")
    return f"{table}\n\n{' '.join(dict.fromkeys(notes))}"


def qwen_memory() -> str:
    """What a request of Qwen's models holds, from their shapes."""
    drafts, lines = 3, []
    for name in ("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b"):
        shape = qwen.config(name)
        recurrence = gdn(
            shape["linear_num_value_heads"],
            shape["linear_num_key_heads"],
            shape["linear_key_head_dim"],
            shape["linear_value_head_dim"],
            shape["linear_conv_kernel_dim"],
            torch.bfloat16,
        )
        kinds = shape["layer_types"]
        layers = kinds.count("linear_attention")
        conv_state, matrix = recurrence.checkpoint
        state = layers * (conv_state.longer(drafts).nbytes + matrix.nbytes)
        ring = recurrence.ring(ring_length(drafts, 0))
        records = layers * sum(record.nbytes for record in ring)
        token = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"]
        token *= len(kinds) - layers
        sizes = ((1 + drafts) * state, state, records, 1024 * token, 32768 * token)
        lines.append([name, *(f"{size / 2**20:.0f}" for size in sizes)])
    header = [
        "shape", "states in vLLM's layout, MiB", "with replay", "records of drafts",
        "keys and values of 1,024 tokens", "of 32,768",
    ]  # fmt: skip
    note = "3 drafts, fp32 states, bf16 keys. Counted without the padding of vLLM's pages."
    return f"{markdown(header, lines)}\n\n{note}"


def _steps(measured: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
    """A table of these results, and what was measured where."""
    lines, notes = [], []
    for name, shape in measured:
        result = load("h200", name)
        given = result["options"]
        for rows, found in sorted(result["batches"].items(), key=lambda item: int(item[0])):
            ratios = found["ratios"]
            lines.append(
                [
                    shape,
                    given[given.index("--num-spec") + 1],
                    rows,
                    f"{found['replay_ms']:.2f}",
                    f"{found['vllm_ms']:.2f}",
                    f"{found['ratio']:.3f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                    str(len(found["runs"])),
                    result["environment"]["commit"],
                ]
            )
        notes.append(_machine(result))
    header = [
        "shape", "drafts", "rows", "replay, ms", "vLLM V2, ms", "÷ V2", "of neighbours", "runs",
        "commit",
    ]  # fmt: skip
    return markdown(header, lines), notes


def texts() -> str:
    """The same requests with replay and with vLLM's own path, in fp32."""
    lines, where = [], {}
    for name, what, fault in TEXTS:
        result = load("h200", f"vllm-texts-{name}")
        env = result["environment"]
        where[f"{env['device']}, {env['cpu']}, torch {env['torch']}."] = True
        for found in result["comparison"]:
            counts = (_counted(found["metrics"], f"vllm:{key}") for key in COUNTED)
            lead, pool = found["largest_lead"], found["runs"][1]
            hits = found["metrics"]["vllm:prefix_cache_hits"]
            if name != "vllm-unmended" and fault == PRESENT and hits[0] != hits[1]:
                continue  # other hits, other texts
            if fault == "none" and (not pool["ours"] or lines[-1][0] == what):
                continue  # the same engine once more, and with vLLM's copies
            lines.append(
                [
                    what,
                    fault,
                    f"{pool['blocks']}{'' if pool['reads'] else ', hits not taken'}",
                    f"{found['different_text']} of {found['requests']}",
                    "-" if lead is None else f"{lead:.2g}",
                    *counts,
                    env["commit"],
                ]
            )
    header = [
        "runs", "vLLM's fault", "blocks", "texts that differ", "led by at most",
        "prefix-hit tokens", "accepted drafts", "preemptions", "commit",
    ]  # fmt: skip
    return f"{markdown(header, lines)}\n\n{' '.join(where)}"


def served() -> str:
    """vLLM's OpenAI server with the plug-in and without, under vLLM's client."""
    result = load("h200", "vllm_openai_server")
    lines = []
    for places, found in sorted(result["rows"].items(), key=lambda item: int(item[0])):
        ours, theirs = found["replay"], found["vllm"]
        line = [places]
        for figure, _, form in SERVED:
            line += [f"{ours[figure]:{form}} : {theirs[figure]:{form}}"]
            line += [f"{found['ratio'][figure]:.2f}"]
        lines.append(line)
    header = ["under way", *(x for _, name, _ in SERVED for x in (name, "÷"))]
    return f"{markdown(header, lines)}\n\n{_served_note(result)}"


def gained() -> str:
    """The first of these steps, short: what a user of vLLM gains."""
    result = load("h200", STEPS[0][0])
    lines = []
    for rows, found in sorted(result["batches"].items(), key=lambda item: int(item[0])):
        spread = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
        lines.append([rows, f"{found['ratio']:.2f}", spread])
    header = ["requests that decode", "step ÷ vLLM's own", "of neighbouring runs"]
    fit = _fit(load("h200", "vllm_replay_requests"))
    return f"{markdown(header, lines)}\n\n{fit} {where(result)}"


def poisoned() -> str:
    """Free blocks and drafts that are no numbers, dummy runs and captures."""
    lines = []
    for name in ("vllm_poison", "vllm_poison-eager"):
        result = load("h200", name)
        given = result["options"]
        setting = f"{given['drafts']} drafts, {'graphs' if given['graphs'] else 'eager'}"
        for run, what in POISONED.items():
            if run in result["runs"]:
                cells = _survived(result["runs"][run])
                lines.append([setting, what, *cells, result["environment"]["commit"]])
        where = _machine(result)
    header = [
        "engine", "between steps", "texts that differ", "hits, acceptance, preemptions",
        "values not finite", "steps", "dummy runs", "graphs captured", "bytes changed", "commit",
    ]  # fmt: skip
    return f"{markdown(header, lines)}\n\n{where}"


def _survived(found: dict[str, Any]) -> list[str]:
    """Cells of one run beside the clean one; its texts are compared where it has all requests."""
    comparison = found.get("comparison")
    texts = ["-", "-"]
    if comparison:
        texts = [f"{comparison['different_text']} of {comparison['requests']}"]
        texts += ["identical" if alike(comparison) else "different"]
    changed = [found[key] for key in ("guess_bytes", "state_bytes") if key in found]
    return [
        *texts,
        f"{found['not_finite']} of {found['tokens']}",
        *(str(found.get(key) or "-") for key in ("steps", "dummy_runs", "captures")),
        str(sum(changed)) if changed else "-",
    ]


def checked() -> str:
    """Check mode of replay."""
    result = load("h200", "vllm-check-replay")
    runs = [run["adapter"][0] for run in result["runs"]]

    def total(name: str) -> int:
        return sum(run[name] for run in runs)

    lines = [
        [
            what,
            str(total(f"checked_{what}")),
            str(total(f"different_{what}")),
            f"{max(run[f'worst_{what}'] for run in runs):.2g}",
        ]
        for what in ("states", "outputs", "boundaries")
    ]
    header = ["of a layer", "compared", "outside the tolerance", "largest difference"]
    note = f"{total('checked_steps')} steps. {where(result)}"
    return f"{markdown(header, lines)}\n\n{note}"


def histories() -> str:
    """Random histories on each release's scheduler."""
    lines = []
    releases = load("cpu", "vllm-histories")["releases"]
    for release, found in sorted(releases.items(), key=lambda item: _version(item[0])):
        both = [found["synchronous"], found["asynchronous"]]

        def of(key: str, both: list[dict[str, Any]] = both) -> str:
            return " : ".join(str(kind.get(key, 0)) for kind in both)

        holes = " : ".join(str(len(kind["holes"])) for kind in both)
        counts = ("histories", "steps", "preemptions", "boundaries", "cut short")
        line = [f"vLLM {release}", holes, *map(of, counts)]
        lines.append(line)
    header = [
        "release", "holes", "histories", "steps", "preemptions", "boundaries", "cut short",
    ]  # fmt: skip
    # What has changed since the first release is the result itself.
    commits = sorted({found["commit"].removesuffix("-dirty") for found in releases.values()})
    note = f"Synchronous : asynchronous, commit {', '.join(commits)}."
    return f"{markdown(header, lines)}\n\n{note}"


TABLES = {
    "vllm-replay-steps": steps,
    "vllm-qwen-steps": qwen_steps,
    "vllm-qwen-memory": qwen_memory,
    "vllm-replay-texts": texts,
    "vllm-served": served,
    "vllm-gained": gained,
    "vllm-poisoned": poisoned,
    "vllm-checked": checked,
    "vllm-histories": histories,
}


def _fit(result: dict[str, Any]) -> str:
    given = result["options"]
    cache = given[given.index("--kv-gib") + 1]
    ours, theirs = (result["fit"][side] for side in ("replay", "vllm"))
    return (
        f"In the same {cache} GiB of cache {ours['running']} requests ran at once with replay, "
        f"{theirs['running']} without: {ours['tokens_per_s']:.0f} and "
        f"{theirs['tokens_per_s']:.0f} tokens/s, prompts included (commit "
        f"{result['environment']['commit']})."
    )


def _machine(result: dict[str, Any]) -> str:
    env = result["environment"]
    return f"{env['device']}, {env['cpu']}."


def _version(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _counted(metrics: dict[str, Any], name: str) -> str:
    """A counter of both runs; some are not there without drafts."""
    counts = metrics.get(name)
    return " : ".join(f"{count:.0f}" for count in counts) if counts else "-"


def _served_note(result: dict[str, Any]) -> str:
    rows, given = result["rows"], result["options"]
    pairs = " to ".join(map(str, sorted({len(found["runs"]) // 2 for found in rows.values()})))
    ours, theirs = given["kv_gib"]
    running = max((int(places) for places in rows), default=0)
    most = max(run["running"] for run in rows[str(running)]["runs"] if run["side"] == "vllm")
    return (
        f"{given['drafts']} drafts, acceptance {given['acceptance']}, {given['per_place']} "
        f"requests for each under way, medians of {pairs} pairs of runs. "
        f"{ours} GiB of cache with the plug-in, {theirs} without, where at most {most:.0f} "
        "requests ran at once. "
        f"{where(result)}"
    )
