"""The shipped checkpoint is one that other programs load: names, shapes, fields, size, text."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "hybrid_runtime" / "checkpoints" / "python-small"
PROMPT = "def read_lines(path):\n    with open(path) as f:\n        "


def import_training() -> None:
    """Make the checkout's ``training`` importable although the checkout is not on sys.path."""
    if "training" not in sys.modules:
        folder = ROOT / "training"
        spec = importlib.util.spec_from_file_location(
            "training", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["training"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["training"])


import_training()
from training.export import build_tokenizer, tensors  # noqa: E402
from training.heads import MTP, Eagle  # noqa: E402
from training.shapes import EAGLE, TARGET, block_size  # noqa: E402
from training.trunk import Trunk  # noqa: E402


def names_and_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a safetensors file."""
    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def test_directory_is_at_most_6_megabytes() -> None:
    sizes = [path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(sizes) <= 6_000_000


def test_configuration_suits_other_engines() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config == TARGET
    assert config["architectures"] == ["NemotronHForCausalLM"]
    assert set(config["hybrid_override_pattern"]) == set("M*-E")
    assert config["mtp_hybrid_override_pattern"] == "*E"
    assert config["head_dim"] == 64
    for even in ("num_key_value_heads", "n_groups", "mamba_num_heads", "n_routed_experts"):
        assert config[even] % 2 == 0, even
    for wide in ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "vocab_size"):
        assert config[wide] % 64 == 0, wide
    assert max(block_size(drafts) for drafts in range(6)) <= 128
    assert json.loads((CHECKPOINT / "eagle" / "config.json").read_text()) == EAGLE


@pytest.mark.parametrize("file", ["model.safetensors", "eagle/model.safetensors"])
def test_tensors_have_the_public_names_and_dtypes(file: str) -> None:
    if file == "model.safetensors":
        fresh = tensors(Trunk(TARGET)) | tensors(MTP(TARGET), "mtp.")
    else:
        fresh = tensors(Eagle(EAGLE))
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    expected = {name: (tuple(t.shape), dtypes[t.dtype]) for name, t in fresh.items()}
    assert names_and_shapes(CHECKPOINT / file) == expected


def test_names_are_those_of_published_checkpoints() -> None:
    names = set(load_file(CHECKPOINT / "model.safetensors"))
    assert {
        "backbone.embeddings.weight",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.1.mixer.experts.0.up_proj.weight",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.shared_experts.down_proj.weight",
        "backbone.layers.3.mixer.q_proj.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.1.mixer.experts.3.down_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
    } <= names
    eagle = set(load_file(CHECKPOINT / "eagle" / "model.safetensors"))
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= eagle
    assert "layers.0.input_layernorm.weight" not in eagle


def test_tokenizer_maps_bytes_to_their_values() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = "def f(x):\n\treturn 'é€日\x00'  # \r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == TARGET["eos_token_id"]
    assert tokenizer("<|endoftext|>x")["input_ids"] == [TARGET["eos_token_id"], ord("x")]
    written = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    assert json.loads(build_tokenizer().to_str()) == written


def test_transformers_loads_it_and_agrees_with_the_trained_model() -> None:
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert len(config.layers_block_type) == len(TARGET["hybrid_override_pattern"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    trunk = Trunk(TARGET).eval()
    weights = load_file(CHECKPOINT / "model.safetensors")
    trunk.load_state_dict({name: weights[name].float() for name in trunk.state_dict()})
    tokens = torch.tensor([list((PROMPT * 3).encode())])
    with torch.no_grad():
        ours = trunk.lm_head(trunk(tokens))
        theirs = model.eval()(tokens).logits
        answer = model.generate(
            tokens[:, : len(PROMPT)], max_new_tokens=16, do_sample=False, pad_token_id=257
        )
    # the router weighs experts, so a near-tie could flip a choice; this text has none
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert bytes(answer[0, len(PROMPT) :].tolist()).isascii()
