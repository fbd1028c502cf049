"""A checkpoint's parts, loaded once they and the options have been checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from hybrid_runtime.device.select import select_device
from hybrid_runtime.engine.checks import DTYPES, resolve_dtype
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.models.checkpoint import load_eagle, load_mtp, load_nemotron_h, resolve
from hybrid_runtime.models.config import NemotronHConfig, load_config
from hybrid_runtime.models.nemotron_h import NemotronH


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an `Engine` is made of. head: the drafter's network, None where it needs none."""

    model: NemotronH
    config: EngineConfig
    tokenizer: Tokenizer
    head: Any


def load(
    path: str | Path,
    config: EngineConfig,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    eagle_path: str | Path | None,
) -> Loaded:
    """Load a checkpoint; arguments as of `Engine.from_pretrained`.

    Raises:
        ValueError: an argument, the checkpoint's files, or the two together are wrong. Weights are
            read only after everything else has been found right.
    """
    where = select_device(device)
    directory = resolve(path)
    model_config = load_config(directory)
    weights = _weight_dtype(dtype, model_config, where)
    config.layout(model_config, weights)
    eagle = _eagle_directory(config, model_config, directory, eagle_path)
    tokenizer = _tokenizer(directory)
    model = load_nemotron_h(directory, where, weights)
    head: Any = None
    if config.drafter == "mtp":
        head = load_mtp(directory, model)
    elif eagle is not None:
        head = load_eagle(eagle, model)
    return Loaded(model, config, tokenizer, head)


def _weight_dtype(
    dtype: torch.dtype | str | None, model: NemotronHConfig, device: torch.device
) -> torch.dtype:
    """The dtype meant; a checkpoint that names none has float32 weights."""
    if dtype is None:
        dtype = "auto" if device.type == "cuda" else torch.float32
    own = model.dtype or "float32"
    if dtype == "auto" and own not in DTYPES:
        raise ValueError(
            f"dtype is 'auto', but the checkpoint's own is {own!r}; it must be one of "
            f"{', '.join(DTYPES)}"
        )
    return resolve_dtype("dtype", dtype, DTYPES.get(own, torch.float32))


def _eagle_directory(
    config: EngineConfig,
    model: NemotronHConfig,
    directory: Path,
    eagle_path: str | Path | None,
) -> Path | None:
    """Where the EAGLE head is, if that is the drafter; refuses a drafter without its network."""
    if config.drafter == "mtp" and not model.num_nextn_predict_layers:
        raise ValueError(
            f"drafter is 'mtp', but checkpoint {directory} has no MTP head; it must be None, "
            "'ngram', or 'eagle' with a head of its own"
        )
    return resolve(eagle_path or directory / "eagle") if config.drafter == "eagle" else None


def _tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"checkpoint {directory} has no tokenizer.json; it must hold one")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
