"""What a checkpoint says about generating: which tokens end a text, and how to sample where a
request does not say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid_runtime.engine.tokenizer_files import CONFIG, token_text, tokenizer_config
from hybrid_runtime.models.json_fields import FLAG, Kind, integer, named, or_list_of, read_optional
from hybrid_runtime.models.model import ModelConfig
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
    def of(cls, directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> Generation:
        """Of a checkpoint directory. Raises `ValueError` for a file that cannot be read, a token
        that is none, or parameters that are refused."""
        given = read_optional(directory, FILE, _kinds(config.vocab_size))
        own = given.get("eos_token_id")
        listed = own if isinstance(own, list) else [own] if own is not None else []
        ends = {*config.eos_token_id, *listed}
        if not ends:
            ends = _end_of_tokenizer(directory, tokenizer, config.vocab_size)
        with named(directory / FILE):
            params = _params(given)
        return cls(tuple(sorted(ends)), params)


def _kinds(vocabulary: int) -> dict[str, Kind]:
    """What the fields must be that are read; `SamplingParams` checks those of sampling."""
    token = integer(0, vocabulary - 1)
    return {"eos_token_id": or_list_of(token, "such"), "do_sample": FLAG}


def _end_of_tokenizer(directory: Path, tokenizer: Tokenizer, vocabulary: int) -> set[int]:
    """The id of `eos_token` in `tokenizer_config.json`, said in the log; a warning if there is
    none."""
    text = token_text(tokenizer_config(directory).get("eos_token"))
    token = None if text is None else tokenizer.token_to_id(text)
    if token is not None and token >= vocabulary:
        raise ValueError(
            f"eos_token in {directory / CONFIG} is {text!r}, token {token}; it must be in "
            f"0..{vocabulary - 1}"
        )
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
        return SamplingParams()  # and what else the file has is not looked at
    wanted = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    params = SamplingParams(**{"temperature": 1.0} | wanted)
    logger.info("requests without parameters are sampled: %s", params)
    return params
