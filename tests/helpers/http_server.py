"""A server of this package in a thread, on a port of its own.

`served`, `client` and `alone` are fixtures of all tests in tests/server, one each per process.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from helpers.small_engine import nothing_leaked
from prometheus_client.parser import text_string_to_metric_families

from hybrid_runtime import demo
from hybrid_runtime.engine import Engine
from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.server.options import ServerOptions
from hybrid_runtime.server.run import Server, bind, url

MODEL = "python-small"
SIZES: dict[str, Any] = {
    "device": "cpu", "drafter": "mtp", "max_requests": 4, "max_model_len": 256, "block_size": 16,
    "max_waiting": 64,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ mood }}def {% endif %}"
)


def shipped(**options: Any) -> Engine:
    """An engine of the shipped checkpoint, which any thread may take."""
    return Engine.from_pretrained(demo.SHIPPED, **SIZES | options)


@dataclass(frozen=True)
class Running:
    url: str
    engine: Engine
    server: Server
    http: httpx.Client

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", **options)

    def metrics(self) -> dict[str, float]:
        """Samples by name, with their labels as Prometheus writes them, but for that of all."""
        found = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                given = dict(sample.labels)
                assert given.pop("model_name") == MODEL
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(given.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def until(self, sample: str, value: float) -> None:
        """Return when this sample has this value."""
        end = time.monotonic() + 60
        while self.metrics().get(sample, 0.0) != value:
            assert time.monotonic() < end, f"{sample} is not {value}"


def completed(answer: httpx.Response) -> str:
    """The text of a completion, which came whole or in a stream."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["text"]
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Running]:
    """Serve an engine. In the end the server drains, and nothing may be left in the engine."""
    ready, bound = threading.Event(), bind("127.0.0.1", 0)
    address = url(bound)
    server = Server(engine, ServerOptions(**{"model_name": MODEL} | options), ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), name="server")
    thread.start()
    try:
        assert ready.wait(60)
        with httpx.Client(base_url=address, timeout=60, verify=False) as http:
            yield Running(address, engine, server, http)
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()
    nothing_leaked(engine)


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """The server of tests that leave nothing behind, for requests of at most 8 results."""
    engine = shipped()
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, {"default": "here"})
    with running(engine, max_body_bytes=100_000, max_choices=8) as server:
        yield server
        good = server.post("completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


@pytest.fixture(scope="session")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def alone() -> Engine:
    """An engine that shows what a request gets by itself."""
    return shipped(max_requests=1)
