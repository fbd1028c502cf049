"""Where a conversation's prompt may be gone on with: behind its head and its last user message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.engine.conversation import Conversation, common_prefix, conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.thinking and loop.index0 > last %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST = "{% set ns = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}" \
    "{% set ns.at = loop.index0 %}{% endif %}{% endfor %}{% set last = ns.at %}"  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief. ☕"}
USER = {"role": "user", "content": "Was ist 1 & 1?\n\n"}
ANSWER = {"role": "assistant", "content": "2", "thinking": "eins und eins"}
MORE = {"role": "user", "content": "And 2 + 2?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(SHIPPED) / "tokenizer.json"))


def talk(tokenizer: Tokenizer, messages: list[dict[str, Any]], source: str = "") -> Conversation:
    source = source or LAST + CHATML
    template = ChatTemplate({"default": source}, {}, {"default": "here"})
    return conversation(template, messages, None, None, tokenizer, 10**6)


def text(tokenizer: Tokenizer, made: Conversation, place: int) -> str:
    tokens = made.tokens[: made.checkpoints_at[place]].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_they_end_behind_the_system_prompt_and_the_last_user_message(tokenizer: Tokenizer) -> None:
    made = talk(tokenizer, [SYSTEM, USER, ANSWER, MORE])
    assert len(made.checkpoints_at) == 2
    assert text(tokenizer, made, 0) == "<|im_start|>system\nBe brief. ☕<|im_end|>\n"
    assert text(tokenizer, made, 1).endswith("And 2 + 2?<|im_end|>\n")
    assert made.checkpoints_at[1] < len(made.tokens)


def test_a_prompt_without_the_earlier_thinking_goes_on_at_the_last_user_message(
    tokenizer: Tokenizer,
) -> None:
    loop = talk(tokenizer, [SYSTEM, USER, ANSWER])
    later = talk(tokenizer, [SYSTEM, USER, ANSWER, MORE])
    pin = loop.checkpoints_at[-1]
    assert loop.tokens[:pin].tolist() == later.tokens[:pin].tolist()
    assert loop.tokens.tolist() != later.tokens[: len(loop.tokens)].tolist()
    assert loop.checkpoints_at == talk(tokenizer, [SYSTEM, USER]).checkpoints_at


def test_where_the_rendered_part_is_no_beginning_it_is_the_common_one(
    tokenizer: Tokenizer,
) -> None:
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}of {{ messages | length }}"
    made = talk(tokenizer, [USER, ANSWER], source)
    assert text(tokenizer, made, 0) == USER["content"] + "|"
    counted = talk(tokenizer, [USER, ANSWER], "{{ messages | length }}" + source)
    assert counted.checkpoints_at == ()


def test_a_template_that_refuses_a_part_leaves_the_others(tokenizer: Tokenizer) -> None:
    source = "{% if messages[-1].role == 'system' %}{{ raise_exception('no query') }}{% endif %}"
    made = talk(tokenizer, [SYSTEM, USER], source + CHATML.replace("> last", "> 99"))
    assert len(made.checkpoints_at) == 1
    assert text(tokenizer, made, 0).endswith("<|im_end|>\n")


def test_a_token_that_holds_more_than_the_message_is_left_out(tokenizer: Tokenizer) -> None:
    """Tokens in front of a position have only characters of the part."""
    messages = [{"role": "user", "content": "☕ def  x"}, {"role": "assistant", "content": "y"}]
    for between in ("", " ", "\n", "☕", "ef"):
        source = "{{ messages[0].content }}" + between + "{{ messages[1].content }}"
        made = talk(tokenizer, messages, source)
        whole = tokenizer.decode(made.tokens.tolist(), skip_special_tokens=False)
        for at in made.checkpoints_at:
            front = tokenizer.decode(made.tokens[:at].tolist(), skip_special_tokens=False)
            assert (messages[0]["content"] + between).startswith(front)
            longer = tokenizer.decode(made.tokens[: at + 1].tolist(), skip_special_tokens=False)
            assert not (messages[0]["content"] + between).startswith(longer) or longer == whole


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0), ("xa", "ya", 0), ("aaaa", "aaaab", 4)],
)
def test_common_prefix(one: str, other: str, want: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == want


def test_a_chat_keeps_its_last_user_message() -> None:
    """Through the whole engine: the next prompt drops what was thought, and goes on there."""
    engine = Engine.from_pretrained(SHIPPED, drafter=None, max_requests=1, dtype="float32")
    engine.chat_template = ChatTemplate({"default": LAST + CHATML}, {}, {"default": "here"})
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = engine.conversation([SYSTEM, USER])
    engine.chat([SYSTEM, USER], params)
    answer = engine.chat([SYSTEM, USER, ANSWER, MORE], params)
    assert answer.hit.tokens == first.checkpoints_at[-1]
    other = engine.chat([SYSTEM, MORE], params)
    assert other.hit.tokens == first.checkpoints_at[0]
    assert engine.stats().prefix.message_hits == 2
