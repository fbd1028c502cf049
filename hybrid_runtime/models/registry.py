"""Which family of models a checkpoint is of. A new family is a file of its own and a line here."""

from pathlib import Path

from hybrid_runtime.models import nemotron_h, qwen3_5
from hybrid_runtime.models.json_fields import named, read_json, shown
from hybrid_runtime.models.model import Family, ModelConfig

FAMILIES: dict[str, Family] = {
    "nemotron_h": nemotron_h.FAMILY,
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5.FAMILY
    ),
}
"""By `model_type` of config.json."""
_UNNAMED = "nemotron_h"
"""Of a config.json without `model_type`."""


def load_config(path: str | Path) -> tuple[Family, ModelConfig]:
    """Read ``config.json`` of a checkpoint directory (or the file itself).

    Raises:
        ValueError: no such file, not JSON, a family that is not known, or a field that is refused;
            the file and the field as it stands there are named.
    """
    decoded = read_json(path, "config.json")
    decoded.pop("quantization_config", None)  # is no family's, see `read_quantization`
    with named(Path(path) / "config.json" if Path(path).is_dir() else Path(path)):
        name = decoded.get("model_type")
        known = FAMILIES.get(name if isinstance(name, str) else _UNNAMED if name is None else "")
        if known is None:
            must = " or ".join(map(repr, FAMILIES))
            raise ValueError(
                f"config field model_type is {shown(name)}, must be {must}: nothing else is "
                "supported"
            )
        return known, known.read_config(decoded)
