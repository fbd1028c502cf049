"""What a checkpoint says about generating: which tokens end a text, and how to sample where a
request does not say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid_runtime.models.config import NemotronHConfig, read_json
from hybrid_runtime.specdecode.sampling import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Its fields that `SamplingParams` has too."""


@dataclass(frozen=True, slots=True)
class Generation:
    """eos_token_ids: tokens that end a text, those of `generation_config.json` and `config.json`
    together; the tokenizer's own where both name none. params: for requests without; greedy unless
    `generation_config.json` has `do_sample`."""

    eos_token_ids: tuple[int, ...]
    params: SamplingParams

    @classmethod
    def of(cls, directory: Path, config: NemotronHConfig, tokenizer: Tokenizer) -> Generation:
        """Of a checkpoint directory. Raises `ValueError` for a file that cannot be read, a token
        that is none, or parameters that are refused."""
        given = read_json(directory, FILE) if (directory / FILE).is_file() else {}
        ends = {*config.eos_token_id, *_tokens(given.get("eos_token_id"))}
        if not ends:
            ends = _end_of_tokenizer(directory, tokenizer)
        for token in ends:
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"eos_token_id of checkpoint {directory} has {token}; it must be in "
                    f"0..{config.vocab_size - 1}"
                )
        return cls(tuple(sorted(ends)), _params(given))


def _tokens(eos: object) -> list[int]:
    """The field `eos_token_id`: null, a token, or a list of them."""
    tokens: list[Any] = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in tokens):
        raise ValueError(f"eos_token_id in {FILE} is {eos!r}; it must be a token id or a list")
    return tokens


def _end_of_tokenizer(directory: Path, tokenizer: Tokenizer) -> set[int]:
    """The id of `eos_token` in `tokenizer_config.json`, said in the log; a warning if there is
    none."""
    file = "tokenizer_config.json"
    given = read_json(directory, file) if (directory / file).is_file() else {}
    text = given.get("eos_token")
    if isinstance(text, Mapping):
        text = text.get("content")
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if token is None:
        logger.warning(
            "checkpoint %s names no eos_token_id: texts end by max_tokens or what requests ask for",
            directory,
        )
        return set()
    logger.info("checkpoint %s names no eos_token_id: the tokenizer's is %d", directory, token)
    return {token}


def _params(given: Mapping[str, Any]) -> SamplingParams:
    if not given.get("do_sample"):
        return SamplingParams()
    wanted = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    try:
        params = SamplingParams(**{"temperature": 1.0} | wanted)
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from None
    logger.info("requests without parameters are sampled: %s", params)
    return params
