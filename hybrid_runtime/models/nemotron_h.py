"""Nemotron-H: a stack of Mamba-2, attention, MLP and expert layers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.embedding import embedding
from hybrid_runtime.models.attention import join_projections
from hybrid_runtime.models.config import NemotronHConfig
from hybrid_runtime.models.few_layers import few_layers
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.layers import Layer
from hybrid_runtime.models.mamba import Mamba2Mixer
from hybrid_runtime.models.mamba_kernels import mamba_parts
from hybrid_runtime.models.norm import RMSNorm


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the names of the checkpoint."""

    def __init__(self, config: NemotronHConfig, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        self.embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, device=device, dtype=dtype
        )
        self.layers = nn.ModuleList(
            Layer(config, kind, index, device, dtype) for index, kind in enumerate(config.pattern)
        )
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon, device, dtype)


class NemotronH(nn.Module):
    """The model; its parameters hold no values until a checkpoint is loaded.

    Attributes:
        config: the shapes.
        kv_layers: indices of the attention layers, the keys of ``Caches.kv``.
        state_layers: indices of the Mamba layers, the keys of ``Caches.states``.
        kv_shape: (num_key_value_heads, head_dim) of one cached key.
    """

    def __init__(self, config: NemotronHConfig, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.kv_layers = tuple(i for i, kind in enumerate(config.pattern) if kind == "*")
        self.state_layers = tuple(i for i, kind in enumerate(config.pattern) if kind == "M")
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self._running: list[nn.Module] | None = None
        # Built without storage: filling large matrices only to overwrite them takes minutes.
        self.backbone = Backbone(config, "meta", dtype)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(
                config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype
            )
        self.to_empty(device=device)
        join_projections(self)
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.backbone.norm_f.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices and activations."""
        return self.backbone.norm_f.weight.dtype

    @property
    def A_log(self) -> Tensor:
        """[Mamba layers, heads]: log of the rates at which states decay."""
        return torch.stack(
            [
                layer.mixer.A_log
                for layer in self.backbone.layers
                if isinstance(layer, Layer) and isinstance(layer.mixer, Mamba2Mixer)
            ]
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """int [T] to [T, hidden_size]."""
        return embedding(tokens, self.backbone.embeddings.weight)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within it `forward` runs few layers, which together launch every kernel that all of them
        launch over as many rows and tokens. What it returns has the shape of hidden states, but
        means nothing."""
        layers = self.backbone.layers
        self._running = [layers[index] for index in few_layers(layers)]
        try:
            yield
        finally:
            self._running = None

    def forward(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        """Run one step over all rows, updating caches.

        Args:
            tokens: int [T], rows one after another; tokens outside all rows need valid ids too.
            batch: the rows.
            positions: where their Mamba states lie.
            caches: keys, values and states.

        Returns:
            [T, hidden_size] after the final norm.
        """
        x = self.embed(tokens)
        if self.config.residual_in_fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        parts = mamba_parts(batch, positions, caches, x.shape[0], self.config)
        delta: Tensor | None = None
        for layer in self._running or self.backbone.layers:
            x, delta = layer(x, delta, batch, parts, caches)
        return self.backbone.norm_f.add(x, delta)[0]

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size]: logits are products with it."""
        head = self.backbone.embeddings if self.lm_head is None else self.lm_head
        return head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] after the final norm to [T, vocab_size]."""
        return F.linear(hidden, self.output_weight)
