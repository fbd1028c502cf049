"""Weight matrices: the only code of the models that creates, multiplies or names them. A number
format is added here and in the loader (`checkpoint.py`)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.embedding import embedding
from hybrid_runtime.kernels.moe.fused_moe import fused_moe

MAX_TOKENS = 256
"""Up to so many, halves were the faster ones on an H200; more have not been tried."""


class Linear(nn.Module):
    """`x @ weight.T + bias`, without values until a checkpoint is loaded.

    weight: `[outputs, inputs]`. bias: `[outputs]` or None.

    Args:
        halves: the product may be left as a sum of two, for whoever adds it to something anyway.
        weight: `[outputs, inputs]` to be used; None: memory of its own.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        device: torch.device | str,
        dtype: torch.dtype,
        bias: bool = False,
        halves: bool = False,
        weight: Tensor | None = None,
    ):
        super().__init__()
        if weight is None:
            weight = torch.empty(outputs, inputs, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        """`[T, inputs]` to `[T, outputs]`, or with `halves`, for a few tokens on a GPU, to
        `[2, T, outputs]`, whose sum it is.

        The output is too small then to occupy the GPU by tiles. cuBLAS may divide the inner
        dimension by itself, and needs a second kernel to add up; a batch of two products is the
        same division, and the next norm adds up (`add_rms_norm`). Each half is rounded to x's
        dtype, which together is about as much as rounding their sum.
        """
        if not self.halves or not x.is_cuda or len(x) > MAX_TOKENS:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None or x.shape[1] % 32:
            return F.linear(x, self.weight, self.bias)
        weight = self.weight.unflatten(1, (2, -1)).permute(1, 2, 0)
        return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), weight)


class Embedding(Linear):
    """A `Linear` with a line per token, `[vocab_size, size]`, in which tokens are looked up; as an
    output head it gives logits."""

    def lookup(self, tokens: Tensor) -> Tensor:
        """int `[T]` to `[T, size]`."""
        return embedding(tokens, self.weight)


class MergedLinear:
    """Projections of one input as parts of one matrix: one product computes neighbours among them.

    parts: by name; each is a `Linear` that a module registers under the name of the checkpoint, and
        its weight is a part of the matrix.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self._matrix = torch.empty(sum(outputs.values()), inputs, device=device, dtype=dtype)
        self._sizes = dict(outputs)
        weights = zip(outputs.items(), self._matrix.split(list(outputs.values())), strict=True)
        self.parts = {
            name: Linear(inputs, size, device, dtype, weight=weight)
            for (name, size), weight in weights
        }

    def __call__(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Products of `[T, inputs]` with some parts, `[T, outputs]` each, by one product.

        names: the parts, side by side in this order; none = all.
        """
        order = list(self._sizes)
        first = order.index(names[0]) if names else 0
        names = names or tuple(order)
        if tuple(order[first : first + len(names)]) != names:
            raise ValueError(f"names is {names}; they must be side by side in {order}")
        sizes = [self._sizes[name] for name in names]
        start = sum(self._sizes[name] for name in order[:first])
        return F.linear(x, self._matrix[start : start + sum(sizes)]).split(sizes, -1)


class Experts(nn.Module):
    """The matrices of all routed experts, stacked.

    up_proj: `[count, inner, size]`. down_proj: `[count, size, inner]`.
    """

    def __init__(
        self, count: int, size: int, inner: int, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.count = count
        self.up_proj = nn.Parameter(torch.empty(count, inner, size, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(count, size, inner, device=device, dtype=dtype))

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return self.up_proj.nbytes + self.down_proj.nbytes

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
        return fused_moe(x, weights, experts, self.up_proj, self.down_proj)


def checkpoint_tensors(module: Any) -> dict[str, Tensor]:
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
