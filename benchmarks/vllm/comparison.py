"""Comparing two runs of the requests of `serve.py serve`."""

from __future__ import annotations

import collections
import hashlib
import json
from typing import Any

HITS = "vllm:prefix_cache_hits"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def digest(tokens: list[int]) -> str:
    """Short stand-in for a text where only equality matters."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How two runs of the same requests differ.

    first_differences: request, position, and by how much the best log-probability led there, in
        the run where it led by less. A rounding can only turn one that hardly led.
    """
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    places = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
    ]
    different = [n for n, (a, b) in enumerate(pairs) if a != b]
    leads = {n: _lead(places[n], one["gaps"][n], other["gaps"][n]) for n in different}
    cached = zip(one["cached"], other["cached"], strict=True)
    names = collections.ChainMap(one["metrics"], other["metrics"])
    return {
        "runs": [{key: run[key] for key in ("ours", "blocks", "reads")} for run in (one, other)],
        "requests": len(pairs),
        "different_text": len(different),
        "largest_lead": max((lead for lead in leads.values() if lead is not None), default=None),
        "first_differences": [(n, places[n], leads[n]) for n in different],
        "different_prefix_hits": sum(a != b for a, b in cached),
        "metrics": {n: [one["metrics"].get(n), other["metrics"].get(n)] for n in sorted(names)},
    }


def line(found: dict[str, Any]) -> str:
    """A comparison in a line."""
    hits, accepted = (found["metrics"].get(name) for name in (HITS, ACCEPTED))
    return (
        f"{found['different_text']} of {found['requests']} texts differ, led by at most "
        f"{found['largest_lead']}; hits {hits}, accepted {accepted}; "
        f"{' : '.join(_name(run) for run in found['runs'])}"
    )


def _name(run: dict[str, Any]) -> str:
    whose, cache = "ours" if run["ours"] else "vLLM", "" if run["reads"] else ", cache unread"
    return f"{whose}, {run['blocks']} blocks{cache}"


def _lead(position: int, *gaps: list[float]) -> float | None:
    known = [run[position] for run in gaps if position < len(run)]
    return min(known, default=None)
