"""One layer of a Nemotron-H model or MTP head: norm, mixer, residual."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.config import NemotronHConfig
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.models.mamba import Mamba2Mixer
from hybrid_runtime.models.mamba_kernels import MambaPart
from hybrid_runtime.models.moe import MLP, MoE
from hybrid_runtime.models.norm import RMSNorm


class Layer(nn.Module):
    """``x + mixer(norm(x))`` with the mixer that `kind` (M, *, - or E) names; the sum is left to
    the next norm.

    Raises:
        ValueError: kind is none of these.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        kind: str,
        index: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.index = index
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, device, dtype)
        self.mixer: Mamba2Mixer | Attention | MLP | MoE
        if kind == "M":
            self.mixer = Mamba2Mixer(config, index, device, dtype)
        elif kind == "*":
            self.mixer = Attention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                device,
                dtype,
            )
        elif kind == "-":
            self.mixer = MLP(
                config.hidden_size, config.intermediate_size, config.mlp_bias, device, dtype
            )
        elif kind == "E":
            self.mixer = MoE(config, device, dtype)
        else:
            raise ValueError(f"kind is {kind!r}, must be one of M * - E")

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        batch: RowBatch,
        parts: Sequence[MambaPart] | None,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] to the residual stream and what this layer adds to it: of the same
        shape, or parts [2, T, hidden_size] of it.

        The addition is left to whoever norms the sum next, in one pass over both.

        Args:
            x: the residual stream.
            delta: what is still to be added to it; None = nothing.
            batch: the rows.
            parts: the rows with the kernels of Mamba layers; may be None in other layers.
            caches: addressed by the layer's index.
            wanted: both results are those of these tokens, [rows, hidden_size]; None = all tokens.
                Only for attention layers.

        Raises:
            ValueError: a Mamba layer without parts.
        """
        normed, x = self.norm.add(x, delta)
        if isinstance(self.mixer, Mamba2Mixer):
            if parts is None:
                raise ValueError("parts is None, must be given for a Mamba layer")
            return x, self.mixer(normed, parts, caches)
        if isinstance(self.mixer, Attention):
            delta = self.mixer(normed, batch, caches, self.index, halves=True, wanted=wanted)
            return x if wanted is None else wanted.of(x), delta
        if isinstance(self.mixer, MLP):
            return x, self.mixer(normed, halves=True)
        return x, self.mixer(normed)
