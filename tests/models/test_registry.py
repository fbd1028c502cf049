"""A family of models is a file of its own and a line in the registry: nobody else names it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toy_family import Toy, toy_checkpoint
from safetensors.torch import load_file

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.models.checkpoint import Checkpoint, load_model
from hybrid_runtime.models.registry import FAMILIES, load_config

__all__ = ["toy_checkpoint"]  # fixture

ROOT = Path(__file__).parents[2]
PROMPT = "def main(argv=None):\n    parser = argparse.ArgumentParser(\n"
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": None},
        {"drafter": "ngram"},
        {"drafter": "ngram", "state_layout": "columns"},
        {"graphs": True, "steps_ahead": 1},
    ],
    ids=str,
)
def test_a_family_that_only_tests_know_serves(
    toy_checkpoint: Path, options: dict[str, Any]
) -> None:
    """The text of a prompt that is computed whole, again by a prefix hit."""
    with Engine.from_pretrained(
        toy_checkpoint, device="cpu", drafter=None, prefix_caching=False, block_size=16
    ) as plain:
        want = plain.generate([PROMPT], PARAMS)[0].tokens
    assert len(set(want)) > 10  # not one token again and again
    with Engine.from_pretrained(toy_checkpoint, device="cpu", block_size=16, **options) as engine:
        assert isinstance(engine.model, Toy)
        first, second = (engine.generate([PROMPT], PARAMS)[0] for _ in range(2))
        assert first.tokens == second.tokens == want
        assert first.hit.tokens == 0
        assert second.hit.tokens == (second.prompt_tokens - 1) // 16 * 16 > 0


def test_its_tensors_are_loaded_by_their_own_names(toy_checkpoint: Path) -> None:
    checkpoint = Checkpoint(toy_checkpoint)
    model = load_model(checkpoint, "cpu", torch.float32)
    stored = load_file(toy_checkpoint / "model.safetensors")
    loaded = checkpoint.family.tensors(model, ())
    assert stored.keys() == loaded.keys()
    assert "toy/state/in_proj/weight" in stored
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


def test_its_config_is_refused_by_its_own_rules(toy_checkpoint: Path) -> None:
    (toy_checkpoint / "config.json").write_text(json.dumps({"model_type": "toy"}))
    with pytest.raises(ValueError, match=r"toy/config\.json: config field n_embd is missing"):
        Engine.from_pretrained(toy_checkpoint)


def test_a_family_without_a_draft_head_says_so(toy_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"drafter is 'mtp', but checkpoint .* has no MTP head"):
        Engine.from_pretrained(toy_checkpoint, drafter="mtp")


@pytest.mark.parametrize("name", ["llama", 5, ["toy"], ""])
def test_an_unknown_family_is_refused_by_those_that_are_known(
    toy_checkpoint: Path, name: object
) -> None:
    (toy_checkpoint / "config.json").write_text(json.dumps({"model_type": name}))
    known = " or ".join(map(repr, FAMILIES))
    assert known.startswith("'nemotron_h' or 'qwen3_next' or ")
    must = rf"model_type is .*, must be {known}: nothing else"
    with pytest.raises(ValueError, match=must):
        Engine.from_pretrained(toy_checkpoint)


def test_a_config_without_a_model_type_is_of_the_first_family(tmp_path: Path) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path) == load_config(SHIPPED)


def test_nobody_else_names_a_family() -> None:
    for name, files in (
        ("NemotronH", r"models/nemotron_h\w*|integrations/vllm/\w+"),
        ("Qwen35", r"models/qwen3_5\w*|integrations/vllm/\w+"),
    ):
        _check_files(name, re.compile(rf"hybrid_runtime/({files})\.py"))


def _check_files(name: str, allowed: re.Pattern[str]) -> None:
    """Identifiers that begin with a family's name are its own."""
    for folder in ("hybrid_runtime", "specdecode", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            named = re.search(rf"\b{name}", file.read_text())
            assert named is None or allowed.fullmatch(path), path
