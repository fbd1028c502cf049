"""Perplexity: what the engine computes is what transformers does, over windows side by side."""

import json
import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import hf_model
from helpers.small_engine import CONFIG, VOCABULARY, engine, nothing_leaked
from hypothesis import given
from hypothesis import strategies as st
from transformers import NemotronHForCausalLM

from hybrid_runtime import demo
from hybrid_runtime.bench import perplexity
from hybrid_runtime.cli import main
from hybrid_runtime.engine.request import BrokenLogits
from hybrid_runtime.engine.tokenize import Tokens

MODEL = str(demo.SHIPPED)
TEXT = "import os\r\nnaïve = 'è'\n" * 9


@pytest.fixture(scope="module")
def hf() -> NemotronHForCausalLM:
    return hf_model(CONFIG, seed=3)


def tokens_of(count: int) -> Tokens:
    generator = np.random.default_rng(count)
    return generator.integers(0, VOCABULARY, count).astype(np.int32)


def by_transformers(hf: NemotronHForCausalLM, tokens: Tokens, window: int) -> float:
    total = 0.0
    for start in range(0, len(tokens), window):
        some = torch.from_numpy(tokens[start : start + window]).long()
        with torch.inference_mode():
            logits = hf(some[None]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits[:-1], some[1:], reduction="sum").item()
    return total


@pytest.mark.parametrize(
    ("count", "window"), [(2, 64), (64, 64), (65, 32), (97, 32), (300, 17), (7, 2)]
)
def test_the_likelihood_is_that_of_transformers(
    hf: NemotronHForCausalLM, count: int, window: int
) -> None:
    tokens = tokens_of(count)
    wanted = perplexity.config(window, block_size=16, max_tokens_per_step=48)
    options = {name: getattr(wanted, name) for name in wanted.__slots__ if name != "drafter"}
    runs = engine(hf, None, **options)
    total, scored = perplexity.negative_log_likelihood(runs, tokens, window)
    assert scored == count - math.ceil(count / window)
    assert total == pytest.approx(by_transformers(hf, tokens, window), rel=1e-4)
    nothing_leaked(runs)


def test_broken_logits_are_an_error(hf: NemotronHForCausalLM) -> None:
    runs = engine(hf, None, max_model_len=32)
    runs.model.backbone.norm_f.weight.fill_(float("nan"))
    with pytest.raises(BrokenLogits, match="NaN or infinite"):
        perplexity.negative_log_likelihood(runs, tokens_of(40), 32)


@given(count=st.integers(1, 200), window=st.integers(2, 60))
def test_windows_hold_each_token_once(count: int, window: int) -> None:
    tokens = np.arange(count, dtype=np.int32)
    found = perplexity.windows(tokens, window)
    assert list(chain.from_iterable(found)) == list(range(count))
    assert all(len(one) == window for one in found[:-1])


def test_figures_say_the_same_in_other_units() -> None:
    found = perplexity.figures(total=30.0, scored=20, tokens=22, size=44)
    assert found["nll_per_token"] == pytest.approx(1.5)
    assert found["perplexity"] == pytest.approx(math.exp(1.5))
    # Half a token a byte.
    assert found["bits_per_byte"] == pytest.approx(1.5 / math.log(2) / 2)


def measure(tmp_path: Path, *options: str) -> dict[str, Any]:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_bytes(TEXT.encode())
    given = ["bench", MODEL, "--perplexity", str(text), "--window", "50", "--json", str(out)]
    assert main([*given, *options]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_checkpoint_and_its_rounded_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure(tmp_path, "--quantization", "fp8")
    plain, rounded = result["rows"]
    size = len(TEXT.encode())  # a byte is a token, line ends as they are
    for row in (plain, rounded):
        assert (row["tokens"], row["bytes"]) == (size, size)
        assert row["scored"] == size - math.ceil(size / 50)
        assert row["perplexity"] == pytest.approx(math.exp(row["nll_per_token"]), rel=1e-4)
    assert plain["weights"] == "float32"
    assert rounded["weights"] == "float32, fp8"
    difference = rounded["nll_per_token"] - plain["nll_per_token"]
    assert difference != 0
    assert result["difference"]["nll_per_token"] == pytest.approx(difference, abs=1e-4)
    printed = capsys.readouterr().out
    assert f"{plain['perplexity']:.3f}" in printed
    assert "difference" in printed


def test_without_rounding_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure(tmp_path)
    assert len(result["rows"]) == 1
    assert "difference" not in result
    assert "difference" not in capsys.readouterr().out


def test_keys_and_values_in_8_bits_change_it(tmp_path: Path) -> None:
    (plain,), (rounded,) = (
        measure(tmp_path, "--kv-cache-dtype", dtype)["rows"] for dtype in ("auto", "fp8")
    )
    assert rounded["nll_per_token"] != plain["nll_per_token"]
    assert rounded["nll_per_token"] == pytest.approx(plain["nll_per_token"], rel=0.1)


@pytest.mark.parametrize(
    ("given", "wrong", "message"),
    [
        (b"", [], "perplexity is '.*text', which is empty"),
        (b"a", [], "perplexity is '.*text', which is 1 token long; it must have at least 2"),
        (b"ab\xff", [], "perplexity is '.*text', which has byte 0xff at 2; it must be UTF-8"),
        (None, [], "perplexity is '.*text': No such file"),
        (b"abc", ["--window", "1"], "window is 1; it must be an integer of at least 2"),
        (
            b"abc",
            ["--ssm-dtype", "float32,float16"],
            "ssm_dtype is float32,float16; it must be one",
        ),
        (b"abc", ["--max-model-len", "1"], "window is 1"),
    ],
)
def test_bad_input_is_one_line(
    given: bytes | None,
    wrong: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    if given is not None:
        text.write_bytes(given)
    assert main(["bench", MODEL, "--perplexity", str(text), *wrong]) == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(f"hybrid-runtime: error: {message}.*\n", printed)


def test_a_window_without_a_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", MODEL, "--window", "8"]) == 2
    assert "window is 8; it must be None without a perplexity" in capsys.readouterr().err


def test_weights_that_are_quantised_already_are_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in demo.SHIPPED.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((demo.SHIPPED / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--perplexity", str(demo.SHIPPED / "README.md"), "--quantization", "fp8"]
    assert main(["bench", str(tmp_path), *options]) == 2
    printed = capsys.readouterr()
    assert "windows" not in printed.err
    assert "quantised already" in printed.err
