"""The tensors in safetensors files: checked against those wanted, and copied into place."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.formats import SCALE
from hybrid_runtime.models.json_fields import Kind, one_line, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = Kind(
    "an object that maps tensor names to names of files beside it",
    lambda value: isinstance(value, Mapping) and bool(value) and all(map(_is_name, value.values())),
)
_DTYPES = ("F32", "BF16", "F16")
"""Of plain numbers, as safetensors calls them."""
_E4M3 = "F8_E4M3"


class Pieces:
    """Where a tensor of a file goes that lies in several places: its lines, one piece after
    another.

    pieces: of one dtype, `[lines, *]` each; changed by `copy_`.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = tuple(pieces)
        self.dtype, self.device = pieces[0].dtype, pieces[0].device

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(piece) for piece in self.pieces), *self.pieces[0].shape[1:])

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def copy_(self, source: Tensor) -> None:
        """Have these values, of the same shape."""
        lengths = [len(piece) for piece in self.pieces]
        for piece, part in zip(self.pieces, source.split(lengths), strict=True):
            piece.copy_(part)


Destination = Tensor | Pieces
"""Where a tensor of a file goes."""


class TensorFiles:
    """Names, shapes and values of the tensors in a checkpoint directory.

    Attributes:
        files: tensor name to the file that holds it.
        dtypes: tensor name to its dtype, as safetensors calls it.

    Raises:
        ValueError: no weights, any of another dtype than is supported somewhere, a broken file, or
            an index that contradicts the files.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        weight_map: Mapping[str, str] = {}
        index = directory / _INDEX
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
        self.dtypes: dict[str, str] = {}
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
                if part.get_dtype() not in (*_DTYPES, _E4M3):
                    raise ValueError(
                        f"tensor {name} in {file} is {part.get_dtype()}, must be one of "
                        f"{', '.join(_DTYPES)}, or {_E4M3} with a scale"
                    )
                self.files[name] = file
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = part.get_dtype()

    def check(
        self,
        wanted: Mapping[str, Destination],
        present: Iterable[str],
        rounded: Collection[str] = (),
    ) -> None:
        """Hold names, dtypes, shapes and the values of scales against those wanted; arguments and
        errors as of `load`."""
        names = set(present)
        stored = wanted.keys() - {scale_of(name) for name in rounded}
        for name in sorted(stored - names):
            weight = f"{name.rpartition('.')[0]}.weight"
            where = self.files[weight] if weight in names else self.directory
            raise ValueError(f"tensor {name} is missing in {where}")
        for name in sorted(names - stored):
            raise ValueError(f"tensor {name} in {self.files[name]} is unexpected")
        scales: dict[str, Sequence[int]] = {}
        for name, destination in wanted.items():
            if name not in stored:
                continue
            found = self.dtypes[name]
            must: tuple[str, ...] = _DTYPES
            if destination.dtype == E4M3 and name not in rounded:
                must = (_E4M3,)
            if found not in must:
                one_of = "one of " if len(must) > 1 else ""
                raise ValueError(
                    f"tensor {name} in {self.files[name]} is {found}, must be {one_of}"
                    f"{', '.join(must)}"
                )
            if name.endswith(SCALE):
                scales[name] = destination.shape
            elif self.shapes[name] != tuple(destination.shape):
                raise ValueError(
                    f"tensor {name} in {self.files[name]} is {list(self.shapes[name])}, must be "
                    f"{list(destination.shape)}"
                )
        self.check_scales(scales)

    def check_scales(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse scales that are not float32, not finite and above 0, or not of these shapes, by
        name; dimensions of 1 may be there or not."""
        for name, shape in shapes.items():
            file = self.files[name]
            if self.dtypes[name] != "F32":
                raise ValueError(f"tensor {name} in {file} is {self.dtypes[name]}, must be F32")
            if [n for n in self.shapes[name] if n != 1] != [n for n in shape if n != 1]:
                raise ValueError(
                    f"tensor {name} in {file} is {list(self.shapes[name])}, must be {list(shape)}"
                )
        # Experts have ten thousands of them: each file is opened once, and looked through at once.
        for file, inside in self._by_file(shapes).items():
            with _opened(file) as opened:
                parts = [opened.get_tensor(name).flatten() for name in inside]
            values = torch.cat(parts)
            wrong = ~(values.isfinite() & (values > 0))
            if wrong.any():
                at = int(wrong.int().argmax())
                ends = torch.tensor([len(part) for part in parts]).cumsum(0)
                name = inside[int((ends <= at).sum())]
                raise ValueError(
                    f"tensor {name} in {file} holds {values[at]:g}, must hold finite numbers above "
                    "0"
                )

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for name in names:
            found.setdefault(self.files[name], []).append(name)
        return found

    def load(
        self,
        wanted: Mapping[str, Destination],
        present: Iterable[str],
        rounded: Collection[str] = (),
    ) -> None:
        """Copy tensors into place, converted to the destination's dtype and device.

        Everything is checked by the headers first, so nothing has changed when this raises.

        Args:
            wanted: tensor name to destination.
            present: the names in the files that belong to `wanted`; must be the same set.
            rounded: weights that the files hold as plain numbers, and `wanted` in 8 bits with a
                scale for each line, which the files have not.

        Raises:
            ValueError: a tensor is missing, unexpected, or has a wrong dtype, shape or scale.
        """
        self.check(wanted, present, rounded)
        by_file = self._by_file(wanted.keys() - {scale_of(name) for name in rounded})
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Loading weights", total=sum(map(len, by_file.values())))
            for file, inside in by_file.items():
                with _opened(file) as opened:
                    for name in inside:
                        self._fill(wanted, name, opened.get_tensor(name), name in rounded)
                        bar.advance(task)

    @staticmethod
    def _fill(wanted: Mapping[str, Destination], name: str, given: Tensor, rounded: bool) -> None:
        destination = wanted[name]
        if not rounded:
            destination.copy_(given.view(destination.shape))
            return
        lines = given.to(destination.device).flatten(0, -2)
        values, scale = quantize_lines_reference(lines)
        destination.copy_(values.view(destination.shape))
        wanted[scale_of(name)].copy_(scale.view(destination.shape[:-1]))


def scale_of(weight: str) -> str:
    """The name of the scales of a weight."""
    return weight + SCALE


def _is_name(value: object) -> bool:
    """Of a file in the same directory, not of one anywhere else."""
    right = isinstance(value, str) and value.isprintable() and value not in ("", "..")
    return right and Path(str(value)).name == value


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
    rounded: those of weights that are rounded as they are loaded.
    """

    files: TensorFiles
    wanted: Mapping[str, Destination]
    present: set[str]
    rounded: frozenset[str] = frozenset()

    def check(self) -> None:
        """As of `TensorFiles.check`."""
        self.files.check(*self[1:])

    def load(self) -> None:
        """As of `TensorFiles.load`."""
        self.files.load(*self[1:])

    @property
    def nbytes(self) -> int:
        """In the dtypes in which they are wanted."""
        return sum(tensor.nbytes for tensor in self.wanted.values())
