"""Nemotron-H: a stack of Mamba-2, attention, MLP and expert layers, and its MTP head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.few_layers import few_layers
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, StatePositions, WantedTokens
from hybrid_runtime.models.linear import Embedding, Experts, Linear, checkpoint_tensors
from hybrid_runtime.models.mamba import Mamba2Mixer, Mamba2Scans
from hybrid_runtime.models.model import Family, StateGroup
from hybrid_runtime.models.moe import MLP, MoE, Router, Routing
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.models.norm import RMSNorm
from hybrid_runtime.models.state_parts import state_parts

Device = torch.device | str
Mixer = Mamba2Mixer | Attention | MLP | MoE


def mamba(c: NemotronHConfig, index: int, device: Device, dtype: torch.dtype) -> Mamba2Mixer:
    """The mixer of a layer `M`."""
    return Mamba2Mixer(
        hidden_size=c.hidden_size,
        shape=c.mamba2,
        layer=index,
        mamba_layer=c.pattern[:index].count("M"),
        bias=c.use_bias,
        conv_bias=c.use_conv_bias,
        eps=c.layer_norm_epsilon,
        device=device,
        dtype=dtype,
    )


def attention(c: NemotronHConfig, index: int, device: Device, dtype: torch.dtype) -> Attention:
    """The mixer of a layer `*`."""
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return Attention(c.hidden_size, heads, kv_heads, c.head_dim, index, device, dtype, halves=True)


def mlp(c: NemotronHConfig, index: int, device: Device, dtype: torch.dtype) -> MLP:
    """The mixer of a layer `-`."""
    return MLP(c.hidden_size, c.intermediate_size, c.mlp_bias, device, dtype, halves=True)


def moe(c: NemotronHConfig, index: int, device: Device, dtype: torch.dtype) -> MoE:
    """The mixer of a layer `E`."""
    hidden, latent = c.hidden_size, c.moe_latent_size
    routing = Routing(
        experts=c.n_routed_experts,
        top_k=c.num_experts_per_tok,
        num_expert_group=c.n_group,
        topk_group=c.topk_group,
        renormalize=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
    )
    size, inner = latent or hidden, c.moe_intermediate_size
    return MoE(
        Router(hidden, routing, device, dtype),
        Experts(routing.experts, size, inner, device, dtype),
        MLP(hidden, c.moe_shared_expert_intermediate_size, c.mlp_bias, device, dtype),
        None
        if latent is None
        else (
            Linear(hidden, latent, device, dtype, c.mlp_bias),
            Linear(latent, hidden, device, dtype, c.mlp_bias),
        ),
    )


_MIXERS: dict[str, Callable[[NemotronHConfig, int, Device, torch.dtype], Mixer]] = {
    "M": mamba,
    "*": attention,
    "-": mlp,
    "E": moe,
}
"""By the characters of a pattern."""


class Layer(nn.Module):
    """``x + mixer(norm(x))`` with the mixer that `kind` (M, *, - or E) names; the sum is left to
    the next norm."""

    def __init__(
        self, config: NemotronHConfig, kind: str, index: int, device: Device, dtype: torch.dtype
    ):
        super().__init__()
        self.index = index
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, device, dtype)
        self.mixer = _MIXERS[kind](config, index, device, dtype)

    def forward(
        self, x: Tensor, delta: Tensor | None, step: Pass, wanted: WantedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] to the residual stream and what this layer adds to it: of the same
        shape, or parts [parts, T, hidden_size] of it.

        The addition is left to whoever norms the sum next, in one pass over both.

        Args:
            x: the residual stream.
            delta: what is still to be added to it; None = nothing.
            step: the pass.
            wanted: both results are those of these tokens, [rows, hidden_size]; None = all tokens.
                Only for attention layers.
        """
        normed, x = self.norm.add(x, delta, self.mixer.quantizer)
        if wanted is None:
            return x, self.mixer(normed, step)
        return wanted.of(x), self.mixer(normed, step, wanted)


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the names of the checkpoint."""

    def __init__(self, config: NemotronHConfig, device: Device, dtype: torch.dtype):
        super().__init__()
        self.embeddings = Embedding(config.hidden_size, config.vocab_size, device, dtype)
        self.layers = nn.ModuleList(
            Layer(config, kind, index, device, dtype) for index, kind in enumerate(config.pattern)
        )
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon, device, dtype)


class NemotronH(nn.Module):
    """A `HybridModel`; its parameters hold no values until a checkpoint is loaded.

    Attributes:
        config: the shapes.
        state_layers: indices of the Mamba layers, the keys of ``Caches.states``.
    """

    def __init__(self, config: NemotronHConfig, device: Device, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions, self.eos_token_ids = config.max_position_embeddings, config.eos_token_id
        self.kv_layers = tuple(i for i, kind in enumerate(config.pattern) if kind == "*")
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self.kv_dtype: torch.dtype | None = None
        self.state_layers = tuple(i for i, kind in enumerate(config.pattern) if kind == "M")
        self._scans = Mamba2Scans(*config.time_step_limit, config.chunk_size)
        self._running: list[nn.Module] | None = None
        self.backbone = Backbone(config, device, dtype)
        self.lm_head: Embedding | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.hidden_size, config.vocab_size, device, dtype)
        self.requires_grad_(False).eval()

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """That of the Mamba layers, if there are any."""
        if not self.state_layers:
            return ()
        rates = tuple(
            self.get_parameter(f"backbone.layers.{layer}.mixer.A_log")
            for layer in self.state_layers
        )
        dtype = self.config.ssm_cache_dtype
        recurrence = self.config.mamba2.recurrence
        return (StateGroup(recurrence, self.state_layers, dtype, (rates,)),)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.backbone.norm_f.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices and activations."""
        return self.backbone.norm_f.weight.dtype

    @property
    def _output(self) -> Embedding:
        return self.backbone.embeddings if self.lm_head is None else self.lm_head

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size]: logits are products with it."""
        return self._output.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """int [T] to [T, hidden_size]."""
        return self.backbone.embeddings.lookup(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] after the final norm to [T, vocab_size]."""
        logits: Tensor = self._output(hidden)
        return logits

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """As of `HybridModel`."""
        layers = self.backbone.layers
        self._running = [layers[index] for index in few_layers(layers)]
        try:
            yield
        finally:
            self._running = None

    def forward(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        """As of `HybridModel`."""
        x, config = self.embed(tokens), self.config
        if config.residual_in_fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        parts = state_parts(batch, positions, caches, x.shape[0], self._scans)
        step, delta = Pass(batch, caches, parts), None
        for layer in self._running or self.backbone.layers:
            x, delta = layer(x, delta, step)
        return self.backbone.norm_f.add(x, delta)[0]


class MTPLayer(Layer):
    """A layer of the head; the first one also joins the inputs, the last one norms the output."""

    def __init__(self, target: NemotronH, kind: str, index: int, first: bool, last: bool):
        config, device, dtype = target.config, target.device, target.dtype
        super().__init__(config, kind, index, device, dtype)
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm: RMSNorm | None = None
        self.hnorm: RMSNorm | None = None
        self.eh_proj: Linear | None = None
        self.final_layernorm: RMSNorm | None = None
        if first:
            self.enorm = RMSNorm(hidden, eps, device, dtype)
            self.hnorm = RMSNorm(hidden, eps, device, dtype)
            self.eh_proj = Linear(2 * hidden, hidden, device, dtype)
        if last:
            self.final_layernorm = RMSNorm(hidden, eps, device, dtype)


class MTPHead(nn.Module):
    """Drafts the token after next from the next token and the target's hidden state.

    Position p sees token p + 1 and the hidden state of position p (after ``norm_f``, or the
    head's own output in later passes), and stores its keys and values at position p. Embedding
    and output head are the target's.

    Attributes:
        drafter: by which name the engine knows it.
        kv_layers: keys of ``Caches.kv``, num_layers of the target + index of the layer in the head.
        kv_shape: (num_key_value_heads, head_dim).

    Raises:
        ValueError: the target's config names no MTP head, or one of several steps.
    """

    drafter = "mtp"

    def __init__(self, target: NemotronH):
        super().__init__()
        config = target.config
        if config.num_nextn_predict_layers != 1:
            raise ValueError(
                f"config field num_nextn_predict_layers is {config.num_nextn_predict_layers}, "
                "must be 1 for an MTP head"
            )
        pattern, base = config.mtp_pattern, target.num_layers
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
        self.requires_grad_(False).eval()

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        batch: RowBatch,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """As of `specdecode.drafter.DraftHead`; the result is after the last norm. From queries
        of the last attention layer on, only wanted tokens are computed."""
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
        x, step, delta = first.eh_proj(joined), Pass(batch, caches), None
        for layer in self._layers:
            only = wanted if layer.index == last_attention else None
            x, delta = layer(x, delta, step, only)
        return last.final_layernorm.add(x, delta)[0]

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size], the target's."""
        return self._target[0].output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, vocab_size] by the target's output head."""
        return self._target[0].logits(hidden)


FAMILY = Family(
    read_config=NemotronHConfig.from_dict,
    build=NemotronH,
    tensors=checkpoint_tensors,
    build_head=MTPHead,
    head_prefix="mtp.",
    formats=True,
)
