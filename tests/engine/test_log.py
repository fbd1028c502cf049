"""The log says what was loaded and chosen, and what was given up for which reason."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine
from hybrid_runtime.engine.memory_plan import MemoryPlan, longest
from hybrid_runtime.engine.summary import log_engine


def logged(caplog: pytest.LogCaptureFixture, level: int, **options: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "hybrid_runtime"):
        Engine.from_pretrained(SHIPPED, device="cpu", **options)
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == level)


def test_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    text = logged(caplog, logging.INFO, block_size=32, max_model_len=1000, max_requests=3)
    for words in (
        "python-small: 9.6 MiB of torch.float32 to cpu in ",
        "layout replay, ring of 15 tokens, torch.float32, saved every 32 tokens, ",
        " MiB per request with a checkpoint, at most 4 blocks of ",
        "3 slots for requests of up to 1000 tokens, ",
        " KV blocks of 32 tokens, 13 state blocks (keys and values ",
        "drafts as many as pay, at most 7 a step by mtp, ",
        "strategy auto, 0 ahead, no graphs, retention all",
    ):
        assert words in text


def test_nothing_is_given_up_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, logging.WARNING) == ""
    assert logged(caplog, logging.WARNING, max_model_len=8192, max_requests=1) == ""


GIVEN_UP: list[tuple[dict[str, Any], str]] = [
    (
        {"block_size": 256, "max_model_len": 200},
        "no prefix can be found again but where a text has ended: states are saved every 256",
    ),
    ({"drafter": "ngram", "sampled_drafts": True}, "sampled_drafts does nothing: drafter 'ngram'"),
    (
        {"max_model_len": 8193, "max_requests": 1},
        "max_model_len is 8193, more than the 8192 tokens that the model was made for "
        "(max_position_embeddings)",
    ),
    ({"graphs": True}, "no CUDA graphs: they need a GPU, and the device is cpu"),
]


@pytest.mark.parametrize(("options", "words"), GIVEN_UP, ids=[w for _, w in GIVEN_UP])
def test_what_was_given_up(
    options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert words in logged(caplog, logging.WARNING, **options)


def test_requests_that_do_not_all_fit_at_full_length(caplog: pytest.LogCaptureFixture) -> None:
    """Where the blocks are what a GPU had room for; chosen ones are nobody's surprise."""
    with Engine.from_pretrained(SHIPPED, block_size=16, max_model_len=160) as engine:
        plan = MemoryPlan((45, 64), kv=0, state=0, slots=0, step=0, weights=0, draft_copy=0)
        caplog.clear()
        log_engine(engine.config, engine.manager.layout, engine.model, plan)
        chosen = replace(engine.config, num_blocks=(45, 64))
        log_engine(chosen, engine.manager.layout, engine.model, plan)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    full = 8 * -(-longest(engine.config, engine.model.device) // 16)
    assert f"not all 8 requests fit at full length, about 4 do: 45 of {full} KV blocks" in warning
