"""Nemotron-H configuration: reads both spellings, refuses what would change results unseen."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from hybrid_runtime.models.json_fields import (
    COUNT,
    FLAG,
    SIZE,
    UNREAD,
    Kind,
    check_fields,
    check_unquantised,
    integer,
    merge,
    one_line,
    one_of,
    only,
    or_list_of,
    positive,
    shown,
    unpacked,
)
from hybrid_runtime.models.model import Mamba2Shape

SYMBOLS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What SSM states may be kept in, by the names of config files."""

# Other spellings of fields, met in published Nemotron-H files or accepted by transformers.
ALIASES = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
    "num_query_groups": "num_key_value_heads",
    "rms_norm_eps": "layer_norm_epsilon",
    "torch_dtype": "dtype",
}

_DTYPES = one_of(*STATE_DTYPES, *(str(dtype) for dtype in STATE_DTYPES.values()))
_TOKEN = integer(0, 2**31 - 1)
_MOST_LAYERS = 4096


def _layers(least: int) -> Kind:
    """Characters, one per layer."""
    return Kind(
        f"a text of {least} to {_MOST_LAYERS} layers, each one of M * - E",
        lambda value: (
            isinstance(value, str)
            and least <= len(value) <= _MOST_LAYERS
            and set(value) <= set(SYMBOLS.values())
        ),
    )


def _layer_list(least: int) -> Kind:
    return Kind(
        f"a list of {least} to {_MOST_LAYERS} layers, each one of {', '.join(SYMBOLS)}",
        lambda value: (
            isinstance(value, list)
            and least <= len(value) <= _MOST_LAYERS
            and all(isinstance(layer, str) and layer in SYMBOLS for layer in value)
        ),
    )


_LIMITS = Kind(
    "[low, high], 0 <= low <= high",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(limit) in (int, float) for limit in value)
        and 0 <= value[0] <= value[1]
    ),
)

# What each field must be, by our names; those with one implemented value stand first.
KINDS: dict[str, Kind] = {
    "model_type": only("nemotron_h"),
    "attention_bias": only(False),
    "hidden_act": only("relu2"),
    "mamba_hidden_act": only("silu"),
    "mlp_hidden_act": only("relu2"),
    "sliding_window": only(None),
    "mamba_proj_bias": FLAG,
    "n_shared_experts": integer(0, COUNT),
    "num_hidden_layers": integer(1, COUNT),
    "hybrid_override_pattern": _layers(1),
    "mtp_hybrid_override_pattern": _layers(0),
    "layers_block_type": _layer_list(1),
    "layer_types": _layer_list(1),
    "mtp_layers_block_type": _layer_list(0),
    "mtp_layer_types": _layer_list(0),
    "pattern": _layers(1),
    "mtp_pattern": _layers(0),
    "vocab_size": integer(1, SIZE),
    "hidden_size": integer(1, SIZE),
    "intermediate_size": integer(1, SIZE),
    "num_attention_heads": integer(1, COUNT),
    "num_key_value_heads": integer(1, COUNT),
    "head_dim": integer(1, COUNT),
    "mamba_num_heads": integer(1, COUNT),
    "mamba_head_dim": integer(1, COUNT),
    "n_groups": integer(1, COUNT),
    "ssm_state_size": integer(1, COUNT),
    "conv_kernel": integer(2, COUNT),
    "chunk_size": integer(1, SIZE),
    "time_step_limit": _LIMITS,
    "mamba_ssm_cache_dtype": _DTYPES,
    "n_routed_experts": integer(1, COUNT),
    "num_experts_per_tok": integer(1, COUNT),
    "moe_intermediate_size": integer(1, SIZE),
    "moe_shared_expert_intermediate_size": integer(1, SIZE),
    "moe_latent_size": integer(1, SIZE),
    "n_group": integer(1, COUNT),
    "topk_group": integer(1, COUNT),
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": positive(1e9),
    "num_nextn_predict_layers": integer(0, COUNT),
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "mlp_bias": FLAG,
    "residual_in_fp32": FLAG,
    "tie_word_embeddings": FLAG,
    "layer_norm_epsilon": positive(1),
    "max_position_embeddings": integer(1, 2**31 - 1),
    "bos_token_id": _TOKEN,
    "eos_token_id": or_list_of(_TOKEN, "such"),
    "pad_token_id": _TOKEN,
    "dtype": _DTYPES,
}
KINDS |= {alias: KINDS[name] for alias, name in ALIASES.items() if name in KINDS}

# Fields that cannot change the logits of a given checkpoint at inference. No implementation of
# the family uses a rotary embedding, so the fields that would shape one are here too.
# fmt: off
HARMLESS = UNREAD | {
    "expand", "mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min", "mamba_expand",
    "moe_router_force_load_balancing", "moe_shared_expert_overlap", "num_logits_to_keep",
    "partial_rotary_factor", "rescale_prenorm_residual", "rope_parameters", "rope_scaling",
    "rope_theta", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank",
    "use_mamba_kernels",
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig:
    """Shapes and constants of a Nemotron-H model, named as in its Hugging Face config.

    Two fields are ours: ``pattern`` and ``mtp_pattern`` give one character per layer of the model
    and of one step of its MTP head (``M`` Mamba-2, ``*`` attention, ``-`` MLP, ``E`` experts).
    ``time_step_limit`` clamps the Mamba time step everywhere, as the authors' code does;
    ``time_step_min``, ``_max`` and ``_floor`` only shape initial weights. Defaults are those of
    transformers. ``dtype`` is the checkpoint's own, by name, and ``mamba_ssm_cache_dtype`` what its
    authors keep SSM states in, see ``ssm_cache_dtype``.
    """

    vocab_size: int
    hidden_size: int
    pattern: str
    mtp_pattern: str = ""
    intermediate_size: int = 21504
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    chunk_size: int = 128
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    mamba_ssm_cache_dtype: str = "float32"
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    use_bias: bool = False
    use_conv_bias: bool = True
    mlp_bias: bool = False
    residual_in_fp32: bool = False
    tie_word_embeddings: bool = False
    layer_norm_epsilon: float = 1e-5
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, the MTP head's not counted."""
        return len(self.pattern)

    @property
    def mamba2(self) -> Mamba2Shape:
        """Sizes of a Mamba layer."""
        return Mamba2Shape(
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            groups=self.n_groups,
            conv_width=self.conv_kernel,
        )

    @property
    def has_draft_head(self) -> bool:
        """Whether the checkpoint brings an MTP head."""
        return bool(self.num_nextn_predict_layers)

    @property
    def ssm_cache_dtype(self) -> torch.dtype:
        """Dtype in which the checkpoint's authors keep SSM states; the default of an engine's
        ``ssm_dtype``."""
        return STATE_DTYPES[self.mamba_ssm_cache_dtype]

    def __post_init__(self) -> None:
        values = asdict(self)
        check_fields(values, KINDS)
        _check_together(values, {})

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "NemotronHConfig":
        """Read the contents of a config.json.

        The rule for fields: an implemented one is used; one in `HARMLESS`, one that starts
        with an underscore, and one that is null is ignored; one with a single supported value
        must have it; any other field is refused, because it may change results.

        Args:
            config: the decoded file.

        Raises:
            ValueError: naming the field, its value and what is supported.
        """
        given = {name: unpacked(value) for name, value in config.items() if value is not None}
        check_unquantised(given)
        check_fields(given, KINDS)
        known: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        own = {item.name for item in fields(NemotronHConfig)} - {"pattern", "mtp_pattern"}
        for name in (*ALIASES, *sorted(own)):
            if name in given:
                merge(known, spelled, ALIASES.get(name, name), name, given[name])
        known["pattern"], spelled["pattern"] = _pattern(given, "")
        if known.get("num_nextn_predict_layers"):
            known["mtp_pattern"], spelled["mtp_pattern"] = _pattern(given, "mtp_")
        for name in ("vocab_size", "hidden_size", "pattern"):
            if not known.get(name):
                what = "hybrid_override_pattern (or layers_block_type)"
                raise ValueError(
                    f"config field {what if name == 'pattern' else name} is missing, must be "
                    f"{KINDS[name].must}"
                )
        _check_unread(given, known)
        expected = own | KINDS.keys() - {"pattern", "mtp_pattern"} | HARMLESS | ALIASES.keys()
        unknown = sorted(n for n in given.keys() - expected if not n.startswith("_"))
        if unknown:
            raise ValueError(
                f"config field {one_line(unknown[0])} is {shown(given[unknown[0]])}, but this "
                "field is not known and might change results; supported: without it (all unknown "
                f"fields: {one_line(', '.join(unknown))})"
            )
        if "eos_token_id" in known:
            eos = known["eos_token_id"]
            known["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
        if "time_step_limit" in known:
            low, high = known["time_step_limit"]
            known["time_step_limit"] = (float(low), float(high))
        for name in ("layer_norm_epsilon", "routed_scaling_factor"):
            if name in known:
                known[name] = float(known[name])
        for name in ("dtype", "mamba_ssm_cache_dtype"):
            if name in known:
                known[name] = known[name].removeprefix("torch.")
        _check_together(_DEFAULTS | known, spelled)
        return NemotronHConfig(**known)


_DEFAULTS = {item.name: item.default for item in fields(NemotronHConfig)}


def _check_together(values: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
    """Hold fields against each other. spelled: what a file calls those that it has."""

    def refuse(name: str, must: str) -> None:
        raise ValueError(
            f"config field {spelled.get(name, name)} is {shown(values[name])}, must {must}"
        )

    def called(name: str) -> str:
        return f"{spelled.get(name, name)} ({values[name]})"

    heads, mtp = values["num_nextn_predict_layers"], values["mtp_pattern"]
    if heads and not mtp:
        refuse("mtp_pattern", "name at least one layer, because there is a draft head")
    if heads and "M" in mtp:
        refuse("mtp_pattern", "be of * - E: a draft head with Mamba layers is not supported")
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("mamba_num_heads", "n_groups"),
        ("n_routed_experts", "n_group"),
    ):
        if values[whole] % values[part]:
            refuse(whole, f"be a multiple of {called(part)}")
    experts, groups = values["n_routed_experts"], values["n_group"]
    if groups > 1 and experts < 2 * groups:
        refuse("n_group", f"leave at least 2 of the {experts} experts per group")
    if values["topk_group"] > groups:
        refuse("topk_group", f"be at most {called('n_group')}")
    candidates = experts // groups * values["topk_group"]
    if values["num_experts_per_tok"] > candidates:
        refuse("num_experts_per_tok", f"be at most {candidates}, the experts in topk_group groups")
    if any(token >= values["vocab_size"] for token in values["eos_token_id"]):
        refuse("eos_token_id", f"be below {called('vocab_size')}")


def _check_unread(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Fields that only say again, or say for layers that may not be there, what others say."""
    layers = given.get("num_hidden_layers", len(known["pattern"]))
    if layers != len(known["pattern"]):
        raise ValueError(
            f"config field num_hidden_layers is {layers}, must be the number of layers named by "
            f"the pattern ({len(known['pattern'])})"
        )
    if given.get("mamba_proj_bias") and not given.get("use_bias"):
        raise ValueError("config field mamba_proj_bias is True, must be False, as use_bias is")
    shared = given.get("n_shared_experts", 1)
    if shared != 1 and "E" in known["pattern"] + known.get("mtp_pattern", ""):
        raise ValueError(
            f"config field n_shared_experts is {shared}, must be 1: nothing else is supported"
        )


def _pattern(given: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    """The layers in characters, and the field that names them, whichever spelling the file has."""
    names = [f"{prefix}{name}" for name in ("hybrid_override_pattern", "layers_block_type")]
    names.append(f"{prefix}layer_types")
    found = {
        name: "".join(SYMBOLS.get(layer, layer) for layer in given[name])
        for name in names
        if name in given
    }
    if len(set(found.values())) > 1:
        raise ValueError(f"config fields name different layers, they must agree: {shown(found)}")
    return next(((layers, name) for name, layers in found.items()), ("", names[0]))
