"""What cannot be served is refused in OpenAI's form, and harms nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from helpers.http_server import Running, running, shipped

from hybrid_runtime.server import schemas


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
    assert len(found["message"].splitlines()) == 1
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
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be greater"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens", "[0, 16], at most max_tokens"),
    ({"prompt": "x", "bad_words": [""]}, "bad_words", "non-empty"),
    ({"prompt": "x", "bad_words": ["\ud800"]}, "bad_words.0", '"\\ud800"; it holds a lone'),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"prompt": "x", "allowed_token_ids": [1, 400]}, "allowed_token_ids", "400"),
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
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "has keys ['a']"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias", "400"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", "integers >= 0"),
    ({"prompt": "x", "repetition_penalty": 1e-38}, "repetition_penalty", "1e-38, must be a number"),
    ({"prompt": "x", "repetition_penalty": 1e39}, "repetition_penalty", "in [1e-30, 1e+30]"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "must be null"),
    ({"prompt": "x", "suffix": "y"}, "suffix", 'suffix is "y"; not supported'),
    ({"prompt": "x", "best_of": 4}, "best_of", "best_of is 4; not supported"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "is true; not supported"),
    ({"prompt": "x", "priority": 1}, "priority", "must be null or 0"),
    ({"prompt": "x", "add_special_tokens": False}, "add_special_tokens", "must be null or true"),
    ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "is 1; not supported"),
    ({"prompt": "x", "vllm_xargs": {"a": 1}}, "vllm_xargs", '{"a": 1}'),
    ({"prompt": "x", "\ud800\n": 1}, "\\ud800", "Unrecognized request argument"),
    ({"prompt": "x", "a\nb": "c" * 999}, "a b", 'which is "ccc'),
    ({"prompt": "x", "stream": "yes"}, "stream", "valid boolean"),
    ({"prompt": "x", "stream_options": {}}, "stream_options", "null unless stream is true"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"prompt": "x", "cache_salt": "\udfff"}, "cache_salt", "unicode string"),
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
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "seed": -1, "stop": "",
        "top_k": 2**31, "store": True, "metadata": {"a": "b"}, "request_id": "mine",
        "use_beam_search": False, "length_penalty": 2.0, "priority": 0, "add_special_tokens": True,
        "response_format": {"type": "text"}, "vllm_xargs": {}, "thinking_token_budget": -1,
    }  # fmt: skip
    assert served.post("completions", json=body).status_code == 200
    assert served.post("completions", json=body | {"stop": ["", "b"]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "needed"),
    [
        ("completions", schemas.CompletionBody, {"prompt": "x", "max_tokens": 1}),
        ("embeddings", schemas.EmbeddingBody, {"input": "x"}),
    ],
)
def test_null_is_the_default_of_every_field(
    served: Running, path: str, body: Any, needed: dict[str, Any]
) -> None:
    given = dict.fromkeys(body.model_fields) | needed
    assert served.post(path, json=given).status_code == 200


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
