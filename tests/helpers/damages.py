"""A tiny checkpoint, and ways to damage it.

`whole` and `checkpoint` are fixtures: a test file that uses one imports both.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.heads import EAGLE
from helpers.oracle import random_config, randomise, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

HEAD, NORM = "lm_head.weight", "backbone.norm_f.weight"
TOKENS = 320
CONFIG = random_config("M-*E", vocab_size=TOKENS, num_nextn_predict_layers=1) | {
    "hybrid_override_pattern": "M-*E",
    "mtp_hybrid_override_pattern": "*E",
    "layer_norm_epsilon": 1e-5,
}
del CONFIG["layers_block_type"]
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
EAGLE_CONFIG, EAGLE_MODEL = "eagle/config.json", f"eagle/{MODEL}"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with MTP and EAGLE head, and the tokenizer of the shipped one."""
    directory = tmp_path_factory.mktemp("whole")
    model = NemotronH(NemotronHConfig.from_dict(CONFIG), "cpu", torch.float32)
    head, shape = MTPHead(model), EAGLE | {"vocab_size": TOKENS}
    eagle = EagleHead(EagleConfig.from_dict(shape), model, own_embedding=True)
    for seed, module in enumerate((model, head, eagle)):
        randomise(module, seed)
    save_checkpoint(directory, CONFIG, model, head)
    save_checkpoint(directory / "eagle", shape, eagle)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SHIPPED / name, directory / name)
    return directory


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def write(name: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content

    def damage(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)

    return damage


def write_json(name: str, content: Any) -> Damage:
    return write(name, json.dumps(content))


def change(name: str, **fields: Any) -> Damage:
    """Other fields in a JSON file."""

    def damage(directory: Path) -> None:
        given = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(given | fields))

    return damage


def gone(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def folder(name: str) -> Damage:
    """A directory where a file must be."""

    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()

    return damage


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another header of the weights, over the same data."""

    def changed(raw: bytes) -> bytes:
        (length,) = struct.unpack("<Q", raw[:8])
        text = json.dumps(change(json.loads(raw[8 : 8 + length]))).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return edit(MODEL, changed)


def tensors(name: str = MODEL, **changes: Tensor | None) -> Damage:
    """Other tensors in a safetensors file; None takes one out."""

    def damage(directory: Path) -> None:
        given: dict[str, Any] = load_file(directory / name) | changes
        save_file({n: t for n, t in given.items() if t is not None}, directory / name)

    return damage


def cast(dtype: torch.dtype) -> Damage:
    """The output head in another dtype, without a scale."""
    return tensors(**{HEAD: torch.zeros(TOKENS, 32).to(dtype)})


def shards(index: Any) -> Damage:
    """The weights as a.safetensors, and an index."""

    def damage(directory: Path) -> None:
        (directory / MODEL).rename(directory / "a.safetensors")
        write_json(INDEX, index)(directory)

    return damage


def twice(directory: Path) -> None:
    shutil.copy(directory / MODEL, directory / "b.safetensors")
    shards({"weight_map": {HEAD: "a.safetensors", NORM: "b.safetensors"}})(directory)


def broken_link(directory: Path) -> None:
    (directory / MODEL).unlink()
    os.symlink(directory / "blob", directory / MODEL)
