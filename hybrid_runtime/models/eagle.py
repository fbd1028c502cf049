"""EAGLE-1 draft head: one Llama decoder layer over the joined embedding and hidden state."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.attention.rotary import Rotary
from hybrid_runtime.models.attention import Attention
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, WantedTokens
from hybrid_runtime.models.json_fields import (
    COUNT,
    OBJECT,
    SIZE,
    Kind,
    check_fields,
    check_unquantised,
    integer,
    named,
    only,
    positive,
)
from hybrid_runtime.models.linear import Embedding, Linear
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.moe import GatedMLP
from hybrid_runtime.models.norm import RMSNorm

_KINDS: dict[str, Kind] = {
    "model_type": only("llama"),
    "num_hidden_layers": only(1),
    "hidden_act": only("silu"),
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "rope_scaling": only(None),
    "rope_parameters": OBJECT,
    "vocab_size": integer(1, SIZE),
    "hidden_size": integer(1, SIZE),
    "intermediate_size": integer(1, SIZE),
    "num_attention_heads": integer(1, COUNT),
    "num_key_value_heads": integer(1, COUNT),
    "head_dim": integer(1, COUNT),
    "rms_norm_eps": positive(1),
    "rope_theta": positive(1e12),
}
_ROPE = {"rope_type": only("default"), "rope_theta": _KINDS["rope_theta"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shapes of the head, named as in a Llama config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_fields(asdict(self), _KINDS)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config field num_attention_heads is {self.num_attention_heads}, must be a "
                f"multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"config field head_dim is {self.head_dim}, must be even")

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "EagleConfig":
        """Read a decoded config.json.

        Raises:
            ValueError: a field is missing, or has a value that is not supported.
        """
        given = {name: value for name, value in config.items() if value is not None}
        check_unquantised(given)
        check_fields(given, _KINDS)
        rope = given.get("rope_parameters", {})
        with named("rope_parameters"):
            check_fields(rope, _ROPE)
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        for name in required:
            if name not in given:
                raise ValueError(f"config field {name} is missing, must be {_KINDS[name].must}")
        heads = given["num_attention_heads"]
        theta = next((x["rope_theta"] for x in (rope, given) if x.get("rope_theta")), 10000.0)
        return EagleConfig(
            **{name: given[name] for name in required},
            num_key_value_heads=given.get("num_key_value_heads", heads),
            head_dim=given.get("head_dim", given["hidden_size"] // heads),
            rms_norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
        )


class EagleLayer(nn.Module):
    """A Llama decoder layer without the norm before attention."""

    def __init__(self, config: EagleConfig, layer: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            layer,
            device,
            dtype,
            rotary=Rotary(config.head_dim, config.rope_theta),
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, device, dtype)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, device, dtype
        )


class EagleHead(nn.Module):
    """Drafts the token after next from the next token and the target's hidden state.

    Position p sees token p + 1 and the hidden state of position p (the target's after ``norm_f``,
    or the head's own output in later passes), is rotated as position p, and stores its keys and
    values there. The output head is the target's, and so is the embedding unless `own_embedding`.

    Args:
        config: the head's shapes.
        target: the model it drafts for.
        fc_bias: whether the joining projection has a bias.
        own_embedding: whether the checkpoint brings an embedding of its own.

    Attributes:
        drafter: by which name the engine knows it.
        kv_layers: the key of ``Caches.kv``: (num_layers of the target,).
        kv_shape: (num_key_value_heads, head_dim).

    Raises:
        ValueError: hidden or vocabulary size differ from the target's.
    """

    drafter = "eagle"

    def __init__(
        self,
        config: EagleConfig,
        target: HybridModel,
        fc_bias: bool = False,
        own_embedding: bool = False,
    ):
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            own, wanted = getattr(config, name), getattr(target, name)
            if own != wanted:
                raise ValueError(f"config field {name} is {own}, must be the target's {wanted}")
        self.config = config
        # In a tuple, so that the target does not become a submodule with parameters of its own.
        self._target = (target,)
        self.kv_layers = (target.num_layers,)
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        hidden, device, dtype = config.hidden_size, target.device, target.dtype
        self.embed_tokens: Embedding | None = None
        if own_embedding:
            self.embed_tokens = Embedding(hidden, config.vocab_size, device, dtype)
        self.fc = Linear(2 * hidden, hidden, device, dtype, fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config, *self.kv_layers, device, dtype)])
        self.requires_grad_(False).eval()

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        batch: RowBatch,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """As of `specdecode.drafter.DraftHead`; the result is the layer's output."""
        target, layer = self._target[0], self.layers[0]
        assert isinstance(layer, EagleLayer)
        own = self.embed_tokens
        embedded = target.embed(tokens) if own is None else own.lookup(tokens)
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        attended = layer.self_attn(x, Pass(batch, caches), wanted)
        x = attended + (x if wanted is None else wanted.of(x))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    @property
    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size], the target's."""
        return self._target[0].output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, vocab_size] by the target's output head."""
        return self._target[0].logits(hidden)
