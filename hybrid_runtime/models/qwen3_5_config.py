"""Configuration of Qwen3-Next and Qwen3.5 to 3.8: reads their files' spellings, refuses what would
change results unseen."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hybrid_runtime.kernels.attention.rotary import Rotary
from hybrid_runtime.models.gdn import GDNShape
from hybrid_runtime.models.json_fields import (
    COUNT,
    FLAG,
    OBJECT,
    SIZE,
    UNREAD,
    Kind,
    check_fields,
    check_unquantised,
    integer,
    merge,
    named,
    one_line,
    one_of,
    only,
    or_list_of,
    positive,
    shown,
    unpacked,
)

INTERLEAVED = "qwen3_next"
"""Whose projections to q, k, v and z, and to b and a, are stored head by head."""
TEXT_TYPES = (INTERLEAVED, "qwen3_5_text", "qwen3_5_moe_text")
WHOLE_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Models that read images too: the `model_type` of their text model, which is the one that runs."""

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALIASES = {
    "torch_dtype": "dtype",
    "num_nextn_predict_layers": "mtp_num_hidden_layers",
    "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_DTYPES = one_of(*STATE_DTYPES, *(str(dtype) for dtype in STATE_DTYPES.values()))
_TOKEN = integer(0, 2**31 - 1)
_MOST_LAYERS = 4096
_FACTOR = positive(1)

KINDS: dict[str, Kind] = {
    "model_type": one_of(*TEXT_TYPES),
    "attention_bias": only(False),
    "attn_output_gate": only(True),
    "hidden_act": only("silu"),
    "mtp_use_dedicated_embeddings": only(False),
    "output_gate_type": one_of("swish", "silu"),
    "sliding_window": only(None),
    "use_sliding_window": only(False),
    "num_hidden_layers": integer(1, _MOST_LAYERS),
    "layer_types": Kind(
        f"a list of 1 to {_MOST_LAYERS} layers, each {_LINEAR} or {_FULL}",
        lambda value: (
            isinstance(value, list)
            and 1 <= len(value) <= _MOST_LAYERS
            and all(layer in (_LINEAR, _FULL) for layer in value)
        ),
    ),
    "full_attention_interval": integer(1, _MOST_LAYERS),
    "vocab_size": integer(1, SIZE),
    "hidden_size": integer(1, SIZE),
    "intermediate_size": integer(1, SIZE),
    "num_attention_heads": integer(1, COUNT),
    "num_key_value_heads": integer(1, COUNT),
    "head_dim": integer(1, COUNT),
    "linear_num_value_heads": integer(1, COUNT),
    "linear_num_key_heads": integer(1, COUNT),
    "linear_key_head_dim": integer(1, COUNT),
    "linear_value_head_dim": integer(1, COUNT),
    "linear_conv_kernel_dim": integer(2, COUNT),
    "mamba_ssm_dtype": _DTYPES,
    "num_experts": integer(0, COUNT),
    "num_experts_per_tok": integer(1, COUNT),
    "moe_intermediate_size": integer(1, SIZE),
    "shared_expert_intermediate_size": integer(1, SIZE),
    "decoder_sparse_step": integer(1, COUNT),
    "mlp_only_layers": Kind(
        "a list of numbers of layers",
        lambda value: (
            isinstance(value, list) and all(type(n) is int and 0 <= n < COUNT for n in value)
        ),
    ),
    "norm_topk_prob": FLAG,
    "mtp_num_hidden_layers": integer(0, 1),
    "tie_word_embeddings": FLAG,
    "rms_norm_eps": positive(1),
    "rope_theta": positive(1e12),
    "partial_rotary_factor": _FACTOR,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "max_position_embeddings": integer(1, 2**31 - 1),
    "bos_token_id": _TOKEN,
    "eos_token_id": or_list_of(_TOKEN, "such"),
    "pad_token_id": _TOKEN,
    "dtype": _DTYPES,
}
KINDS |= {alias: KINDS[name] for alias, name in ALIASES.items()}
# Positions of texts are the same along all axes of `mrope`, which makes it a plain rotation.
_ROPE: dict[str, Kind] = {
    "rope_type": only("default"), "type": only("default"), "rope_theta": KINDS["rope_theta"],
    "partial_rotary_factor": _FACTOR, "mrope_section": Kind("a list", lambda v: type(v) is list),
    "mrope_interleaved": FLAG,
}  # fmt: skip
_OF_WHOLE = {"text_config": OBJECT, "tie_word_embeddings": FLAG, "dtype": _DTYPES}
_OF_IMAGES = frozenset({
    "image_token_id", "language_model_only", "video_token_id", "vision_config",
    "vision_end_token_id", "vision_start_token_id",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """Shapes and constants, named as in Hugging Face configs, whose defaults are these.

    Three fields are ours: ``attends`` says of each layer whether it is one of attention, not of
    Gated DeltaNet, ``sparse`` whether it has experts, and ``rotary`` is the position embedding.
    ``mamba_ssm_dtype`` is what the authors keep matrices in.
    """

    vocab_size: int
    hidden_size: int
    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    rotary: Rotary
    interleaved: bool = False
    intermediate_size: int = 0
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_num_value_heads: int = 32
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    mamba_ssm_dtype: str = "float32"
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    mtp_num_hidden_layers: int = 0
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int | None = None
    eos_token_id: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, the MTP head's not counted."""
        return len(self.attends)

    @property
    def gdn(self) -> GDNShape:
        """Sizes of a Gated DeltaNet layer."""
        return GDNShape(
            heads=self.linear_num_value_heads,
            key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )

    @property
    def has_draft_head(self) -> bool:
        """Whether the checkpoint brings an MTP head."""
        return bool(self.mtp_num_hidden_layers)

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "Qwen35Config":
        """Read the contents of a config.json.

        An implemented field is used; one in `UNREAD`, one that starts with an underscore, and one
        that is null is ignored; one with a single supported value must have it; any other is
        refused, because it may change results.

        Args:
            config: the decoded file, of a text model or of one that reads images too.

        Raises:
            ValueError: naming the field, its value and what is supported.
        """
        given = _of_text({name: unpacked(v) for name, v in config.items() if v is not None})
        check_unquantised(given)
        check_fields(given, KINDS)
        known: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        own = {item.name for item in fields(Qwen35Config)}
        for name in (*ALIASES, *sorted(own)):
            if name in given:
                merge(known, spelled, ALIASES.get(name, name), name, given[name])
        expected = KINDS.keys() | UNREAD
        unknown = sorted(n for n in given.keys() - expected if not n.startswith("_"))
        if unknown:
            raise ValueError(
                f"config field {one_line(unknown[0])} is {shown(given[unknown[0]])}, but this "
                "field is not known and might change results; supported: without it (all unknown "
                f"fields: {one_line(', '.join(unknown))})"
            )
        kind = given.get("model_type", TEXT_TYPES[1])
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if name not in given:
                raise ValueError(f"config field {name} is missing, must be {KINDS[name].must}")
        known["interleaved"] = kind == INTERLEAVED
        known["attends"] = _attends(given)
        known["sparse"] = _sparse(given, kind)
        known["rotary"] = _rotary(given, known.get("head_dim", 256))
        if kind == INTERLEAVED:  # whose files don't say, and have one
            known.setdefault("mtp_num_hidden_layers", 1)
            known.setdefault("num_experts_per_tok", 10)
            known.setdefault("num_experts", 512)
        elif kind == "qwen3_5_moe_text":
            known.setdefault("num_experts", 256)
        else:
            known.setdefault("num_key_value_heads", 4)
        if kind != INTERLEAVED:  # which always do
            known["norm_topk_prob"] = True
        if not any(known["sparse"]):
            known["num_experts"] = 0
        eos = known.get("eos_token_id", ())
        known["eos_token_id"] = (eos,) if isinstance(eos, int) else tuple(eos)
        known["rms_norm_eps"] = float(known.get("rms_norm_eps", 1e-6))
        for name in ("dtype", "mamba_ssm_dtype"):
            if name in known:
                known[name] = known[name].removeprefix("torch.")
        read = Qwen35Config(**known)
        _check_together(read)
        return read


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's fields, of a config that may have them apart."""
    kind = config.get("model_type")
    if kind not in WHOLE_TYPES:
        return config
    check_fields(config, _OF_WHOLE)
    inner = {n: unpacked(v) for n, v in config.get("text_config", {}).items() if v is not None}
    inner.setdefault("model_type", WHOLE_TYPES[kind])
    if inner["model_type"] != WHOLE_TYPES[kind]:
        raise ValueError(
            f"config field text_config.model_type is {shown(inner['model_type'])}, must be "
            f"{WHOLE_TYPES[kind]!r}, as model_type is {kind!r}"
        )
    for name, value in config.items():
        if name in ("model_type", "text_config") or name in _OF_IMAGES | UNREAD:
            continue
        if inner.setdefault(name, value) != value:
            raise ValueError(
                f"config field {name} is {shown(value)}, but that of text_config is "
                f"{shown(inner[name])}; they must agree"
            )
    return inner


def _attends(given: Mapping[str, Any]) -> tuple[bool, ...]:
    layers = given["num_hidden_layers"]
    if "layer_types" not in given:
        interval = given.get("full_attention_interval", 4)
        return tuple((index + 1) % interval == 0 for index in range(layers))
    types = given["layer_types"]
    if len(types) != layers:
        raise ValueError(
            f"config field num_hidden_layers is {layers}, must be the number of layers that "
            f"layer_types names ({len(types)})"
        )
    return tuple(layer == _FULL for layer in types)


def _sparse(given: Mapping[str, Any], kind: str) -> tuple[bool, ...]:
    layers = given["num_hidden_layers"]
    if kind != INTERLEAVED:
        return (kind == "qwen3_5_moe_text",) * layers
    step, dense = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers", ())
    some = given.get("num_experts", 512) > 0
    return tuple(some and index not in dense and (index + 1) % step == 0 for index in range(layers))


def _rotary(given: Mapping[str, Any], head_dim: int) -> Rotary:
    """Of the fields beside each other, or in an object of their own."""
    found: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling"):
        inside = {n: unpacked(v) for n, v in given.get(place, {}).items() if v is not None}
        with named(place):
            check_fields(inside, _ROPE)
            for name in sorted(inside.keys() - _ROPE.keys()):
                raise ValueError(
                    f"config field {one_line(name)} is {shown(inside[name])}, but this field is "
                    "not known and might change results"
                )
        found |= inside
    spelled = dict.fromkeys(found, "rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in given:
            merge(found, spelled, name, name, given[name])
    size = int(head_dim * found.get("partial_rotary_factor", 0.25))
    if size < 2 or size % 2:
        raise ValueError(
            f"config field partial_rotary_factor is {found.get('partial_rotary_factor', 0.25)}, "
            f"must make an even number of the {head_dim} elements of a head turn, and not 0"
        )
    return Rotary(size, float(found.get("rope_theta", 10000.0)))


def _check_together(config: Qwen35Config) -> None:
    """Hold fields against each other."""
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(
                f"config field {whole} is {getattr(config, whole)}, must be a multiple of {part} "
                f"({getattr(config, part)})"
            )
    if not all(config.sparse) and not config.intermediate_size:
        raise ValueError(
            f"config field intermediate_size is missing, must be {KINDS['intermediate_size'].must}"
        )
    if any(config.sparse) and config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"config field num_experts_per_tok is {config.num_experts_per_tok}, must be at most "
            f"num_experts ({config.num_experts})"
        )
    if any(token >= config.vocab_size for token in config.eos_token_id):
        raise ValueError(
            f"config field eos_token_id is {config.eos_token_id}, must be below vocab_size "
            f"({config.vocab_size})"
        )
