"""End tokens and default sampling, as a checkpoint's files say."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import hybrid_runtime
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.generation import Generation
from hybrid_runtime.models.registry import load_config

SHIPPED = Path(hybrid_runtime.__file__).parent / "checkpoints" / "python-small"
END = 256


def checkpoint(where: Path, **files: dict[str, Any] | None) -> Path:
    """The shipped checkpoint with fields of its JSON files changed; None: without the file."""
    for file in SHIPPED.iterdir():
        changes = files.get(file.stem, {})
        if changes is None:
            continue
        if file.stem in files:
            given = json.loads(file.read_text()) | changes
            given = {name: value for name, value in given.items() if value is not ...}
            (where / file.name).write_text(json.dumps(given))
        else:
            (where / file.name).symlink_to(file)
    return where


def generation(directory: Path) -> Generation:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Generation.of(directory, load_config(directory)[1], tokenizer)


@pytest.mark.parametrize(
    ("config", "given", "ends"),
    [
        ({}, {}, {END}),
        ({"eos_token_id": 10}, {"eos_token_id": [10, 32]}, {10, 32}),
        ({"eos_token_id": [7, 8]}, None, {7, 8}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        ({"eos_token_id": ...}, {"eos_token_id": None}, {END}),  # the tokenizer's
    ],
    ids=str,
)
def test_end_tokens_of_both_files(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any] | None, ends: set[int]
) -> None:
    directory = checkpoint(tmp_path, config=config, generation_config=given)
    assert set(generation(directory).eos_token_ids) == ends


def test_a_checkpoint_without_an_end_token_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(
        tmp_path, config={"eos_token_id": ...}, generation_config=None, tokenizer_config=None
    )
    with caplog.at_level(logging.WARNING):
        assert generation(directory).eos_token_ids == ()
    assert "names no eos_token_id" in caplog.text


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"temperature": 0.3}, SamplingParams()),
        ({"do_sample": False, "top_k": -1}, SamplingParams()),  # nobody reads it
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None},
            SamplingParams(temperature=0.6, top_p=0.95),
        ),
        ({"do_sample": True, "top_k": 20}, SamplingParams(temperature=1.0, top_k=20)),
    ],
    ids=str,
)
def test_sampling_where_a_request_does_not_say(
    tmp_path: Path, given: dict[str, Any], params: SamplingParams
) -> None:
    assert generation(checkpoint(tmp_path, generation_config=given)).params == params


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"eos_token_id": 320}}, "G: config field eos_token_id is 320, must"),
        ({"generation_config": {"eos_token_id": "x"}}, "G: config field eos_token_id is 'x', must"),
        (
            {"generation_config": {"eos_token_id": [True]}},
            r"G: config field eos_token_id is \[True\], must be an integer in 0..319, or a list",
        ),
        ({"generation_config": {"do_sample": 1}}, "G: config field do_sample is 1, must be true"),
        ({"generation_config": {"do_sample": True, "top_p": 7}}, "G: top_p is 7, must be a number"),
        (
            {"generation_config": {"do_sample": True, "temperature": "0.7"}},
            "G: temperature is '0.7', must be a",
        ),
        (
            {"generation_config": {"do_sample": True, "top_k": -1}},
            "G: top_k is -1, must be an integer >= 0",
        ),
        ({"config": {"eos_token_id": "x"}}, r"/config\.json: config field eos_token_id is 'x'"),
        ({"config": {"eos_token_id": [7, 320]}}, r"eos_token_id is \(7, 320\), must be below"),
        (
            {"config": {"eos_token_id": ...}, "generation_config": None}
            | {"tokenizer_config": {"eos_token": 5}},
            r"tokenizer_config\.json: config field eos_token is 5, must be a text, or an object",
        ),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("G:", r"/generation_config\.json:")):
        generation(checkpoint(tmp_path, **files))


def test_the_engine_goes_by_them(tmp_path: Path) -> None:
    prompt = "def add(a, b):"
    options: dict[str, Any] = {"device": "cpu", "drafter": None, "max_model_len": 64}
    text = Engine.from_pretrained(SHIPPED, **options).generate([prompt])[0]
    end = text.tokens[5]
    directory = checkpoint(
        tmp_path, generation_config={"eos_token_id": end, "do_sample": True, "temperature": 1e-4}
    )
    engine = Engine.from_pretrained(directory, **options)
    assert engine.default_params == SamplingParams(temperature=1e-4)
    answer = engine.generate([prompt])[0]
    assert answer.finish_reason == "stop"
    assert answer.tokens == text.tokens[: text.tokens.index(end)]
    assert answer.tokens == engine.generate([prompt], SamplingParams())[0].tokens
