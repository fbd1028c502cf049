"""A matrix product left as the sum of two, for whoever adds it to something anyway."""

import torch
from torch import Tensor, nn

MAX_TOKENS = 256
"""Up to so many, halves were the faster ones on an H200; more have not been tried."""


def in_halves(linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)`, `[T, out]`, or for a few tokens on a GPU `[2, T, out]`, whose sum it is.

    The output is too small then to occupy the GPU by tiles. cuBLAS may divide the inner dimension
    by itself, and needs a second kernel to add up; a batch of two products is the same division,
    and the next norm adds up (`add_rms_norm`). Each half is rounded to x's dtype, which together
    is about as much as rounding their sum.
    """
    if not x.is_cuda or len(x) > MAX_TOKENS or linear.bias is not None or x.shape[1] % 32:
        whole: Tensor = linear(x)
        return whole
    weight = linear.weight.unflatten(1, (2, -1)).permute(1, 2, 0)
    return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), weight)
