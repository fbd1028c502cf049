"""The log says what was loaded and chosen, and what was given up for which reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine


def logged(caplog: pytest.LogCaptureFixture, level: int, **options: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "hybrid_runtime"):
        Engine.from_pretrained(SHIPPED, device="cpu", **options)
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == level)


def test_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    text = logged(caplog, logging.INFO, block_size=32, max_model_len=1000, max_requests=3)
    for words in (
        "python-small: 9.6 MiB of torch.float32 to cpu in ",
        "layout replay, torch.float32, blocks of 32 tokens, ",
        " MiB per request with a snapshot, at most 4 blocks of ",
        "3 slots for requests of up to 1000 tokens, ",
        " KV blocks, 13 state blocks (keys and values ",
        "drafts 3 a step by mtp, strategy auto, 0 ahead, no graphs, retention all",
    ):
        assert words in text


def test_nothing_is_given_up_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, logging.WARNING) == ""


GIVEN_UP: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 256, "max_model_len": 200}, "no prefix can be found again: a block has 256"),
    (
        {"block_size": 16, "max_model_len": 160, "num_blocks": (45, 64)},
        "not all 8 requests fit at full length, about 4 do: 45 of 88 KV blocks",
    ),
    ({"drafter": "ngram", "sampled_drafts": True}, "sampled_drafts does nothing: drafter 'ngram'"),
    ({"graphs": True}, "no CUDA graphs: they need a GPU, and the device is cpu"),
]


@pytest.mark.parametrize(("options", "words"), GIVEN_UP, ids=[w for _, w in GIVEN_UP])
def test_what_was_given_up(
    options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert words in logged(caplog, logging.WARNING, **options)
