"""The conv_state: what a causal convolution keeps of a request."""

from typing import Literal, get_args

import torch

from hybrid_runtime.kernels.recurrence import TensorSpec

ConvLayout = Literal["SD", "DS"]
"""How blocks hold a conv_state: `[positions, channels]` or `[channels, positions]`."""


def conv_state_spec(
    channels: int, width: int, dtype: torch.dtype, layout: ConvLayout = "SD"
) -> TensorSpec:
    """Inputs of `channels` channels at the last `width - 1` positions; `width`: inputs of one
    output.

    Raises:
        ValueError: a width below 2, or an unknown layout.
    """
    if layout not in get_args(ConvLayout):
        raise ValueError(f"conv_layout is {layout!r}; it must be 'SD' or 'DS'")
    if width < 2:
        raise ValueError(f"conv_width is {width}; it must be at least 2")
    if layout == "DS":
        return TensorSpec("conv_state", (channels, width - 1), dtype, token_axis=1)
    return TensorSpec("conv_state", (width - 1, channels), dtype, token_axis=0)
