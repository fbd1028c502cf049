"""The requests of `serve.py serve`, driving an engine through them, and comparing two runs."""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any


def traffic(args: argparse.Namespace) -> list[tuple[list[int], int, int | None]]:
    """Prompts with shared prefixes (bytes are the checkpoint's tokens), tokens to generate, and
    after how many tokens to abort."""
    rng = random.Random(args.seed)
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(p.read_bytes() for p in sorted(root.glob("*.py"))[:60])
    prefixes = []
    for _ in range(12):
        start = rng.randrange(len(text) - 700)
        prefixes.append(text[start : start + rng.randrange(40, 600)])
    requests = []
    for _ in range(args.prompts):
        start = rng.randrange(len(text) - 400)
        prompt = rng.choice(prefixes) + text[start : start + rng.randrange(1, 300)]
        length = rng.randrange(16, args.tokens)
        abort = rng.randrange(4, length) if rng.random() < 0.1 else None
        requests.append((list(prompt), length, abort))
    return requests


def drive(llm: Any, requests: list[Any], at_once: int, tag: str) -> dict[str, Any]:
    """Serve all requests, at most `at_once` at a time; tokens and cached prefix tokens of each."""
    from vllm import SamplingParams

    engine, todo = llm.llm_engine, iter(enumerate(requests))
    tokens: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    running: set[int] = set()

    def submit() -> None:
        for number, (prompt, length, _) in todo:
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            engine.add_request(f"{tag}-{number}", {"prompt_token_ids": prompt}, params)
            running.add(number)
            return

    steps = 0
    started = time.perf_counter()
    for _ in range(at_once):
        submit()
    while running:
        steps += 1
        for output in engine.step():
            number = int(output.request_id.split("-")[1])
            if number not in running:
                continue
            tokens[number] = list(output.outputs[0].token_ids)
            cached[number] = output.num_cached_tokens or 0
            abort = requests[number][2]
            if abort is not None and len(tokens[number]) >= abort:
                engine.abort_request([output.request_id])
                # Steps in flight decide by how much it overshot.
                tokens[number] = tokens[number][:abort]
            elif not output.finished:
                continue
            running.discard(number)
            submit()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - started
    return {
        "tokens": [tokens[n] for n in sorted(tokens)],
        "cached": [cached[n] for n in sorted(cached)],
        "calls": steps,
        "seconds": seconds,
    }


def digest(tokens: list[int]) -> str:
    """Short stand-in for a text where only equality matters."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How two runs of the same requests differ; `first_differences` by request and position."""
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    places = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
    ]
    different = [n for n, (a, b) in enumerate(pairs) if a != b]
    cached = zip(one["cached"], other["cached"], strict=True)
    names = collections.ChainMap(one["metrics"], other["metrics"])
    return {
        "ours": [one["ours"], other["ours"]],
        "requests": len(pairs),
        "different_text": len(different),
        "first_differences": [(n, places[n]) for n in different[:10]],
        "different_prefix_hits": sum(a != b for a, b in cached),
        "metrics": {n: [one["metrics"].get(n), other["metrics"].get(n)] for n in sorted(names)},
    }
