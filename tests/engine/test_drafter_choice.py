"""Drafter "auto": an MTP head, else an EAGLE head, else n-gram look-up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.models.eagle import EagleHead
from hybrid_runtime.models.nemotron_h import MTPHead

PARAMS = SamplingParams(max_tokens=6)


def drafts_with(engine: Engine) -> str | None:
    """What the engine says, once it has written something with it."""
    assert len(engine.generate(["import "], PARAMS)[0].tokens) == 6
    return engine.config.drafter


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(SHIPPED, tmp_path / "model")


def without_mtp_weights(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith("mtp.")}
    save_file(tensors, file)


def without_mtp(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["num_nextn_predict_layers"], config["mtp_hybrid_override_pattern"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    without_mtp_weights(checkpoint)


def test_an_mtp_head_comes_first() -> None:
    assert drafts_with(Engine.from_pretrained(SHIPPED)) == "mtp"


def test_an_eagle_head_that_is_named_comes_before_it() -> None:
    assert drafts_with(Engine.from_pretrained(SHIPPED, eagle_path=SHIPPED / "eagle")) == "eagle"


def test_else_the_eagle_head_beside_the_checkpoint(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_mtp(checkpoint)
    with caplog.at_level("INFO", "hybrid_runtime"):
        assert drafts_with(Engine.from_pretrained(checkpoint)) == "eagle"
    assert "drafter is EAGLE" in caplog.text
    assert "its config names no MTP head" in caplog.text


def test_else_n_grams(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    without_mtp_weights(checkpoint)
    shutil.rmtree(checkpoint / "eagle")
    assert drafts_with(Engine.from_pretrained(checkpoint)) == "ngram"
    assert "drafter is n-gram look-up" in caplog.text
    assert "its files have no tensor of one" in caplog.text


def test_a_loaded_model_drafts_with_the_head_that_it_is_given() -> None:
    loaded = Engine.from_pretrained(SHIPPED, drafter=None).model
    heads = {"mtp": MTPHead(loaded), "ngram": None}
    for name, head in heads.items():
        assert Engine(loaded, EngineConfig(), head=head).config.drafter == name
    eagle = Engine.from_pretrained(SHIPPED, drafter="eagle").runner.drafter
    head = getattr(eagle, "head", None)
    assert isinstance(head, EagleHead)
    with pytest.raises(ValueError, match="head is None; drafter 'mtp' needs one"):
        Engine(loaded, EngineConfig(drafter="mtp"))
