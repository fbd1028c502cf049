"""A checkpoint's parts, loaded once they and the options have been checked."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from hybrid_runtime.device.select import select_device
from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.engine.checks import DTYPES, resolve_dtype
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.generation import Generation
from hybrid_runtime.engine.memory_plan import Planner, gib
from hybrid_runtime.engine.tokenizer_files import load_tokenizer
from hybrid_runtime.models.checkpoint import (
    TensorFiles,
    build_eagle,
    build_mtp,
    head_tensors,
    load_eagle,
    load_mtp,
    load_nemotron_h,
    model_tensors,
    resolve,
)
from hybrid_runtime.models.config import NemotronHConfig, load_config
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.specdecode.drafter import DrafterName

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an `Engine` is made of. head: the drafter's network, None where it needs none.
    chat_template: None where the checkpoint has none."""

    model: NemotronH
    config: EngineConfig
    tokenizer: Tokenizer
    head: Any
    chat_template: ChatTemplate | None
    generation: Generation


@dataclass(frozen=True, slots=True)
class _Draft:
    """The drafter that was found: its name, and where its network is (None: it has none)."""

    name: DrafterName | None
    directory: Path | None = None

    def load(self, model: NemotronH) -> Any:
        """Its network, filled."""
        if self.directory is None:
            return None
        return (load_mtp if self.name == "mtp" else load_eagle)(self.directory, model)

    def build(self, model: NemotronH) -> Any:
        """Its network, not filled, for a model that is not; held against the headers of its
        files."""
        if self.directory is None:
            return None
        files = TensorFiles(self.directory)
        head = (build_mtp if self.name == "mtp" else build_eagle)(files, model)
        files.check(*head_tensors(files, head))
        return head


def load(
    path: str | Path,
    config: EngineConfig,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    eagle_path: str | Path | None,
) -> Loaded:
    """Load a checkpoint; arguments as of `Engine.from_pretrained`.

    Raises:
        ValueError: an argument, the checkpoint's files, or the two together are wrong, or they do
            not fit the device. Weights are read only after everything else has been found right.
    """
    where = select_device(device)
    _check_path("path", path)
    if eagle_path is not None:
        _check_path("eagle_path", eagle_path)
    directory = resolve(path)
    model_config = load_config(directory)
    weights = _weight_dtype(dtype, model_config, where)
    layout = config.layout(model_config, weights)
    tokenizer = load_tokenizer(directory, model_config.vocab_size)
    chat_template = ChatTemplate.of(directory)
    generation = Generation.of(directory, model_config, tokenizer)
    draft = _draft(config, model_config, directory, eagle_path)
    # The networks without storage: the files' shapes are checked, and their bytes known.
    files, shape = TensorFiles(directory), NemotronH(model_config, "meta", weights)
    files.check(*model_tensors(files, shape))
    head = draft.build(shape)
    config = config.resolved(head)
    count = _bytes(shape) + (0 if head is None else _bytes(head))
    Planner(config, layout, shape, head, where, count).plan()

    start = time.perf_counter()
    model = load_nemotron_h(directory, where, weights)
    loaded = Loaded(model, config, tokenizer, draft.load(model), chat_template, generation)
    took, size = time.perf_counter() - start, gib(count)
    logger.info("loaded %s: %s of %s to %s in %.1f s", directory, size, weights, where, took)
    return loaded


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{name} is {value!r}; it must be a directory or a hub id")


def _weight_dtype(
    dtype: torch.dtype | str | None, model: NemotronHConfig, device: torch.device
) -> torch.dtype:
    """The dtype meant; a checkpoint that names none has float32 weights."""
    if dtype is None:
        dtype = "auto" if device.type == "cuda" else torch.float32
    own = DTYPES.get(model.dtype or "", torch.float32)
    return resolve_dtype("dtype", dtype, own)


def _draft(
    config: EngineConfig,
    model: NemotronHConfig,
    directory: Path,
    eagle_path: str | Path | None,
) -> _Draft:
    """The drafter asked for, or the first that there is; refuses one without its network."""
    name = config.drafter
    if eagle_path is not None and name not in ("auto", "eagle"):
        raise ValueError(
            f"eagle_path is {str(eagle_path)!r} with drafter={name!r}; it must be None unless the "
            "drafter is 'eagle' or 'auto'"
        )
    if name == "mtp" and not model.num_nextn_predict_layers:
        raise ValueError(
            f"drafter is 'mtp', but checkpoint {directory} has no MTP head; it must be 'auto', "
            "None, 'ngram', or 'eagle' with a head of its own"
        )
    if name == "eagle" or (name == "auto" and eagle_path is not None):
        return _Draft("eagle", resolve(eagle_path or directory / "eagle"))
    if name == "auto":
        return _first_drafter(model, directory)
    return _Draft(name, directory if name == "mtp" else None)


def _first_drafter(model: NemotronHConfig, directory: Path) -> _Draft:
    """MTP, else EAGLE, else n-gram look-up, and the reason in the log."""
    missing = "its config names no MTP head"
    if model.num_nextn_predict_layers:
        if any(name.startswith("mtp.") for name in TensorFiles(directory).files):
            return _Draft("mtp", directory)
        missing = "its config names an MTP head, but its files have no tensor of one"
    if os.path.lexists(directory / "eagle" / "config.json"):
        logger.info("drafter is EAGLE, from %s: %s", directory / "eagle", missing)
        return _Draft("eagle", directory / "eagle")
    logger.warning(
        "drafter is n-gram look-up, which helps where text repeats: %s, and %s does not exist",
        missing,
        directory / "eagle" / "config.json",
    )
    return _Draft("ngram")


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
