"""Keys, sizes, floods: what is too much is refused at once, and the others are served."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from helpers.http_server import MODEL, Running, completed, running, shipped

from hybrid_runtime.engine import AsyncEngine, SamplingParams
from hybrid_runtime.server.app import create_app
from hybrid_runtime.server.options import ServerOptions

JSON = {"content-type": "application/json"}


@pytest.fixture
def guarded() -> Iterator[Running]:
    with running(shipped(drafter=None), api_keys=("one", "two"), max_body_bytes=1000) as server:
        yield server


def test_keys(guarded: Running) -> None:
    body = {"prompt": "a = 1\n" * 12, "max_tokens": 1}
    cached = []
    for key in ("Bearer one", "bearer one", "Bearer two"):
        answer = guarded.post("completions", json=body, headers={"authorization": key})
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 64, 0]  # a key finds what it has computed itself, and nobody else's
    for given in (None, "Bearer three", "one", "Basic one"):
        headers = {"authorization": given} if given else {}
        for path in ("/v1/models", "/v1/nothing", "/tokenize", "/detokenize"):
            answer = guarded.http.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ping", "/version"):
        assert guarded.http.get(path).status_code == 200
    assert guarded.metrics()['hybrid_runtime_http_requests_total{path="other",status="401"}'] == 4


def test_large_bodies(guarded: Running) -> None:
    """With their length in front, and in pieces without."""
    headers = {**JSON, "authorization": "Bearer one"}
    for path in ("/v1/completions", "/tokenize"):
        for content in (b" " * 1001, iter([b" " * 600, b" " * 600])):
            answer = guarded.http.post(path, content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
    # Who has no key is refused before a body is read.
    answer = guarded.post("completions", content=b" " * 10_000, headers=JSON)
    assert answer.status_code == 401


def test_pieces_of_a_body_are_added_up() -> None:
    """Each piece is small enough; a socket would join those that come at once."""
    options = ServerOptions(model_name=MODEL, max_body_bytes=1000)
    served = httpx.ASGITransport(create_app(AsyncEngine(shipped(drafter=None)), options))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 400

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=served, base_url="http://here") as client:
            return await client.post("/v1/completions", content=pieces(), headers=JSON)

    answer = asyncio.run(send())
    assert answer.status_code == 413
    assert "it may have 1000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_never_comes() -> None:
    with running(shipped(drafter=None), body_seconds=0.05) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b'content-length: 100\r\n\r\n{"prompt'
            )
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_flood_is_refused_and_the_others_are_served() -> None:
    """429 beyond the queue; who was let in gets its whole text."""
    engine = shipped(max_requests=1, max_waiting=2)
    body = {"prompt": "import ", "max_tokens": 40, "temperature": 0}
    (want,) = engine.generate(["import "], SamplingParams(max_tokens=40))
    engine.hand_over()

    async def flood(server: Running) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            sent = [
                client.post("/v1/completions", json=body | {"stream": i % 2 == 1})
                for i in range(16)
            ]
            return await asyncio.gather(*sent)

    with running(engine) as server:
        answers = asyncio.run(flood(server))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert "max_waiting is 2" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"
            else:
                assert completed(answer) == want.text
        for reason, status in (("length", 200), ("refused", 429)):
            name = f'hybrid_runtime_completions_total{{finish_reason="{reason}"}}'
            assert server.metrics()[name] == statuses.count(status)


def test_more_prompts_than_may_wait_take_turns() -> None:
    engine = shipped(max_requests=1, max_waiting=2, drafter=None)
    prompts = [f"{letter} = " for letter in "abcdefghij"]
    check = engine.check_queue
    asked: list[int] = []

    def counted() -> None:
        asked.append(0)
        check()

    wanted = [a.text for a in engine.generate(prompts[:2], SamplingParams(max_tokens=3))]
    engine.hand_over()
    engine.check_queue = counted  # type: ignore[method-assign]
    with running(engine) as server:
        body = {"prompt": prompts, "max_tokens": 3, "temperature": 0}
        answer = server.post("completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]][:2] == wanted
        assert len(answer["choices"]) == 10
        assert len(asked) < 60  # nobody asks again before there is room
        assert len(server.post("embeddings", json={"input": prompts}).json()["data"]) == 10


def test_open_requests_are_bounded() -> None:
    engine = shipped(max_model_len=4096)
    with running(engine, max_concurrency=1) as server:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        for _ in range(2):
            with server.http.stream("POST", "/v1/completions", json=body) as first:
                lines = first.iter_lines()  # the answer is closed when nobody holds them
                assert next(lines)
                refused = server.post("completions", json={"prompt": "x"})
                assert refused.status_code == 429
                assert "1 requests are open" in refused.json()["error"]["message"]
                assert server.http.get("/health").status_code == 200
            server.until("hybrid_runtime_http_requests_open", 1)  # the one that asks
            assert server.post("completions", json={"prompt": "x"}).status_code == 200
