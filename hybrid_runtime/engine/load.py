"""A checkpoint's parts, loaded once they and the options have been checked."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from hybrid_runtime.device.select import select_device
from hybrid_runtime.engine.chat import ChatTemplate
from hybrid_runtime.engine.checks import DTYPES, check_fp8, resolve_dtype
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.generation import Generation
from hybrid_runtime.engine.memory_plan import Planner, gib
from hybrid_runtime.engine.tokenizer_files import load_tokenizer
from hybrid_runtime.kernels.linear.quantize import E4M3
from hybrid_runtime.models.attention import KV_SCALES
from hybrid_runtime.models.checkpoint import (
    Checkpoint,
    DraftCheckpoint,
    EagleCheckpoint,
    load_head,
    load_model,
)
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.quantization import Quantization
from hybrid_runtime.models.tensor_files import StoredTensors

logger = logging.getLogger(__name__)
QuantizationName = Literal["fp8"]
"""What weights may be rounded to as they are loaded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an `Engine` is made of.

    head: the drafter's network, None where it needs none.
    chat_template: None where the checkpoint has none."""

    model: HybridModel
    config: EngineConfig
    tokenizer: Tokenizer
    head: Any
    chat_template: ChatTemplate | None
    generation: Generation


def load(
    path: str | Path,
    config: EngineConfig,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    eagle_path: str | Path | None,
    quantization: QuantizationName | None = None,
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
    checkpoint = Checkpoint(path, quantization)
    directory = checkpoint.directory
    if checkpoint.quantization is not None:
        check_fp8(f"{checkpoint.quantization.source}: weights", where)
    weights = _weight_dtype(dtype, checkpoint.config.dtype, where)
    # The networks without storage: the files' shapes are checked, and their bytes known.
    shape = checkpoint.build("meta", weights)
    layout = config.layout(shape)
    tokenizer = load_tokenizer(directory, shape.vocab_size)
    chat_template = ChatTemplate.of(directory)
    generation = Generation.of(directory, checkpoint.config, tokenizer)
    source = _draft_head(config, checkpoint, eagle_path)
    tensors = checkpoint.tensors(shape)
    tensors.check()
    _log_kv_dtype(config, shape, checkpoint.quantization, tensors)
    head, count = None, tensors.nbytes
    if source is not None:
        head = source.build_head(shape)
        tensors = source.head_tensors(head)
        tensors.check()
        count += tensors.nbytes
    config = config.resolved(head)
    Planner(config, layout, shape, head, where, count).plan()

    start = time.perf_counter()
    model = load_model(checkpoint, where, weights)
    head = None if source is None else load_head(source, model)
    loaded = Loaded(model, config, tokenizer, head, chat_template, generation)
    took, size = time.perf_counter() - start, gib(count)
    formats = "" if checkpoint.quantization is None else " and FP8"
    logger.info(
        "loaded %s: %s of %s%s to %s in %.1f s", directory, size, weights, formats, where, took
    )
    return loaded


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{name} is {value!r}; it must be a directory or a hub id")


def _log_kv_dtype(
    config: EngineConfig, model: HybridModel, said: Quantization | None, tensors: StoredTensors
) -> None:
    """Say where keys and values are not kept as exactly as they could be, or as the checkpoint
    says."""
    chosen = config.kv_dtype(model)
    ends = tuple(f"{name}.{scale}" for name, scale in KV_SCALES.items())
    layers = len(model.kv_layers)
    without = layers - sum(name.endswith(ends) for name in tensors.wanted) // len(ends)
    if chosen == E4M3 and without:
        because = f"kv_cache_dtype={config.kv_cache_dtype!r}"
        if config.kv_cache_dtype == "auto" and said is not None:
            because = said.source
        logger.warning(
            "keys and values of %d of %d layers are in FP8 with 1 for scales: %s asks for FP8, and "
            "the checkpoint has no scales of them; kv_cache_dtype=%r would keep them as they are",
            without,
            layers,
            because,
            str(model.dtype).removeprefix("torch."),
        )
    elif chosen != E4M3 and model.kv_dtype == E4M3 and said is not None:
        logger.info(
            "keys and values are in %s, as kv_cache_dtype says; %s asks for FP8",
            chosen,
            said.source,
        )


def _weight_dtype(
    dtype: torch.dtype | str | None, own: str | None, device: torch.device
) -> torch.dtype:
    """The dtype meant. own: the checkpoint's; one that names none has float32 weights."""
    if dtype is None:
        dtype = "auto" if device.type == "cuda" else torch.float32
    return resolve_dtype("dtype", dtype, DTYPES.get(own or "", torch.float32))


def _draft_head(
    config: EngineConfig, checkpoint: Checkpoint, eagle_path: str | Path | None
) -> DraftCheckpoint | None:
    """Where the network of the drafter is that is asked for, or of the first that there is; None:
    it has none."""
    name, directory = config.drafter, checkpoint.directory
    if eagle_path is not None and name not in ("auto", "eagle"):
        raise ValueError(
            f"eagle_path is {str(eagle_path)!r} with drafter={name!r}; it must be None unless the "
            "drafter is 'eagle' or 'auto'"
        )
    if name == "mtp" and not checkpoint.config.has_draft_head:
        raise ValueError(
            f"drafter is 'mtp', but checkpoint {directory} has no MTP head; it must be 'auto', "
            "None, 'ngram', or 'eagle' with a head of its own"
        )
    if name == "eagle" or (name == "auto" and eagle_path is not None):
        return EagleCheckpoint(eagle_path or directory / "eagle")
    if name == "auto":
        return _first_draft_head(checkpoint)
    return checkpoint if name == "mtp" else None


def _first_draft_head(checkpoint: Checkpoint) -> DraftCheckpoint | None:
    """MTP, else EAGLE, else none, for n-gram look-up; the reason in the log."""
    directory, missing = checkpoint.directory, "its config names no MTP head"
    if checkpoint.config.has_draft_head:
        if checkpoint.holds_head:
            return checkpoint
        missing = "its config names an MTP head, but its files have no tensor of one"
    if os.path.lexists(directory / "eagle" / "config.json"):
        logger.info("drafter is EAGLE, from %s: %s", directory / "eagle", missing)
        return EagleCheckpoint(directory / "eagle")
    logger.warning(
        "drafter is n-gram look-up, which helps where text repeats: %s, and %s does not exist",
        missing,
        directory / "eagle" / "config.json",
    )
    return None
