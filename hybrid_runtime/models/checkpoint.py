"""Load checkpoints in Hugging Face format: config.json plus safetensors."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.json_fields import (
    OBJECT,
    Kind,
    check_unquantised,
    named,
    one_line,
    read_json,
    read_optional,
)
from hybrid_runtime.models.linear import checkpoint_tensors
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.registry import load_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_QUANTISED = "hf_quant_config.json"
"""ModelOpt's, which says what config.json need not."""
_SHARDS = Kind(
    "an object that maps tensor names to names of files beside it",
    lambda value: isinstance(value, Mapping) and bool(value) and all(map(_is_name, value.values())),
)
_DTYPES = ("F32", "BF16", "F16")
"""As safetensors calls them."""


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


class TensorFiles:
    """Names, shapes and values of the tensors in a checkpoint directory.

    Attributes:
        files: tensor name to the file that holds it.

    Raises:
        ValueError: no weights, quantised ones or any of another dtype, a broken file, or an index
            that contradicts the files.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        weight_map: Mapping[str, str] = {}
        index = directory / _INDEX
        _check_not_quantised(directory)
        if os.path.lexists(directory / _SINGLE):
            files = [directory / _SINGLE]
        elif os.path.lexists(index):
            weight_map = read_json(directory, _INDEX, {"weight_map": _SHARDS}).get("weight_map", {})
            if not weight_map:
                raise ValueError(f"{index} has no weight_map, must be {_SHARDS.must}")
            files = [directory / name for name in sorted(set(weight_map.values()))]
            for file in files:
                if not file.exists():
                    raise ValueError(f"{file} does not exist, but {index} names it")
        else:
            raise ValueError(f"{directory} has no weights, must hold {_SINGLE} or {_INDEX}")
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            self._read_header(file)
        for name, listed in weight_map.items():
            if self.files.get(name) != directory / listed:
                raise ValueError(
                    f"tensor {name} is missing in {directory / listed}, but {index} puts it there"
                )

    def _read_header(self, file: Path) -> None:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in self.files:
                    raise ValueError(
                        f"tensor {name} is in both {self.files[name]} and {file}, must be in "
                        "one file"
                    )
                if not name.isprintable():
                    raise ValueError(f"tensor {name!r} in {file} has no name that can be printed")
                part = opened.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"tensor {name} in {file} is {part.get_dtype()}, must be one of "
                        f"{', '.join(_DTYPES)}"
                    )
                self.files[name] = file
                self.shapes[name] = tuple(part.get_shape())

    def check(self, wanted: Mapping[str, Tensor], present: Iterable[str]) -> None:
        """Hold names and shapes against those wanted; arguments and errors as of `load`."""
        names = set(present)
        for name in sorted(wanted.keys() - names):
            raise ValueError(f"tensor {name} is missing in {self.directory}")
        for name in sorted(names - wanted.keys()):
            raise ValueError(f"tensor {name} in {self.files[name]} is unexpected")
        for name, destination in wanted.items():
            if self.shapes[name] != tuple(destination.shape):
                raise ValueError(
                    f"tensor {name} in {self.files[name]} is {list(self.shapes[name])}, must be "
                    f"{list(destination.shape)}"
                )

    def load(self, wanted: Mapping[str, Tensor], present: Iterable[str]) -> None:
        """Copy tensors into place, converted to the destination's dtype and device.

        Everything is checked by the headers first, so nothing has changed when this raises.

        Args:
            wanted: tensor name to destination.
            present: the names in the files that belong to `wanted`; must be the same set.

        Raises:
            ValueError: a tensor is missing, unexpected, or has a wrong shape.
        """
        self.check(wanted, present)
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.files[name], []).append(name)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Loading weights", total=len(wanted))
            for file, inside in by_file.items():
                with _opened(file) as opened:
                    for name in inside:
                        wanted[name].copy_(opened.get_tensor(name))
                        bar.advance(task)


def _is_name(value: object) -> bool:
    """Of a file in the same directory, not of one anywhere else."""
    right = isinstance(value, str) and value.isprintable() and value not in ("", "..")
    return right and Path(str(value)).name == value


def _check_not_quantised(directory: Path) -> None:
    given = read_optional(directory, _QUANTISED, {"quantization": OBJECT})
    about = given.get("quantization")
    if given and (about is None or about.get("quant_algo") is not None):
        with named(directory / _QUANTISED):
            check_unquantised({"quantization": about or given}, "quantization")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; `ValueError` names it if it is none, or cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a safetensors file: {one_line(error)}") from error


class StoredTensors(NamedTuple):
    """Tensors of a network that a checkpoint holds.

    wanted: by name, where they go.
    present: the names in the files that are the network's; must be the same.
    """

    files: TensorFiles
    wanted: Mapping[str, Tensor]
    present: set[str]

    def check(self) -> None:
        """As of `TensorFiles.check`."""
        self.files.check(self.wanted, self.present)

    def load(self) -> None:
        """As of `TensorFiles.load`."""
        self.files.load(self.wanted, self.present)

    @property
    def nbytes(self) -> int:
        """In the dtypes in which they are wanted."""
        return sum(tensor.nbytes for tensor in self.wanted.values())


class Checkpoint:
    """A model's checkpoint, which may hold a draft head too. config.json is read at once, weights
    when their tensors are asked for.

    Args:
        path: directory or hub id.

    Attributes:
        directory: where the files are.
        family, config: by config.json.

    Raises:
        ValueError: as of `resolve` and `load_config`.
    """

    def __init__(self, path: str | Path):
        self.directory = resolve(path)
        self.family, self.config = load_config(self.directory)

    @cached_property
    def files(self) -> TensorFiles:
        return TensorFiles(self.directory)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> HybridModel:
        """The model without values."""
        return self.family.build(self.config, device, dtype)

    def tensors(self, model: HybridModel) -> StoredTensors:
        """Those that fill the model; a draft head's are not its."""
        present = set(self.files.files)
        if self.config.has_draft_head:
            present -= self._of_head()
        return StoredTensors(self.files, self.family.tensors(model), present)

    def build_head(self, target: HybridModel) -> nn.Module:
        """The draft head without values, on the target's device; `ValueError` if the config names
        none that is supported."""
        with named(self.directory / "config.json"):
            if self.family.build_head is None:
                raise ValueError("models of this family have no draft head")
            return self.family.build_head(target)

    def head_tensors(self, head: nn.Module) -> StoredTensors:
        """Those that fill the draft head."""
        return StoredTensors(self.files, self.family.tensors(head), self._of_head())

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
        self.files = TensorFiles(resolve(path))

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
        dtype: dtype of the matrices; whatever the file holds is converted. What enters exponentials
            or routes tokens stays at least fp32.

    Raises:
        ValueError: naming the tensor and its file that is wrong.
    """
    model = checkpoint.build(device, dtype)
    checkpoint.tensors(model).load()
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
