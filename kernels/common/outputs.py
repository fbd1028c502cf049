"""Outputs that go to a place of the caller's."""

from __future__ import annotations

from torch import Tensor


def check_out(out: Tensor | None, like: Tensor) -> None:
    """Check what kernels take for granted of a place for outputs of the shape and dtype of `like`.

    Raises:
        ValueError: it has another shape or dtype, or is not contiguous.
    """
    if out is None:
        return
    if out.shape != like.shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, must be "
            f"{like.dtype} {list(like.shape)} and contiguous"
        )
