"""Load checkpoints in Hugging Face format: config.json plus safetensors."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hybrid_runtime.models.config import load_config
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
from hybrid_runtime.models.moe import Experts
from hybrid_runtime.models.mtp import MTPHead
from hybrid_runtime.models.nemotron_h import NemotronH

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


def checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Checkpoint names of a module's parameters, with views of their storage.

    Names are the parameters' own, but each routed expert has its own tensors in a checkpoint:
    ``experts.up_proj[i]`` is called ``experts.i.up_proj.weight``.
    """
    stacked = {name for name, part in module.named_modules() if isinstance(part, Experts)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parent, _, last = name.rpartition(".")
        if parent in stacked:
            for i, matrix in enumerate(parameter.data):
                tensors[f"{parent}.{i}.{last}.weight"] = matrix
        else:
            tensors[name] = parameter.data
    return tensors


def load_nemotron_h(path: str | Path, device: torch.device | str, dtype: torch.dtype) -> NemotronH:
    """Build the model of a checkpoint and fill it.

    Args:
        path: directory or hub id.
        device: where the parameters go.
        dtype: dtype of the matrices; whatever the file holds is converted. Router, ``A_log``,
            ``D`` and ``dt_bias`` stay at least fp32.

    Raises:
        ValueError: naming the config field, or the tensor and its file, that is wrong.
    """
    directory = resolve(path)
    config = load_config(directory)
    files = TensorFiles(directory)
    model = NemotronH(config, device, dtype)
    files.load(*model_tensors(files, model))
    return model.eval()


def model_tensors(files: TensorFiles, model: NemotronH) -> tuple[dict[str, Tensor], set[str]]:
    """What `TensorFiles.load` and `check` take for a model: those of an MTP head are not its."""
    present = set(files.files)
    if model.config.num_nextn_predict_layers:
        present = {name for name in present if not name.startswith("mtp.")}
    return checkpoint_tensors(model), present


def head_tensors(
    files: TensorFiles, head: MTPHead | EagleHead
) -> tuple[dict[str, Tensor], set[str]]:
    """The same for a draft head."""
    names = set(files.files)
    if isinstance(head, MTPHead):
        names = {name for name in names if name.startswith("mtp.")}
    return checkpoint_tensors(head), names


def load_mtp(path: str | Path, target: NemotronH) -> MTPHead:
    """Build the MTP head (``mtp.*``) of the target's own checkpoint and fill it.

    Args:
        path: directory or hub id of the checkpoint that `target` was loaded from.
        target: the model it drafts for; gives device and dtype.

    Raises:
        ValueError: the config names no supported head, or a tensor is wrong.
    """
    files = TensorFiles(resolve(path))
    head = build_mtp(files, target)
    files.load(*head_tensors(files, head))
    return head.eval()


def load_eagle(path: str | Path, target: NemotronH) -> EagleHead:
    """Build an EAGLE-1 head and fill it.

    Args:
        path: directory or hub id with the head's own config.json and safetensors.
        target: the model it drafts for; gives device and dtype.

    Raises:
        ValueError: naming the config field, or the tensor and its file, that is wrong.
    """
    files = TensorFiles(resolve(path))
    head = build_eagle(files, target)
    files.load(*head_tensors(files, head))
    return head.eval()


def build_mtp(files: TensorFiles, target: NemotronH) -> MTPHead:
    """The MTP head of the target's checkpoint, not filled yet; errors as of `load_mtp`."""
    with named(files.directory / "config.json"):
        return MTPHead(target)


def build_eagle(files: TensorFiles, target: NemotronH) -> EagleHead:
    """The EAGLE-1 head of a checkpoint, not filled yet; errors as of `load_eagle`."""
    decoded = read_json(files.directory, "config.json")
    with named(files.directory / "config.json"):
        return EagleHead(
            EagleConfig.from_dict(decoded),
            target,
            fc_bias="fc.bias" in files.files,
            own_embedding="embed_tokens.weight" in files.files,
        )
