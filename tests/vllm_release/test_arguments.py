"""The commands of docs/vllm.md through vLLM's own argument parsing, for a checkpoint with MTP
layers and for one without: which runner is chosen, and whether the plug-in replays."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm

from hybrid_runtime.integrations.vllm import versions

ROOT = Path(__file__).parents[2]
RELEASE = versions.parsed(vllm.__version__)
NGRAMS = RELEASE >= (0, 32)
"""Whether the V2 runner drafts by n-grams."""

TINY: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-M*",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MTP = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}


QWEN: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def documented(name: str) -> list[list[str]]:
    """A page's commands: first with MTP, then with n-grams."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    lines = re.findall(r"^vllm serve .*$", page.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM and the plug-in make of each command."""
    places = {}
    for name, config in (("with MTP", TINY | MTP), ("without", TINY), ("Qwen", QWEN)):
        places[name] = tmp_path_factory.mktemp("checkpoint")
        (places[name] / "config.json").write_text(json.dumps(config))
    mtp, ngrams = documented("vllm")
    (qwen,) = documented("qwen")
    selected = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    asked: dict[str, tuple[list[str], str, dict[str, str]]] = {
        "mtp": (mtp, "with MTP", selected if RELEASE < (0, 29) else {}),
        "Qwen": (qwen, "Qwen", selected if RELEASE < (0, 29) else {}),
        "mtp without such layers": (mtp, "without", selected),
        "n-grams": (ngrams, "without", {}),
        "n-grams, V2": (ngrams, "without", selected),
    }
    commands = []
    for command, place, environment in asked.values():
        assert command[:2] == ["vllm", "serve"]
        arguments = ["--model", str(places[place]), "--skip-tokenizer-init", *command[3:]]
        commands.append({"arguments": arguments, "environment": environment})
    paths = (str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    ran = subprocess.run(
        [sys.executable, "-m", "helpers.vllm_arguments"],
        input=json.dumps(commands),
        env=environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(zip(asked, json.loads(ran.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("command", ["mtp", "Qwen"])
def test_mtp_drafts_replay(command: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[command] == {
        "v2": True,
        "drafts": 3,
        "mode": "align",
        "asynchronous": True,
        "why_not": None,
        "shown": True,
    }


def test_mtp_needs_a_checkpoint_with_such_layers(found: dict[str, dict[str, Any]]) -> None:
    assert "mtp" in found["mtp without such layers"]["error"].lower()


def test_n_gram_drafts_replay_where_the_v2_runner_has_them(
    found: dict[str, dict[str, Any]],
) -> None:
    """Before, vLLM takes its V1 runner, whose states are left to it, or refuses to start."""
    left, selected = found["n-grams"], found["n-grams, V2"]
    if NGRAMS:
        assert left == selected
        assert left["why_not"] is None
        assert (left["v2"], left["drafts"], left["asynchronous"]) == (True, 3, True)
    else:
        assert not left["v2"]
        assert "V1 model runner" in left["why_not"]
        assert "ngram" in selected["error"]
