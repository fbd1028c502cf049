"""A checkpoint's tokenizer, and what its files say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid_runtime.models.json_fields import Kind, one_line, read_optional, read_text

CONFIG = "tokenizer_config.json"

_TOKEN = Kind(
    "a text, or an object whose content is one",
    lambda value: isinstance(value.get("content") if isinstance(value, Mapping) else value, str),
)
_SPECIAL = {f"{name}_token": _TOKEN for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_TEMPLATES = Kind(
    "a text, or a list of objects with name and template",
    lambda value: (
        isinstance(value, str)
        or (
            isinstance(value, list)
            and all(
                isinstance(one, Mapping)
                and all(isinstance(one.get(field), str) for field in ("name", "template"))
                for one in value
            )
        )
    ),
)


def load_tokenizer(directory: Path, vocabulary: int) -> Tokenizer:
    """That of a checkpoint whose model knows so many tokens. Raises `ValueError` for none, a file
    that is none, or one of another model."""
    file = directory / "tokenizer.json"
    text = read_text(file)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer: {one_line(error)}") from error
    most = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if not 0 <= most < vocabulary:
        raise ValueError(
            f"{file} has {'no tokens' if most < 0 else f'token id {most}'}, must have ids in "
            f"0..{vocabulary - 1}, as vocab_size in config.json says"
        )
    return tokenizer


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The fields of `tokenizer_config.json`, none without it; `ValueError` for one that is not what
    it must be."""
    return read_optional(directory, CONFIG, _SPECIAL | {"chat_template": _TEMPLATES})


def token_text(given: object) -> str | None:
    """The text of a special token, as either form of the field has it."""
    text = given.get("content") if isinstance(given, Mapping) else given
    return text if isinstance(text, str) else None


def special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by name, from both files that may hold them; errors as `tokenizer_config`."""
    given = tokenizer_config(directory)
    given |= read_optional(directory, "special_tokens_map.json", _SPECIAL)
    texts = {name: token_text(one) for name, one in given.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}
