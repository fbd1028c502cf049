"""Bodies of requests, as OpenAI defines them, and a few fields that vLLM has added.

A field that is not listed here is refused, as OpenAI does. Of OpenAI's fields, those that cannot
change an answer here are accepted and ignored; those that would change it, and are not implemented,
are refused unless they ask for nothing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

Prompts = list[str | list[int]]


def _prompts(value: Any) -> Prompts:
    """One or many prompts, each text or token ids, as a list of prompts."""
    if isinstance(value, str) or (_is_list(value) and value and _is_id(value[0])):
        value = [value]
    if not _is_list(value) or not value:
        raise ValueError(
            "must be a string, an array of strings, an array of token ids, or an array of such "
            "arrays, and not empty"
        )
    for prompt in value:
        if not isinstance(prompt, str) and not (_is_list(prompt) and all(map(_is_id, prompt))):
            raise ValueError("each prompt must be a string or an array of token ids")
        if isinstance(prompt, str):
            _unicode(prompt)
    return list(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _unicode(value: Any) -> Any:
    """Refuse text that tokenizers cannot take, also inside of other values: JSON may hold it."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate; it must be valid Unicode") from None
    return value


def _nothing(value: Any) -> Any:
    if value in (None, [], {}, "none", "auto", 0, False, {"type": "text"}, ["text"]):
        return None
    raise ValueError("is not supported by this server")


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_unicode)]
Unsupported = Annotated[None, BeforeValidator(_nothing)]
"""A field that would change the answer, and must ask for nothing."""
Ignored = Any
"""A field that cannot change the answer."""
Stops = Annotated[list[Annotated[Text, Field(min_length=1)]], BeforeValidator(_texts)]
PromptField = Annotated[
    Prompts, PlainValidator(_prompts, json_schema_input_type=str | list[str | int | list[int]])
]


class Body(BaseModel):
    """What all bodies share: strict types, and no field that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    user: Ignored = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: in every chunk
    include_obfuscation: Ignored = None


class Sampled(Body):
    """What completions and chat completions share. None is OpenAI's default everywhere."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Stops, Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # Of this server.
    deadline: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is set; it must be null unless stream is true")
        return self


class CompletionBody(Sampled):
    """Of `/v1/completions`."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Literal[1] | None = None
    suffix: Unsupported = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One of a chat. An assistant's may be one of ours, sent back as it came."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    def rendered(self) -> dict[str, str]:
        """As chat templates take it; parts of text stand on lines of their own, as vLLM has it."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "\n".join(parts)} | named


class ChatBody(Sampled):
    """Of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_unicode)] | None = None  # vLLM

    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    reasoning_effort: Unsupported = None
    response_format: Unsupported = None
    store: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class EmbeddingBody(Body):
    """Of `/v1/embeddings`."""

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    # Of this server; see `Engine.embed`.
    pooling: Literal["last", "mean"] = "last"
    instruction: Text = ""
    normalize: bool = True
