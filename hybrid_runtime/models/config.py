"""Nemotron-H configuration: reads both spellings, refuses what would change results unseen."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

_SYMBOLS = {
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
_ALIASES = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_min": "time_step_min",
    "mamba_n_groups": "n_groups",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
    "num_query_groups": "num_key_value_heads",
    "rms_norm_eps": "layer_norm_epsilon",
    "torch_dtype": "dtype",
}

# Fields with one implemented value each.
_FIXED = (
    ("model_type", "nemotron_h"),
    ("attention_bias", False),
    ("hidden_act", "relu2"),
    ("mamba_hidden_act", "silu"),
    ("mamba_proj_bias", False),
    ("mlp_hidden_act", "relu2"),
    ("n_shared_experts", 1),
    ("quantization_config", None),
    ("sliding_window", None),
)

# Fields that cannot change the logits of a given checkpoint at inference. No implementation of
# the family uses a rotary embedding, so the fields that would shape one are here too.
# fmt: off
HARMLESS = frozenset([
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "expand",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "mamba_dt_init_floor", "mamba_expand", "max_length", "max_position_embeddings", "min_length",
    "moe_router_force_load_balancing", "moe_shared_expert_overlap", "name_or_path",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_logits_to_keep",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "partial_rotary_factor", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "rescale_prenorm_residual", "return_dict",
    "return_dict_in_generate", "rope_parameters", "rope_scaling", "rope_theta",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "time_step_floor", "time_step_max",
    "time_step_min", "time_step_rank", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers_version", "typical_p", "use_bfloat16", "use_cache", "use_mamba_kernels",
])
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
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, the MTP head's not counted."""
        return len(self.pattern)

    @property
    def mamba_intermediate_size(self) -> int:
        """Mamba heads times their dimension."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the Mamba convolution: x, B and C."""
        return self.mamba_intermediate_size + 2 * self.n_groups * self.ssm_state_size

    @property
    def ssm_cache_dtype(self) -> torch.dtype:
        """Dtype in which the checkpoint's authors keep SSM states; the default of an engine's
        ``ssm_dtype``."""
        return STATE_DTYPES[self.mamba_ssm_cache_dtype]

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int:
                least = 0 if item.name == "num_nextn_predict_layers" else 1
                if type(value) is not int or value < least:
                    raise ValueError(
                        f"config field {item.name} is {value!r}, must be an integer >= {least}"
                    )
            if item.type is bool and type(value) is not bool:
                raise ValueError(f"config field {item.name} is {value!r}, must be true or false")
        for name in ("pattern", "mtp_pattern"):
            wrong = set(getattr(self, name)) - set("M*-E")
            if wrong:
                raise ValueError(f"config field {name} has {sorted(wrong)}, must be of M * - E")
        if self.mamba_ssm_cache_dtype not in STATE_DTYPES:
            raise ValueError(
                f"config field mamba_ssm_cache_dtype is {self.mamba_ssm_cache_dtype!r}, must be "
                f"one of {', '.join(STATE_DTYPES)}"
            )
        if not self.pattern:
            raise ValueError("config field pattern is empty, must name at least one layer")
        if self.num_nextn_predict_layers and not self.mtp_pattern:
            raise ValueError("config field mtp_pattern is empty, must name at least one layer")
        if self.num_nextn_predict_layers and "M" in self.mtp_pattern:
            raise ValueError(
                f"config field mtp_pattern is {self.mtp_pattern!r}, must be of * - E: "
                "a draft head with Mamba layers is not supported"
            )
        self._divides("num_attention_heads", "num_key_value_heads")
        self._divides("mamba_num_heads", "n_groups")
        self._divides("n_routed_experts", "n_group")
        if self.n_group > 1 and self.n_routed_experts < 2 * self.n_group:
            raise ValueError(
                f"config field n_group is {self.n_group}, must leave at least 2 of the "
                f"{self.n_routed_experts} experts per group"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"config field topk_group is {self.topk_group}, must be at most "
                f"n_group ({self.n_group})"
            )
        candidates = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > candidates:
            raise ValueError(
                f"config field num_experts_per_tok is {self.num_experts_per_tok}, must be at most "
                f"{candidates}, the experts in topk_group groups"
            )
        if self.moe_latent_size is not None and self.moe_latent_size < 1:
            raise ValueError(
                f"config field moe_latent_size is {self.moe_latent_size}, must be null or positive"
            )
        if not self.time_step_limit[0] <= self.time_step_limit[1]:
            raise ValueError(
                f"config field time_step_limit is {self.time_step_limit}, must be [low, high]"
            )

    def _divides(self, whole: str, part: str) -> None:
        a, b = getattr(self, whole), getattr(self, part)
        if a % b:
            raise ValueError(f"config field {whole} is {a}, must be a multiple of {part} ({b})")

    @staticmethod
    def from_dict(config: Mapping[str, Any], ignore: Collection[str] = ()) -> "NemotronHConfig":
        """Read the contents of a config.json.

        The rule for fields: an implemented one is used; one in :data:`HARMLESS`, one that starts
        with an underscore, and one that is null is ignored; one with a single supported value
        must have it; any other field is refused, because it may change results.

        Args:
            config: the decoded file.
            ignore: names of further fields to ignore, at the caller's own risk.

        Raises:
            ValueError: naming the field, its value and what is supported.
        """
        given = {
            name: _decoded(value)
            for name, value in config.items()
            if value is not None and name not in ignore
        }
        for name, only in _FIXED:
            if name in given and given[name] != only:
                if name == "mamba_proj_bias" and given.get("use_bias") is True:
                    continue
                if name == "n_shared_experts" and "E" not in _any_pattern(given):
                    continue
                raise ValueError(
                    f"config field {name} is {given[name]!r}, only {only!r} is supported"
                )
        known: dict[str, Any] = {}
        for alias in _ALIASES:
            if alias in given:
                _merge(known, _ALIASES[alias], alias, given)
        own = {item.name for item in fields(NemotronHConfig)} - {"pattern", "mtp_pattern"}
        for name in own & given.keys():
            _merge(known, name, name, given)
        known["pattern"] = _pattern(given, "hybrid_override_pattern", "layers_block_type")
        if known.get("num_nextn_predict_layers"):
            known["mtp_pattern"] = _pattern(
                given, "mtp_hybrid_override_pattern", "mtp_layers_block_type"
            )
        for name in ("vocab_size", "hidden_size", "pattern"):
            if not known.get(name):
                shown = "hybrid_override_pattern (or layers_block_type)"
                raise ValueError(f"config field {shown if name == 'pattern' else name} is missing")
        layers = given.get("num_hidden_layers", len(known["pattern"]))
        if layers != len(known["pattern"]):
            raise ValueError(
                f"config field num_hidden_layers is {layers}, must be the number of layers named "
                f"by the pattern ({len(known['pattern'])})"
            )
        spelled = {
            "hybrid_override_pattern",
            "layers_block_type",
            "layer_types",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "mtp_layer_types",
            "num_hidden_layers",
        }
        expected = own | spelled | HARMLESS | _ALIASES.keys() | {name for name, _ in _FIXED}
        unknown = sorted(n for n in given.keys() - expected if not n.startswith("_"))
        if unknown:
            raise ValueError(
                f"config field {unknown[0]} is {given[unknown[0]]!r}, but this field is not known "
                "and might change results; supported: without it (all unknown fields: "
                f"{', '.join(unknown)})"
            )
        if "eos_token_id" in known:
            eos = known["eos_token_id"]
            eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
            if any(type(token) is not int for token in eos):
                raise ValueError(
                    f"config field eos_token_id is {known['eos_token_id']!r}; supported: a token "
                    "id, a list of them, or null"
                )
            known["eos_token_id"] = tuple(eos)
        if "time_step_limit" in known:
            low, high = known["time_step_limit"]
            known["time_step_limit"] = (float(low), float(high))
        for name in ("dtype", "mamba_ssm_cache_dtype"):
            if name in known:
                known[name] = str(known[name]).removeprefix("torch.")
        return NemotronHConfig(**known)


def load_config(path: str | Path) -> NemotronHConfig:
    """Read ``config.json`` of a checkpoint directory (or the file itself).

    Raises:
        ValueError: no such file, not JSON, or a field that is refused.
    """
    return NemotronHConfig.from_dict(read_json(path, "config.json"))


def read_json(path: str | Path, name: str) -> dict[str, Any]:
    """The object in JSON file `name` of directory `path` (or in `path` itself if it is a file).

    Raises:
        ValueError: no such file, or it does not hold a JSON object.
    """
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{file} does not exist, must be the {name} of a checkpoint")
    try:
        decoded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ValueError(f"{file} holds a {type(decoded).__name__}, must hold a JSON object")
    return decoded


def _decoded(value: Any) -> Any:
    # transformers >= 5 writes numbers that JSON lacks as {"__float__": "Infinity"}.
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def _merge(known: dict[str, Any], name: str, spelled: str, given: Mapping[str, Any]) -> None:
    value = given[spelled]
    if name in known and known[name] != value:
        raise ValueError(
            f"config field {spelled} is {value!r}, but another spelling of the same field "
            f"({name}) is {known[name]!r}; they must agree"
        )
    known[name] = value


def _pattern(given: Mapping[str, Any], as_string: str, as_list: str) -> str:
    """The layer pattern in characters, from whichever spelling the file has."""
    names = [as_list, as_list.replace("layers_block_type", "layer_types")]
    found: dict[str, str] = {}
    if as_string in given:
        found[as_string] = given[as_string]
    for name in names:
        if name in given:
            wrong = [kind for kind in given[name] if kind not in _SYMBOLS]
            if wrong:
                raise ValueError(
                    f"config field {name} has {wrong[0]!r}, must be of {', '.join(_SYMBOLS)}"
                )
            found[name] = "".join(_SYMBOLS[kind] for kind in given[name])
    if len(set(found.values())) > 1:
        raise ValueError(f"config fields name different layers, they must agree: {found}")
    return next(iter(found.values()), "")


def _any_pattern(given: Mapping[str, Any]) -> str:
    return _pattern(given, "hybrid_override_pattern", "layers_block_type") + _pattern(
        given, "mtp_hybrid_override_pattern", "mtp_layers_block_type"
    )
