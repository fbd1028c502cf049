"""Tables of the vLLM plug-in, from `vllm-*.json`."""

from __future__ import annotations

from statistics import median
from typing import Any

from markdown import markdown
from source import load, where

SERVED = (("serve-3", "one GPU"), ("serve-0", "one GPU"), ("serve-3-tp2", "two, tensor parallel"))
TIMED = (("time-8b", "Nemotron-H-8B"), ("time-narrow", "narrow, 40 Mamba layers"))
HOOKS = ("preprocess_state", "postprocess_state")


def serving() -> str:
    """The same requests with our copies and with vLLM's, and the check mode."""
    lines = []
    for name, gpus in SERVED:
        result = load("h200", f"vllm-{name}")
        ours = next(run for run in result["runs"] if run["ours"])
        same = [*result["comparison"], *result.get("comparison_with_plugin_off", [])]
        counted = ours["metrics"]
        lines.append(
            [
                gpus,
                str(result["options"]["drafts"]),
                f"{max(c['different_text'] for c in same)} of {same[0]['requests']}",
                "identical" if all(alike(c) for c in same) else "different",
                *(str(counted.get(f"vllm:{key}", "-")) for key in COUNTED),
                *(str(ours["adapter"][0][key]) for key in ("steps", "skipped")),
                str(sum(ours["adapter"][0][key] for key in ("precopied", "postcopied"))),
                result["environment"]["commit"],
            ]
        )
    checked = [run["adapter"][0] for run in load("h200", "vllm-check")["runs"]]
    total = {key: sum(run[key] for run in checked) for key in ("checked_steps", "different_bytes")}
    env = load("h200", "vllm-serve-3")["environment"]
    header = [
        "GPUs", "drafts", "texts that differ", "hits, acceptance, preemptions", "prefix-hit tokens",
        "accepted drafts", "preemptions", "steps", "skipped", "states moved", "commit",
    ]  # fmt: skip
    return (
        f"{markdown(header, lines)}\n\n{env['device']}, vLLM 0.25.1, blocks of 64 tokens. "
        f"Check mode: {total['checked_steps']} steps beside vLLM's kernels, "
        f"{total['different_bytes']} bytes different."
    )


def timing() -> str:
    """Step, kernels and host of both, and the step of vLLM's V1 runner."""
    waiting: dict[int, list[float]] = {}
    for row in load("h200", "vllm-v1")["rows"]:
        waiting.setdefault(row["batch"], []).append(row["step_ms_mean"])
    lines = []
    for name, shape in TIMED:
        for batch, found in load("h200", f"vllm-{name}")["batches"].items():
            v1 = waiting.get(int(batch)) if name == "time-8b" else None
            kernels = [_kernels(found["kernels"][side]) for side in ("ours", "vllm")]
            lines.append(
                [
                    shape,
                    batch,
                    f"{found['ours_ms']:.2f}",
                    f"{found['vllm_ms']:.2f}",
                    f"{found['ratio']:.3f}",
                    f"{median(v1):.2f}" if v1 else "-",
                    *(f"{us:.1f}" for us, _ in kernels),
                    f"{100 * kernels[0][0] / kernels[1][0]:.0f} %",
                    " : ".join(f"{launches:.2g}" for _, launches in kernels),
                    " : ".join(f"{_host(found['runs'], ours):.0f}" for ours in (True, False)),
                ]
            )
    header = [
        "shape", "rows", "step, ms", "vLLM V2", "÷ V2", "vLLM V1", "kernels, µs", "of vLLM V2",
        "share", "launches, ours : V2", "host µs, ours : V2",
    ]  # fmt: skip
    pairs = [
        r for found in load("h200", "vllm-time-narrow")["batches"].values() for r in found["ratios"]
    ]
    note = (
        "Milliseconds are medians of each side, ÷ V2 the median over neighbouring runs; on the "
        f"narrow shape these lie between {min(pairs):.2f} and {max(pairs):.2f}. Launches without "
        "the one that notes accepted tokens, which both make; its time is included."
    )
    return f"{markdown(header, lines)}\n\n{note} {where(load('h200', 'vllm-time-8b'))}"


def releases() -> str:
    """Names, signatures and attributes that the adapter touches, by release."""
    result = load("cpu", "vllm_compat")
    lines = [
        [f"vLLM {release}", str(found["checked"]), str(len(found["missing"]))]
        for release, found in result["releases"].items()
    ]
    note = f"Looked up in the wheels' sources, commit {result['environment']['commit']}."
    return markdown(["release", "looked up", "missing"], lines) + "\n\n" + note


TABLES = {
    "vllm-releases": releases,
    "vllm-serving": serving,
    "vllm-timing": timing,
}
COUNTED = ("prefix_cache_hits", "spec_decode_num_accepted_tokens", "num_preemptions")


def alike(comparison: dict[str, Any]) -> bool:
    """Whether two runs had the same hits, acceptance and preemptions."""
    counts = comparison["metrics"].values()
    return not comparison["different_prefix_hits"] and all(a == b for a, b in counts)


def _kernels(found: dict[str, dict[str, float]]) -> tuple[float, float]:
    """GPU µs per step of the state's kernels, and their launches; the one that both make included
    in the time only."""
    own = [value for name, value in found.items() if not name.startswith("_scatter")]
    return sum(value["us"] for value in found.values()), sum(value["launches"] for value in own)


def _host(runs: list[dict[str, Any]], ours: bool) -> float:
    return median(
        sum(run["host_us"][hook]["p50"] for hook in HOOKS) for run in runs if run["ours"] == ours
    )
