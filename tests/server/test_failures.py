"""A step that fails is told to those who were in it, in their form; the server goes on."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from helpers.http_server import MODEL, Running, completed, running, shipped

BODY = {"prompt": "import ", "max_tokens": 12, "temperature": 0}
ERRORS = 'hybrid_runtime_completions_total{finish_reason="error"}'


class Fault:
    """Raises in the forward pass that was chosen, counted from then on, when it may."""

    def __init__(self) -> None:
        self.left = -1
        self.may = threading.Event()
        self.may.set()

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            assert self.may.wait(60)
            raise ArithmeticError("injected")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, Fault]]:
    engine, fault = shipped(), Fault()
    engine.model.register_forward_pre_hook(fault)
    with running(engine) as server:
        yield server, fault


@pytest.fixture
def faulty(served: tuple[Running, Fault]) -> Iterator[tuple[Running, Fault]]:
    server, _ = served
    want = completed(server.post("completions", json=BODY))
    yield served
    assert completed(server.post("completions", json=BODY)) == want


CALLS: list[Callable[[Running], int]] = [
    lambda server: server.post("completions", json=BODY).status_code,
    lambda server: server.post("completions", json=BODY | {"stream": True}).status_code,
    lambda server: server.post("embeddings", json={"input": "x"}).status_code,
]


@pytest.mark.parametrize("call", range(3))
def test_before_the_first_token(faulty: tuple[Running, Fault], call: int) -> None:
    server, fault = faulty
    fault.left = 1
    assert CALLS[call](server) == 500
    fault.left = 1
    answer = server.post("completions", json=BODY)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "server_error")
    assert "injected" not in answer.text  # what went wrong inside is the log's
    assert answer.headers["x-request-id"]
    assert "server" not in answer.headers  # nor which software serves


def test_in_a_stream(faulty: tuple[Running, Fault], caplog: pytest.LogCaptureFixture) -> None:
    server, fault = faulty
    fault.left = 2
    fault.may.clear()
    body = BODY | {"stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert "choices" in next(lines)
        fault.may.set()
        *_, error, _, done, _ = lines
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "injected" in caplog.text


def test_in_a_stream_of_the_openai_client(faulty: tuple[Running, Fault]) -> None:
    server, fault = faulty
    fault.left, before = 2, server.metrics().get(ERRORS, 0)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fault.may.clear()
    stream = client.completions.create(
        model=MODEL, prompt="import ", max_tokens=12, temperature=0, stream=True
    )
    assert next(stream).choices
    fault.may.set()
    with pytest.raises(openai.APIError, match="failed on this request"):
        list(stream)
    assert server.metrics()[ERRORS] == before + 1


def test_an_engine_that_is_broken_is_not_healthy() -> None:
    def fail() -> None:
        raise ArithmeticError("injected")

    with running(shipped(drafter=None)) as server:
        assert server.http.get("/health").json() == {"status": "ok"}
        app: Any = server.server.config.app
        serving = app.app.state.service.engine
        serving._inbox.put(fail)
        serving._thread.join()
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "closed"})
        for path, body in (("completions", BODY), ("embeddings", {"input": "x"})):
            refused = server.post(path, json=body)
            assert refused.status_code == 503
            assert "the engine is closed or has failed" in refused.json()["error"]["message"]
            assert "injected" not in refused.text
            assert refused.headers["retry-after"] == "1"
        assert server.http.get("/metrics").status_code == 200
