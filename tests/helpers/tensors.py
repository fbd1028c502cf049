"""Tensors that tests of kernels make and compare."""

from typing import Any

import torch
from helpers.interpreter import CUDA
from torch import Tensor

DEVICE = "cuda" if CUDA else "cpu"


def ints(*values: Any) -> Tensor:
    """int32 on `DEVICE`."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def noise(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers on `DEVICE`, drawn in fp32."""
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def framed(like: Tensor) -> Tensor:
    """A contiguous place for outputs of that shape and dtype, with a token of NaN on both sides."""
    tokens, *rest = like.shape
    return torch.full((tokens + 2, *rest), float("nan"), dtype=like.dtype, device=DEVICE)[1:-1]


def frame_is_whole(out: Tensor) -> bool:
    """Nothing was written beside a place that `framed` gave."""
    assert out._base is not None
    return bool(out._base[[0, -1]].isnan().all())


def all_equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))
