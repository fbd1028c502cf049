"""Bodies of requests, as OpenAI and vLLM define them, and the `SamplingParams` that they give.

A field that is not listed here is refused, as OpenAI does. Listed fields that cannot change an
answer here are accepted and ignored. Those that would change it, and are not implemented, are
refused unless they ask for nothing. Null is the default of every field that may be left out.
"""

from __future__ import annotations

import json
from dataclasses import replace
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

from hybrid_runtime.engine import SamplingParams
from hybrid_runtime.models.json_fields import shown
from hybrid_runtime.server.errors import ApiError, refused

Prompts = list[str | list[int]]


def _prompts(value: Any) -> Prompts:
    """One or many prompts, each text or token ids, as a list of prompts."""
    if isinstance(value, str) or (_is_list(value) and value and _is_id(value[0])):
        value = [value]
    if not _is_list(value) or not value:
        raise ValueError(
            "it must be a string, an array of strings, an array of token ids, or an array of such "
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
    """The value, unless it holds lone surrogates: JSON may have them, tokenizers refuse them."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds a lone surrogate, and must be valid Unicode") from None
    return value


def _texts(value: Any) -> Any:
    """One or many texts as a list, without empty ones, which ask for nothing."""
    value = [value] if isinstance(value, str) else value
    return [text for text in value if text != ""] if _is_list(value) else value


def _unless(*nothing: Any) -> BeforeValidator:
    """For a field that is not implemented: it must be null or one of `nothing`."""

    def check(value: Any) -> None:
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in nothing
        ):
            known = " or ".join(json.dumps(each) for each in (None, *nothing))
            raise ValueError(f"not supported by this server: it must be {known}")

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_unicode)]
Ignored = Any
"""A field that cannot change the answer."""
Unsupported = Annotated[None, _unless()]
UnsupportedFlag = Annotated[None, _unless(False)]
UnsupportedList = Annotated[None, _unless([])]
UnsupportedObject = Annotated[None, _unless({})]
Stops = Annotated[list[Text], BeforeValidator(_texts)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Variables = Annotated[dict[str, Any], AfterValidator(_unicode)]
PromptField = Annotated[
    Prompts, PlainValidator(_prompts, json_schema_input_type=str | list[str | int | list[int]])
]


class Strict(BaseModel):
    """Strict types, and no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Body(Strict):
    """Fields of all bodies."""

    model: str | None = None
    user: Ignored = None
    metadata: Ignored = None
    request_id: Ignored = None  # vLLM
    session_id: Ignored = None  # vLLM


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as in vLLM: in every chunk
    include_obfuscation: Ignored = None


class Sampled(Body):
    """Fields of completions and chat completions."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
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
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[Text] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    cache_salt: (
        Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_unicode)] | None
    ) = None

    # Of this server.
    deadline: Annotated[float, Field(ge=0)] | None = None

    # OpenAI's, for its own models or its own accounts.
    store: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None

    # vLLM's that mean something only with other fields, which are refused, or on other paths.
    length_penalty: Ignored = None
    return_mm_kwargs: Ignored = None
    return_token_offsets: Ignored = None
    spaces_between_special_tokens: Ignored = None
    truncation_side: Ignored = None

    ec_transfer_params: UnsupportedObject = None
    kv_transfer_params: UnsupportedObject = None
    logprob_token_ids: UnsupportedList = None
    priority: Annotated[None, _unless(0)] = None
    repetition_detection: Unsupported = None
    response_format: Annotated[None, _unless({"type": "text"})] = None
    return_tokens_as_token_ids: UnsupportedFlag = None
    routed_experts_prompt_start: Annotated[None, _unless(0)] = None
    stream_interval: Annotated[None, _unless(1)] = None
    structured_outputs: UnsupportedObject = None
    thinking_token_budget: Annotated[None, _unless(-1)] = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: UnsupportedFlag = None
    vllm_xargs: UnsupportedObject = None
    watermarking: UnsupportedFlag = None

    @model_validator(mode="after")
    def _check(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is set; it must be null unless stream is true")
        if self.prompt_logprobs is not None and self.stream:  # as in vLLM
            raise ValueError(
                f"prompt_logprobs is {self.prompt_logprobs}; it must be null if stream is true"
            )
        return self


class CompletionBody(Sampled):
    """Of `/v1/completions`."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    add_special_tokens: Annotated[None, _unless(True)] = None
    best_of: Annotated[None, _unless(1)] = None
    prompt_embeds: UnsupportedList = None
    suffix: Annotated[None, _unless("")] = None


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    """A message of a chat. An answer of this server may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: UnsupportedList = None
    function_call: Unsupported = None
    tool_calls: UnsupportedList = None

    def rendered(self) -> dict[str, str]:
        """As chat templates take it, with each part of text on a line of its own, as in vLLM."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "\n".join(parts)} | named


Messages = Annotated[list[Message], Field(min_length=1)]


class Conversation(Strict):
    """vLLM's fields about how a conversation becomes a prompt."""

    chat_template_kwargs: Variables | None = None
    add_generation_prompt: Annotated[None, _unless(True)] = None
    chat_template: Unsupported = None
    continue_final_message: UnsupportedFlag = None
    media_io_kwargs: UnsupportedObject = None
    mm_processor_kwargs: UnsupportedObject = None
    tools: UnsupportedList = None


class ChatBody(Sampled, Conversation):
    """Of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    parallel_tool_calls: Ignored = None
    prediction: Ignored = None
    include_reasoning: Ignored = None  # vLLM, for models whose reasoning it parses

    add_special_tokens: UnsupportedFlag = None
    audio: Unsupported = None
    documents: UnsupportedList = None
    echo: UnsupportedFlag = None
    function_call: Annotated[None, _unless("none", "auto")] = None
    functions: UnsupportedList = None
    modalities: Annotated[None, _unless(["text"])] = None
    moderation: Unsupported = None
    reasoning_effort: Annotated[None, _unless("none")] = None
    return_prompt_text: UnsupportedFlag = None
    tool_choice: Annotated[None, _unless("none", "auto")] = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class EmbeddingBody(Body):
    """Of `/v1/embeddings`."""

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    # Of this server; see `Engine.embed`.
    pooling: Literal["last", "mean"] | None = None
    instruction: Text | None = None
    normalize: bool | None = None

    # vLLM's.
    add_special_tokens: Annotated[None, _unless(True)] = None
    priority: Annotated[None, _unless(0)] = None
    truncate_prompt_tokens: Unsupported = None


class TokenizeBody(Body, Conversation):
    """Of `/tokenize`: a text or a conversation."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages: one of them must be given, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is true; it must be false with messages")
        return self


class DetokenizeBody(Body):
    """Of `/detokenize`."""

    tokens: TokenIds


_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_params(
    body: Sampled,
    default: SamplingParams,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[SamplingParams]:
    """Parameters of each choice of a prompt; `ApiError` for values that the engine refuses.

    body: the request. Its seed, which OpenAI allows to be negative, is taken modulo 2**63; a
        negative `top_k`, which vLLM allows, is 0.
    default: the checkpoint's own, for what the body leaves out; if greedy, OpenAI's, which samples.
    max_tokens: most tokens of the output.
    logprobs: likely tokens to list beside each token of the output; None = no log-probabilities.
    prompt_logprobs: the same for tokens of the prompt.
    """
    if default.temperature == 0:
        default = SamplingParams(temperature=1.0)
    given = {name: getattr(body, name) for name in _DEFAULTED}
    given = {name: value for name, value in given.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    try:
        return replace(
            default,
            **given,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body),
            allowed_token_ids=_tuple(body.allowed_token_ids),
            bad_words=tuple(body.bad_words or ()),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=body.n or 1,
            seed=None if body.seed is None else body.seed % 2**63,
            max_tokens=max_tokens,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        ).each()
    except ValueError as error:
        raise refused(error) from error


def _tuple(tokens: list[int] | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens)


def _logit_bias(body: Sampled) -> dict[int, float] | None:
    """The bias by token id; JSON has only text for keys."""
    if body.logit_bias is None:
        return None
    try:
        return {int(token): value for token, value in body.logit_bias.items()}
    except ValueError as error:
        raise ApiError(
            400,
            f"logit_bias has keys {shown(list(body.logit_bias))}; they must be token ids",
            param="logit_bias",
        ) from error
