"""Keys and values in 8 bits: who decides it, what it saves, and that nothing else changes."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.damages import MODEL, checkpoint, tensors, whole
from helpers.modelopt import BESIDE, KV_SCALES, write_fp8
from helpers.oracle import make_caches, run_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_runtime.cli import main
from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.engine.memory_plan import Planner
from hybrid_runtime.kernels.linear.quantize import E4M3
from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.checkpoint import Checkpoint, load_model
from hybrid_runtime.models.few_layers import layer_kind
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

__all__ = ["checkpoint", "whole"]  # fixtures

INPUTS = dict.fromkeys(("in", "out", "up", "down", "q", "o"), 0.02) | {"down": 0.1}
K, V = "backbone.layers.2.mixer.k_proj.k_scale", "backbone.layers.2.mixer.v_proj.v_scale"
HEAD_K, HEAD_V = "mtp.layers.0.mixer.k_proj.k_scale", "mtp.layers.0.mixer.v_proj.v_scale"
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
BEFORE = """class File:
    def __init__(self, fp):
        self._fp = fp
        self._closed = False

    def read(self, size=-1):
        return self._fp.read(size)

"""
METHODS = [
    "    def readline(self, size=-1):\n",
    "    def write(self, data):\n",
    "    def close(self",
]


@pytest.fixture
def narrow(checkpoint: Path) -> Path:
    write_fp8(checkpoint, INPUTS, kv_scales=KV_SCALES)
    return checkpoint


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint with scales of its keys and values, and one matrix in 8 bits."""
    directory: Path = shutil.copytree(SHIPPED, tmp_path_factory.mktemp("calibrated") / "model")
    scales = {"k_scale": 0.0124, "v_scale": 0.0122}
    write_fp8(directory, INPUTS, algorithms={"*.0.mixer.in_proj": "FP8"}, kv_scales=scales)
    return directory


def scales(module: Any) -> list[float]:
    """Of keys and values, layer by layer."""
    parts: list[Any] = [part for part in module.modules() if isinstance(part, Attention)]
    return [float(s) for one in parts for s in (one.k_proj.k_scale, one.v_proj.v_scale)]


def run(directory: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(directory, **{"device": "cpu", "drafter": None} | options)


def stored_in(engine: Engine) -> set[torch.dtype]:
    return {part.dtype for layer in engine.runner.caches.kv.values() for part in layer}


@pytest.mark.parametrize(
    ("asked", "becomes"),
    [
        ("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16),
        (torch.float16, torch.float16), ("fp8", E4M3), (E4M3, E4M3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("drafter", [None, "mtp", "eagle"])
def test_of_a_plain_checkpoint(
    checkpoint: Path, asked: Any, becomes: torch.dtype, drafter: Any
) -> None:
    """Draft heads keep theirs in the same dtype."""
    engine = run(checkpoint, kv_cache_dtype=asked, drafter=drafter, max_requests=2)
    assert engine.kv_cache_dtype == becomes
    assert stored_in(engine) == {becomes}
    assert len(engine.generate(["x y"], SamplingParams(max_tokens=4))[0].tokens) == 4


def test_auto_is_what_the_checkpoint_says(narrow: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybrid_runtime")
    engine = run(narrow, drafter="mtp")
    assert engine.config.kv_cache_dtype == "auto"
    assert stored_in(engine) == {engine.kv_cache_dtype} == {E4M3}
    assert scales(engine.model) == pytest.approx(list(KV_SCALES.values()))
    assert "keys and values in torch.float8_e4m3fn" in caplog.text
    assert "1 for scales" not in caplog.text

    caplog.clear()
    assert run(narrow, kv_cache_dtype="bfloat16").kv_cache_dtype == torch.bfloat16
    assert f"keys and values are in torch.bfloat16, as kv_cache_dtype says; {narrow}" in caplog.text

    caplog.clear()
    tensors(**{K: None, V: None})(narrow)
    assert run(narrow).kv_cache_dtype == E4M3
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"1 of 1 layers are in FP8 with 1 for scales: {narrow / BESIDE}: quantiz" in warning
    assert "kv_cache_dtype='float32' would keep" in warning


def test_layers_without_scales_are_said(
    calibrated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(SHIPPED, kv_cache_dtype="fp8")
    assert "2 of 2 layers are in FP8 with 1 for scales: kv_cache_dtype='fp8' asks" in caplog.text
    partly: Path = shutil.copytree(calibrated, tmp_path / "model")
    mixer = "backbone.layers.3.mixer"
    tensors(**{f"{mixer}.k_proj.k_scale": None, f"{mixer}.v_proj.v_scale": None})(partly)
    run(partly)
    assert "1 of 2 layers are in FP8 with 1 for scales" in caplog.text


@pytest.mark.parametrize("wrong", ["fp8_e5m2", "int8", "", None, torch.float64, torch.float8_e5m2])
def test_other_dtypes_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype is .*; it must be one of 'auto', 'fl"):
        EngineConfig(kv_cache_dtype=wrong)


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NemotronH(
        NemotronHConfig(vocab_size=96, hidden_size=64, pattern="M*"), "meta", torch.bfloat16
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    config = EngineConfig(drafter=None, kv_cache_dtype="fp8")
    planner = Planner(config, config.layout(model), model, None, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8': keys .* 8\.9 or more.* 8\.6"):
        planner.plan()


@pytest.mark.parametrize("scale", [K, V, HEAD_K, HEAD_V])
def test_damaged_scales_are_refused(narrow: Path, scale: str) -> None:
    one, file = torch.ones(()), f"tensor {scale} in {narrow / MODEL}"
    tensors(**{HEAD_K: one, HEAD_V: one.clone()})(narrow)
    unused = re.sub("._proj.._scale", "o_proj.k_scale", scale)
    for name, value, words in (
        (scale, 0 * one, f"{file} holds 0, must hold finite numbers above 0"),
        (scale, -one, f"{file} holds -1, must"),
        (scale, one * torch.nan, f"{file} holds nan, must"),
        (scale, one * torch.inf, f"{file} holds inf, must"),
        (scale, torch.ones(2), f"{file} is [2], must be []"),
        (scale, one.half(), f"{file} is F16, must be F32"),
        (scale, None, f"tensor {scale} is missing in {narrow}, but "),
        (unused, one, f"tensor {unused} in {narrow / MODEL} is unexpected"),
    ):
        tensors(**{scale: one.clone(), name: value})(narrow)
        with pytest.raises(ValueError, match=re.escape(words)):
            run(narrow, drafter="mtp")


def test_draft_heads_have_scales_of_their_own(narrow: Path) -> None:
    tensors(**{HEAD_K: torch.tensor(0.25), HEAD_V: torch.tensor([0.5])})(narrow)
    engine = run(narrow, drafter="mtp")
    drafter: Any = engine.runner.drafter
    assert scales(drafter.head) == [0.25, 0.5]
    assert len(engine.generate(["x y"], SamplingParams(max_tokens=8))[0].tokens) == 8


def test_layers_with_scales_launch_other_kernels() -> None:
    """So warm-up passes run both kinds."""
    plain, scaled = (Attention(32, 4, 2, 8, 0, "cpu", torch.float32) for _ in range(2))
    assert layer_kind(plain) == layer_kind(scaled)
    scaled.add_kv_scales()
    assert layer_kind(plain) != layer_kind(scaled)


@torch.inference_mode()
def logits(directory: Path, kv_dtype: torch.dtype | None, chunks: list[int]) -> Tensor:
    model: Any = load_model(Checkpoint(directory), "cpu", torch.float32)
    tokens = torch.tensor(list("".join(PROMPTS).encode()))
    caches = make_caches(model, 2, 16, len(tokens), kv_dtype=kv_dtype)
    chunks = [*chunks, len(tokens) - sum(chunks)]
    found: Tensor = model.logits(run_prompt(model, tokens, chunks, caches, 16, slot=1))
    return found


def test_logits_are_near_those_of_plain_caches(calibrated: Path) -> None:
    """A number of 8 bits is off by a sixteenth at most; bfloat16 by a 256th."""
    exact = logits(calibrated, None, [])
    for directory, kv_dtype, bound in (
        (SHIPPED, None, 1e-2), (calibrated, torch.bfloat16, 2e-3), (calibrated, E4M3, 3e-2),
    ):  # fmt: skip
        error = (logits(directory, kv_dtype, []) - exact).norm() / exact.norm()
        assert error < bound
    assert error > 2e-3


def test_chunks_see_the_same_keys_and_values(calibrated: Path) -> None:
    """A token attends to what is stored of its own prompt, never to what has not been rounded."""
    whole, cut = (logits(calibrated, E4M3, chunks) for chunks in ([], [1, 30, 7, 64]))
    assert (whole - cut).norm() < 1e-3 * whole.norm()


def test_scales_do_nothing_to_plain_caches(calibrated: Path, tmp_path: Path) -> None:
    without: Path = shutil.copytree(calibrated, tmp_path / "model")
    stored = load_file(without / MODEL)
    kept = {name: t for name, t in stored.items() if not name.endswith(tuple(KV_SCALES))}
    assert len(kept) < len(stored)
    save_file(kept, without / MODEL, metadata={"format": "pt"})
    assert torch.equal(logits(calibrated, None, []), logits(without, None, []))
    assert not torch.equal(logits(calibrated, E4M3, []), logits(without, E4M3, []))


WAYS: dict[str, dict[str, Any]] = {
    "alone": {"prefix_caching": False},
    "hits": {},
    "mtp": {"drafter": "mtp"},
    "ngram": {"drafter": "ngram", "steps_ahead": 1},
    "columns": {"drafter": "mtp", "state_layout": "columns"},
    "preempted": {"num_blocks": (21, 64)},
    "host": {"num_blocks": (21, 64), "host_blocks": (64, 64), "max_requests": 1},
    "chunks": {"max_prompt_tokens": 48},
}


def test_text_does_not_depend_on_how_it_is_run(calibrated: Path) -> None:
    """Of a checkpoint that knows what it writes: of random weights near ties fall either way."""
    texts = {}
    for way, options in WAYS.items():
        sizes = {"max_model_len": 320, "block_size": 16, "kv_block_size": 16}
        engine = run(calibrated, **sizes | options)
        assert stored_in(engine) == {E4M3}
        for again in (False, True):
            if way == "host":  # the device has forgotten all of it
                for pool in (engine.scheduler.kv.pool, engine.scheduler.state.pool):
                    pool.clear()
            requests = [engine.submit(BEFORE + method, GREEDY) for method in METHODS]
            while not engine.idle:
                engine.step()
            texts[way, again] = [request.text for request in requests]
        stats = engine.stats()
        assert (stats.preemptions > 0) == (way == "preempted")
        if way == "host":
            assert engine.prefix_cache.host is not None
            assert engine.prefix_cache.host.tier.stats.loaded_blocks > 0
        elif way in ("hits", "mtp", "ngram", "columns"):
            assert all(request.hit.tokens > 0 for request in requests)
    first = texts["alone", False]
    assert all("\n" in text for text in first)
    assert {way for way, text in texts.items() if text != first} == set()


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "mtp"])
def test_graphs_write_what_the_shipped_checkpoint_writes(calibrated: Path, drafter: Any) -> None:
    engine = run(calibrated, device="cuda", drafter=drafter)
    engine.capture()
    assert stored_in(engine) == {E4M3}
    prompt = 'def read_lines(path):\n    """Yield the lines of a file."""\n'
    (done,) = engine.generate([prompt], SamplingParams(stop=("\n\n",), max_tokens=96))
    assert done.text.startswith("    lines = []\n    for line in ")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["generate", str(SHIPPED), "-p", "def ", "--max-tokens", "4", "--device", "cpu"]
    assert main([*wanted, "--kv-cache-dtype", "fp8"]) == 0
    with pytest.raises(SystemExit):
        main([*wanted, "--kv-cache-dtype", "int8"])
    assert "argument --kv-cache-dtype: invalid choice: 'int8'" in capsys.readouterr().err
