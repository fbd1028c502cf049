"""A family of models that only tests know: its own config fields, layers, tensor names and forward.

`toy_checkpoint` is a fixture: a test file that uses it imports it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.models import registry
from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, StatePositions
from hybrid_runtime.models.linear import Embedding, checkpoint_tensors
from hybrid_runtime.models.mamba import Mamba2Mixer, Mamba2Scans
from hybrid_runtime.models.model import Family, Mamba2Shape, StateGroup
from hybrid_runtime.models.moe import MLP
from hybrid_runtime.models.norm import RMSNorm
from hybrid_runtime.models.state_parts import state_parts

VOCABULARY = 320
"""As the tokenizer of the shipped checkpoint has."""
STATES = Mamba2Shape(heads=2, head_dim=8, state_size=8, groups=1, conv_width=3)


@dataclass(frozen=True)
class ToyConfig:
    width: int
    vocab_size: int = VOCABULARY
    eos_token_id: tuple[int, ...] = ()
    dtype: str | None = "float32"
    has_draft_head: bool = False

    @staticmethod
    def read(decoded: Mapping[str, Any]) -> ToyConfig:
        if "n_embd" not in decoded:
            raise ValueError("config field n_embd is missing")
        return ToyConfig(decoded["n_embd"])


class Toy(nn.Module):
    """Attention first, then a state, then an MLP; one embedding for both ends."""

    kv_layers, kv_shape, num_layers, max_positions = (0,), (1, 16), 3, None
    kv_dtype: torch.dtype | None = None

    def __init__(self, config: ToyConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = config.vocab_size, config.width
        self.eos_token_ids = config.eos_token_id
        width = config.width
        self.table = Embedding(width, config.vocab_size, device, dtype)
        self.state = Mamba2Mixer(
            hidden_size=width, shape=STATES, layer=1, mamba_layer=0, bias=False, conv_bias=True,
            eps=1e-5, device=device, dtype=dtype,
        )  # fmt: skip
        self.steps = nn.ModuleList(
            [
                Attention(width, 2, 1, 16, 0, device, dtype),
                self.state,
                MLP(width, 3 * width, False, device, dtype),
            ]
        )
        self.norms = nn.ModuleList(RMSNorm(width, 1e-5, device, dtype) for _ in range(4))
        self.requires_grad_(False)

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        return (StateGroup(STATES.recurrence, (1,), torch.float32, ((self.state.A_log,),)),)

    @property
    def device(self) -> torch.device:
        return self.output_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.output_weight.dtype

    @property
    def output_weight(self) -> Tensor:
        return self.table.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table.lookup(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table(hidden)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        yield

    def forward(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        x = self.embed(tokens)
        scans = Mamba2Scans(0.0, float("inf"), 16)
        parts = state_parts(batch, positions, caches, len(x), scans)
        for norm, step in zip(self.norms, self.steps, strict=False):
            x = x + step(norm(x), Pass(batch, caches, parts))
        return self.norms[3](x)


def tensors(module: nn.Module, names: Collection[str] = ()) -> dict[str, Tensor]:
    """By names with slashes."""
    return {f"toy/{name.replace('.', '/')}": t for name, t in checkpoint_tensors(module).items()}


FAMILY = Family(read_config=ToyConfig.read, build=Toy, tensors=tensors)


@pytest.fixture
def toy_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of random weights, while the family is registered."""
    monkeypatch.setitem(registry.FAMILIES, "toy", FAMILY)
    model = Toy(ToyConfig(32), "cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    filled = tensors(model)
    for name, tensor in filled.items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.2 * noise if "norm" in name or name.endswith("/D") else 0.4 * noise)
    directory = tmp_path / "toy"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "toy", "n_embd": 32}))
    save_file({n: t.clone() for n, t in filled.items()}, directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, directory / name)
    return directory
