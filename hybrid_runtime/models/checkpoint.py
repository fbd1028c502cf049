"""Load checkpoints in Hugging Face format: config.json plus safetensors."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import nn

from hybrid_runtime.kernels.linear.quantize import E4M3
from hybrid_runtime.models.attention import KV_SCALES, Attention
from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.json_fields import (
    OBJECT,
    check_unquantised,
    named,
    read_json,
    read_optional,
)
from hybrid_runtime.models.linear import checkpoint_tensors, join, place
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.quantization import BESIDE, read_quantization
from hybrid_runtime.models.registry import load_config
from hybrid_runtime.models.tensor_files import StoredTensors, TensorFiles


def resolve(path_or_hub_id: str | Path) -> Path:
    """Directory of a checkpoint; a hub id is downloaded, or taken from the local hub cache.

    Raises:
        ValueError: no such directory, and the hub can't give it either (no such repository, no
            access, no network and not in the cache).
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if path.exists():
        raise ValueError(f"checkpoint {name!r} is a file, must be a directory or a hub id")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ValueError(
            f"checkpoint {name!r} does not exist, must be a directory or a hub id (owner/name)"
        )
    try:
        folder = snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"])
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"checkpoint {name!r} is no directory here, and the hub did not give it "
            f"({type(error).__name__}: {error}); it must be a directory or, with a network or a "
            "filled hub cache, a hub id"
        ) from error
    return Path(folder)


class Checkpoint:
    """A model's checkpoint, which may hold a draft head too. config.json is read at once, weights
    when their tensors are asked for.

    Args:
        path: directory or hub id.
        quantization: what plain weights are to be rounded to, as of `read_quantization`.

    Attributes:
        directory: where the files are.
        family, config: by config.json.
        quantization: formats of the model's matrices; None: all are plain.

    Raises:
        ValueError: as of `resolve`, `load_config` and `read_quantization`.
    """

    def __init__(self, path: str | Path, quantization: str | None = None):
        self.directory = resolve(path)
        self.family, self.config = load_config(self.directory)
        self.quantization = read_quantization(self.directory, quantization)
        if self.quantization is not None and not self.family.formats:
            raise ValueError(
                f"{self.quantization.source}: models of this family have plain weights only"
            )

    @cached_property
    def files(self) -> TensorFiles:
        return TensorFiles(self.directory)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> HybridModel:
        """The model without values; `ValueError` as of `Quantization.store`."""
        if self.quantization is None:
            return self.family.build(self.config, device, dtype)
        # Formats are given by name, so before that there is no memory to take.
        model: Any = self.family.build(self.config, "meta", dtype)
        self.quantization.store(model, self.family.head_prefix)
        if self.quantization.kv_fp8:
            model.kv_dtype = E4M3
            self._add_kv_scales(model)
        place(model, device)
        built: HybridModel = model
        return built

    def tensors(self, model: HybridModel) -> StoredTensors:
        """Those that fill the model; a draft head's are not its."""
        others = self.family.others
        present = {name for name in self.files.files if not name.startswith(others)}
        if self.config.has_draft_head:
            present -= self._of_head()
        wanted, rounded = self.family.tensors(model, self.files.files), frozenset[str]()
        if self.quantization is not None and self.quantization.rounded:
            rounded = frozenset(name for name, t in wanted.items() if t.dtype == E4M3)
        return StoredTensors(self.files, wanted, present, rounded)

    def _add_kv_scales(self, module: nn.Module) -> None:
        """Make room for the scales of keys and values that the files have; `ValueError` if of one
        of the two alone."""
        for layer, part in module.named_modules():
            if not isinstance(part, Attention):
                continue
            names = [f"{layer}.{proj}.{scale}" for proj, scale in KV_SCALES.items()]
            there = [name for name in names if name in self.files.files]
            if len(there) == 1:
                (missing,) = set(names) - set(there)
                raise ValueError(
                    f"tensor {missing} is missing in {self.directory}, but {there[0]} is in "
                    f"{self.files.files[there[0]]}"
                )
            if there:
                part.add_kv_scales()

    def build_head(self, target: HybridModel) -> nn.Module:
        """The draft head without values, on the target's device; `ValueError` if the config names
        none that is supported, or files have a scale of keys and none of values."""
        with named(self.directory / "config.json"):
            if self.family.build_head is None:
                raise ValueError("models of this family have no draft head")
            head = self.family.build_head(target)
        if self.quantization is not None and self.quantization.kv_fp8:
            self._add_kv_scales(head)
        return head

    def head_tensors(self, head: nn.Module) -> StoredTensors:
        """Those that fill the draft head."""
        return StoredTensors(
            self.files, self.family.tensors(head, self.files.files), self._of_head()
        )

    @property
    def holds_head(self) -> bool:
        """Whether the files have a tensor of the draft head."""
        return bool(self._of_head())

    def _of_head(self) -> set[str]:
        return {name for name in self.files.files if name.startswith(self.family.head_prefix)}


class EagleCheckpoint:
    """A checkpoint of an EAGLE-1 head, with its own config.json.

    Args:
        path: directory or hub id.

    Raises:
        ValueError: as of `resolve` and `TensorFiles`.
    """

    def __init__(self, path: str | Path):
        directory = resolve(path)
        about = read_optional(directory, BESIDE, {"quantization": OBJECT}).get("quantization")
        if about is not None and about.get("quant_algo") is not None:
            with named(directory / BESIDE):
                check_unquantised({"quantization": about}, "quantization")
        self.files = TensorFiles(directory)

    def build_head(self, target: HybridModel) -> EagleHead:
        """The head without values, on the target's device; `ValueError` names the config field that
        is wrong."""
        files, directory = self.files.files, self.files.directory
        decoded = read_json(directory, "config.json")
        with named(directory / "config.json"):
            return EagleHead(
                EagleConfig.from_dict(decoded),
                target,
                fc_bias="fc.bias" in files,
                own_embedding="embed_tokens.weight" in files,
            )

    def head_tensors(self, head: nn.Module) -> StoredTensors:
        """Those that fill it."""
        return StoredTensors(self.files, checkpoint_tensors(head), set(self.files.files))


DraftCheckpoint = Checkpoint | EagleCheckpoint
"""Where a draft head comes from."""


def load_model(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype
) -> HybridModel:
    """Build the model of a checkpoint and fill it.

    Args:
        checkpoint: of the model.
        device: where the parameters go.
        dtype: dtype of activations, and of matrices that are plain; whatever the file holds is
            converted. What enters exponentials or routes tokens stays at least fp32.

    Raises:
        ValueError: naming the tensor and its file that is wrong.
    """
    model = checkpoint.build(device, dtype)
    checkpoint.tensors(model).load()
    if checkpoint.quantization is not None:
        loaded: Any = model
        join(loaded)
    return model


def load_head(checkpoint: DraftCheckpoint, target: HybridModel) -> nn.Module:
    """Build a draft head and fill it.

    Args:
        checkpoint: of the head.
        target: the model it drafts for; gives device and dtype.

    Raises:
        ValueError: naming the config field, or the tensor and its file, that is wrong.
    """
    head = checkpoint.build_head(target)
    checkpoint.head_tensors(head).load()
    return head
