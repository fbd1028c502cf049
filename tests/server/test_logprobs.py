"""Log-probabilities in OpenAI's and vLLM's forms. Those of prompts, asked for and read as lm-eval's
`local-completions` does it, are the log-likelihoods of one pass of transformers."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.http_server import MODEL, Running, running
from helpers.small_engine import engine, hf, prompts, tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import TokenLogprobs
from hybrid_runtime.server.logprobs import of_chat, of_completion

__all__ = ["hf", "prompts", "tokenizer"]  # fixtures

ASKED: dict[str, Any] = {
    "model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(hf: NemotronHForCausalLM, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(engine(hf, tokenizer, drafter="ngram", max_tokens_per_step=40)) as server:
        yield server


def pass_of(hf: NemotronHForCausalLM, prompt: list[int]) -> Tensor:
    """Log-probabilities of all tokens behind each of a prompt's, `[tokens, vocabulary]`."""
    with torch.inference_mode():
        return hf(torch.tensor([prompt])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_log_likelihoods(
    served: Running, hf: NemotronHForCausalLM, prompts: list[list[int]], max_tokens: int
) -> None:
    """Of what follows a context, and whether it is what greedy decoding would give; again when all
    of it could be found in the prefix cache. lm-eval leaves out the one token that is generated."""
    batch, contexts = [list(prompt) for prompt in prompts[1:]], [len(p) // 2 for p in prompts[1:]]
    batch[-1][-1] = int(pass_of(hf, batch[-1])[-2].argmax())  # what greedy decoding gives
    contexts[-1] = len(batch[-1]) - 1
    end = -1 if max_tokens else None
    for _ in range(2):
        body = ASKED | {"prompt": batch, "max_tokens": max_tokens}
        answer = served.post("completions", json=body).json()
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        for prompt, context, choice in zip(batch, contexts, choices, strict=True):
            found = choice["logprobs"]["token_logprobs"][context:end]
            top = choice["logprobs"]["top_logprobs"][context:end]
            greedy = all(own == max(each.values()) for own, each in zip(found, top, strict=True))
            lines, follows = pass_of(hf, prompt)[context - 1 : -1], torch.tensor(prompt[context:])
            want = lines.gather(1, follows[:, None]).sum().item()
            assert sum(found) == pytest.approx(want, abs=1e-3)
            assert greedy == bool((lines.argmax(-1) == follows).all())
        assert greedy  # so that both are seen
        assert answer["usage"]["completion_tokens"] == max_tokens * len(batch)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_stands_in_front_with_its_log_probabilities(
    served: Running, prompts: list[list[int]], stream: bool
) -> None:
    prompt = prompts[4]
    body = ASKED | {"prompt": prompt, "max_tokens": 5, "stream": stream}
    answer = served.post("completions", json=body)
    if stream:
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    else:
        parts = answer.json()["choices"]
    shown: dict[str, list[Any]] = {
        name: [one for part in parts for one in part["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    texts = [f"t{token}" for token in prompt]
    assert {len(values) for values in shown.values()} == {len(prompt) + 5}
    assert shown["tokens"][: len(prompt)] == texts
    assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
    assert all(value <= 0 for value in shown["token_logprobs"][1:])
    assert shown["text_offset"][:3] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    assert "".join(part["text"] for part in parts).startswith(" ".join(texts))
    assert parts[-1]["finish_reason"] == "length"


def test_prompt_logprobs_are_as_in_vllm(
    served: Running, hf: NemotronHForCausalLM, prompts: list[list[int]]
) -> None:
    prompt = prompts[3]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = served.post("completions", json=body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (first, choice["logprobs"]) == (None, None)
    for entry, token, line in zip(others, prompt[1:], pass_of(hf, prompt), strict=False):
        best = line.topk(2).indices.tolist()
        assert set(entry) == {str(token), *map(str, best)}
        for rank, id in enumerate(best, 1):
            assert (entry[str(id)]["rank"], entry[str(id)]["decoded_token"]) == (rank, f"t{id}")
            assert entry[str(id)]["logprob"] == pytest.approx(line[id].item(), abs=1e-4)
        assert entry[str(token)]["logprob"] == pytest.approx(line[token].item(), abs=1e-4)
        assert token in best or entry[str(token)]["rank"] is None
    both = ASKED | {"prompt": prompt, "prompt_logprobs": 3}
    (choice,) = served.post("completions", json=both).json()["choices"]
    assert {len(each) for each in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(each) for each in choice["prompt_logprobs"][1:]} <= {3, 4}


def test_generated_answers(served: Running, prompts: list[list[int]]) -> None:
    """Requests of tasks that generate: token ids in, text up to a stop string out."""
    body = {
        "model": MODEL, "prompt": prompts[2:5], "max_tokens": 8, "temperature": 0, "seed": 1234,
        "stop": ["\n\n", "<|endoftext|>"],
    }  # fmt: skip
    choices = served.post("completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert all(choice["text"] for choice in choices)


SPELLING = {0: "a", 1: "�", 2: "�", 3: "ß"}
ENTRIES = [TokenLogprobs(-1.0, [(1, -0.5), (2, -0.6)]), TokenLogprobs(-math.inf, [(0, -0.1)])]


def test_what_json_cannot_say() -> None:
    """Minus infinity; and tokens whose text is the same."""
    spell = SPELLING.__getitem__
    found = of_completion([0, 3], ENTRIES, spell, 7)
    assert found == {
        "tokens": ["a", "ß"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"a": -1.0, "�": -0.5}, {"ß": -9999.0, "a": -0.1}],
        "text_offset": [7, 8],
    }
    chat = of_chat([0, 3], ENTRIES, spell)
    assert [entry["bytes"] for entry in chat["content"]] == [[97], list("ß".encode())]
    json.dumps([found, chat], allow_nan=False)
