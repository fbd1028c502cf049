"""A client that goes away takes its request along, and nothing else."""

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from helpers.http_server import Running, completed, running, shipped

from hybrid_runtime.engine import Engine, SamplingParams

LONG = {"prompt": "class Stack:", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "import ", "max_tokens": 12, "temperature": 0}
ABORTED = 'hybrid_runtime_completions_total{finish_reason="abort"}'
STATUS = 'hybrid_runtime_http_requests_total{path="/v1/completions",status="%d"}'


@pytest.fixture(scope="module")
def engine() -> Engine:
    return shipped(max_requests=2, max_model_len=4096)


@pytest.fixture(scope="module")
def want(engine: Engine) -> str:
    (answer,) = engine.generate(["import "], SamplingParams(max_tokens=12))
    engine.hand_over()
    return answer.text


@pytest.fixture
def served(engine: Engine, want: str) -> Iterator[Running]:
    with running(engine) as server:
        yield server
        assert completed(server.post("completions", json=SHORT)) == want


@contextmanager
def sent(
    server: Running, body: dict[str, Any], path: str = "completions"
) -> Iterator[socket.socket]:
    """A request whose answer nobody has read, on a connection of its own, which is then reset."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield connection
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.mark.parametrize("n", [1, 3])
def test_in_the_middle_of_a_stream(served: Running, want: str, n: int) -> None:
    with sent(served, LONG | {"stream": True, "n": n}) as connection:
        assert b"200 OK" in connection.recv(100)
    served.until(ABORTED, n)
    assert served.metrics()[STATUS % 200] == 1  # its head had been sent


@pytest.mark.parametrize("stream", [False, True])
def test_before_any_answer(served: Running, stream: bool) -> None:
    """While it waits behind others."""
    with sent(served, LONG | {"n": 2}):
        served.until("hybrid_runtime_requests_running", 2)
        with sent(served, LONG | {"n": 2, "stream": stream}):
            served.until("hybrid_runtime_requests_waiting", 2)
        served.until(ABORTED, 2)
        served.until(STATUS % 499, 1)
    served.until(ABORTED, 4)
    served.until(STATUS % 499, 2)


def test_while_others_are_served(served: Running, want: str) -> None:
    with sent(served, LONG | {"stream": True}) as connection:
        assert connection.recv(100)
        assert completed(served.post("completions", json=SHORT)) == want
    assert completed(served.post("completions", json=SHORT | {"stream": True})) == want
    served.until(ABORTED, 1)


def test_who_does_not_read_holds_nobody_up(served: Running, want: str) -> None:
    """The engine runs on; the text waits for its reader."""
    body = LONG | {"stream": True, "max_tokens": 60, "return_token_ids": True}
    with sent(served, body):
        served.until("hybrid_runtime_requests_running", 1)
        assert completed(served.post("completions", json=SHORT)) == want
        served.until("hybrid_runtime_requests_running", 0)


def test_an_embedding(served: Running) -> None:
    inputs = ["x = 1\n" * 600] * 12
    with sent(served, {"input": inputs}, "embeddings"):
        served.until("hybrid_runtime_requests_running", 2)
    served.until("hybrid_runtime_requests_running", 0)
    served.until('hybrid_runtime_http_requests_total{path="/v1/embeddings",status="499"}', 1)


def test_in_the_middle_of_a_body(served: Running) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        )
        served.until("hybrid_runtime_http_requests_open", 2)
    served.until("hybrid_runtime_http_requests_open", 1)


def test_what_takes_longer_than_the_drain_ends_as_aborted(
    engine: Engine, want: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream with a last chunk, `[DONE]` and the usage; a whole answer with what it has."""
    body = LONG | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    with running(engine, drain_seconds=0.05) as server, ThreadPoolExecutor() as pool:
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            begun = [next(lines)]
            whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
            server.until("hybrid_runtime_requests_waiting", 1)
            server.server.should_exit = True
            *events, done = [line for line in (*begun, *lines) if line]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert (done, reasons.count("abort")) == ("data: [DONE]", 2)
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert whole.result().json()["choices"][0]["finish_reason"] == "abort"
    assert [record for record in caplog.records if record.exc_info] == []


def test_who_does_not_read_holds_no_drain_up(
    engine: Engine, want: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine, drain_seconds=0.05) as server, sent(server, LONG | {"stream": True}):
        server.until("hybrid_runtime_requests_running", 1)
        server.server.should_exit = True
    assert [record for record in caplog.records if record.exc_info] == []
