"""The soak through the HTTP server: clients that stream, wait, leave, set deadlines and come too
many at once, while drafters and allocations fail. Each finished text must be the one that the
request gets alone; each that was cut short must be its beginning; nothing may be left behind.

    python benchmarks/engine/soak_http.py --short
    python benchmarks/engine/soak_http.py

Server and clients share a process, so that faults can be injected and the engine looked into; they
talk over sockets. Every client sends one request after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import httpx
import torch
from record import arguments, save
from soak import (
    CHECKPOINT,
    SAMPLES,
    Case,
    FailingDrafter,
    Fault,
    Injected,
    Judge,
    at_rest,
    build,
    catalogue,
    used,
)

from hybrid_runtime.engine import Engine
from hybrid_runtime.server.options import ServerOptions
from hybrid_runtime.server.run import Server, bind, url

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class Unexpected(logging.Handler):
    """Counts exceptions in the log that this benchmark has not caused."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.ERROR)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Injected):
            self._counts["unexpected errors"] += 1
            print(record.getMessage(), repr(error), flush=True)


class Clients:
    """The load: what was asked, what came back."""

    def __init__(
        self, args: argparse.Namespace, cases: list[Case], counts: Counter[str], fault: Fault
    ) -> None:
        self.memory: list[list[int]] = []
        self._args, self._cases, self._counts, self._fault = args, cases, counts, fault
        self._judge = Judge(args)
        self._random = random.Random(args.seed)

    async def run(self, address: str) -> None:
        """All clients at once, until so many requests have been taken."""
        async with httpx.AsyncClient(base_url=address, timeout=600, limits=LIMITS) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self._args.clients)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self._counts["submitted"] < self._args.requests:
            self._counts["submitted"] += 1
            case = self._random.choice(self._cases)
            if self._random.random() < self._args.faults:
                self._fault.armed = self._random.choice(["drafter", "allocation"])
            leaves = self._random.random() < 0.1
            body = self._body(case)
            tokens: list[int] = []
            text = [""]
            answer = asyncio.create_task(self._ask(http, body, tokens, text, leaves))
            if leaves and not body["stream"]:
                await asyncio.wait({answer}, timeout=self._random.random() * 0.3)
                answer.cancel()
            await asyncio.wait({answer})
            reason = "left" if answer.cancelled() else answer.result()
            self._count(case, reason, tokens, text[0])
            if self._counts["submitted"] >= self._args.requests * len(self.memory) // SAMPLES:
                self.memory.append([self._counts["submitted"], *used()])

    def _body(self, case: Case) -> dict[str, Any]:
        params = case.params
        late = self._random.random() < 0.06
        return {
            "prompt": case.prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self._random.random() < 0.6,
            "cache_salt": "one" if self._random.random() < 0.7 else "two",
            "deadline": self._random.choice([0.0, 0.02, 0.1]) if late else None,
        }

    async def _ask(
        self,
        http: httpx.AsyncClient,
        body: dict[str, Any],
        tokens: list[int],
        text: list[str],
        leaves: bool,
    ) -> str:
        """Why it ended; tokens and text are filled as they come. A full queue is asked again."""
        while True:
            if body["stream"]:
                reason = await self._stream(http, body, tokens, text, leaves)
            else:
                answer = await http.post("/v1/completions", json=body)
                reason = str(answer.status_code)
                if reason == "200":
                    (choice,) = answer.json()["choices"]
                    tokens += choice["token_ids"]
                    text[0], reason = choice["text"], choice["finish_reason"]
            if reason != "429":
                return "error" if reason == "500" else reason
            self._counts["queue full"] += 1
            await asyncio.sleep(self._random.random() * 2)

    async def _stream(
        self,
        http: httpx.AsyncClient,
        body: dict[str, Any],
        tokens: list[int],
        text: list[str],
        leaves: bool,
    ) -> str:
        left = self._random.randrange(8)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            async with aclosing(_events(answer)) as events:
                async for event in events:
                    if "error" in event:
                        return "error"
                    (choice,) = event["choices"]
                    tokens += choice["token_ids"]
                    text[0] += choice["text"]
                    if choice["finish_reason"]:
                        return str(choice["finish_reason"])
                    left -= 1
                    if leaves and left < 0:
                        return "left"
        return "cut"

    def _count(self, case: Case, reason: str, tokens: list[int], text: str) -> None:
        self._counts[f"ended by {reason}"] += 1
        if reason not in ("stop", "length", "deadline", "error", "left"):
            self._counts["unexpected errors"] += 1
        whole = reason in ("stop", "length")
        verdict = self._judge(case, tokens, whole)
        known = case.text if whole else case.text[: len(text)]
        if verdict == "right" and text != known and whole:
            verdict = "wrong"
        self._counts[verdict if whole else f"beginnings {verdict}"] += 1


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def soak(args: argparse.Namespace, counts: Counter[str]) -> tuple[Engine, list[list[int]]]:
    """Serve, load, drain; the engine at rest, and memory as it went."""
    cases = catalogue(args)
    engine, fault = build(args, alone=False), Fault(counts)
    engine.capture()
    engine.runner.drafter = FailingDrafter(engine.runner.drafter, fault)
    engine.model.register_forward_pre_hook(lambda *_: fault("allocation"))
    engine.hand_over()
    for name in ("uvicorn", "hybrid_runtime"):
        logging.getLogger(name).addHandler(Unexpected(counts))
        logging.getLogger(name).propagate = False
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    address = url(bound)
    server = Server(engine, ServerOptions(model_name="soak"), ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    ready.wait()
    clients = Clients(args, cases, counts, fault)
    try:
        asyncio.run(clients.run(address))
    finally:
        server.should_exit = True
        thread.join()
    return engine, clients.memory


def run(args: argparse.Namespace) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    torch.set_num_threads(1)  # operations of the shipped checkpoint are too small for more
    started = time.perf_counter()
    engine, memory = soak(args, counts)
    counts["seconds"] = round(time.perf_counter() - started)
    options = {k: str(v) for k, v in vars(args).items() if k != "out"}
    return {"options": options} | at_rest(engine, counts, memory)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__, "default: none")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=100)
    parser.add_argument("--longest", type=int, default=32, help="tokens that a request asks for")
    parser.add_argument("--faults", type=float, default=0.05, help="chance per request")
    parser.add_argument("--max-requests", type=int, default=8)
    parser.add_argument("--max-waiting", type=int, default=12)
    parser.add_argument("--blocks", type=int, nargs=2, default=(48, 20), help="KV and state")
    parser.add_argument("--host-blocks", type=int, nargs=2, default=(100, 60))
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="with an MTP head")
    parser.add_argument("--state-layout", default="replay")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="what the tests run")
    args = parser.parse_args(argv)
    if args.short:
        small = {
            "requests": 80, "distinct": 8, "longest": 16, "clients": 20, "max_requests": 4,
            "max_waiting": 6, "blocks": (30, 14), "host_blocks": (60, 40),
        }  # fmt: skip
        args = argparse.Namespace(**vars(args) | small)
    return args


if __name__ == "__main__":
    asked = parsed()
    found = run(asked)
    if asked.out:
        print(save("soak-http", found, asked.out))
    print(json.dumps(found["counts"] | {"left": found["left"]}, indent=2))
