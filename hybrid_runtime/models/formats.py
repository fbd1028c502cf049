"""Number formats of weight matrices: what is stored of a matrix, and what a product with it is. A
format is a class here and a line in `FORMATS`."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_runtime.kernels.linear.fp8_product import fp8_product
from hybrid_runtime.kernels.linear.quantize import E4M3, Quantizer, Scaled, quantize
from hybrid_runtime.kernels.moe.scaled_experts import ScaledExperts

SCALE = "_scale"
"""What names of scales end in."""
MAX_TOKENS = 256
"""Up to so many, halves were the faster ones on an H200; more have not been tried."""


class Tensors(Protocol):
    """What is stored of a matrix: `weight` and the format's other tensors, by the names that they
    have in a checkpoint. Those of routed experts are stacked, `[count, *shape]`."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor


class Stored(Tensors, Protocol):
    """What products read.

    dtype: of results.
    bias: `[outputs]` or None.
    halves: the product may be left as a sum, for whoever adds it to something anyway.
    """

    dtype: torch.dtype
    halves: bool

    @property
    def bias(self) -> Tensor | None: ...


class Format(Protocol):
    """A number format. algorithm: what ModelOpt calls it."""

    algorithm: str

    def tensors(self, outputs: int, inputs: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """What is stored of a matrix `[outputs, inputs]`, on the meta device, by the names in a
        checkpoint: `weight` first. Each has a line per output or is a scalar. Scales are float32,
        called `*_scale`, and above 0. dtype: of activations."""

    def quantizer(self, matrix: Stored) -> Quantizer | None:
        """How products take their inputs, for whoever makes them; None: as they are."""

    def product(self, matrix: Stored, x: Tensor | Scaled) -> Tensor:
        """`[T, inputs]`, perhaps quantised already, to `[T, outputs]`, or with `halves` perhaps to
        `[parts, T, outputs]`, whose sum it is."""

    def experts(self, up: Tensors, down: Tensors) -> tuple[Tensor | ScaledExperts, ...]:
        """What `fused_moe` takes of the matrices of routed experts, up and down. Scales of inputs
        of the first are all the same, see `Experts.join`."""


class Plain:
    """Numbers as they are, in the dtype of activations."""

    algorithm = "none"

    def tensors(self, outputs: int, inputs: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device="meta")}

    def quantizer(self, matrix: Stored) -> Quantizer | None:
        return None

    def product(self, matrix: Stored, x: Tensor | Scaled) -> Tensor:
        """With `halves`, for a few tokens on a GPU, `[2, T, outputs]`.

        The output is too small then to occupy the GPU by tiles. cuBLAS may divide the inner
        dimension by itself, and needs a second kernel to add up; a batch of two products is the
        same division, and the next norm adds up (`add_rms_norm`). Each half is rounded to x's
        dtype, which together is about as much as rounding their sum.
        """
        assert isinstance(x, Tensor)
        if not matrix.halves or not x.is_cuda or len(x) > MAX_TOKENS:
            return F.linear(x, matrix.weight, matrix.bias)
        if matrix.bias is not None or x.shape[1] % 32:
            return F.linear(x, matrix.weight, matrix.bias)
        weight = matrix.weight.unflatten(1, (2, -1)).permute(1, 2, 0)
        return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), weight)

    def experts(self, up: Tensors, down: Tensors) -> tuple[Tensor | ScaledExperts, ...]:
        return up.weight, down.weight


class FP8PerTensor:
    """8 bits (e4m3) with one scale for all weights and one, known beforehand, for all inputs."""

    algorithm = "FP8"

    def tensors(self, outputs: int, inputs: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        scale = torch.empty((), dtype=torch.float32, device="meta")
        weight = torch.empty(outputs, inputs, dtype=E4M3, device="meta")
        return {"weight": weight, "weight_scale": scale, "input_scale": scale}

    def quantizer(self, matrix: Stored) -> Quantizer:
        return Quantizer(matrix.input_scale)

    def product(self, matrix: Stored, x: Tensor | Scaled) -> Tensor:
        return _fp8_product(matrix, x, self.quantizer(matrix))

    def experts(self, up: Tensors, down: Tensors) -> tuple[Tensor | ScaledExperts, ...]:
        return (
            ScaledExperts(up.weight, up.weight_scale, up.input_scale[0]),
            ScaledExperts(down.weight, down.weight_scale, down.input_scale),
        )


class FP8PerChannel:
    """8 bits (e4m3) with a scale for each output's weights, and one for each token's inputs, which
    is found when they are there."""

    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"

    def tensors(self, outputs: int, inputs: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        scale = torch.empty(outputs, dtype=torch.float32, device="meta")
        return {
            "weight": torch.empty(outputs, inputs, dtype=E4M3, device="meta"),
            "weight_scale": scale,
        }

    def quantizer(self, matrix: Stored) -> Quantizer:
        return Quantizer()

    def product(self, matrix: Stored, x: Tensor | Scaled) -> Tensor:
        return _fp8_product(matrix, x, self.quantizer(matrix))

    def experts(self, up: Tensors, down: Tensors) -> tuple[Tensor | ScaledExperts, ...]:
        return tuple(ScaledExperts(one.weight, one.weight_scale) for one in (up, down))


def _fp8_product(matrix: Stored, x: Tensor | Scaled, quantizer: Quantizer) -> Tensor:
    given = quantize(x, quantizer) if isinstance(x, Tensor) else x
    weight = Scaled(matrix.weight, matrix.weight_scale)
    return fp8_product(given, weight, matrix.dtype, matrix.bias, matrix.halves)


PLAIN = Plain()
FP8_PER_TENSOR, FP8_PER_CHANNEL = FP8PerTensor(), FP8PerChannel()
FORMATS: dict[str, Format] = {one.algorithm: one for one in (FP8_PER_TENSOR, FP8_PER_CHANNEL)}
"""Those that checkpoints may have besides plain numbers."""
ROUNDED_TO: dict[str, Format] = {"fp8": FP8_PER_CHANNEL}
"""By the engine's option `quantization`: what plain weights are rounded to as they are loaded, by
lines: `weight` and `weight_scale` of the format are those of `quantize_lines`."""
