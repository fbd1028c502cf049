"""`/tokenize`, `/detokenize`, `/version` and `/ping`, as vLLM has them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.http_server import MODEL, Running, running, shipped

from hybrid_runtime.engine.chat import ChatTemplate

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    engine = shipped(drafter=None)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, {"default": "here"})
    with running(engine, api_keys=("key",), max_body_bytes=1000) as server:
        server.http.headers["authorization"] = "Bearer key"
        yield server


@pytest.mark.parametrize("text", ["def é(😀):", ""])
def test_there_and_back(served: Running, text: str) -> None:
    asked = {"model": MODEL, "prompt": text, "return_token_strs": True}
    found = served.http.post("/tokenize", json=asked).json()
    strings = found.pop("token_strs")
    ids = list(text.encode())
    assert found == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    assert strings == [tokenizer.id_to_token(id) for id in ids]
    plain = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert plain.json() == found | {"token_strs": None}
    back = served.http.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text}


def test_a_conversation(served: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"mood": "good"},
    }  # fmt: skip
    found = served.http.post("/tokenize", json=body).json()
    assert bytes(found["tokens"]).decode() == "user: x\ngood"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "one of them must be given"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages", "at least 1 item"),
        ("/tokenize", {"prompt": [1]}, "prompt", "valid string"),
        ("/tokenize", {"prompt": "x", "tools": [1]}, "tools", "not supported"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens", "must be false",
        ),
        ("/detokenize", {}, "tokens", "Missing required"),
        ("/detokenize", {"tokens": [97, 400]}, "tokens", "tokens has 400"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "tokens.0 is -1"),
    ],
)  # fmt: skip
def test_wrong_bodies(
    served: Running, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = served.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_they_are_guarded_as_the_others(served: Running, path: str) -> None:
    keyless = {"authorization": ""}
    assert served.http.post(path, json={"prompt": "x"}, headers=keyless).status_code == 401
    assert served.http.post(path, json={"prompt": "x" * 1000}).status_code == 413


def test_version_and_ping(served: Running) -> None:
    keyless = {"authorization": ""}
    version = importlib.metadata.version("hybrid-runtime")
    assert served.http.get("/version", headers=keyless).json() == {"version": version}
    for method in ("GET", "POST"):
        answer = served.http.request(method, "/ping", headers=keyless)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
