"""What cannot be served is refused, before it runs, with one error in OpenAI's form."""

import json
from typing import Any

import httpx
import openai
import pytest
from helpers.http_server import Running

from hybrid_runtime.server import schemas

MESSAGE = {"role": "user", "content": "x"}


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


FIELDS: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str, str]]]] = {
    "/v1/completions": ({"prompt": "x"}, [
        ({"prompt": ...}, "prompt", "Missing required parameter: prompt"),
        ({"tempreature": 1}, "tempreature", "Unrecognized request argument supplied"),
        ({"prompt": 3}, "prompt", "must be a string, an array"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": [[1], "x", 2]}, "prompt", "each prompt must be"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": [[]]}, "prompt", "prompt is empty"),
        ({"prompt": [400]}, "prompt", "token 400"),
        ({"prompt": [-1]}, "prompt", "must be a string"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ({"stop": "\ud800"}, "stop.0", "surrogate"),
        ({"stop": [1]}, "stop.0", "valid string"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be greater"),
        ({"min_tokens": 17}, "min_tokens", "[0, 16], at most max_tokens"),
        ({"bad_words": [""]}, "bad_words", "non-empty"),
        ({"bad_words": ["\ud800"]}, "bad_words.0", '"\\ud800"; it holds a lone'),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [1, 400]}, "allowed_token_ids", "400"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 256}, "prompt", "context is 256 tokens, but 257"),
        ({"prompt": "x" * 300}, "prompt", "context is 256 tokens, but 316"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 9}, "n", "at most 8"),
        ({"prompt": ["x"] * 3, "n": 3}, "n", "asks for 9 results; at most 8"),
        ({"deadline": float("inf")}, "deadline", "finite"),
        ({"deadline": -1}, "deadline", "greater than or equal to 0"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "has keys ['a']"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({"logit_bias": {"400": 1}}, "logit_bias", "400"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "integers >= 0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "1e-38, must be a number"),
        ({"repetition_penalty": 1e39}, "repetition_penalty", "in [1e-30, 1e+30]"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "must be null"),
        ({"suffix": "y"}, "suffix", 'suffix is "y"; not supported'),
        ({"best_of": 4}, "best_of", "best_of is 4; not supported"),
        ({"use_beam_search": True}, "use_beam_search", "is true; not supported"),
        ({"priority": 1}, "priority", "must be null or 0"),
        ({"add_special_tokens": False}, "add_special_tokens", "must be null or true"),
        ({"add_special_tokens": 1}, "add_special_tokens", "is 1; not supported"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", '{"a": 1}'),
        ({"\ud800\n": 1}, "\\ud800", "Unrecognized request argument"),
        ({"a\nb": "c" * 999}, "a b", 'which is "ccc'),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {}}, "stream_options", "null unless stream is true"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"cache_salt": "\udfff"}, "cache_salt", "unicode string"),
        ({"model": 1}, "model", "valid string"),
    ]),
    "/v1/chat/completions": ({"messages": [MESSAGE], "max_tokens": 2}, [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "x"}, "messages", "valid list"),
        ({"messages": [{"role": "abacus", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Missing required"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages", "no developers"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "surrogate"),
        ({"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs", "surrogate"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context is 256"),
        ({"max_tokens": 256}, "messages", "context is 256"),
        ({"top_logprobs": 3}, "top_logprobs", "must be 0 unless logprobs"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logit_bias": {"400": 1}}, "logit_bias", "400"),
        ({"chat_template": "x"}, "chat_template", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"prompt": "x"}, "prompt", "Unrecognized request argument"),
    ]),
    "/v1/embeddings": ({"input": "x"}, [
        ({"input": ...}, "input", "Missing required parameter"),
        ({"pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"dimensions": 7}, "dimensions", "must be 192"),
        ({"input": ["x"] * 9}, "input", "at most 8"),
        ({"input": ["x", ""]}, "input", "prompt is empty"),
        ({"input": ["x", "y" * 257]}, "input", "context is 256 tokens"),
        ({"instruction": "\ud800"}, "instruction", "surrogate"),
        ({"input": [[1]], "instruction": "Code: "}, "input", "instruction is a str"),
    ]),
    "/tokenize": ({}, [
        ({}, "prompt", "one of them must be given"),
        ({"prompt": "x", "messages": []}, "messages", "at least 1 item"),
        ({"prompt": [1]}, "prompt", "valid string"),
        ({"prompt": "x", "tools": [1]}, "tools", "not supported"),
        (
            {"messages": [MESSAGE], "add_special_tokens": True},
            "add_special_tokens", "must be false",
        ),
    ]),
    "/detokenize": ({}, [
        ({}, "tokens", "Missing required"),
        ({"tokens": [97, 400]}, "tokens", "tokens has 400"),
        ({"tokens": [-1]}, "tokens.0", "tokens.0 is -1"),
    ]),
}  # fmt: skip
"""By path: a body that is right, and wrong changes of it (`...` leaves a field out) with the field
that the error names and a part of its message."""


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [(path, *row) for path, (_, rows) in FIELDS.items() for row in rows],
    ids=[f"{path}-{i}" for path, (_, rows) in FIELDS.items() for i in range(len(rows))],
)
def test_wrong_field(
    served: Running, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    body = {name: value for name, value in (FIELDS[path][0] | change).items() if value is not ...}
    answer = served.http.post(  # as text, because httpx writes no NaN
        path, content=json.dumps(body), headers={"content-type": "application/json"}
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
    chat = {
        "messages": [MESSAGE], "max_tokens": 1, "tools": [],
        "tool_choice": "none", "parallel_tool_calls": True, "logprobs": False, "documents": [],
        "continue_final_message": False, "add_generation_prompt": True, "include_reasoning": False,
        "response_format": {"type": "text"}, "service_tier": "auto",
    }  # fmt: skip
    assert served.post("chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "needed"),
    [
        ("completions", schemas.CompletionBody, {"prompt": "x", "max_tokens": 1}),
        ("chat/completions", schemas.ChatBody, {"messages": [MESSAGE], "max_tokens": 1}),
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


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="python-small", prompt="x", max_tokens=1000)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
