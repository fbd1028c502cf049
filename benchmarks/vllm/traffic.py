"""The requests of `serve.py serve`, and driving an engine through them."""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def empty(llm: Any) -> None:
    """Forget cached prefixes. A step that was queued ahead may hold blocks."""
    for _ in range(3):
        if llm.llm_engine.reset_prefix_cache():
            return
        llm.llm_engine.step()
    raise RuntimeError("vLLM kept its prefix cache; runs would hit each other's prompts")


@contextmanager
def held_back(llm: Any, blocks: int) -> Iterator[None]:
    """Keep so many blocks of the cache, which nobody uses, out of the pool."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(blocks)
    try:
        yield
    finally:
        pool.free_blocks(held)


def drive(
    llm: Any,
    requests: list[Any],
    at_once: int,
    tag: str,
    reads: bool = True,
    between: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Serve all requests, at most `at_once` at a time; each one's tokens, by how much the best
    log-probability of each token's position led, and cached prefix tokens. reads: start from
    cached prefixes. between: called after every step."""
    from vllm import SamplingParams

    engine, todo = llm.llm_engine, iter(enumerate(requests))
    tokens: dict[int, list[int]] = {}
    gaps: dict[int, list[float]] = {}
    cached: dict[int, int] = {}
    running: set[int] = set()

    def submit() -> None:
        for number, (prompt, length, _) in todo:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
                skip_reading_prefix_cache=not reads,
            )
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
            gaps[number] = [lead(found) for found in output.outputs[0].logprobs or ()]
            running.discard(number)
            submit()
        if between is not None:
            between()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - started
    return {
        "tokens": [tokens[n] for n in sorted(tokens)],
        "gaps": [gaps[n] for n in sorted(gaps)],
        "cached": [cached[n] for n in sorted(cached)],
        "calls": steps,
        "seconds": seconds,
    }


def lead(logprobs: Any) -> float:
    """By how much the best of a position's log-probabilities is ahead of the second."""
    best, second, *_ = sorted((one.logprob for one in logprobs.values()), reverse=True)
    return float(f"{best - second:.3g}")
