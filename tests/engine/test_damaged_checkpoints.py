"""Damaged checkpoints: each is refused in one line that names the file and what is wrong."""

import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.damages import (
    EAGLE_CONFIG,
    EAGLE_MODEL,
    HEAD,
    INDEX,
    MODEL,
    NORM,
    TOKENS,
    Damage,
    broken_link,
    cast,
    change,
    checkpoint,
    edit,
    folder,
    gone,
    header,
    shards,
    tensors,
    twice,
    whole,
    write,
    write_json,
)

from hybrid_runtime.cli import main
from hybrid_runtime.engine import Engine, SamplingParams

__all__ = ["checkpoint", "whole"]  # fixtures

OTHER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 999}, "unk_token": "a"},
}
EXPERT = "backbone.layers.3.mixer.experts.7.up_proj.weight"
JOINED = "mtp.layers.0.eh_proj.weight"
NO_NORM = "layers.0.input_layernorm.weight"  # an EAGLE head has none
NO_TOKENS = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}

# What is damaged, how, and what is said behind the file's path.
FILES: list[tuple[str, Damage, str]] = [
    *(
        (name, damage, message)
        for name in ("config.json", EAGLE_CONFIG, "generation_config.json", "tokenizer_config.json")
        for damage, message in (
            (write(name, ""), " is not JSON: Expecting value"),
            (write(name, '{"a": 1,'), " is not JSON: Expecting property name"),
            (write(name, "[" * 100_000), " is not JSON: maximum recursion|Expecting"),
            (write(name, "[]"), " holds a list, must hold a JSON object"),
            (write(name, "null"), " holds a NoneType, must hold a JSON object"),
            (write(name, '{"a": 1' + "0" * 5000 + "}"), " is not JSON: Exceeds the limit"),
            (write(name, b"\xff\xfe{\0}\0"), " has no UTF-8 text: .* 0xff in position 0"),
            (write(name, "\ufeff{}"), " is not JSON: Unexpected UTF-8 BOM"),
            (folder(name), " is a directory, must be a file"),
        )
    ),
    (
        "config.json",
        change("config.json", **{"a\nb": 1}),
        ": config field a b is 1, but this field",
    ),
    ("config.json", change("config.json", **{"a" * 9999: 1}), ": config field a+ ... is 1, but"),
    ("config.json", gone("config.json"), " does not exist, must be a file of the checkpoint"),
    (EAGLE_CONFIG, gone(EAGLE_CONFIG), " does not exist"),
    # Weights.
    ("", gone(MODEL), " has no weights, must hold model.safetensors or"),
    (MODEL, broken_link, " is not a safetensors file: No such file"),
    (MODEL, folder(MODEL), " is not a safetensors file: .*(No such device|directory)"),
    (MODEL, write(MODEL, b""), " is not a safetensors file: .*header too small"),
    (MODEL, edit(MODEL, lambda raw: raw[:5]), " is not a .* header too small"),
    (MODEL, edit(MODEL, lambda raw: raw[:200]), " is not a .* invalid header length"),
    (MODEL, edit(MODEL, lambda raw: raw[: len(raw) // 2]), " is not a .* incomplete metadata"),
    (MODEL, edit(MODEL, lambda raw: raw[:-1]), " is not a .* incomplete metadata"),
    (MODEL, edit(MODEL, lambda raw: raw + b"\0"), " is not a .* incomplete metadata"),
    (MODEL, edit(MODEL, lambda raw: b"\xff" * 8 + raw[8:]), " is not a .* header too large"),
    (MODEL, edit(MODEL, lambda raw: raw[:8] + b"\0" + raw[9:]), " is not a .* in header"),
    (MODEL, write(MODEL, b"\x80\x02}q\x00." * 100), " is not a .* header too large"),
    (MODEL, write(MODEL, "version https://git-lfs.github.com/spec/v1\n"), " is not a .* too large"),
    (MODEL, header(lambda given: []), " is not a .* invalid JSON in header"),
    (MODEL, header(lambda given: given | {HEAD: {}}), " is not a .* missing field"),
    (
        MODEL,
        header(lambda given: given | {HEAD: given[HEAD] | {"dtype": "Q4"}}),
        " is not a .*`Q4`",
    ),
    (
        MODEL,
        header(lambda given: given | {HEAD: given[HEAD] | {"shape": [-1]}}),
        " is not a .*`-1`",
    ),
    (
        MODEL,
        header(lambda given: given | {HEAD: given[HEAD] | {"shape": [2**63, 2**63]}}),
        " is not a .* overflow",
    ),
    (MODEL, header(lambda given: given | {HEAD: given[NORM]}), " is not a .* offset"),
    (MODEL, cast(torch.int8), " is I8, must be one of F32, BF16, F16"),
    (MODEL, cast(torch.float8_e4m3fn), " is F8_E4M3, must be one of F32, BF16, F16"),
    (MODEL, cast(torch.float8_e5m2), " is F8_E5M2, must be one of"),
    (MODEL, cast(torch.float64), " is F64, must be one of"),
    (MODEL, cast(torch.bool), " is BOOL, must be one of"),
    ("", tensors(**{HEAD: None}), "tensor lm_head.weight is missing in FILE"),
    ("", tensors(**{EXPERT: None}), f"tensor {EXPERT} is missing in FILE"),
    ("", write(MODEL, struct.pack("<Q", 2) + b"{}"), "tensor .* is missing in FILE"),
    ("", tensors(**{"mtp.layers.0.hnorm.weight": None}), "tensor mtp.* is missing in FILE"),
    (MODEL, tensors(**{"mtp.layers.2.norm.weight": torch.ones(32)}), " is unexpected"),
    (MODEL, tensors(**{JOINED: torch.ones(32, 32)}), r" is \[32, 32\], must be \[32, 64\]"),
    (MODEL, tensors(**{"a\nb": torch.ones(1)}), " has no name that can be printed"),
    (MODEL, tensors(**{"lm_head.scale": torch.ones(1)}), " is unexpected"),
    (MODEL, tensors(**{HEAD: torch.ones(32, TOKENS)}), r" is \[32, 320\], must be \[320, 32\]"),
    (MODEL, tensors(**{HEAD: torch.ones(())}), r" is \[\], must be \[320, 32\]"),
    (EAGLE_MODEL, write(EAGLE_MODEL, b""), " is not a safetensors file"),
    (EAGLE_MODEL, edit(EAGLE_MODEL, lambda raw: raw[:-9]), " is not a safetensors file"),
    ("eagle", gone(EAGLE_MODEL), " has no weights"),
    ("eagle", tensors(EAGLE_MODEL, **{"fc.weight": None}), "tensor fc.weight is missing in FILE"),
    (EAGLE_MODEL, tensors(EAGLE_MODEL, **{NO_NORM: torch.ones(32)}), " is unexpected"),
    (EAGLE_MODEL, tensors(EAGLE_MODEL, **{"fc.bias": torch.ones(3)}), r" is \[3\], must be \[32\]"),
    (EAGLE_MODEL, tensors(EAGLE_MODEL, **{"fc.bias": torch.ones(32).char()}), " is I8, must be"),
    # Index files.
    (INDEX, shards({}), " has no weight_map, must be an object that maps"),
    (INDEX, shards([]), " holds a list"),
    (INDEX, shards({"weight_map": None}), " has no weight_map"),
    (INDEX, shards({"weight_map": 5}), ": config field weight_map is 5, must be an object"),
    (INDEX, shards({"weight_map": []}), r": config field weight_map is \[\], must be an object"),
    (INDEX, shards({"weight_map": {}}), ": config field weight_map is {}, must be an object"),
    (INDEX, shards({"weight_map": {HEAD: 5}}), ": config field weight_map is {.*: 5}, must be"),
    (INDEX, shards({"weight_map": {HEAD: None}}), ": config field weight_map is {.*: None}, must"),
    (INDEX, shards({"weight_map": {HEAD: "../a"}}), ": config field weight_map .* files beside it"),
    (INDEX, shards({"weight_map": {HEAD: "/etc/hosts"}}), ": config field weight_map .* beside it"),
    ("b.safetensors", shards({"weight_map": {HEAD: "b.safetensors"}}), " does not exist, but"),
    ("a.safetensors", shards({"weight_map": {"x": "a.safetensors"}}), ", but .*index.json puts it"),
    (
        INDEX,
        shards({"weight_map": {HEAD: "a\nb"}}),
        r": config field weight_map is .*'a\\nb'}, must",
    ),
    ("b.safetensors", twice, ", must be in one file"),
    # What says that weights are quantised.
    *(
        ("hf_quant_config.json", write_json("hf_quant_config.json", content), message)
        for content, message in (
            (
                {"quantization": {"quant_algo": "NVFP4"}},
                ": quantization: config field quant_algo is 'NVFP4', must be one of FP8, ",
            ),
            ({"quantization": {"quant_algo": 8}}, ": quantization: .* quant_algo is 8, must be a"),
            (
                {"quantization": "NVFP4"},
                ": config field quantization is 'NVFP4', must be an object",
            ),
            ({"quantization": None}, ": quantization: is None, must be an object"),
            ([], " holds a list"),
        )
    ),
    # The tokenizer and what stands beside it.
    *(
        ("tokenizer.json", damage, message)
        for damage, message in (
            (gone("tokenizer.json"), " does not exist, must be a file of the checkpoint"),
            (folder("tokenizer.json"), " is a directory, must be a file"),
            (write("tokenizer.json", ""), " is not a tokenizer: EOF"),
            (write("tokenizer.json", "{}"), " is not a tokenizer: Model missing"),
            (write("tokenizer.json", "[]"), " is not a tokenizer: invalid type"),
            (write("tokenizer.json", b"\xff\xfe"), " has no UTF-8 text"),
            (edit("tokenizer.json", lambda raw: raw[:-9]), " is not a tokenizer: "),
            (change("tokenizer.json", model={"type": "BPE"}), " is not a tokenizer: "),
            (change("tokenizer.json", version="9\n\u2028"), " is not a tokenizer: Unknown"),
            (change("tokenizer.json", version="9"), " is not a tokenizer: Unknown"),
            (write_json("tokenizer.json", OTHER), r" has token id 999, must have ids in 0\.\.319"),
            (write_json("tokenizer.json", NO_TOKENS), " has no tokens, must have ids in 0"),
        )
    ),
    *(
        (name, change(name, **fields), f": config field {next(iter(fields))} is .*, must be a text")
        for name in ("tokenizer_config.json",)
        for fields in (
            {"eos_token": 5},
            {"bos_token": True},
            {"pad_token": {"id": 257}},
            {"chat_template": 5},
            {"chat_template": ["{{ messages }}"]},
            {"chat_template": [{"name": "default"}]},
        )
    ),
    (
        "special_tokens_map.json",
        write_json("special_tokens_map.json", {"bos_token": []}),
        r": config field bos_token is \[\], must be a text",
    ),
    ("chat_template.jinja", folder("chat_template.jinja"), " is a directory"),
    ("chat_template.jinja", write("chat_template.jinja", b"caf\xe9"), " has no UTF-8 text"),
    (
        "additional_chat_templates/rag.jinja",
        write("additional_chat_templates/rag.jinja", b"caf\xe9"),
        " has no UTF-8 text",
    ),
]
FLAG, SIZE, COUNT = "true or false", r"an integer in 1\.\.1048576", r"an integer in 1\.\.65536"
TOKEN = r"an integer in 0\.\.319, or a list"
ABOVE = "a number above 0 and at most 1$"
LAYERS = r"a text of 1 to 4096 layers, each one of M \* - E"
NAN = math.nan

# Fields by file, wrong values of each, and what it must be.
FIELDS: list[tuple[str, str, list[Any], str]] = [
    ("config.json", "layer_norm_epsilon", ["1e-5", -1, 0, NAN, math.inf, True, [1e-5]], ABOVE),
    ("config.json", "norm_eps", ["1e-5", NAN, 2], ABOVE),
    ("config.json", "routed_scaling_factor", ["2.5", -1, 0, NAN, False, {}], "a number above 0"),
    ("config.json", "hybrid_override_pattern", [1, "", "MXE", ["M"], "M" * 5000], LAYERS),
    ("config.json", "layers_block_type", ["mamba", [], ["mamba", 1], {"0": "mamba"}], "a list of"),
    ("config.json", "mtp_hybrid_override_pattern", [1, "*X"], "a text of 0 to 4096 layers"),
    ("config.json", "hidden_size", [0, -1, "32", 32.0, True, [32], 2**40, 10**30], SIZE),
    ("config.json", "vocab_size", [0, "320", 10**30], SIZE),
    ("config.json", "head_dim", [0, -8, NAN, "8"], COUNT),
    ("config.json", "n_routed_experts", [0, 10**6, "8"], COUNT),
    ("config.json", "num_local_experts", [-1], COUNT),
    ("config.json", "conv_kernel", [0, 1, 4.5], r"an integer in 2\.\.65536"),
    ("config.json", "num_hidden_layers", ["4", 0, True], COUNT),
    ("config.json", "num_nextn_predict_layers", [-1, True, "1"], r"an integer in 0\.\.65536"),
    ("config.json", "norm_topk_prob", [1, "true", 0.0], FLAG),
    ("config.json", "tie_word_embeddings", [0, "no"], FLAG),
    ("config.json", "attention_bias", [0, True], "False: nothing else is supported"),
    ("config.json", "n_shared_experts", [True, "1", 1.0], r"an integer in 0\.\.65536"),
    ("config.json", "model_type", ["llama", 5], "'nemotron_h' or 'qwen3_next' or .*: nothing else"),
    (
        "config.json",
        "time_step_limit",
        [5, [0], [0, "x"], [NAN, 1], [-1, 1], [1, 0.5], {"__float__": "x"}, [0, True]],
        r"\[low, high\], 0 <= low <= high",
    ),
    ("config.json", "mamba_ssm_cache_dtype", [5, "int8", ["float32"]], "one of float32, bfloat16"),
    ("config.json", "torch_dtype", ["float8_e4m3fn", 16, {}], "one of float32, bfloat16, float16"),
    ("config.json", "eos_token_id", [-1, "x", [True], {"id": 1}, 1.0], "an integer in 0"),
    ("config.json", "eos_token_id", [10**9, [5, 320]], r"below vocab_size \(320\)"),
    ("config.json", "max_position_embeddings", [0, -1, "8192", 8192.0], r"an integer in 1\.\."),
    (
        "config.json",
        "quantization_config",
        ["awq", ["FP8"]],
        "an object",
    ),
    ("config.json", "num_attention_heads", [3], r"a multiple of num_key_value_heads \(2\)"),
    ("config.json", "mamba_n_groups", [0, 2.0], COUNT),
    (EAGLE_CONFIG, "hidden_size", [0, "32", True, 2**40], SIZE),
    (EAGLE_CONFIG, "num_key_value_heads", [0, -2, 2.0], COUNT),
    (EAGLE_CONFIG, "rms_norm_eps", ["1e-6", NAN, -1], ABOVE),
    (EAGLE_CONFIG, "rope_theta", ["10000", 0, NAN, True], "a number above 0"),
    (EAGLE_CONFIG, "rope_parameters", [5, []], "an object"),
    (EAGLE_CONFIG, "mlp_bias", [0], "False"),
    (EAGLE_CONFIG, "quantization_config", [{"quant_method": "fp8"}], "absent: the weights are"),
    ("generation_config.json", "eos_token_id", [-1, 320, "x", [None], {}], TOKEN),
    ("generation_config.json", "do_sample", [1, "yes"], FLAG),
    ("generation_config.json", "temperature", ["1", NAN, -1, True], "a finite number >= 0"),
    ("generation_config.json", "top_k", [-1, 1.5, True], "an integer >= 0"),
    ("generation_config.json", "top_p", [0, 7, "x"], "a number > 0"),
]
ALSO = {"generation_config.json": {"do_sample": True}}  # without, the others are not looked at
CASES: list[tuple[str, Damage, str]] = [
    *FILES,
    *(
        (
            name,
            change(name, **ALSO.get(name, {}) | {field: value}),
            f": (config field )?{field} is .*, must be {must}",
        )
        for name, field, values, must in FIELDS
        for value in values
    ),
]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    CASES,
    ids=[f"{i} {name}" for i, (name, _, _) in enumerate(CASES)],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_that_names_the_file(
    checkpoint: Path,
    file: str,
    damage: Damage,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(checkpoint)
    drafter: Any = "eagle" if file.startswith("eagle") else "mtp"
    with pytest.raises((ValueError, OSError)) as refused:
        Engine.from_pretrained(checkpoint, drafter=drafter, device="cpu")
    capsys.readouterr()
    assert main(["generate", str(checkpoint), "-p", "x", "--drafter", drafter]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hybrid-runtime: error: ")
    wanted = message if "FILE" in message else f"FILE{message}"
    for said in (str(refused.value), shown.removesuffix("\n")):
        assert "\n" not in said
        assert len(said) < 1200
        assert re.search(wanted, said.replace(str(checkpoint / file), "FILE")), said


def test_what_they_are_made_from_is_taken(checkpoint: Path) -> None:
    for drafter in ("mtp", "eagle"):
        engine = Engine.from_pretrained(checkpoint, drafter=drafter)
        assert engine.generate(["x"], SamplingParams(max_tokens=4))[0].tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "config field hidden_size is missing, must be an integer in 1"),
        (
            {"hybrid_override_pattern": None},
            "hybrid_override_pattern .* is missing, must be a text",
        ),
        ({"vocab_size": 64}, r"tokenizer.json has token id 255, must have ids in 0\.\.63"),
        (
            {"num_nextn_predict_layers": 2},
            "/config.json: .*num_nextn_predict_layers is 2, must be 1",
        ),
        ({"ssm_state_size": 2**16}, r"in_proj.weight in .* is \[100, 32\], must be \[262212, 32\]"),
        ({"intermediate_size": 2**20}, r"tensor .* is \[48, 32\], must be \[1048576, 32\]"),
        ({"soft_cap": 1 << 200}, "config field soft_cap is .*, but this field is not known"),
    ],
)
def test_fields_that_do_not_go_with_the_rest(
    checkpoint: Path, fields: dict[str, Any], message: str
) -> None:
    change("config.json", **fields)(checkpoint)
    with pytest.raises(ValueError, match=message) as refused:
        Engine.from_pretrained(checkpoint, drafter="mtp", device="cpu")
    assert str(checkpoint) in str(refused.value)


def test_fields_that_are_right_however_they_are_spelled(checkpoint: Path) -> None:
    fields = {"layer_norm_epsilon": 1, "routed_scaling_factor": 2, "time_step_limit": [0, 1]}
    change("config.json", **fields, mamba_dt_min=0.001, mamba_dt_max=0.1)(checkpoint)
    write_json("hf_quant_config.json", {"quantization": {"quant_algo": None}})(checkpoint)
    change("generation_config.json", temperature=1, top_k=50, top_p=1)(checkpoint)
    engine = Engine.from_pretrained(checkpoint, device="cpu", dtype="auto")
    config = engine.model.config
    assert (config.layer_norm_epsilon, config.routed_scaling_factor) == (1.0, 2.0)
    assert type(config.layer_norm_epsilon) is type(config.routed_scaling_factor) is float


def test_weights_of_nan_are_one_line_and_status_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors(**{HEAD: torch.full((TOKENS, 32), NAN)})(checkpoint)
    assert main(["generate", str(checkpoint), "-p", "x", "--drafter", "none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybrid-runtime: error: ")
    assert error.count("\n") == 1


def test_a_tokenizer_that_cannot_encode_is_one_line(checkpoint: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    write_json("tokenizer.json", {"version": "1.0", "model": model})(checkpoint)
    engine = Engine.from_pretrained(checkpoint, drafter=None)
    with pytest.raises(ValueError, match="prompt is not what the tokenizer can encode: WordLevel"):
        engine.generate(["unheard"])


def test_a_process_says_nothing_else(checkpoint: Path) -> None:
    write_json("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})(checkpoint)
    ran = subprocess.run(
        [sys.executable, "-m", "hybrid_runtime", "generate", str(checkpoint), "-p", "x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert re.match(r"hybrid-runtime: error: /.*hf_quant_config\.json: .*'NVFP4'", ran.stderr)
