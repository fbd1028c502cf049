"""Checkpoints of Qwen3-Next and Qwen3.5: what their tensors are called, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.qwen import KINDS, head_tensors, hf_model, save
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_runtime.kernels.attention.rotary import Rotary
from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.checkpoint import Checkpoint, load_head, load_model
from hybrid_runtime.models.qwen3_5_config import Qwen35Config
from hybrid_runtime.models.registry import load_config

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def rewrite(directory: Path, change: Change) -> None:
    """Change the tensors of a checkpoint."""
    file = directory / "model.safetensors"
    changed = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(changed, file, metadata={"format": "pt"})


def made(kind: str, directory: Path, **fields: Any) -> Path:
    save(hf_model(kind, 1), directory, head_tensors(kind, 2), **fields)
    return directory


def parameters(directory: Path, quantization: str | None = None) -> dict[str, Tensor]:
    """Of model and draft head."""
    checkpoint = Checkpoint(directory, quantization)
    model: Any = load_model(checkpoint, "cpu", torch.float32)
    return dict(model.named_parameters()) | dict(load_head(checkpoint, model).named_parameters())


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as one tensor, as transformers keeps them and Qwen3.5 is published."""
    found = {n: t for n, t in tensors.items() if not re.search(r"^model\..*\.experts\.\d", n)}
    for layer in range(4):
        path = f"model.layers.{layer}.mlp.experts"
        of = [
            {name: tensors[f"{path}.{i}.{name}_proj.weight"] for name in ("gate", "up", "down")}
            for i in range(6)
        ]
        found[f"{path}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in of])
        found[f"{path}.down_proj"] = torch.stack([e["down"] for e in of])
    return found


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's experts one by one, as Qwen3-Next is published."""
    path = "mtp.layers.0.mlp.experts"
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(path)}
    pairs = tensors[f"{path}.gate_up_proj"], tensors[f"{path}.down_proj"]
    for i, (both, down) in enumerate(zip(*pairs, strict=True)):
        gate, up = both.chunk(2)
        for name, lines in (("gate", gate), ("up", up), ("down", down)):
            found[f"{path}.{i}.{name}_proj.weight"] = lines
    return found


def beside_images(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As in a checkpoint that reads images too."""
    found = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in tensors.items()
    }
    return found | {"model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 4)}


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kind", ["next", "moe"])
def test_experts_come_together_or_one_by_one(
    kind: str, quantization: str | None, tmp_path: Path
) -> None:
    want = parameters(made(kind, tmp_path), quantization)
    for change in (joined, apart):
        rewrite(tmp_path, change)
        same(parameters(tmp_path, quantization), want)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_text_model_of_one_that_reads_images(kind: str, tmp_path: Path) -> None:
    want = parameters(made(kind, tmp_path))
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 90,
        "model_type": text["model_type"].removesuffix("_text"), "text_config": text,
        "tie_word_embeddings": False, "transformers_version": "5.0", "video_token_id": 91,
        "vision_config": {"depth": 2}, "vision_start_token_id": 92, "vision_end_token_id": 93,
    }  # fmt: skip
    rope = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text["rope_parameters"] |= rope
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rewrite(tmp_path, beside_images)
    same(parameters(tmp_path), want)
    for wrong, change in (
        ("visual.merger.weight", {"visual.merger.weight": torch.ones(1)}),
        ("model.layers.0.input_layernorm.weight", {}),
    ):
        more = change or {wrong: torch.ones(32)}
        rewrite(tmp_path, lambda found, more=more: found | more)  # type: ignore[misc]
        with pytest.raises(ValueError, match=rf"tensor {wrong} in .* is unexpected"):
            parameters(tmp_path)
        rewrite(tmp_path, lambda found, wrong=wrong: {n: t for n, t in found.items() if n != wrong})  # type: ignore[misc]
    whole["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="tie_word_embeddings is True, but that of text_config is"):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_at_load_is_that_of_each_line(kind: str, tmp_path: Path) -> None:
    plain, rounded = (parameters(made(kind, tmp_path), q) for q in (None, "fp8"))
    narrow = {name for name, tensor in rounded.items() if tensor.dtype == E4M3}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in narrow} >= {
        "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "o_proj", "down_proj",
    }  # fmt: skip
    assert not any("gate.weight" in name or "mtp." in name or "head" in name for name in narrow)
    for name, tensor in plain.items():
        if name in narrow:
            values, scale = quantize_lines_reference(tensor.flatten(0, -2))
            assert torch.equal(rounded[name].float(), values.view(tensor.shape).float())
            assert torch.equal(rounded[f"{name}_scale"], scale.view(tensor.shape[:-1]))
        else:
            assert torch.equal(rounded[name], tensor)


def test_gated_experts_need_a_scale_for_each_line(tmp_path: Path) -> None:
    """Files have gate and up apart, with a scale each, and here they are one matrix."""
    made("moe", tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(ValueError, match="gated experts are FP8, which has one scale for all"):
        Checkpoint(tmp_path).build("cpu", torch.float32)


PROJECTED = "model.layers.0.linear_attn.in_proj_qkvz.weight"
ROUTED = "model.layers.1.mlp.experts.3.gate_proj.weight"
SHARED = "model.layers.1.mlp.shared_expert_gate.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: v for n, v in t.items() if n != PROJECTED}, f"{PROJECTED} is missing"),
        (lambda t: {n: v for n, v in t.items() if n != ROUTED}, f"{ROUTED} is missing"),
        (lambda t: t | {PROJECTED: t[PROJECTED][1:]}, f"{PROJECTED} in .* is .* must be"),
        (lambda t: t | {SHARED: t[SHARED].T}, rf"{SHARED} in .* is \[32, 1\], must be \[1, 32\]"),
        (lambda t: t | {"model.layers.9": torch.ones(1)}, r"tensor model.layers.9 in .* is unexp"),
        (lambda t: joined(t) | {ROUTED: t[ROUTED]}, f"tensor {ROUTED} in .* is unexpected"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(change: Change, message: str, tmp_path: Path) -> None:
    rewrite(made("next", tmp_path), change)
    with pytest.raises(ValueError, match=message):
        load_model(Checkpoint(tmp_path), "cpu", torch.float32)


def test_a_head_may_be_named_and_missing(tmp_path: Path) -> None:
    """Nobody but the published files of Qwen3-Next says that there is one."""
    save(hf_model("next", 1), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config.has_draft_head
    assert not checkpoint.holds_head
    load_model(checkpoint, "cpu", torch.float32)


PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {"depth": 27},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
        "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish",
        "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        },
    },
}  # fmt: skip
"""Of a 27B as published, with the field that Qwen3.8 adds."""


def test_a_published_config_is_read_whole() -> None:
    config = Qwen35Config.from_dict(PUBLISHED)
    assert config.rotary == Rotary(64, 1e7)
    assert config.attends == (False, False, False, True) * 16
    assert not any(config.sparse)
    assert config.has_draft_head
    assert not config.interleaved
    assert config.gdn == (48, 16, 128, 128, 4)
    assert config.gdn.conv_channels == 10240
    assert (config.dtype, config.eos_token_id) == ("bfloat16", (248044,))
    older = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "model_type": "qwen3_next"}
    text = {n: v for n, v in PUBLISHED["text_config"].items() if n != "rope_parameters"}
    read = Qwen35Config.from_dict(text | older)
    assert read.rotary == config.rotary
    assert read.interleaved
    assert read.num_experts == 512
    assert all(read.sparse)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, must be True: nothing else"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', must be one of swish"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers is 2, must be an integer in 0\.\.1"),
        ({"use_sliding_window": True}, "use_sliding_window is True, must be False"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: .* rope_type is 'yarn'"),
        ({"rope_parameters": {"beta": 1}}, "rope_parameters: config field beta is 1, but this"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0, but another spelling of the same field"),
        ({"partial_rotary_factor": 0.001, "rope_parameters": {}}, "partial_rotary_factor is 0.001"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers is 64, must be the number of"),
        ({"layer_types": ["kda"]}, "layer_types is .* must be a list of 1 to 4096 layers"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads is 40, must be a multiple of"),
        ({"num_attention_heads": 23}, "num_attention_heads is 23, must be a multiple of num_key"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"eos_token_id": 248320}, r"eos_token_id is \(248320,\), must be below vocab_size"),
        ({"sparse_attention_config": {}}, "sparse_attention_config is {}, but this field is not"),
        ({"model_type": "qwen3_5_moe_text"}, "text_config.model_type is 'qwen3_5_moe_text', must"),
        ({"num_nextn_predict_layers": 0}, "mtp_num_hidden_layers is 1, but another spelling"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .* must be abs"),
    ],
)  # fmt: skip
def test_what_would_change_results_unseen_is_refused(changed: dict[str, Any], message: str) -> None:
    text = PUBLISHED["text_config"] | changed
    with pytest.raises(ValueError, match=message):
        Qwen35Config.from_dict(PUBLISHED | {"text_config": text})
