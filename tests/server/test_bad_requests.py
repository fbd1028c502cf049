"""What cannot be served is refused in OpenAI's form, and harms nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from helpers.http_server import Running, running, shipped


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(shipped(drafter=None), max_body_bytes=100_000, max_choices=8) as server:
        yield server
        good = server.post("completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's four fields and no others."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["type"] == ("invalid_request_error" if status != 429 else "rate_limit_error")
    assert response.headers["x-request-id"]
    return found


BODIES = [
    (b"", "must be a JSON object"),
    (b"{", "is not JSON"),
    (b"nonsense", "is not JSON"),
    (b'{"prompt": "x"', "is not JSON"),
    (b"[]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b"\xff\xfe\x00", "error parsing the body"),
    (b"[" * 50_000, "error parsing the body"),
    (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "error parsing the body"),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["completions", "embeddings"])
def test_malformed(served: Running, path: str, body: bytes, message: str) -> None:
    answer = served.post(path, content=body, headers={"content-type": "application/json"})
    assert message in error(answer, 400)["message"]


FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Missing required parameter: prompt"),
    ({"prompt": "x", "tempreature": 1}, "tempreature", "Unrecognized request argument supplied"),
    ({"prompt": 3}, "prompt", "must be a string, an array"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[1], "x", 2]}, "prompt", "each prompt must be"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": [400]}, "prompt", "token 400"),
    ({"prompt": [-1]}, "prompt", "must be a string"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"prompt": "x", "stop": "\ud800"}, "stop.0", "surrogate"),
    ({"prompt": "x", "stop": [1]}, "stop.0", "valid string"),
    ({"prompt": "x", "stop": [""]}, "stop.0", "at least 1 item"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"prompt": "x", "max_tokens": 256}, "prompt", "context is 256 tokens, but 257"),
    ({"prompt": "x" * 300}, "prompt", "context is 256 tokens, but 316"),
    ({"prompt": "x", "temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", "finite"),
    ({"prompt": "x", "temperature": True}, "temperature", "valid number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "seed": 2**63}, "seed", "less than"),
    ({"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "x", "n": 9}, "n", "at most 8"),
    ({"prompt": ["x"] * 3, "n": 3}, "n", "asks for 9 results; at most 8"),
    ({"prompt": "x", "deadline": float("inf")}, "deadline", "finite"),
    ({"prompt": "x", "deadline": -1}, "deadline", "greater than or equal to 0"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "no token id"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21"),
    ({"prompt": "x", "logprobs": 1, "echo": True}, "echo", "must be false with logprobs"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "best_of": 4}, "best_of", "Input should be 1"),
    ({"prompt": "x", "stream": "yes"}, "stream", "valid boolean"),
    ({"prompt": "x", "stream_options": {}}, "stream_options", "null unless stream is true"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"prompt": "x", "model": 1}, "model", "valid string"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), FIELDS, ids=range(len(FIELDS)))
def test_wrong_field(served: Running, body: dict[str, Any], param: str, message: str) -> None:
    answer = served.post(  # as text, because httpx writes no NaN
        "completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    found = error(answer, 400)
    assert (found["param"], message in found["message"]) == (param, True), found
    if "context" in message:
        assert found["code"] == "context_length_exceeded"


@pytest.mark.parametrize("wrong", [{"prompt": "x" * 300}, {"top_p": 2}, {"logprobs": 21}])
def test_a_stream_that_cannot_begin_is_an_error_not_a_stream(
    served: Running, wrong: dict[str, Any]
) -> None:
    error(served.post("completions", json={"prompt": "x", "stream": True} | wrong), 400)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "Missing required parameter"),
        ({"input": "x", "pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"input": "x", "dimensions": 7}, "dimensions", "must be 192"),
        ({"input": ["x"] * 9}, "input", "at most 8"),
        ({"input": ["x", ""]}, "input", "prompt is empty"),
        ({"input": ["x", "y" * 257]}, "input", "context is 256 tokens"),
        ({"input": "x", "instruction": "\ud800"}, "instruction", "surrogate"),
        ({"input": [[1]], "instruction": "Code: "}, "input", "instruction is a str"),
    ],
)
def test_wrong_embedding(served: Running, body: dict[str, Any], param: str, message: str) -> None:
    answer = served.post(
        "embeddings", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    found = error(answer, 400)
    assert (found["param"], message in found["message"]) == (param, True), found


def test_what_asks_for_nothing_is_accepted(served: Running) -> None:
    body = {
        "prompt": "x", "max_tokens": 1, "suffix": None, "best_of": None, "user": "me",
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "seed": -1, "stop": None,
    }  # fmt: skip
    assert served.post("completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/nothing", 404),
        ("GET", "/", 404), ("GET", "/v1/models/gpt-9", 404), ("POST", "/health", 405),
    ],
)  # fmt: skip
def test_wrong_place(served: Running, method: str, path: str, status: int) -> None:
    error(served.http.request(method, path), status)


def test_a_body_must_call_itself_json(served: Running) -> None:
    """As a page in a browser, which may post text anywhere, cannot without leave."""
    answer = served.post("completions", content=b'{"prompt": "x"}')
    assert "application/json" in error(answer, 400)["message"]


def test_the_client_raises_its_own_errors(served: Running) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="python-small", prompt="x", max_tokens=1000)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
