"""The `openai` client gets what the engine gives, whole and in streams, alone and beside others."""

import asyncio
from functools import cache
from typing import Any

import openai
import pytest
from helpers.http_server import MODEL, Running, completed, running, shipped

from hybrid_runtime.engine import Engine, SamplingParams

PROMPTS = ["def main(", "import ", "class Stack:\n    def push(self, x):\n        ", "try:\n    "]


@cache
def text(alone: Engine, prompt: str, **params: object) -> str:
    return alone.generate([prompt], SamplingParams(**{"max_tokens": 24} | params))[0].text


def test_whole(client: openai.OpenAI, alone: Engine) -> None:
    prompt = PROMPTS[0]
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text(alone, prompt), "length")
    assert answer.usage is not None
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
    assert (*counts, answer.usage.total_tokens) == (len(prompt), 24, len(prompt) + 24)


def test_stream_of_token_ids(client: openai.OpenAI, alone: Engine) -> None:
    want = text(alone, PROMPTS[0])
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=list(PROMPTS[0].encode()), max_tokens=24, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *parts, last = chunks
    assert len(parts) > 3
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in parts) == want
    reasons = [chunk.choices[0].finish_reason for chunk in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 24)
    assert [chunk.usage for chunk in parts] == [None] * len(parts)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    """As clients of vLLM ask for it."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(
        model=MODEL, prompt=PROMPTS[:2], max_tokens=9, n=2, stream=True, stream_options=options
    )
    usage = [chunk.usage for chunk in chunks]
    assert {each.prompt_tokens for each in usage if each} == {len("".join(PROMPTS[:2]))}
    counts = [each.completion_tokens if each else 0 for each in usage]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 36)


def test_several_prompts_and_choices(client: openai.OpenAI, alone: Engine) -> None:
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8}
    want = [text(alone, prompt, **how, seed=seed) for prompt in PROMPTS for seed in (5, 6)]
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS, "n": 2, "seed": 5} | how
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    pieces = [""] * 8
    for chunk in client.completions.create(**asked, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == want


def test_ends_and_extensions(client: openai.OpenAI, alone: Engine) -> None:
    whole = text(alone, PROMPTS[2])
    stop = whole[10:13]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPTS[2], max_tokens=24, temperature=0, stop=stop, echo=True,
        extra_body={"return_token_ids": True, "top_k": -1, "cache_salt": "mine"},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.text == PROMPTS[2] + whole[: whole.index(stop)]
    assert choice.model_extra is not None
    assert bytes(choice.model_extra["token_ids"]).decode().startswith(whole[: whole.index(stop)])
    late = client.completions.create(
        model=MODEL, prompt="x", max_tokens=200, extra_body={"deadline": 0}
    )
    assert late.choices[0].finish_reason == "deadline"  # type: ignore[comparison-overlap]
    (short,) = client.completions.create(model=MODEL, prompt="import ", temperature=0).choices
    assert short.text == text(alone, "import ", max_tokens=16)  # OpenAI's own default


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, alone: Engine, stream: bool) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2)
    (want,) = alone.generate([PROMPTS[2]], params)
    assert want.logprobs is not None
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": PROMPTS[2], "max_tokens": 12, "temperature": 0, "logprobs": 2,
    }  # fmt: skip
    answer: Any = client.completions.create(**asked, stream=stream)
    parts = [each.choices[0].logprobs for each in (answer if stream else [answer])]
    tokens = [token for part in parts if part for token in part.tokens or ()]
    assert tokens == [chr(token) for token in want.tokens]
    found = [value for part in parts if part for value in part.token_logprobs or ()]
    assert found == pytest.approx([each.logprob for each in want.logprobs], abs=1e-3)
    top = [likely for part in parts if part for likely in part.top_logprobs or ()]
    assert [set(likely) for likely in top] == [
        {chr(token) for token, _ in each.top} for each in want.logprobs
    ]
    assert [at for part in parts if part for at in part.text_offset or ()] == list(range(12))


def test_what_shifts_the_choice(client: openai.OpenAI, alone: Engine) -> None:
    """Each field reaches the engine."""
    for name, value, here in (
        ("presence_penalty", 2.0, 2.0), ("frequency_penalty", 2.0, 2.0), ("min_p", 0.9, 0.9),
        ("repetition_penalty", 1.5, 1.5), ("top_k", 2, 2), ("top_p", 0.5, 0.5),
        ("logit_bias", {"97": 100}, {97: 100.0}), ("stop_token_ids", [32], (32,)),
        ("allowed_token_ids", [97, 98, 99], (97, 98, 99)), ("bad_words", ["s", "e"], ("s", "e")),
    ):  # fmt: skip
        how: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 5}
        (want,) = alone.generate([PROMPTS[0]], SamplingParams(**how | {name: here}))
        answer = client.completions.create(
            model=MODEL, prompt=PROMPTS[0], **how, extra_body={name: value}
        )
        assert answer.choices[0].text == want.text, name
        assert answer.choices[0].finish_reason == want.finish_reason


def test_what_shifts_the_end(client: openai.OpenAI, alone: Engine) -> None:
    """Of a text that a stop string would end; special tokens are in it where they are wanted."""
    whole = text(alone, PROMPTS[2])
    stop = whole[2:4]
    at = whole.index(stop)
    end = whole.index(stop, at + 1) if stop in whole[at + 1 :] else None
    special = alone.tokenizer.decode([256], skip_special_tokens=False) if alone.tokenizer else ""
    assert special
    for extra, want in (
        ({}, whole[:at]),
        ({"include_stop_str_in_output": True}, whole[: at + len(stop)]),
        ({"min_tokens": at + len(stop) + 1}, whole[:end]),
        ({"allowed_token_ids": [256], "max_tokens": 2}, ""),
        ({"allowed_token_ids": [256], "max_tokens": 2, "skip_special_tokens": False}, 2 * special),
    ):
        asked = {"prompt": PROMPTS[2], "max_tokens": 24, "temperature": 0, "stop": stop}
        more: dict[str, Any] = {"ignore_eos": True} | extra
        body: dict[str, Any] = asked | {"max_tokens": more.pop("max_tokens", 24)}
        answer = client.completions.create(model=MODEL, **body, extra_body=more)
        assert answer.choices[0].text == want, extra


def test_a_negative_seed_is_one_of_the_upper_half(client: openai.OpenAI, alone: Engine) -> None:
    texts = []
    for seed, here in ((-1, 2**63 - 1), (1, 1)):
        answer = client.completions.create(
            model=MODEL, prompt=PROMPTS[0], seed=seed, temperature=2.0, max_tokens=12
        )
        texts.append(answer.choices[0].text)
        assert texts[-1] == text(alone, PROMPTS[0], seed=here, temperature=2.0, max_tokens=12)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("default", "here"),
    [
        (SamplingParams(), {"temperature": 1.0}),
        (SamplingParams(temperature=0.7, top_k=5), {"temperature": 0.7, "top_k": 5}),
    ],
)
def test_what_is_left_out_is_the_checkpoints(
    served: Running, alone: Engine, monkeypatch: pytest.MonkeyPatch,
    default: SamplingParams, here: dict[str, Any],
) -> None:  # fmt: skip
    """Its `generation_config.json`, where that samples; else OpenAI's temperature of 1."""
    monkeypatch.setattr(served.engine, "default_params", default)
    body = {"prompt": PROMPTS[1], "seed": 1, "max_tokens": 8}
    for given in ({}, {"temperature": 0.4}, {"top_k": 2}):
        want = text(alone, PROMPTS[1], seed=1, max_tokens=8, **here | given)
        assert completed(served.post("completions", json=body | given)) == want


def test_a_prefix_is_found_by_the_same_salt_only(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int | None:
        answer = client.completions.create(
            model=MODEL, prompt="a = 1\n" * 12, max_tokens=2, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("one"), cached("two")] == [0, 64, 0]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    for call in (
        lambda: client.models.retrieve("gpt-9"),
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.embeddings.create(model="gpt-9", input="x"),
    ):
        with pytest.raises(openai.NotFoundError, match="must be 'python-small'"):
            call()


def many(served: Running, alone: Engine, clients: int, tokens: int) -> None:
    """That many at once, every second one in a stream, get the texts that each gets alone."""
    prompts = [PROMPTS[i % 4] + "\n" * (i // 4) for i in range(8)]
    wanted = [
        text(alone, prompt, temperature=0.8 * (i % 2), seed=i, max_tokens=tokens)
        for i, prompt in enumerate(prompts)
    ]

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        asked: dict[str, Any] = {
            "model": MODEL, "prompt": prompts[i % 8], "max_tokens": tokens, "seed": i % 8,
            "temperature": 0.8 * (i % 2),
        }  # fmt: skip
        if i // 8 % 2:
            return (await client.completions.create(**asked)).choices[0].text
        stream = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(clients)))

    assert asyncio.run(main()) == [wanted[i % 8] for i in range(clients)]


def test_many_clients(served: Running, alone: Engine) -> None:
    many(served, alone, 16, 8)


@pytest.mark.slow
def test_a_hundred_clients(alone: Engine) -> None:
    with running(shipped(max_requests=32, max_waiting=100)) as served:
        many(served, alone, 100, 24)
        assert served.metrics()["hybrid_runtime_prefix_hit_tokens_total"] > 0
