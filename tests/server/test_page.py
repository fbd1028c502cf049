"""docs/server.md names every option, path, field, status and metric, and no others."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from helpers.http_server import shipped

from hybrid_runtime.cli import parser
from hybrid_runtime.engine import EngineConfig
from hybrid_runtime.server import app, chat, completions, embeddings, schemas, tokenizer
from hybrid_runtime.server.metrics import PREFIX, Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_every_option() -> None:
    """With its default; those of `EngineConfig` stand in docs/engine.md."""
    (commands,) = (
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    options = {
        action.option_strings[0]: str(action.default)
        for action in commands.choices["serve"]._actions
        if action.option_strings and action.dest not in ("help", *EngineConfig.__dataclass_fields__)
    }
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| `([^`]*)` \|", section("Options"), re.MULTILINE))
    assert rows == options


def test_every_path() -> None:
    routers = (app.router, chat.router, completions.router, embeddings.router, tokenizer.router)
    paths = {
        re.sub(r"\{.*\}", "NAME", route.path)
        for router in routers for route in router.routes if isinstance(route, APIRoute)
    }  # fmt: skip
    assert set(re.findall(r"`(?:GET|POST) (\S+)`", section("Paths"))) == paths | {"/openapi.json"}


BODIES: tuple[Any, ...] = (
    schemas.CompletionBody, schemas.ChatBody, schemas.EmbeddingBody, schemas.TokenizeBody,
    schemas.DetokenizeBody,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_every_field(body: Any) -> None:
    missing = {f for f in body.model_fields if not re.search(rf"`{f}`", section("Fields"))}
    assert not missing


def test_no_field_that_there_is_not() -> None:
    known: set[str] = {f for body in BODIES for f in body.model_fields}
    named = re.findall(r"^\| (`.*?`) \|", section("Fields"), re.MULTILINE)
    assert {n for names in named for n in re.findall(r"`(\w+)`", names)} <= known


def test_every_metric() -> None:
    families = Metrics(shipped(drafter=None), "x").registry.collect()
    names = {family.name.removeprefix(f"{PREFIX}_") for family in families}
    rows = re.findall(r"^\| (`.*?`) \|", section("Metrics"), re.MULTILINE)
    assert {n for row in rows for n in re.findall(r"`(\w+)`", row)} == names
