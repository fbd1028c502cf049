"""Conversations as prompts: a checkpoint's chat template, rendered as transformers does."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hybrid_runtime.engine.tokenizer_files import CONFIG, special_tokens, tokenizer_config
from hybrid_runtime.models.json_fields import one_line, read_text, shown

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""`role`, and what the template makes of the rest: `content`, `tool_calls`, ..."""

_MORE = "additional_chat_templates"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of a checkpoint.

    sources: Jinja text by name; "tool_use", where there is one, is taken for conversations with
        tools, "default" for all others. One that Jinja cannot read is said in the log at once, and
        refused with the reason when it is asked for: a model that only completes needs none.
    special_tokens: by name ("bos_token", ...), as templates write them.
    origins: the file of each source, for messages.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        origins: Mapping[str, str],
    ) -> None:
        self._special, self._origins = dict(special_tokens), dict(origins)
        self._templates: dict[str, Template] = {}
        self._broken: dict[str, str] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _compile(source)
            except Exception as error:  # what Jinja makes of it may be no Python either
                # Of what Jinja compiles to, the line is none of the template's.
                line = error.lineno if isinstance(error, TemplateSyntaxError) else None
                why = error.msg if isinstance(error, SyntaxError) else error
                self._broken[name] = (
                    f"chat template {name!r} in {origins[name]} is broken, must be what Jinja can "
                    f"read: {one_line(why)}" + ("" if line is None else f" (line {line})")
                )
                logger.warning("no chat: %s", self._broken[name])

    @classmethod
    def of(cls, directory: Path) -> ChatTemplate | None:
        """That of a checkpoint: `chat_template.jinja`, else in `tokenizer_config.json`; None if it
        has none. `ValueError` for a file that is not what it must be."""
        config, specials = tokenizer_config(directory), special_tokens(directory)
        where = str(directory / CONFIG)
        given = config.get("chat_template") or []
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        sources = {one["name"]: one["template"] for one in named}
        origins = dict.fromkeys(sources, where)
        files = {f.stem: f for f in sorted((directory / _MORE).glob("*.jinja"))}
        if os.path.lexists(own := directory / "chat_template.jinja"):
            files["default"] = own
        for name, file in files.items():
            sources[name], origins[name] = read_text(file), str(file)
        return cls(sources, specials, origins) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt that a conversation is, up to where the assistant's answer begins.

        tools: JSON schemas of functions that may be called. options: further variables of the
        template, such as `enable_thinking`. generation_prompt: with what the template puts in front
        of the answer. Raises `ValueError` for what is no conversation, or
        what the template refuses.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._origins else "default"
        if name in self._broken:
            raise ValueError(self._broken[name])
        if name not in self._templates:
            raise ValueError(
                f"{', '.join(dict.fromkeys(self._origins.values()))} has the chat templates "
                f"{', '.join(self._origins)}; one of them must be called default"
            )
        variables = {
            "messages": [_with_reasoning(m) for m in _checked(messages)],
            "tools": None if tools is None else _plain("tools", list(tools)),
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        extra: dict[str, Any] = _plain("template_options", dict(options or {}))
        try:
            return self._templates[name].render(variables | self._special | extra)
        except Exception as error:  # a template is a program of strangers
            raise ValueError(
                f"messages do not go with the chat template in {self._origins[name]}: "
                f"{one_line(error) or type(error).__name__}"
            ) from error


def rendered(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> str:
    """As `ChatTemplate.render`, of a checkpoint that may have none."""
    if template is None:
        raise ValueError(
            "the checkpoint has no chat template; chat_template.jinja or tokenizer_config.json "
            "must hold one"
        )
    return template.render(messages, tools, options)


def _checked(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages is {messages!r}; it must be a list of messages, such as "
            "[{'role': 'user', 'content': 'Hello'}]"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages holds {message!r}; it must be a mapping with a role, such as "
                "{'role': 'user', 'content': 'Hello'}"
            )
    plain: list[dict[str, Any]] = _plain("messages", [dict(m) for m in messages])
    return plain


def _plain(name: str, value: Any) -> Any:
    """A copy of JSON's types only: templates are strangers' code, other objects have methods."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {shown(value)}; it must be what JSON can hold: {error}"
        ) from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """What an assistant thought, under the names that templates know it by."""
    thought = next((message[n] for n in _REASONING if message.get(n) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought} | message | {"reasoning_content": thought}


# -- the sandbox, as transformers has it ---------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only its body."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that begin with an underscore: those lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` can be a name
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template must not store {name!r} in a namespace")


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would misread.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)
