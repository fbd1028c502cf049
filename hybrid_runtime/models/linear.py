"""Weight matrices: the only code of the models that creates, multiplies or names them. What of them
is stored, and what a product is, is their format's, see `formats.py`."""

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.embedding import embedding
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled
from hybrid_runtime.kernels.moe.fused_moe import fused_moe
from hybrid_runtime.models.formats import PLAIN, Format


class Matrix(nn.Module):
    """A matrix in a format, without values until a checkpoint is loaded.

    weight: `[outputs, inputs]`; its format may have further tensors.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self, inputs: int, outputs: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.dtype = inputs, outputs, dtype
        self.format: Format = PLAIN
        self.store_as(PLAIN, device)

    def stored(self) -> Mapping[str, Tensor]:
        """Names and shapes of the format's tensors, on the meta device."""
        return self.format.tensors(self.outputs, self.inputs, self.dtype)

    def store_as(self, format: Format, device: torch.device | str) -> None:
        """Be a matrix of that format, without values."""
        for name in self.stored():
            self._parameters.pop(name, None)
        self.format = format
        for name, like in self.stored().items():
            self.put(name, torch.empty_like(like, device=device))

    def put(self, name: str, tensor: Tensor) -> None:
        """Have a tensor of the format at another place."""
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def extra_repr(self) -> str:
        return f"{self.inputs} to {self.outputs}, {self.format.algorithm}"


class Linear(Matrix):
    """`x @ weight.T + bias`. bias: `[outputs]` or None.

    Args:
        halves: the product may be left as a sum, for whoever adds it to something anyway.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        device: torch.device | str,
        dtype: torch.dtype,
        bias: bool = False,
        halves: bool = False,
    ):
        super().__init__(inputs, outputs, device, dtype)
        self.halves = halves
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None

    @property
    def quantizer(self) -> Quantizer | None:
        """How `forward` takes its input in 8 bits, for whoever makes it; None: not."""
        return self.format.quantizer(self)

    def forward(self, x: Tensor | Scaled) -> Tensor:
        """`[T, inputs]` to `[T, outputs]`, or with `halves` perhaps to `[parts, T, outputs]`, whose
        sum it is. x: quantised, if at all, as `quantizer` says."""
        return self.format.product(self, x)


class Embedding(Linear):
    """A `Linear` with a line per token, `[vocab_size, size]`, in which tokens are looked up; as an
    output head it gives logits."""

    def lookup(self, tokens: Tensor) -> Tensor:
        """int `[T]` to `[T, size]`."""
        return embedding(tokens, self.weight)


class MergedLinear(nn.Module):
    """Projections of one input whose values lie side by side: one product computes neighbours among
    them, where their formats and scalars are equal. Each of the others is a product of its own.

    parts: by name; each is a `Linear` that a module registers under the name of the checkpoint.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        super().__init__()
        # No submodules: their names in a checkpoint are not below this one's.
        self.parts = {name: Linear(inputs, n, "meta", dtype) for name, n in outputs.items()}
        self._joined: dict[tuple[str, ...], Linear] = {}
        self.place(device)

    def place(self, device: torch.device | str) -> None:
        """Take memory on the device: of what has a line per output for all parts together."""
        self._joined, parts = {}, list(self.parts.values())
        sizes = [part.outputs for part in parts]
        if all(part.format is parts[0].format for part in parts):
            for name, like in parts[0].stored().items():
                if like.dim():
                    whole = like.new_empty((sum(sizes), *like.shape[1:]), device=device)
                    for part, lines in zip(parts, whole.split(sizes), strict=True):
                        part.put(name, lines)
        else:
            for part in parts:
                part.store_as(part.format, device)
        if not any(like.dim() == 0 for part in parts for like in part.stored().values()):
            self.join()

    def join(self) -> None:
        """See which neighbours can share a product: once scalars have their values."""
        self._joined, order = {}, list(self.parts)
        if len({part.format for part in self.parts.values()}) > 1:
            return
        for first, end in combinations(range(len(order) + 1), 2):
            names = tuple(order[first:end])
            if _same_scalars([self.parts[name] for name in names]):
                self._joined[names] = self._over(names)

    def _over(self, names: tuple[str, ...]) -> Linear:
        """Neighbours as one matrix."""
        parts = [self.parts[name] for name in names]
        first, outputs = parts[0], sum(part.outputs for part in parts)
        whole = Linear(first.inputs, outputs, "meta", first.dtype)
        whole.format = first.format
        for name, like in first.stored().items():
            part = getattr(first, name).data
            if like.dim():  # as its neighbours lie behind it
                part = part.as_strided((outputs, *part.shape[1:]), part.stride())
            whole.put(name, part)
        return whole

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`; None too where parts would have to be quantised differently."""
        whole = self._joined.get(tuple(self.parts))
        return None if whole is None else whole.quantizer

    def forward(self, x: Tensor | Scaled, *names: str) -> tuple[Tensor, ...]:
        """Products of `[T, inputs]` with some parts, `[T, outputs]` each.

        names: the parts, side by side in this order; none = all.
        """
        order = tuple(self.parts)
        names = names or order
        whole = self._joined.get(names)
        if whole is not None:
            return whole(x).split([self.parts[name].outputs for name in names], -1)
        first = order.index(names[0])
        if order[first : first + len(names)] != names:
            raise ValueError(f"names is {names}; they must be side by side in {list(order)}")
        return tuple(self.parts[name](x) for name in names)

    def extra_repr(self) -> str:
        return ", ".join("+".join(names) for names in self._joined)


def _same_scalars(parts: list[Linear]) -> bool:
    first = parts[0]
    scalars = [name for name, like in first.stored().items() if not like.dim()]
    return all(
        bool(getattr(part, name) == getattr(first, name)) for name in scalars for part in parts[1:]
    )


class StackedMatrix(Matrix):
    """The same matrix of so many experts. weight: `[count, outputs, inputs]`; so are the format's
    further tensors stacked."""

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self.count = count
        super().__init__(inputs, outputs, device, dtype)

    def stored(self) -> Mapping[str, Tensor]:
        one = super().stored()
        return {name: like.new_empty((self.count, *like.shape)) for name, like in one.items()}


class Experts(nn.Module):
    """The matrices of all routed experts, stacked: `up_proj` of `[inner, size]`, `down_proj` of
    `[size, inner]`, both of one format. Of gated ones `up_proj` is `[2 * inner, size]`: what
    checkpoints call ``gate_proj`` comes first."""

    def __init__(
        self,
        count: int,
        size: int,
        inner: int,
        device: torch.device | str,
        dtype: torch.dtype,
        gated: bool = False,
    ):
        super().__init__()
        self.count, self.gated = count, gated
        self.up_proj = StackedMatrix(count, size, (1 + gated) * inner, device, dtype)
        self.down_proj = StackedMatrix(count, inner, size, device, dtype)

    @property
    def projections(self) -> tuple[str, ...]:
        """What checkpoints call an expert's matrices."""
        return (*(("gate_proj",) if self.gated else ()), "up_proj", "down_proj")

    def store_as(self, format: Format, device: torch.device | str) -> None:
        """Be of that format, without values; `ValueError` if gate and up would need a scale each
        where there is one for both."""
        if self.gated and any(not like.dim() for like in format.tensors(1, 1, self.dtype).values()):
            raise ValueError(
                f"gated experts are {format.algorithm}, which has one scale for all lines of a "
                "matrix; they must be in a format with a scale for each line"
            )
        self.up_proj.store_as(format, device)
        self.down_proj.store_as(format, device)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.up_proj.dtype

    def join(self) -> None:
        """Once scales have their values: a token is quantised once for all of its experts, by the
        largest scale that any has for it, as in vLLM. Between the products each keeps its own."""
        if "input_scale" in self.up_proj.stored():
            scale = self.up_proj.input_scale.data
            scale.copy_(scale.amax().expand_as(scale))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            x: [T, size].
            weights: [T, top_k].
            experts: int64 [T, top_k].

        Returns:
            [T, size] in x's dtype.

        Raises:
            ValueError: shapes or dtypes that do not go together.
        """
        up, down = self.up_proj.format.experts(self.up_proj, self.down_proj)
        return fused_moe(x, weights, experts, up, down, gated=self.gated)


def checkpoint_tensors(module: Any, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Checkpoint names of a module's parameters, with views of their storage. names: those in the
    files, which make no difference here.

    Names are the parameters' own, but each routed expert has its own tensors in a checkpoint:
    ``experts.up_proj.weight[i]`` is called ``experts.i.up_proj.weight``.
    """
    stacked = {name for name, part in module.named_modules() if isinstance(part, StackedMatrix)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parent, _, last = name.rpartition(".")
        if parent in stacked:
            experts, _, matrix = parent.rpartition(".")
            for i, tensor in enumerate(parameter.data):
                tensors[f"{experts}.{i}.{matrix}.{last}"] = tensor
        else:
            tensors[name] = parameter.data
    return tensors


def matrices(module: nn.Module) -> dict[str, Linear]:
    """The matrices that may be of any format, by their names in a checkpoint: neither embedding nor
    output head, nor what routes tokens. Those of routed experts are not among them."""
    return {name: part for name, part in module.named_modules() if type(part) is Linear}


def place(module: nn.Module, device: torch.device | str) -> None:
    """Take memory on the device for a module that was built on the meta device."""
    for part in module.modules():
        if isinstance(part, MergedLinear):
            part.place(device)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(part, name, nn.Parameter(empty, requires_grad=False))


def join(module: nn.Module) -> None:
    """What is to be done once values are loaded, see `MergedLinear.join` and `Experts.join`."""
    for part in module.modules():
        if isinstance(part, MergedLinear | Experts):
            part.join()
