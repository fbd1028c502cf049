"""Qwen3-Next and Qwen3.5 to 3.8: Gated DeltaNet and gated attention layers, each with an MLP or
experts behind it, and their MTP head."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.few_layers import few_layers
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, StatePositions, WantedTokens
from hybrid_runtime.models.gdn import GatedDeltaNet, GDNScans
from hybrid_runtime.models.linear import Embedding, Experts, Linear, StackedMatrix
from hybrid_runtime.models.model import Family, StateGroup
from hybrid_runtime.models.moe import GatedMLP, GatedMoE, SoftmaxRouter
from hybrid_runtime.models.norm import RMSNorm
from hybrid_runtime.models.qwen3_5_config import STATE_DTYPES, Qwen35Config
from hybrid_runtime.models.state_parts import state_parts
from hybrid_runtime.models.tensor_files import Destination, Pieces

Device = torch.device | str


class Layer(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; the last sum is left to the next norm.

    Args:
        index: key of the layer's caches.
        state_layer: its index among the layers with states; None: it attends.
        sparse: it has experts.
    """

    def __init__(
        self,
        c: Qwen35Config,
        index: int,
        state_layer: int | None,
        sparse: bool,
        device: Device,
        dtype: torch.dtype,
    ):
        super().__init__()
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.index = index
        self.input_layernorm = RMSNorm(hidden, eps, device, dtype, centred=True)
        self.linear_attn: GatedDeltaNet | None = None
        self.self_attn: Attention | None = None
        if state_layer is not None:
            self.linear_attn = GatedDeltaNet(hidden, c.gdn, index, state_layer, eps, device, dtype)
        else:
            self.self_attn = Attention(
                hidden_size=hidden,
                num_heads=c.num_attention_heads,
                num_kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                layer=index,
                device=device,
                dtype=dtype,
                halves=True,
                rotary=c.rotary,
                norm_eps=eps,
                gated=True,
            )
        self.post_attention_layernorm = RMSNorm(hidden, eps, device, dtype, centred=True)
        self.mlp: GatedMLP | GatedMoE
        if sparse:
            self.mlp = GatedMoE(
                SoftmaxRouter(
                    hidden, c.num_experts, c.num_experts_per_tok, c.norm_topk_prob, device, dtype
                ),
                Experts(c.num_experts, hidden, c.moe_intermediate_size, device, dtype, gated=True),
                GatedMLP(hidden, c.shared_expert_intermediate_size, device, dtype),
            )
        else:
            self.mlp = GatedMLP(hidden, c.intermediate_size, device, dtype, halves=True)

    def forward(
        self, x: Tensor, delta: Tensor | None, step: Pass, wanted: WantedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] to the residual stream and what is still to be added to it, of the same
        shape, or parts [parts, T, hidden_size] of it.

        Args:
            x: the residual stream.
            delta: what is still to be added to it; None = nothing.
            step: the pass.
            wanted: both results are those of these tokens, [rows, hidden_size]; None = all tokens.
                Only where the layer attends.
        """
        if self.linear_attn is not None:
            normed, x = self.input_layernorm.add(x, delta, self.linear_attn.quantizer)
            delta = self.linear_attn(normed, step)
        else:
            assert self.self_attn is not None
            normed, x = self.input_layernorm.add(x, delta, self.self_attn.quantizer)
            delta = self.self_attn(normed, step, wanted)
            x = x if wanted is None else wanted.of(x)
        normed, x = self.post_attention_layernorm.add(x, delta, self.mlp.quantizer)
        return x, self.mlp(normed)


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the names of the checkpoint."""

    def __init__(self, c: Qwen35Config, device: Device, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = Embedding(c.hidden_size, c.vocab_size, device, dtype)
        self.layers = nn.ModuleList(
            Layer(
                c,
                index,
                None if attends else index - sum(c.attends[:index]),
                c.sparse[index],
                device,
                dtype,
            )
            for index, attends in enumerate(c.attends)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, device, dtype, centred=True)


class Qwen35(nn.Module):
    """A `HybridModel`; its parameters hold no values until a checkpoint is loaded.

    Attributes:
        config: the shapes.
        state_layers: indices of the Gated DeltaNet layers, the keys of ``Caches.states``.
    """

    def __init__(self, config: Qwen35Config, device: Device, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions, self.eos_token_ids = config.max_position_embeddings, config.eos_token_id
        self.kv_layers = tuple(i for i, attends in enumerate(config.attends) if attends)
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self.kv_dtype: torch.dtype | None = None
        self.state_layers = tuple(i for i, attends in enumerate(config.attends) if not attends)
        self._scans = GDNScans()
        self._running: list[nn.Module] | None = None
        self.model = Backbone(config, device, dtype)
        self.lm_head: Embedding | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.hidden_size, config.vocab_size, device, dtype)
        self.requires_grad_(False).eval()

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """That of the Gated DeltaNet layers, if there are any."""
        if not self.state_layers:
            return ()
        dtype = STATE_DTYPES[self.config.mamba_ssm_dtype]
        recurrence = self.config.gdn.recurrence
        return (StateGroup(recurrence, self.state_layers, dtype, (), layouts=("replay",)),)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices and activations."""
        return self.model.norm.weight.dtype

    @property
    def _output(self) -> Embedding:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size]: logits are products with it."""
        return self._output.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """int [T] to [T, hidden_size]."""
        return self.model.embed_tokens.lookup(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] after the final norm to [T, vocab_size]."""
        logits: Tensor = self._output(hidden)
        return logits

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """As of `HybridModel`."""
        layers = self.model.layers
        self._running = [layers[index] for index in few_layers(layers)]
        try:
            yield
        finally:
            self._running = None

    def forward(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        """As of `HybridModel`."""
        x, delta = self.embed(tokens), None
        parts = state_parts(batch, positions, caches, x.shape[0], self._scans)
        step = Pass(batch, caches, parts)
        for layer in self._running or self.model.layers:
            x, delta = layer(x, delta, step)
        return self.model.norm.add(x, delta)[0]


class MTP(nn.Module):
    """The modules of the head, under the names of the checkpoint."""

    def __init__(self, c: Qwen35Config, device: Device, dtype: torch.dtype):
        super().__init__()
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, device, dtype, centred=True)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, device, dtype, centred=True)
        self.fc = Linear(2 * hidden, hidden, device, dtype)
        layer = Layer(c, c.num_hidden_layers, None, any(c.sparse), device, dtype)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(hidden, eps, device, dtype, centred=True)


class MTPHead(nn.Module):
    """Drafts the token after next from the next token and the target's hidden state.

    Position p sees token p + 1 and the hidden state of position p (after the final norm, or the
    head's own output in later passes), and stores its keys and values at position p. Embedding
    and output head are the target's.

    Attributes:
        drafter: by which name the engine knows it.
        kv_layers: the key of ``Caches.kv``: (num_layers of the target,).
        kv_shape: (num_key_value_heads, head_dim).

    Raises:
        ValueError: the target's config names no MTP head.
    """

    drafter = "mtp"

    def __init__(self, target: Qwen35):
        super().__init__()
        config = target.config
        if config.mtp_num_hidden_layers != 1:
            raise ValueError(
                f"config field mtp_num_hidden_layers is {config.mtp_num_hidden_layers}, must be 1 "
                "for an MTP head"
            )
        # In a tuple, so that the target does not become a submodule with parameters of its own.
        self._target = (target,)
        self.kv_layers = (target.num_layers,)
        self.kv_shape = target.kv_shape
        self.mtp = MTP(config, target.device, target.dtype)
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
        on, only wanted tokens are computed."""
        target, mtp = self._target[0], self.mtp
        joined = hidden.new_empty((len(tokens), 2 * hidden.shape[1]), dtype=target.dtype)
        left, right = joined.chunk(2, dim=-1)
        mtp.pre_fc_norm_embedding(target.embed(tokens), out=left)
        mtp.pre_fc_norm_hidden(hidden, out=right)
        x, delta = mtp.layers[0](mtp.fc(joined), None, Pass(batch, caches), wanted)
        return mtp.norm.add(x, delta)[0]

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size], the target's."""
        return self._target[0].output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, vocab_size] by the target's output head."""
        return self._target[0].logits(hidden)


_BESIDE_IMAGES = "model.language_model."
"""Before names of the text model, for "model.", in checkpoints that have an encoder of images."""


def tensors(module: nn.Module, names: Collection[str] = ()) -> Mapping[str, Destination]:
    """Checkpoint names of a model's or head's parameters, and where they lie.

    Routed experts have tensors of their own, or one for all of them, as the files have it; then
    gate and up are one. Qwen3-Next has q, k, v and z of a key head side by side, and b and a.

    names: those in the files.
    """
    inside = any(name.startswith(_BESIDE_IMAGES) for name in names)
    found: dict[str, Destination] = {}
    for path, part in module.named_modules():
        if inside and path.startswith("model."):
            path = _BESIDE_IMAGES + path.removeprefix("model.")
        if isinstance(part, StackedMatrix):
            found |= _of_experts(path, part, names)
        elif isinstance(part, SoftmaxRouter):
            weight = part.weight.data
            shared = f"{path.removesuffix('.gate')}.shared_expert_gate.weight"
            found |= {f"{path}.weight": weight[: part.experts], shared: weight[part.experts :]}
        else:
            own = part.named_parameters(recurse=False)
            found |= {f"{path}.{name}": parameter.data for name, parameter in own}
    if isinstance(module, Qwen35) and module.config.interleaved:
        for path, part in module.named_modules():
            if isinstance(part, GatedDeltaNet):
                _interleave(path, part, found)
    return found


def _of_experts(path: str, part: StackedMatrix, names: Collection[str]) -> dict[str, Destination]:
    """path: "...experts.up_proj", which holds gates too, or "...experts.down_proj"."""
    experts, _, projection = path.rpartition(".")
    pair = ("gate_proj", "up_proj") if projection == "up_proj" else (projection,)
    whole = f"{experts}.{'gate_up_proj' if len(pair) > 1 else projection}"
    if whole in names:
        # Of the tensor's own name; what belongs to it is named after it.
        own = {name: t.data for name, t in part.named_parameters(recurse=False)}
        return {whole + name.removeprefix("weight"): tensor for name, tensor in own.items()}
    return {
        f"{experts}.{i}.{name}.{last}": lines
        for last, parameter in part.named_parameters(recurse=False)
        for i, tensor in enumerate(parameter.data)
        for name, lines in zip(pair, tensor.chunk(len(pair)), strict=True)
    }


def _interleave(path: str, part: GatedDeltaNet, found: dict[str, Destination]) -> None:
    """Put Qwen3-Next's names for four projections in place of their own."""
    shape, heads = part.shape, part.shape.key_heads
    own = {
        name: dict(part.get_submodule(f"in_proj_{name}").named_parameters())
        for name in ("qkv", "z", "b", "a")
    }
    for last, qkv in own["qkv"].items():
        q, k, v = qkv.data.split([shape.keys, shape.keys, shape.inner])
        z, b, a = (own[name][last].data for name in "zba")
        for name in own:
            del found[f"{path}.in_proj_{name}.{last}"]
        for name, values in (("qkvz", (q, k, v, z)), ("ba", (b, a))):
            by_head = zip(*(value.chunk(heads) for value in values), strict=True)
            pieces = [piece for head in by_head for piece in head]
            found[f"{path}.in_proj_{name}.{last}"] = Pieces(pieces)


FAMILY = Family(
    read_config=Qwen35Config.from_dict,
    build=Qwen35,
    tensors=tensors,
    build_head=MTPHead,
    head_prefix="mtp.",
    others=("model.visual.",),
    formats=True,
)
