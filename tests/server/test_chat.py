"""Chat completions: the template's prompt, and the answer in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.http_server import MODEL, Running, running, shipped

from hybrid_runtime.engine import SamplingParams
from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.server.schemas import ChatBody

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}def "
)
MESSAGES: list[Any] = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None},
    {"role": "user", "content": "z", "name": "me"},
]
PROMPT = "system: x\nuser: a\nb\nassistant: y\nuser: z\ngood def "


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    engine = shipped()
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, {"default": "here"})
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def want() -> str:
    return shipped(max_requests=1).generate([PROMPT], SamplingParams(max_tokens=20))[0].text


ASKED: dict[str, Any] = {
    "model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20,
    "extra_body": {"chat_template_kwargs": {"mood": "good "}},
}  # fmt: skip


def test_whole(client: openai.OpenAI, want: str) -> None:
    answer = client.chat.completions.create(**ASKED, n=2)
    assert answer.object == "chat.completion"
    for index, choice in enumerate(answer.choices):
        assert (choice.index, choice.finish_reason) == (index, "length")
        assert (choice.message.role, choice.message.content) == ("assistant", want)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_tokens"])
def test_no_tokens_are_not_as_many_as_there_is_room_for(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(**ASKED | {"max_completion_tokens": None, name: 0})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_stream(client: openai.OpenAI, want: str) -> None:
    chunks = list(
        client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    deltas = [chunk.choices[0].delta for chunk in parts]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == want
    assert (deltas[-1].content, parts[-1].choices[0].finish_reason) == (None, "length")
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert last.usage is not None
    assert last.usage.total_tokens == len(PROMPT) + 20


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, want: str, stream: bool) -> None:
    asked = ASKED | {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = client.chat.completions.create(**asked)
    parts: list[Any] = [each.choices[0].logprobs for each in (answer if stream else [answer])]
    told = [each for part in parts if part for each in part.content or ()]
    assert "".join(each.token for each in told) == want
    for each in told:
        assert bytes(each.bytes or ()).decode() == each.token
        likeliest, second = each.top_logprobs
        assert (likeliest.token, likeliest.logprob) == (each.token, each.logprob)  # it is greedy
        assert second.logprob <= likeliest.logprob <= 0


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    message: Any = answer.choices[0].message.model_dump()
    again = ASKED | {"messages": [*MESSAGES, message, {"role": "user", "content": "and?"}]}
    assert client.chat.completions.create(**again).choices[0].message.content


def test_as_many_tokens_as_there_is_room_for(served: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 220}], "ignore_eos": True}
    usage = served.post("chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 256


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
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
    ],
)  # fmt: skip
def test_wrong_field(served: Running, wrong: dict[str, Any], param: str, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2} | wrong
    answer = served.post(
        "chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


def test_what_changes_nothing_is_accepted(served: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [],
        "store": True,
        "tool_choice": "none", "response_format": {"type": "text"}, "metadata": {"a": "b"},
        "service_tier": "auto", "parallel_tool_calls": True, "logprobs": False, "user": "me",
        "continue_final_message": False, "add_generation_prompt": True, "documents": [],
        "include_reasoning": False,
    }  # fmt: skip
    assert served.post("chat/completions", json=body).status_code == 200
    nothing = dict.fromkeys(ChatBody.model_fields) | {"messages": body["messages"], "max_tokens": 1}
    assert served.post("chat/completions", json=nothing).status_code == 200


def test_a_checkpoint_without_a_template() -> None:
    with running(shipped(drafter=None)) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = server.post("chat/completions", json=body)
        assert answer.status_code == 400
        assert "has no chat template" in answer.json()["error"]["message"]
