"""Random models of ours and of transformers with the same weights, and whole prompts through ours.

Time steps: transformers clamps them at ``time_step_min`` in a prefill but not in a one-token step,
so with its default (0.001) it disagrees with itself. Ours clamps at ``time_step_limit`` always.
Here ``time_step_min`` is too small to matter, which makes the two definitions one.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import NemotronHConfig as HFConfig
from transformers import NemotronHForCausalLM

from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.linear import checkpoint_tensors
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def random_config(pattern: str, **changes: Any) -> dict[str, Any]:
    """A small config.json as a dict, spelled as transformers 5 spells it."""
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 96,
        "hidden_size": 32,
        "layers_block_type": [KINDS[kind] for kind in pattern],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "time_step_min": 1e-30,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    }
    config.update(changes)
    return config


def hf_model(config: dict[str, Any], seed: int, scale: float = 0.15) -> NemotronHForCausalLM:
    """transformers' model in fp32 with every parameter random, biases and norms included."""
    torch.manual_seed(seed)
    arguments = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    model = NemotronHForCausalLM(HFConfig(**arguments)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith(("norm.weight", "norm_f.weight", ".D")):
            value.data = 1 + 0.2 * noise
        elif name.endswith("A_log"):
            value.data = torch.log(1 + 7 * torch.rand(value.shape, generator=generator))
        elif name.endswith("dt_bias"):
            value.data = -2 + noise
        elif name.endswith("e_score_correction_bias"):
            value.data = 0.2 * noise
        else:
            value.data = scale * noise
    return model


def our_model(config: dict[str, Any], source: NemotronHForCausalLM) -> NemotronH:
    """Ours, with the weights of transformers' model."""
    model = NemotronH(NemotronHConfig.from_dict(config), "cpu", source.dtype)
    given = source.state_dict()
    for name, parameter in model.named_parameters():
        theirs = re.sub(r"(\.experts\.\w+)\.weight$", r"\1", name.replace("backbone.", "model.", 1))
        parameter.data.copy_(given[theirs])
    return model.eval()


def randomise(module: torch.nn.Module, seed: int, scale: float = 0.25) -> None:
    """Fill every parameter of a head with random values (norm weights around 1)."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator).to(value.dtype)
        value.data.copy_(1 + 0.2 * noise if "norm" in name else scale * noise)


def save_checkpoint(directory: Path, config: dict[str, Any], *modules: torch.nn.Module) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name: value.clone()
        for module in modules
        for name, value in checkpoint_tensors(module).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_caches(
    model: HybridModel,
    slots: int,
    block_size: int,
    max_tokens: int,
    num_draft: int = 0,
    heads: Sequence[Any] = (),
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> Caches:
    """Caches of NaN with shuffled block tables: ``max_tokens`` per slot and num_draft columns more.

    Attention and state blocks have the same size; block 0 belongs to nobody. kv_dtype: None = the
    model's.
    """
    dtype = model.dtype
    columns = -(-max_tokens // block_size) + num_draft + 1
    blocks = slots * columns + 1
    generator = torch.Generator().manual_seed(seed)

    def table() -> Tensor:
        order = torch.randperm(blocks - 1, generator=generator) + 1
        return order.reshape(slots, columns).to(torch.int32)

    def nan(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    def keys(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return (nan(blocks, block_size, *shape, dtype=kv_dtype or dtype),) * 2

    kv = {i: keys(model.kv_shape) for i in model.kv_layers}
    for head in heads:
        kv |= {i: keys(head.kv_shape) for i in head.kv_layers}
    kv = {i: (k, v.clone()) for i, (k, v) in kv.items()}
    states = {}
    for group in model.groups:
        conv_state, matrix = group.recurrence(torch.float32, torch.float32, "SD").checkpoint
        shapes = conv_state.longer(num_draft).shape, matrix.shape
        for layer in group.layers:
            states[layer] = (nan(blocks, *shapes[0]), nan(blocks, *shapes[1]))
    return Caches(kv, states, table(), table())


def row_batch(rows: Sequence[tuple[int, int, int]], num_update_rows: int = -1) -> RowBatch:
    """Rows given as (slot, computed, scheduled)."""
    scheduled = [row[2] for row in rows]
    starts = [sum(scheduled[:i]) for i in range(len(rows) + 1)]
    update = len(rows) if num_update_rows < 0 else num_update_rows
    return RowBatch(
        slot=torch.tensor([row[0] for row in rows], dtype=torch.int32),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        computed=torch.tensor([row[1] for row in rows], dtype=torch.int32),
        max_scheduled=max(scheduled),
        max_context=max(row[1] + row[2] for row in rows),
        num_update_rows=update,
        num_update_tokens=starts[update],
    )


def state_positions(rows: Sequence[tuple[int, int, int, int]]) -> StatePositions:
    """Rows given as (draft, read_column, read_offset, write_column)."""
    columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)]
    return StatePositions(*columns)


def run_prompt(
    model: NemotronH,
    tokens: Tensor,
    chunks: Sequence[int],
    caches: Caches,
    block_size: int,
    slot: int = 0,
    computed: int = 0,
    update: bool = False,
) -> Tensor:
    """Hidden states [T, hidden] of one prompt, cut into chunks of the given lengths.

    Follows design.md section 3: the state lives in column ``cdiv(n + s, B) - 1``.

    Args:
        tokens: int64 [sum(chunks)].
        chunks: tokens per forward pass.
        computed: tokens that are in the caches already.
        update: run chunks as update rows (stepped) instead of prefill rows (chunk scan).
    """
    outputs = []
    done = 0
    for length in chunks:
        n = computed + done
        read = -(-n // block_size) - 1
        write = -(-(n + length) // block_size) - 1
        batch = row_batch([(slot, n, length)], num_update_rows=1 if update else 0)
        positions = state_positions([(0, read, 0, write)])
        outputs.append(model(tokens[done : done + length], batch, positions, caches))
        done += length
    return torch.cat(outputs)
