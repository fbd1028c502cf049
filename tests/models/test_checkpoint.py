"""Checkpoint directories: what loads, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from helpers.damages import checkpoint, whole
from helpers.oracle import (
    hf_model,
    make_caches,
    random_config,
    run_prompt,
)
from safetensors.torch import load_file
from torch import Tensor

from hybrid_runtime.models.checkpoint import (
    Checkpoint,
    EagleCheckpoint,
    load_head,
    load_model,
    resolve,
)
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.models.registry import load_config

__all__ = ["checkpoint", "whole"]  # fixtures

# As published with NVIDIA-Nemotron-3-Nano-30B-A3B, Nemotron-H-8B and with a MTP head (Super).
NANO_30B = """{"architectures": ["NemotronHForCausalLM"], "attention_bias": false,
"attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
"bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2,
"head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
"initializer_range": 0.02, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05,
"mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
"mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
"mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
"n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05,
"norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6,
"num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
"partial_rotary_factor": 1.0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
"rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null,
"ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001,
"time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
"topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4", "use_bias": false,
"use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 131072}"""
H_8B_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def logits_of(model: NemotronH, tokens: Tensor) -> Tensor:
    caches = make_caches(model, 1, 16, len(tokens))
    with torch.inference_mode():
        return model.logits(run_prompt(model, tokens, [len(tokens)], caches, 16))


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("latent", [None, 16])
def test_loads_what_transformers_saves(tmp_path: Path, shard_size: str, latent: int | None) -> None:
    config = random_config("M-M*ME", moe_latent_size=latent)
    hf = hf_model(config, 0)
    hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "20KB")
    tokens = torch.randint(0, 96, (40,))
    with torch.inference_mode():
        want = hf(tokens[None], use_cache=False).logits[0]
    model: Any = load_model(Checkpoint(tmp_path), "cpu", torch.float32)
    assert float((logits_of(model, tokens) - want).abs().max() / want.abs().max()) < 1e-5
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_converts_dtypes(tmp_path: Path) -> None:
    config = random_config("ME*")
    hf_model(config, 0).save_pretrained(tmp_path)
    exact: Any = load_model(Checkpoint(tmp_path), "cpu", torch.float64)
    reduced: Any = load_model(Checkpoint(tmp_path), "cpu", torch.bfloat16)
    wide = {"A_log", "D", "dt_bias", "gate.weight", "e_score_correction_bias"}
    for (name, a), (_, b) in zip(exact.named_parameters(), reduced.named_parameters(), strict=True):
        assert a.dtype == torch.float64
        kept = any(name.endswith(end) for end in wide)
        assert b.dtype == (torch.float32 if kept else torch.bfloat16), name
        torch.testing.assert_close(b.double(), a, rtol=1e-2, atol=1e-6)


def test_heads_load(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    target = load_model(Checkpoint(checkpoint), "cpu", torch.float32)
    mtp = load_head(Checkpoint(checkpoint), target)
    eagle = load_head(EagleCheckpoint(checkpoint / "eagle"), target)
    for name in (
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.norm.weight",
        "mtp.layers.0.mixer.q_proj.weight",
        "mtp.layers.1.norm.weight",
        "mtp.layers.1.mixer.gate.e_score_correction_bias",
        "mtp.layers.1.final_layernorm.weight",
    ):
        assert torch.equal(mtp.get_parameter(name), tensors[name])
    expert = tensors["mtp.layers.1.mixer.experts.3.down_proj.weight"]
    assert torch.equal(mtp.get_parameter("mtp.layers.1.mixer.experts.down_proj.weight")[3], expert)
    heads = load_file(checkpoint / "eagle" / "model.safetensors")
    assert heads.keys() == dict(eagle.named_parameters()).keys()
    assert eagle.embed_tokens is not None
    for name, value in eagle.named_parameters():
        assert torch.equal(value, heads[name])


def test_mtp_tensors_without_a_head_in_the_config_are_unexpected(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tensor mtp\..* is unexpected"):
        load_model(Checkpoint(checkpoint), "cpu", torch.float32)


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, must be a directory"):
        resolve(tmp_path / "file")
    for name in (str(tmp_path / "none"), "./none/here", "none"):
        with pytest.raises(ValueError, match="does not exist, must be a directory or a hub id"):
            resolve(name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'owner/name' is no directory here, and the hub did not"):
        resolve("owner/name")
    with pytest.raises(ValueError, match="the hub did not give it"):
        resolve("own er/na?me")


def test_published_configs_load() -> None:
    given: dict[str, Any] = json.loads(NANO_30B)
    nano = NemotronHConfig.from_dict(given)
    assert (nano.num_hidden_layers, nano.pattern.count("*"), nano.pattern.count("E")) == (52, 6, 23)
    assert (nano.mamba2.conv_channels, nano.mamba2.inner) == (6144, 4096)
    assert nano.time_step_limit == (0.0, math.inf)
    assert nano.eos_token_id == (2,)
    assert nano.dtype == "bfloat16"

    for name in ("head_dim", "norm_eps", "partial_rotary_factor", "rope_theta", "n_shared_experts"):
        del given[name]
    given |= {"attention_head_dim": 128, "rms_norm_eps": 1e-5, "num_query_groups": 2}
    given |= {"hybrid_override_pattern": H_8B_PATTERN, "n_routed_experts": None}
    given |= {"eos_token_id": [2, 11]}
    dense = NemotronHConfig.from_dict(given)
    assert (dense.head_dim, dense.pattern) == (128, H_8B_PATTERN)
    assert dense.eos_token_id == (2, 11)


def test_both_spellings_and_defaults_of_transformers(tmp_path: Path) -> None:
    config = random_config("M-*E", num_nextn_predict_layers=1)
    config["mtp_layers_block_type"] = ["full_attention", "moe"]
    as_list = NemotronHConfig.from_dict(config)
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {"hybrid_override_pattern": "M-*E", "mtp_hybrid_override_pattern": "*E"}
    assert NemotronHConfig.from_dict(config) == as_list
    assert (as_list.pattern, as_list.mtp_pattern) == ("M-*E", "*E")
    config["layers_block_type"] = ["mamba", "mlp", "attention", "moe"]
    assert NemotronHConfig.from_dict(config) == as_list

    hf = hf_model(random_config("M-*E"), 0)
    hf.config.save_pretrained(tmp_path)
    loaded: Any = load_config(tmp_path)[1]
    for name in ("intermediate_size", "topk_group", "layer_norm_epsilon", "mamba_ssm_cache_dtype"):
        assert getattr(loaded, name) == getattr(hf.config, name)
    assert loaded.time_step_limit == (0.0, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_of_states_is_the_checkpoints(dtype: torch.dtype) -> None:
    for spelled in (str(dtype), str(dtype).removeprefix("torch.")):
        config = random_config("M", mamba_ssm_cache_dtype=spelled)
        assert NemotronHConfig.from_dict(config).ssm_cache_dtype == dtype
    assert NemotronHConfig.from_dict(random_config("M")).ssm_cache_dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_proj_bias": True}, "config field mamba_proj_bias is True, must be False"),
        ({"mlp_hidden_act": "silu"}, "config field mlp_hidden_act is 'silu', must be 'relu2'"),
        ({"mamba_hidden_act": "gelu"}, "config field mamba_hidden_act is 'gelu', must be 'silu'"),
        ({"sliding_window": 64}, "config field sliding_window is 64, must be None"),
        ({"n_shared_experts": 2}, "config field n_shared_experts is 2, must be 1"),
        ({"layers_block_type": None}, "config field hybrid_override_pattern .* is missing"),
        ({"layers_block_type": ["mamba", "conv"]}, r"config field layers_block_type is .*'conv'"),
        ({"hybrid_override_pattern": "M"}, "config fields name different layers"),
        ({"num_hidden_layers": 3}, "config field num_hidden_layers is 3, must be the number"),
        ({"norm_eps": 1e-6, "rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, but another spelling"),
        ({"n_groups": 3}, "config field mamba_num_heads is 4, must be a multiple of n_groups"),
        ({"n_group": 8}, "config field n_group is 8, must leave at least 2"),
        ({"n_group": 2, "topk_group": 3}, "config field topk_group is 3, must be at most n_group"),
        ({"num_experts_per_tok": 9}, "config field num_experts_per_tok is 9, must be at most 8"),
        ({"num_nextn_predict_layers": 1}, "mtp_hybrid_override_pattern is '', must name"),
        (
            {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*M"},
            r"config field mtp_hybrid_override_pattern is '\*M', must be of \* - E",
        ),
    ],
)
def test_config_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NemotronHConfig.from_dict({**random_config("M*E-"), **change})


def test_unknown_fields() -> None:
    config = random_config("M") | {"_name_or_path": "x", "other": None}
    assert NemotronHConfig.from_dict(config).pattern == "M"
