"""Chat: prompts are those that transformers makes of the same template and messages."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.chat import ChatTemplate

CHATML = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}\n"
    "        {{- raise_exception('unknown role ' ~ message.role) }}\n"
    "    {%- endif %}\n"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content | trim }}{% endif %}<|im_end|>\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Each shows one thing that public templates do.
TEMPLATES = {
    "chatml": CHATML,
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content }}|{% endfor %}",
    "tools as JSON": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{{ messages | tojson }}",
    "namespace": "{% set ns = namespace(seen=0) %}{% for m in messages %}"
    "{% set ns.seen = ns.seen + 1 %}{% endfor %}{{ ns.seen }}{{ dict(a=1) }}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.thinking or '' }}"
    "{% endfor %}",
    "options": "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{{ eos_token }}{{ messages[0]['content'] }}",
    "white space": "  {% for m in messages %}\n    {{ m.content }}\n  {% endfor %}\n",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Was ist <b>1 & 1</b>? ☕\n"},
    {"role": "assistant", "content": "2", "reasoning": "eins und eins"},
    {"role": "user", "content": " And\n2 + 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "naïve <sum>"}}]


def with_template(tmp_path: Path, template: Any) -> Path:
    """The shipped checkpoint with a chat template."""
    copy = shutil.copytree(SHIPPED, tmp_path / "model")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return copy


def rendered(directory: Path, *arguments: Any) -> str:
    template = ChatTemplate.of(directory)
    assert template is not None
    return template.render(*arguments)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(tmp_path: Path, name: str, tools: Any) -> None:
    directory = with_template(tmp_path, TEMPLATES[name])
    options = {"enable_thinking": True}
    theirs = AutoTokenizer.from_pretrained(directory)
    asked = {"tools": tools, "add_generation_prompt": True, **options}
    want = theirs.apply_chat_template(MESSAGES, tokenize=False, **asked)
    assert rendered(directory, MESSAGES, tools, options) == want
    engine = Engine.from_pretrained(directory, drafter=None, max_requests=1)
    ids = engine.chat_prompt(MESSAGES, tools=tools, template_options=options)
    assert ids == theirs.apply_chat_template(MESSAGES, return_dict=False, **asked)


def test_a_chat_is_a_completion_of_its_prompt(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(with_template(tmp_path, CHATML), dtype="float32")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answer = engine.chat(MESSAGES, params)
    want = engine.generate([engine.chat_prompt(MESSAGES)], params)[0]
    assert answer.tokens == want.tokens
    assert len(answer.tokens) == 12
    with pytest.raises(ValueError, match="n is 2; it must be 1 in a chat"):
        engine.chat(MESSAGES, SamplingParams(n=2))


def test_a_template_s_special_tokens_are_not_put_in_front_again(tmp_path: Path) -> None:
    directory = with_template(tmp_path, CHATML)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(file)
    engine = Engine.from_pretrained(directory)
    assert engine.prepare("x").prompt.tolist() == [256, ord("x")]
    assert engine.chat_prompt(MESSAGES)[:2] == [256, ord("<")]


def test_templates_by_name_and_in_files_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory = with_template(tmp_path, named)
    assert rendered(directory, MESSAGES) == "plain"
    assert rendered(directory, MESSAGES, TOOLS) == "tools"
    (directory / "chat_template.jinja").write_text("from a file")
    assert rendered(directory, MESSAGES) == "from a file"
    assert rendered(directory, MESSAGES, TOOLS) == "tools"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file")
    assert rendered(directory, MESSAGES, TOOLS) == "tools of a file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__init__ }}{{ dict.__class__.__mro__[0].x }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="messages do not go with the chat template in"):
        rendered(with_template(tmp_path, template), MESSAGES)


BAD: list[tuple[Any, str]] = [
    ("hello", "messages is 'hello'; it must be a list of messages"),
    ({"role": "user", "content": "x"}, "messages is .* must be a list of messages"),
    ([], r"messages is \[\]; it must be a list of messages"),
    (None, "messages is None"),
    (["hello"], "messages holds 'hello'; it must be a mapping with a role"),
    ([{"content": "x"}], "must be a mapping with a role"),
    ([{"role": 5, "content": "x"}], "must be a mapping with a role"),
    ([{"role": "user", "content": {1, 2}}], r"messages is \[.*\]; it must be what JSON can hold"),
    ([{"role": "oracle", "content": "x"}], "chat template .*: unknown role oracle"),
]


@pytest.mark.parametrize(("messages", "message"), BAD, ids=[m for _, m in BAD])
def test_what_is_no_conversation_is_refused(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendered(with_template(tmp_path, CHATML), messages)


def test_templates_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint has no chat template"):
        Engine.from_pretrained(SHIPPED).chat(MESSAGES)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: .* chat_template is 5, must be"):
        ChatTemplate.of(with_template(tmp_path / "number", 5))
    with pytest.raises(ValueError, match=r"config field chat_template is \[{'name': 'x'}\], must"):
        ChatTemplate.of(with_template(tmp_path / "object", [{"name": "x"}]))
    with pytest.raises(ValueError, match="one of them must be called default"):
        rendered(with_template(tmp_path / "rag", [{"name": "rag", "template": "x"}]), MESSAGES)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages }", r"unexpected '}' \(line 1\)"),
        ("a\n{% for m in messages %}", r"Unexpected end of template.* \(line 2\)"),
        ("{{ messages | no_such }}", r"No filter named 'no_such'\. \(line 1\)"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_a_broken_template_is_said_at_load_and_leaves_completions(
    tmp_path: Path, template: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = with_template(tmp_path, template)
    with caplog.at_level(logging.WARNING):
        engine = Engine.from_pretrained(directory, drafter=None, max_requests=1)
    broken = rf"chat template 'default' in .*tokenizer_config\.json is broken, must be .*{reason}"
    (line,) = (said for said in caplog.messages if "chat template" in said)
    assert re.search(f"^no chat: {broken}", line)
    assert "\n" not in line
    assert engine.generate(["x"], SamplingParams(max_tokens=2))[0].tokens
    with pytest.raises(ValueError, match=f"^{broken}"):
        engine.chat(MESSAGES)


def test_a_broken_template_for_tools_names_its_own_file_and_leaves_the_other(
    tmp_path: Path,
) -> None:
    directory = with_template(tmp_path, "plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{")
    assert rendered(directory, MESSAGES) == "plain"
    with pytest.raises(
        ValueError, match=r"chat template 'tool_use' in .*tool_use\.jinja is broken"
    ):
        rendered(directory, MESSAGES, TOOLS)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ [][5].x }}", "{{ (1).real.x.y }}"])
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="messages do not go with the chat template in"):
        rendered(with_template(tmp_path, template), MESSAGES)
