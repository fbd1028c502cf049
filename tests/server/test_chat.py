"""Chat completions: the template's prompt, and the answer in OpenAI's form."""

from typing import Any

import openai
import pytest
from helpers.http_server import MODEL, Running

from hybrid_runtime.engine import Engine, SamplingParams

MESSAGES: list[Any] = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None},
    {"role": "user", "content": "z", "name": "me"},
]
PROMPT = "system: x\nuser: a\nb\nassistant: y\nuser: z\ngood def "


@pytest.fixture(scope="module")
def want(alone: Engine) -> str:
    return alone.generate([PROMPT], SamplingParams(max_tokens=20))[0].text


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


def test_the_next_prompt_goes_on_where_the_last_user_message_ended(client: openai.OpenAI) -> None:
    """Though the answer in it is another one than was given."""
    said: list[Any] = [{"role": "user", "content": "where a message ends, at any token"}]
    found = []
    for more in ([], [{"role": "assistant", "content": "?"}, {"role": "user", "content": "!"}]):
        answer = client.chat.completions.create(**ASKED | {"messages": said + more})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        found.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert found == [0, len(f"user: {said[0]['content']}\n")]


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
    entries = [each for part in parts if part for each in part.content or ()]
    assert "".join(each.token for each in entries) == want
    for each in entries:
        assert bytes(each.bytes or ()).decode() == each.token
        likeliest, second = each.top_logprobs
        assert (likeliest.token, likeliest.logprob) == (each.token, each.logprob)  # it is greedy
        assert second.logprob <= likeliest.logprob <= 0


def test_extensions_are_those_of_completions(served: Running, client: openai.OpenAI) -> None:
    body = {"temperature": 0, "max_tokens": 20, "prompt_logprobs": 2, "return_token_ids": True}
    (want,) = served.post("completions", json=body | {"prompt": PROMPT}).json()["choices"]
    chat = body | {"messages": MESSAGES} | ASKED["extra_body"]
    answer = served.post("chat/completions", json=chat).json()
    # A chat's prompt runs in chunks that end at its messages, so that rounding differs.
    for one, other in zip(answer["prompt_logprobs"], want["prompt_logprobs"], strict=True):
        assert (one and one.keys()) == (other and other.keys())
        for token in one or ():
            assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-4)
    assert answer["choices"][0]["token_ids"] == want["token_ids"]
    asked: Any = ASKED | {"extra_body": ASKED["extra_body"] | {"return_token_ids": True}}
    chunks: Any = client.chat.completions.create(**asked, stream=True)
    assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == want["token_ids"]


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    message: Any = answer.choices[0].message.model_dump()
    again = ASKED | {"messages": [*MESSAGES, message, {"role": "user", "content": "and?"}]}
    assert client.chat.completions.create(**again).choices[0].message.content


def test_as_many_tokens_as_there_is_room_for(served: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 220}], "ignore_eos": True}
    usage = served.post("chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 256


def test_a_checkpoint_without_a_template(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "chat_template", None)
    body = {"messages": [{"role": "user", "content": "x"}]}
    answer = served.post("chat/completions", json=body)
    assert answer.status_code == 400
    assert "has no chat template" in answer.json()["error"]["message"]
