"""Public checkpoints: what drafts for them, and the memory that they need, from their shapes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from markdown import markdown

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from shapes import SHAPES, Shape, config

from hybrid_runtime.engine import EngineConfig
from hybrid_runtime.engine.memory_plan import Planner
from hybrid_runtime.kernels.sampling.narrow_head import narrow_bytes
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH

BIG_H = {
    "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "mamba_num_heads": 256, "mamba_head_dim": 64, "ssm_state_size": 256,
}  # fmt: skip
# Hub id to its shape, and whether the checkpoint brings an MTP head. Those that nothing here is
# measured with have their sizes from NVIDIA's own Megatron-Bridge.
PUBLIC = {
    "nvidia/Nemotron-H-4B-Base-8K": (
        Shape(
            "Nemotron-H-4B",
            SHAPES["8b"].pattern,
            {
                "hidden_size": 3072, "intermediate_size": 12288,
                "num_attention_heads": 32, "num_key_value_heads": 8,
                "mamba_num_heads": 112, "mamba_head_dim": 64,
            },
        ),
        False,
    ),
    "nvidia/Nemotron-H-8B-Base-8K": (SHAPES["8b"], False),
    "nvidia/Nemotron-H-47B-Base-8K": (
        Shape(
            "Nemotron-H-47B",
            "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*"
            "-M-M-M-M-M-",
            BIG_H | {"intermediate_size": 30720},
        ),
        False,
    ),
    "nvidia/Nemotron-H-56B-Base-8K": (
        Shape(
            "Nemotron-H-56B",
            "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
            BIG_H | {"intermediate_size": 32768},
        ),
        False,
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (SHAPES["9b-v2"], False),
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": (
        Shape(
            "Nemotron-Nano-12B-v2",
            "M-M-M-M*" + 5 * "-M-M-M-M*" + "-M-M-M-M-",
            {
                "hidden_size": 5120, "intermediate_size": 20480,
                "num_attention_heads": 40, "num_key_value_heads": 8,
                "mamba_num_heads": 128, "mamba_head_dim": 80,
            },
        ),
        False,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (SHAPES["nano-30b"], False),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (SHAPES["super-120b"], True),
}  # fmt: skip
GPUS = {"80 GB": 80 * 10**9, "141 GB": 141 * 10**9}
LENGTH = 8192
GIB, MIB = 2**30, 2**20


def checkpoints() -> str:
    """Weights, bytes of a request, and how many requests fit a GPU."""
    lines = []
    for hub_id, (shape, has_mtp) in PUBLIC.items():
        sizes = config(shape, len(shape.pattern))
        if not has_mtp:
            sizes = replace(sizes, num_nextn_predict_layers=0, mtp_pattern="")
        model = NemotronH(sizes, "meta", torch.bfloat16)
        head = MTPHead(model) if has_mtp else None
        parts = [model] if head is None else [model, head]
        weights = sum(p.nbytes for part in parts for p in part.parameters())
        copied = 0 if head is None else narrow_bytes(model.output_weight)
        # As on a GPU, with room for every request at full length.
        options = EngineConfig(
            drafter="mtp" if has_mtp else "ngram", max_requests=1 << 12, max_model_len=LENGTH,
            steps_ahead=1, graphs=True,
        )  # fmt: skip
        layout = options.layout(model)
        planner = Planner(options, layout, model, head, torch.device("cpu"), weights + copied)
        room = {gpu: int(size * options.memory_fraction) for gpu, size in GPUS.items()}
        state = layout.bytes_per_request(len(model.state_layers), checkpoints=1)
        heads, size = model.kv_shape
        layers = len(model.kv_layers) + (0 if head is None else len(head.kv_layers))
        lines.append(
            [
                f"`{hub_id}`",
                "MTP" if has_mtp else "n-gram",
                f"{weights / GIB:.1f}",
                f"{layout.block_size}",
                f"{state / MIB:.0f}",
                f"{2 * heads * size * 2 * layers * 1024 / MIB:.0f}",
                *(str(planner.most_requests(bytes_) or "-") for bytes_ in room.values()),
            ]
        )
    header = [
        "checkpoint", '`"auto"`', "weights, GiB", "block, tokens", "state of a request, MiB",
        "KV of 1024 tokens, MiB", *(f"requests on {gpu}" for gpu in GPUS),
    ]  # fmt: skip
    note = (
        "Default options, bfloat16 weights, float32 states, at most 7 drafts, requests of "
        f"{LENGTH} tokens all at full length at once (-: the weights alone do not fit). Computed "
        "from the checkpoints' configs; nothing is measured."
    )
    return markdown(header, lines) + "\n\n" + note


TABLES = {"checkpoints": checkpoints}
