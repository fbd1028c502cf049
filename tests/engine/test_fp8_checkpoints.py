"""Checkpoints in 8 bits through the engine: texts, and refusals in one line that names the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.damages import (
    MODEL,
    Damage,
    checkpoint,
    tensors,
    whole,
    write_json,
)
from helpers.modelopt import BESIDE, KV_SCALES, write_fp8
from safetensors.torch import load_file

from hybrid_runtime.cli import main
from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.kernels.linear.quantize import E4M3

__all__ = ["checkpoint", "whole"]  # fixtures

SCALES = {"in": 0.01, "out": 0.01, "up": 0.01, "down": 0.02, "q": 0.01, "o": 0.01}
IN, UP = "backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.up_proj"
K, V = "backbone.layers.2.mixer.k_proj", "backbone.layers.2.mixer.v_proj"
EXPERTS = "backbone.layers.3.mixer.experts"
EXPERT, SIXTH = f"{EXPERTS}.0.up_proj", f"{EXPERTS}.5.down_proj"
FILE_BEFORE = """class File:
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
FP8: dict[str, Any] = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*mixer.experts*"]}


@pytest.fixture
def narrow(checkpoint: Path) -> Path:
    write_fp8(checkpoint, SCALES, kv_scales=KV_SCALES)
    return checkpoint


@pytest.fixture
def routed(checkpoint: Path) -> Path:
    """With routed experts in 8 bits too."""
    write_fp8(checkpoint, SCALES, experts=True)
    return checkpoint


def says(**fields: Any) -> Damage:
    """Other fields in hf_quant_config.json."""

    def damage(directory: Path) -> None:
        about = json.loads((directory / BESIDE).read_text())["quantization"]
        write_json(BESIDE, {"quantization": about | fields})(directory)

    return damage


def config(**fields: Any) -> Damage:
    """The same in config.json instead."""

    def damage(directory: Path) -> None:
        (directory / BESIDE).unlink()
        file = directory / "config.json"
        about = {"quant_method": "modelopt", **FP8, "kv_cache_scheme": "FP8"} | fields
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))

    return damage


def also(**fields: Any) -> Damage:
    """The same in both, with other fields in config.json."""

    def damage(directory: Path) -> None:
        kept = (directory / BESIDE).read_bytes()
        config(**fields)(directory)
        (directory / BESIDE).write_bytes(kept)

    return damage


def table(excluded: Any = FP8["exclude_modules"], **formats: Any) -> Damage:
    """A table of some modules."""
    entries = {name: {"quant_algo": algorithm} for name, algorithm in formats.items()}
    return says(quant_algo="MIXED_PRECISION", quantized_layers=entries, exclude_modules=excluded)


def recast(dtype: torch.dtype, name: str = IN) -> Damage:
    def damage(directory: Path) -> None:
        weight = load_file(directory / MODEL)[f"{name}.weight"]
        tensors(**{f"{name}.weight": weight.to(dtype)})(directory)

    return damage


ONE, NONE = torch.ones(()), None
FILE, BESIDE_SAYS = f"DIR/{MODEL}", f"DIR/{BESIDE}: quantization: "
CONFIG_SAYS = "DIR/config.json: quantization_config: "
LIST = "must be a list of names of modules"
DAMAGES: dict[str, tuple[Damage, str]] = {
    # Scales.
    "no scale": (
        tensors(**{f"{IN}.weight_scale": NONE}),
        f"{IN}.weight_scale is missing in {FILE}",
    ),
    "no input's": (
        tensors(**{f"{UP}.input_scale": NONE}),
        f"{UP}.input_scale is missing in {FILE}",
    ),
    "zero": (
        tensors(**{f"{IN}.weight_scale": 0 * ONE}),
        f"{IN}.weight_scale in {FILE} holds 0, must",
    ),
    "negative": (tensors(**{f"{IN}.input_scale": -ONE}), f"{IN}.input_scale in {FILE} holds -1"),
    "nan": (
        tensors(**{f"{IN}.input_scale": ONE * torch.nan}),
        "input_scale in DIR/model.* holds nan",
    ),
    "infinite": (
        tensors(**{f"{IN}.weight_scale": ONE * torch.inf}),
        " holds inf, must hold finite",
    ),
    "of lines": (tensors(**{f"{IN}.weight_scale": torch.ones(100)}), r" is \[100\], must be \[\]"),
    "of blocks": (
        tensors(**{f"{IN}.weight_scale": torch.ones(100, 2)}),
        r" is \[100, 2\], must be",
    ),
    "in half": (
        tensors(**{f"{IN}.weight_scale": ONE.bfloat16()}),
        f"{IN}.weight_scale .* is BF16, must be F32",
    ),
    "unused": (
        tensors(**{"lm_head.weight_scale": ONE}),
        "lm_head.weight_scale in DIR/model.* is unexpected",
    ),
    "inverse": (
        tensors(**{f"{IN}.weight_scale_inv": ONE}),
        "weight_scale_inv in DIR/model.* is unexpected",
    ),
    "second": (
        tensors(**{f"{IN}.weight_scale_2": ONE}),
        "weight_scale_2 in DIR/model.* is unexpected",
    ),
    "of v alone": (
        tensors(**{f"{K}.k_scale": NONE}),
        f"{K}.k_scale is missing in DIR.*{V}.v_scale is in",
    ),
    "of keys, wrong": (
        tensors(**{f"{K}.k_scale": torch.zeros(1)}),
        "k_scale in DIR/model.* holds 0",
    ),
    "of keys, many": (
        tensors(**{f"{K}.k_scale": torch.ones(2)}),
        r"k_scale in .* is \[2\], must be \[\]",
    ),
    "of keys, unused": (
        says(kv_cache_quant_algo=NONE),
        f"{K}.k_scale in DIR/model.* is unexpected",
    ),
    # Weights.
    "plain": (recast(torch.bfloat16), f"{IN}.weight in {FILE} is BF16, must be F8_E4M3"),
    "e5m2": (recast(torch.float8_e5m2), f"{IN}.weight in {FILE} is F8_E5M2, must be one of"),
    "packed": (recast(torch.uint8), f"{IN}.weight in {FILE} is U8, must be one of"),
    "excluded": (
        says(exclude_modules=[EXPERT[:-10], "*.0.*"]),
        f"{IN}.*_scale in .* is unexpected",
    ),
    "head": (
        tensors(**{"lm_head.weight": torch.zeros(320, 32).to(E4M3)}),
        "lm_head.weight .* is F8_E4M3, must be one of",
    ),
    "shape": (
        tensors(**{f"{IN}.weight": torch.zeros(100, 16).to(E4M3)}),
        r" is \[100, 16\], must be \[100, 32\]",
    ),
    "said of nothing": (write_json(BESIDE, {}), f"{IN}.*_scale in {FILE} is unexpected"),
    "experts": (says(exclude_modules=[]), rf"{EXPERTS}.0.\w+.input_scale is missing in {FILE}"),
    # What the files say.
    "blocks": (
        says(quant_algo="FP8_PB_WO"),
        f"{BESIDE_SAYS}.*quant_algo is 'FP8_PB_WO', must be one",
    ),
    "nvfp4": (config(quant_algo="NVFP4"), f"{CONFIG_SAYS}.*quant_algo is 'NVFP4', must be one"),
    "no format": (config(quant_algo=NONE), f"{CONFIG_SAYS}has no quant_algo, must name"),
    "method": (config(quant_method="fp8"), f"{CONFIG_SAYS}.*quant_method is 'fp8', must be one of"),
    "unknown": (config(soft=1), f"{CONFIG_SAYS}config field soft is 1, but this"),
    "names": (
        says(exclude_modules="lm_head"),
        f"{BESIDE_SAYS}.*exclude_modules is 'lm_head', {LIST}",
    ),
    "no names": (config(ignore=[5]), rf"{CONFIG_SAYS}.*ignore is \[5\], {LIST}"),
    "zero point": (
        says(has_zero_point=True),
        f"{BESIDE_SAYS}.*has_zero_point is True, must be false",
    ),
    "kv": (
        says(kv_cache_quant_algo="NVFP4"),
        f"{BESIDE_SAYS}.*kv_cache_quant_algo is 'NVFP4', must",
    ),
    "kv bits": (
        config(kv_cache_scheme={"num_bits": 4, "type": "float"}),
        f"{CONFIG_SAYS}.*kv_cache_scheme is .*, must",
    ),
    "bits": (
        config(config_groups={"group_0": {"weights": {"num_bits": 4, "type": "float"}}}),
        f"{CONFIG_SAYS}config field config_groups.group_0.weights is .*num_bits 8",
    ),
    "dynamic": (
        config(
            config_groups={
                "a": {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
            }
        ),
        f"{CONFIG_SAYS}config field config_groups.a.input_activations is .*must not",
    ),
    "table": (
        table(**{IN: "FP8", UP: "NVFP4"}),
        f"{BESIDE_SAYS}module {UP} in quantized_layers is .*NVFP4",
    ),
    "table of a head": (table(lm_head="FP8"), f"{BESIDE_SAYS}module lm_head is FP8, but the model"),
    "table of an expert": (
        table([], **{EXPERT: "FP8"}),
        f"{BESIDE_SAYS}module {EXPERTS}.0.down_proj is none, must be FP8 as {EXPERT} is: routed",
    ),
    "table of none": (
        table([], **{f"{EXPERTS}.8.up_proj": "FP8"}),
        f"{BESIDE_SAYS}module {EXPERTS[9:]}.8.up_proj is FP8, but the model has no matrix",
    ),
    "empty table": (table(), f"{BESIDE_SAYS}.*quantized_layers is {{}}, must name"),
    "no mixture": (
        says(quantized_layers={IN: {"quant_algo": "FP8"}}),
        f"{BESIDE_SAYS}.*must be absent with",
    ),
    "part of a table": (table(**{IN: "FP8"}), "_scale in .* is unexpected"),
    "both": (
        also(ignore=[UP]),
        f"DIR/{BESIDE}: quantization says something else than DIR/config.json",
    ),
}
EXPERT_DAMAGES: dict[str, tuple[Damage, str]] = {
    "no scale": (
        tensors(**{f"{SIXTH}.weight_scale": NONE}),
        f"{SIXTH}.weight_scale is missing in {FILE}",
    ),
    "no input's": (
        tensors(**{f"{SIXTH}.input_scale": NONE}),
        f"{SIXTH}.input_scale is missing in {FILE}",
    ),
    "zero": (tensors(**{f"{SIXTH}.input_scale": 0 * ONE}), f"{SIXTH}.input_scale in {FILE} holds"),
    "nan": (
        tensors(**{f"{EXPERT}.weight_scale": ONE * torch.nan}),
        f"{EXPERT}.weight_scale in {FILE} holds nan, must hold finite",
    ),
    "of lines": (tensors(**{f"{SIXTH}.weight_scale": torch.ones(32)}), r" is \[32\], must be \[\]"),
    "in half": (tensors(**{f"{EXPERT}.input_scale": ONE.half()}), "input_scale .* is F16, must"),
    "unused": (
        tensors(**{f"{EXPERT}.output_scale": ONE}),
        f"{EXPERT}.output_scale in {FILE} is unexpected",
    ),
    "of none": (
        tensors(**{f"{EXPERTS}.8.up_proj.input_scale": ONE}),
        f"{EXPERTS}.8.up_proj.input_scale in {FILE} is unexpected",
    ),
    "plain": (recast(torch.float16, SIXTH), f"{SIXTH}.weight in {FILE} is F16, must be F8_E4M3"),
    "shape": (
        tensors(**{f"{SIXTH}.weight": torch.zeros(8, 8).to(E4M3)}),
        rf"{SIXTH}.weight in {FILE} is \[8, 8\], must be \[32, ",
    ),
    "excluded": (
        says(exclude_modules=["lm_head", f"{EXPERTS}*"]),
        rf"{EXPERTS}.\d+.\w+_proj.\w+_scale in {FILE} is unexpected",
    ),
    "excluded, one": (
        says(exclude_modules=[f"{EXPERTS}.5"]),
        f"{BESIDE_SAYS}module {EXPERTS}.5.up_proj is none, must be FP8 as {EXPERT} is: routed",
    ),
    "excluded, one matrix": (
        says(exclude_modules=["lm_head", "*experts.0.up_proj"]),
        f"{BESIDE_SAYS}module {EXPERTS}.0.down_proj is FP8, must be none as {EXPERT} is: routed",
    ),
    "table of two formats": (
        table(
            **{
                f"{EXPERTS}.{i}.{which}_proj": "FP8" if i else "FP8_PER_CHANNEL_PER_TOKEN"
                for i in range(8)
                for which in ("up", "down")
            },
            excluded=[],
        ),
        f"{EXPERTS}.1.up_proj is FP8, must be FP8_PER_CHANNEL_PER_TOKEN as {EXPERT} is",
    ),
    "head's": (
        tensors(**{"mtp.layers.1.mixer.experts.0.up_proj.weight_scale": ONE}),
        "mtp.layers.1.mixer.experts.0.up_proj.weight_scale in .* is unexpected",
    ),
}  # fmt: skip


def refused(directory: Path, case: tuple[Damage, str], capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = case
    damage(directory)
    with pytest.raises(ValueError, match=message.replace("DIR", str(directory))) as refused:
        Engine.from_pretrained(directory, device="cpu")
    assert "\n" not in str(refused.value)
    assert main(["generate", str(directory), "-p", "x", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"hybrid-runtime: error: {refused.value}\n"


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    narrow: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(narrow, DAMAGES[case], capsys)


@pytest.mark.parametrize("case", EXPERT_DAMAGES)
def test_damaged_experts_are_refused_in_one_line(
    routed: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(routed, EXPERT_DAMAGES[case], capsys)


def test_what_they_are_made_from_is_taken(narrow: Path) -> None:
    tensors(**{f"{K}.k_scale": NONE, f"{V}.v_scale": NONE})(narrow)
    for change in (lambda _: None, also(), config()):
        change(narrow)
        for drafter in ("mtp", "eagle", None):
            engine = Engine.from_pretrained(narrow, drafter=drafter, device="cpu")
            assert engine.generate(["x"], SamplingParams(max_tokens=4))[0].tokens


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "table"])
def test_experts_in_8_bits_are_taken(checkpoint: Path, algorithm: str) -> None:
    algorithms = {f"{EXPERTS}*": "FP8"} if algorithm == "table" else algorithm
    write_fp8(checkpoint, SCALES, experts=True, algorithms=algorithms, form="both")
    for drafter in ("mtp", None):
        engine = Engine.from_pretrained(checkpoint, drafter=drafter, device="cpu")
        assert engine.generate(["x"], SamplingParams(max_tokens=4))[0].tokens


def test_rounding_what_is_rounded_is_refused(narrow: Path, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"'fp8'; it must be None, .* already, as .*hf_quant_conf"):
        Engine.from_pretrained(narrow, quantization="fp8", device="cpu")
    (narrow / BESIDE).unlink()
    with pytest.raises(ValueError, match=rf"{IN}.* is unexpected"):
        Engine.from_pretrained(narrow, quantization="fp8", device="cpu")
    for wrong in ("int8", "", 8, "FP8"):
        with pytest.raises(ValueError, match=rf"quantization is {wrong!r}; it must be None or one"):
            Engine.from_pretrained(SHIPPED, quantization=wrong, device="cpu")


@pytest.mark.parametrize("way", ["static", "lines", "loading"])
def test_drafts_and_prefix_hits_leave_the_text(way: str, tmp_path: Path) -> None:
    """Of the shipped checkpoint, which knows what it writes: of random weights near ties fall
    either way."""
    directory: Path = shutil.copytree(SHIPPED, tmp_path / "model")
    if way != "loading":
        scales = {"in": 0.02, "out": 0.02, "up": 0.02, "down": 0.1, "q": 0.02, "o": 0.02}
        algorithm = "FP8" if way == "static" else "FP8_PER_CHANNEL_PER_TOKEN"
        write_fp8(directory, scales, algorithms=algorithm, experts=True)
    texts = []
    for drafter in (None, "mtp", "ngram"):
        engine = Engine.from_pretrained(
            directory, drafter=drafter, device="cpu", block_size=16, kv_block_size=16,
            quantization="fp8" if way == "loading" else None,
        )  # fmt: skip
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        for again in (False, True):
            requests = [engine.submit(FILE_BEFORE + prompt, params) for prompt in METHODS]
            while not engine.idle:
                engine.step()
            assert again == all(request.hit.tokens > 0 for request in requests)
            texts.append([request.text for request in requests])
    assert all(text == texts[0] for text in texts)


def test_the_shipped_checkpoint_writes_its_function_in_8_bits() -> None:
    engine = Engine.from_pretrained(SHIPPED, quantization="fp8", drafter="mtp", device="cpu")
    prompt = 'def read_lines(path):\n    """Yield the lines of a file."""\n'
    (done,) = engine.generate([prompt], SamplingParams(stop=("\n\n",), max_tokens=96))
    assert (
        done.text
        == "    lines = []\n    for line in path:\n        lines.append(line)\n    return lines"
    )
    assert engine.stats().mean_acceptance_length > 2.5


@pytest.mark.gpu
def test_the_shipped_checkpoint_writes_its_function_by_graphs() -> None:
    engine = Engine.from_pretrained(SHIPPED, quantization="fp8", drafter="mtp", device="cuda")
    engine.capture()
    prompt = 'def read_lines(path):\n    """Yield the lines of a file."""\n'
    (done,) = engine.generate([prompt], SamplingParams(stop=("\n\n",), max_tokens=96))
    assert done.text.startswith("    lines = []\n    for line in ")
    assert engine.stats().mean_acceptance_length > 2.5


def test_the_command_line_rounds_too(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["generate", str(SHIPPED), "-p", "def ", "--max-tokens", "4", "--device", "cpu"]
    assert main([*wanted, "--quantization", "fp8"]) == 0
    with pytest.raises(SystemExit):
        main([*wanted, "--quantization", "int8"])
    assert "argument --quantization: invalid choice: 'int8'" in capsys.readouterr().err
