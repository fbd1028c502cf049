"""`EngineConfig`: documented, typed, and checked before any weight is read."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import hybrid_runtime
from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, EngineConfig, config
from hybrid_runtime.models.checkpoint import Checkpoint

ROOT = Path(hybrid_runtime.__file__).parents[1]


def test_options_for_type_checkers_are_the_fields_of_the_config() -> None:
    hints = get_type_hints(EngineConfig)
    want = {field.name: hints[field.name] for field in fields(EngineConfig)}
    assert get_type_hints(config.EngineOptions) == want


def test_every_option_is_documented() -> None:
    module = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    (body,) = (
        node.body
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineConfig"
    )
    documented = {
        ast.unparse(option.target)
        for option, text in pairwise(body)
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in fields(EngineConfig)}


CALLS = {
    "max_num_seqs=4": "max_num_seqs",
    "max_requests='4'": "max_requests",
    "drafter='guess'": "drafter",
    "max_requests=4, retention='prompt', ssm_dtype=torch.float16": None,
    "dtype='auto', ssm_dtype='float16'": None,
}


def test_mypy_refuses_unknown_options_and_wrong_types(tmp_path: Path) -> None:
    package = tmp_path / "hybrid_runtime"
    package.mkdir()
    for path in (*(ROOT / "hybrid_runtime").iterdir(), ROOT / "kernels", ROOT / "specdecode"):
        (package / path.name).symlink_to(path)
    # Of everything but the engine and where its options' types come from nothing needs to be known.
    engine = ("engine", "engine.engine", "engine.config", "engine.checks")
    known = (*engine, "specdecode.drafter", "state.layout")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {tmp_path}\nfollow_imports = skip\nignore_missing_imports = True\n"
        + "".join(f"[mypy-hybrid_runtime.{m}]\nfollow_imports = silent\n" for m in known)
    )
    lines = [f"Engine.from_pretrained('.', {call})" for call in CALLS]
    program = ["import torch", "from hybrid_runtime.engine import Engine", *lines]
    (tmp_path / "calls.py").write_text("\n".join(program) + "\n")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir=/dev/null", "calls.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    for number, name in enumerate(CALLS.values(), 3):
        found = [error for error in errors if error.startswith(f"calls.py:{number}:")]
        assert len(found) == (name is not None), ran.stdout
        assert all(str(name) in error for error in found), ran.stdout


@pytest.fixture
def no_weights(tmp_path: Path) -> Path:
    """A checkpoint whose weights are missing."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(SHIPPED / name, copy / name)
    return copy


def change(checkpoint: Path, **values: Any) -> None:
    """Other values in a checkpoint's config; None takes one out."""
    file = checkpoint / "config.json"
    changed = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_requests": 0}, "max_requests is 0; it must be an integer of at least 1"),
    ({"max_requests": 2.5}, "max_requests is 2.5"),
    ({"max_waiting": -1}, "max_waiting is -1"),
    ({"max_requests": None}, "max_requests is None; it must be an integer"),
    ({"max_requests": True}, "max_requests is True; it must be an integer"),
    ({"max_tokens_per_step": "64"}, "max_tokens_per_step is '64'; it must be an integer"),
    ({"block_size": "64"}, "block_size is '64'; it must be an integer"),
    ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5; it must be an integer"),
    ({"num_blocks": 10}, r"num_blocks is 10; it must be \(KV blocks, state blocks\)"),
    ({"num_blocks": (10,)}, r"num_blocks is \(10,\); it must be \(KV blocks, state blocks\)"),
    ({"num_blocks": (4, 0)}, "a size in num_blocks is 0"),
    ({"host_blocks": (0, 4)}, "a size in host_blocks is 0"),
    ({"ring_tokens": "15"}, "ring_tokens is '15'; it must be an integer of at least 0"),
    ({"graphs": "no"}, "graphs is 'no'; it must be one of None, False, True"),
    ({"prefix_caching": 1}, "prefix_caching is 1; it must be True or False"),
    ({"steps_ahead": True}, "steps_ahead is True"),
    ({"synthetic_acceptance": "3"}, "synthetic_acceptance is '3'; it must be a number"),
    ({"retention": None}, "retention is None; it must be 'all', 'prompt' or an integer"),
    ({"device": "abacus"}, "device is 'abacus'; it must be 'cpu', 'cuda' or 'cuda:N'"),
    ({"device": "meta"}, "device is 'meta'; it must be"),
    ({"device": "cuda:99"}, "device is 'cuda:99', but PyTorch finds"),
    ({"memory_fraction": 0}, "memory_fraction is 0; it must be above 0 and at most 1"),
    ({"memory_fraction": 90}, "memory_fraction is 90; it must be above 0 and at most 1"),
    ({"memory_fraction": "0.9"}, "memory_fraction is '0.9'; it must be a number"),
    ({"dtype": "half"}, "dtype is 'half'; it must be one of 'auto', 'float32'"),
    ({"dtype": 16}, "dtype is 16; it must be one of 'auto'"),
    ({"dtype": torch.float64}, "dtype is torch.float64; it must be one of 'auto'"),
    ({"ssm_dtype": "int8"}, "ssm_dtype is 'int8'; it must be one of 'auto'"),
    ({"ssm_dtype": None}, "ssm_dtype is None"),
    ({"steps_ahead": 2}, "steps_ahead is 2"),
    ({"ssm_dtype": torch.float64}, "ssm_dtype is torch.float64"),
    ({"state_layout": "rows"}, "state_layout is 'rows'"),
    ({"retention": "most"}, "retention is 'most'"),
    ({"synthetic_acceptance": 8.5}, "synthetic_acceptance is 8.5; .* must be in 1..8"),
    ({"synthetic_acceptance": (0.9, 0.5)}, "must be 7 rates from 0 to 1"),
    ({"synthetic_acceptance": (0.5, 0.9, 0.1, 0, 0, 0, 0)}, "none above the one before it"),
    ({"synthetic_acceptance": (1.5, 0.9, 0.1, 0, 0, 0, 0)}, "synthetic_acceptance is"),
    ({"synthetic_acceptance": ((0.5,) * 7, (0.5, 0.6))}, "must be 7 rates from 0 to 1"),
    ({"synthetic_acceptance": ((0.5,) * 7, 0.5)}, "must be 7 rates from 0 to 1"),
    ({"adaptive": 1}, "adaptive is 1; it must be"),
    # These need the model's config.
    ({"block_size": 3}, "block_size is 3; it must be larger than num_speculative_tokens"),
    ({"num_speculative_tokens": 16}, r"num_speculative_tokens is 16; it must be in 0\.\.15"),
    (
        {"ring_tokens": 3},
        r"ring_tokens is 3 with num_speculative_tokens=7; it must be 0, 8\.\.15 or 31",
    ),
    ({"ring_tokens": 16}, r"ring_tokens is 16 .*; it must be 0, 8\.\.15 or 31"),
    ({"drafter": "mtp", "eagle_path": "x"}, "eagle_path is 'x' with drafter='mtp'"),
    ({"eagle_path": 5}, "eagle_path is 5; it must be a directory or a hub id"),
    ({"eagle_path": "/no/such/place"}, "'/no/such/place' does not exist"),
    ({"kv_block_size": 0}, "kv_block_size is 0; it must be an integer of at least 1"),
    (
        {"block_size": 16, "kv_block_size": 6},
        r"kv_block_size is 6; it must divide the block size \(16\)",
    ),
    ({"block_size": 16, "retention": 24}, "retention is 24; .* multiple of the block size"),
    ({"stochastic_rounding": True}, "stochastic_rounding is True with ssm_dtype=torch.float32"),
    ({}, "has no weights"),
]


def test_kv_blocks_are_small_where_that_divides_the_blocks_of_states() -> None:
    sizes = {4224: 64, 1056: 32, 1328: 1328, 48: 48, 64: 64, 40: 40, 11: 11, 8: 8}
    assert {block: EngineConfig().kv_block(block) for block in sizes} == sizes
    assert EngineConfig(kv_block_size=4).kv_block(8) == 4


@pytest.mark.parametrize(("options", "message"), BAD, ids=[m for _, m in BAD])
def test_options_are_checked_before_weights_are_read(
    no_weights: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(no_weights, **options)


TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    (
        {"max_requests": 10**8, "drafter": "mtp"},
        "max_requests is 100000000: needs .* fits",
    ),
    (
        {"num_blocks": (10**12, 64), "drafter": "mtp"},
        "num_blocks is .*: needs .* GiB, .* free",
    ),
    (
        {"num_blocks": (64, 3), "drafter": "mtp"},
        "num_blocks is .*; its state blocks must be",
    ),
    (
        {"host_blocks": (10**12, 1), "drafter": "mtp"},
        r"host_blocks is \(1.*: needs .* of host memory",
    ),
    (
        {"host_blocks": (1, 10**12), "drafter": "mtp"},
        "host_blocks is .*: needs .* of host memory",
    ),
]


@pytest.mark.parametrize(("options", "message"), TOO_LARGE, ids=[m for _, m in TOO_LARGE])
def test_what_does_not_fit_is_refused_before_weights_are_read(
    options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=message):
        Engine.from_pretrained(SHIPPED, **options)
    assert "loaded" not in caplog.text


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("max_num_requests", "max_requests"), ("drafters", "drafter"), ("block_sise", "block_size")],
)
def test_an_unknown_option_is_refused_with_the_nearest_that_there_is(
    option: str, nearest: str
) -> None:
    refused = rf"option {option} is not known; the nearest is {nearest} \(all: drafter, "
    with pytest.raises(ValueError, match=refused):
        EngineConfig(**{option: 1})
    with pytest.raises(ValueError, match=refused):
        Engine.from_pretrained(SHIPPED, **{option: 1})


def test_drafts_of_a_head_that_the_checkpoint_lacks_are_refused_before_its_weights_are_read(
    no_weights: Path,
) -> None:
    change(no_weights, num_nextn_predict_layers=None, mtp_hybrid_override_pattern=None)
    with pytest.raises(ValueError, match=r"drafter is 'mtp', but checkpoint .* has no MTP head"):
        Engine.from_pretrained(no_weights, drafter="mtp")
    with pytest.raises(ValueError, match="eagle"):
        Engine.from_pretrained(no_weights, drafter="eagle")
    with pytest.raises(ValueError, match="has no weights"):
        Engine.from_pretrained(no_weights, drafter="ngram")


def test_a_model_without_states_is_refused_before_its_weights_are_read(no_weights: Path) -> None:
    change(no_weights, hybrid_override_pattern="*-", num_hidden_layers=2)
    with pytest.raises(ValueError, match="the model has no layer with a state; it must have one"):
        Engine.from_pretrained(no_weights, drafter="ngram")


@pytest.mark.parametrize(("drafts", "ring_tokens"), [(1, 15), (7, 15), (8, 31), (15, 31)])
def test_many_drafts_get_a_long_ring(drafts: int, ring_tokens: int) -> None:
    model = Checkpoint(SHIPPED).build("meta", torch.float32)
    options = EngineConfig(drafter="ngram", num_speculative_tokens=drafts)
    assert options.layout(model).ring_tokens == ring_tokens
    shorter = EngineConfig(drafter="ngram", num_speculative_tokens=drafts, ring_tokens=0)
    assert shorter.layout(model).ring_tokens == 0


@pytest.mark.parametrize("path", [None, 5, ""])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match=f"path is {path!r}; it must be a directory or a hub id"):
        Engine.from_pretrained(path)


def test_a_broken_tokenizer_is_refused_before_weights_are_read(no_weights: Path) -> None:
    (no_weights / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Engine.from_pretrained(no_weights)


@pytest.mark.parametrize("value", ["bfloat16", torch.bfloat16, "auto"])
def test_dtypes_by_name_and_auto(value: Any) -> None:
    """The shipped checkpoint's own weights are bfloat16, its states float32."""
    runs = Engine.from_pretrained(SHIPPED, device="cpu", dtype=value, ssm_dtype="float16")
    assert runs.model.dtype == torch.bfloat16
    assert runs.manager.layout.matrix_dtype == torch.float16
    runs = Engine.from_pretrained(SHIPPED, device="cpu", ssm_dtype="auto")
    assert runs.model.dtype == runs.manager.layout.matrix_dtype == torch.float32


def test_a_dtype_of_the_checkpoint_that_nothing_computes_in_is_refused(no_weights: Path) -> None:
    change(no_weights, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"/config\.json: .* dtype is 'float8_e4m3fn', must"):
        Engine.from_pretrained(no_weights)


def test_states_have_the_dtype_that_the_checkpoint_asks_for(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(SHIPPED, copy)
    change(copy, mamba_ssm_cache_dtype="bfloat16")
    assert Engine.from_pretrained(copy).manager.layout.matrix_dtype == torch.bfloat16
    chosen = Engine.from_pretrained(copy, ssm_dtype=torch.float16)
    assert chosen.manager.layout.matrix_dtype == torch.float16


def test_most_drafts_where_somebody_drafts() -> None:
    drafters: tuple[Any, ...] = ("auto", "mtp", "ngram", None)
    assert [EngineConfig(drafter=d).num_draft for d in drafters] == [7, 7, 7, 0]
    assert [EngineConfig(drafter=d, adaptive=False).num_draft for d in drafters] == [3, 3, 3, 0]
    assert EngineConfig(drafter="mtp", state_layout="columns").num_draft == 3
    assert EngineConfig(drafter="mtp", num_speculative_tokens=5).num_draft == 5


def test_replay_is_the_layout_for_every_number_of_drafts() -> None:
    """Without any, too, narrow states can be stochastically rounded."""
    model = Checkpoint(SHIPPED).build("meta", torch.float32)
    narrow: dict[str, Any] = {"ssm_dtype": "float16", "stochastic_rounding": True}
    for drafts in (0, 3):
        drafting: dict[str, Any] = {"drafter": "ngram" if drafts else None}
        layout = EngineConfig(**drafting, **narrow).layout(model)
        assert (layout.kind, layout.ring_tokens) == ("replay", 15)
        with pytest.raises(ValueError, match="in the replay layout"):
            EngineConfig(**drafting, **narrow, state_layout="columns").layout(model)
