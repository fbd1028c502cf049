"""The multi-token-prediction head of a Nemotron-H checkpoint."""

from torch import Tensor, nn

from hybrid_runtime.models.attention import join_projections
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.models.layers import Layer
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.norm import RMSNorm


class MTPLayer(Layer):
    """A layer of the head; the first one also joins the inputs, the last one norms the output."""

    def __init__(self, target: NemotronH, kind: str, index: int, first: bool, last: bool):
        config, dtype = target.config, target.dtype
        super().__init__(config, kind, index, "meta", dtype)
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm: RMSNorm | None = None
        self.hnorm: RMSNorm | None = None
        self.eh_proj: nn.Linear | None = None
        self.final_layernorm: RMSNorm | None = None
        if first:
            self.enorm = RMSNorm(hidden, eps, "meta", dtype)
            self.hnorm = RMSNorm(hidden, eps, "meta", dtype)
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta", dtype=dtype)
        if last:
            self.final_layernorm = RMSNorm(hidden, eps, "meta", dtype)


class MTPHead(nn.Module):
    """Drafts the token after next from the next token and the target's hidden state.

    Position p sees token p + 1 and the hidden state of position p (after ``norm_f``, or the
    head's own output in later passes), and stores its keys and values at position p. Embedding
    and output head are the target's.

    Attributes:
        kv_layers: keys of ``Caches.kv``, num_hidden_layers + index of the layer in the head.
        kv_shape: (num_key_value_heads, head_dim).

    Raises:
        ValueError: the target's config names no MTP head, or one of several steps.
    """

    def __init__(self, target: NemotronH):
        super().__init__()
        config = target.config
        if config.num_nextn_predict_layers != 1:
            raise ValueError(
                f"config field num_nextn_predict_layers is {config.num_nextn_predict_layers}, "
                "must be 1 for an MTP head"
            )
        pattern, base = config.mtp_pattern, config.num_hidden_layers
        # In a tuple, so that the target does not become a submodule with parameters of its own.
        self._target = (target,)
        self.kv_layers = tuple(base + i for i, kind in enumerate(pattern) if kind == "*")
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self._layers = tuple(
            MTPLayer(target, kind, base + i, first=i == 0, last=i == len(pattern) - 1)
            for i, kind in enumerate(pattern)
        )
        self.mtp = nn.Module()
        self.mtp.layers = nn.ModuleList(self._layers)
        self.to_empty(device=target.device)
        join_projections(self)
        self.requires_grad_(False)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        batch: RowBatch,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """Run one pass over all rows.

        Args:
            tokens: int [T], the token after each position.
            hidden: [T, hidden_size], the hidden state of each position.
            batch: the rows; computed is the position of a row's first token.
            caches: keys and values of the head's layers; those of all tokens are added.
            wanted: whose results are wanted; None = of all tokens. The others need none from the
                queries of the last attention layer on.

        Returns:
            [T, hidden_size], or that of the wanted tokens, after final_layernorm; feeds both
            `logits` and the next pass.
        """
        last_attention = max(self.kv_layers, default=None)
        if wanted is not None and last_attention is None:
            tokens, hidden = wanted.of(tokens), wanted.of(hidden)
        first, last = self._layers[0], self._layers[-1]
        assert first.enorm is not None
        assert first.hnorm is not None
        assert first.eh_proj is not None
        assert last.final_layernorm is not None
        joined = hidden.new_empty((len(tokens), 2 * hidden.shape[1]), dtype=self._target[0].dtype)
        left, right = joined.chunk(2, dim=-1)
        first.enorm(self._target[0].embed(tokens), out=left)
        first.hnorm(hidden, out=right)
        x = first.eh_proj(joined)
        delta: Tensor | None = None
        for layer in self._layers:
            only = wanted if layer.index == last_attention else None
            x, delta = layer(x, delta, batch, None, caches, only)
        return last.final_layernorm.add(x, delta)[0]

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size], the target's."""
        return self._target[0].output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, vocab_size] by the target's output head."""
        return self._target[0].logits(hidden)
