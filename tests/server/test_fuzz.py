"""Bodies that nobody would write, against a real server: it answers each with what was asked for or
one line that says what is wrong, and goes on."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from helpers.http_server import Running, completed, running, shipped

from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.server import schemas

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 5, 16, 17, 20, 21, 255, 256, 2**31 - 1, 2**31, 2**63 - 1,
    2**63, 2**64, 10**30, 10**400, -1, -2, -(2**31), -(2**63), -(2**63) - 1,
    0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 1e-320, 1e-45, 1e-38, 1e-30, 1e-7, 1e30, 1e38, 1e39, 1e308,
    -0.5, -1e-320, -1e39, math.nan, math.inf, -math.inf,
    "", "a", "5", "none", "auto", "last", "float", "python-small", "é😀", "\0", "a\nb", "\u2028",
    "\ud800", "\udfff\ud800", "x" * 300, "{{ 1 / 0 }}",
    [], [[]], [""], ["a"], ["a", "", "b"], ["\ud800"], ["a"] * 17, [0], [1, 2, 3], [383], [384],
    [400, 1], [2**31], [2**63], [-1], [1.0], [True], [None], [[1], "x"], [[1], [2, 3]], [1] * 300,
    ["x"] * 9, ["a" * 300], ["z"] * 200, [{}], DEEP,
    {}, {"a": 1}, {"1": 1}, {"1": -100}, {"384": 1}, {"400": 1}, {"-1": 1}, {"1": 1e39},
    {"1": math.nan}, {"1": None}, {"1_0": 1}, {"\u0663": 1}, {"": 1}, {"\ud800": 1},
    {"99999999999999999999": 1}, {str(i): 1 for i in range(301)}, {"type": "text"},
    {"type": "json_object"}, {"include_usage": True}, {"include_usage": 1}, {"messages": "x"},
    {"add_generation_prompt": False}, {"x": [1]}, {"x": 0},
    {"messages": 1, "bos_token": [1], "x": {"y": "\ud800"}},
    [{"role": "user", "content": "x"}], [{"role": "user", "content": ["x"]}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "x", "name": "\n", "tool_calls": [1]}],
    [{"role": "assistant", "content": "", "refusal": None}],
]  # fmt: skip
"""For any field, whether they are of its type or not."""

BASES: dict[str, tuple[type[schemas.Body], dict[str, Any]]] = {
    "/v1/completions": (schemas.CompletionBody, {"prompt": "x", "max_tokens": 3}),
    "/v1/chat/completions": (
        schemas.ChatBody,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    ),
    "/v1/embeddings": (schemas.EmbeddingBody, {"input": "x"}),
    "/tokenize": (schemas.TokenizeBody, {"prompt": "x"}),
    "/detokenize": (schemas.DetokenizeBody, {"tokens": [97]}),
}
WEIGHTS = [10, 6, 2, 1, 1]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ x + 1 if x }}{{ 1 / x if x == 0 }}"
UNKNOWN = ["tempreature", "", "__class__", "\ud800", "a\nb", "model.name", "0"]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    engine = shipped(max_model_len=64)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, {"default": "a\nb"})
    with running(engine, max_choices=8, max_body_bytes=100_000) as server:
        yield server


@cache
def fitting(path: str) -> dict[str, list[Any]]:
    """By field, the values that the schema takes. Fields that take all are left out: those are
    ignored."""
    kind, base = BASES[path]
    taken = {n: [v for v in VALUES if fits(kind, base | {n: v})] for n in kind.model_fields}
    return {name: values for name, values in taken.items() if len(values) < len(VALUES)}


def fits(kind: type[schemas.Body], body: dict[str, Any]) -> bool:
    try:
        kind.model_validate(body)
    except ValueError:
        return False
    return True


def mixed(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies: a valid one of which a few fields are changed, added or left out. Two of
    three changes keep to values that the field takes."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choices(list(BASES), WEIGHTS)[0]
        body = dict(BASES[path][1])
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            name, taken = rng.choice(list(fitting(path).items()))
            body[name] = rng.choice(taken if rng.random() < 0.7 else VALUES)
        if rng.random() < 0.05:
            body[rng.choice(UNKNOWN)] = rng.choice(VALUES)
        if rng.random() < 0.05:
            body.pop(rng.choice(list(body)))
        yield path, body


def single() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that a field takes, in a body of its own."""
    for path, (_, base) in BASES.items():
        for name, values in fitting(path).items():
            yield from ((path, base | {name: value}) for value in values)


def check(answer: httpx.Response, sent: str) -> None:
    """2xx, or 4xx with one line in OpenAI's form."""
    assert 200 <= answer.status_code < 300 or 400 <= answer.status_code < 500, (sent, answer.text)
    assert "server_error" not in answer.text, (sent, answer.text)  # in a stream
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error"}
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"].splitlines()) == 1, (sent, error)
        assert len(error["message"]) <= 500


def fuzz(served: Running, bodies: Iterable[tuple[str, dict[str, Any]]]) -> Counter[int]:
    """Send them; how often which status came."""
    statuses: Counter[int] = Counter()
    for path, body in bodies:
        sent = json.dumps(body)
        answer = served.http.post(path, content=sent, headers={"content-type": "application/json"})
        check(answer, f"{path} {sent[:1000]}")
        statuses[answer.status_code] += 1
    assert served.http.get("/health").status_code == 200
    good = served.post("completions", json={"prompt": "x", "max_tokens": 3, "temperature": 0})
    assert completed(good)
    return statuses


def test_a_few(served: Running) -> None:
    statuses = fuzz(served, mixed(4, 100))
    assert min(statuses[200], statuses[400]) > 25


@pytest.mark.slow
def test_many(served: Running) -> None:
    statuses = fuzz(served, mixed(2, 1500))
    assert min(statuses[200], statuses[400]) > 400


@pytest.mark.slow
def test_every_value_that_a_field_takes(served: Running) -> None:
    assert fuzz(served, single())[200] > 100
