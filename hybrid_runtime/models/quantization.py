"""In which format each matrix of a checkpoint is, by what its files say or by what is asked for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from hybrid_runtime.models.formats import FORMATS, PLAIN, ROUNDED_TO, Format
from hybrid_runtime.models.json_fields import (
    OBJECT,
    Kind,
    check_fields,
    named,
    one_line,
    one_of,
    read_json,
    read_optional,
    shown,
)
from hybrid_runtime.models.linear import Experts, matrices

CONFIG, BESIDE = "config.json", "hf_quant_config.json"
_MIXED = "MIXED_PRECISION"
_NAMES = Kind(
    "a list of names of modules",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_EIGHT_BITS = {"num_bits": 8, "type": "float"}
_KV_SCHEME = Kind(
    "'FP8', or an object with num_bits 8 and type 'float'",
    lambda value: (
        value == "FP8"
        or (isinstance(value, Mapping) and _EIGHT_BITS.items() <= dict(value).items())
    ),
)
_TEXT = Kind("a text", lambda value: isinstance(value, str))
_KINDS: dict[str, Kind] = {
    "quant_method": one_of("modelopt"),
    "quant_library": one_of("modelopt"),
    "quant_algo": _TEXT,
    "kv_cache_quant_algo": one_of("FP8"),
    "kv_cache_scheme": _KV_SCHEME,
    "exclude_modules": _NAMES,
    "ignore": _NAMES,
    "quantized_layers": OBJECT,
    "config_groups": OBJECT,
    "has_zero_point": Kind("false: nothing else is supported", lambda value: value is False),
    "pre_quant_scale": Kind("false: nothing else is supported", lambda value: value is False),
}
# Who wrote it; sizes of groups, which FP8 does not have.
_UNREAD = {"producer", "group_size"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Formats of a checkpoint's matrices.

    source: the file and field, or the option, that says so.
    format: of matrices that are neither excluded nor in the table.
    excluded: names, or patterns of them, of modules whose matrices are plain.
    table: formats by the names of matrices from `layers.` on, where each has its own.
    kv_fp8: keys and values are meant to be in FP8, with scales or with 1 for scales.
    rounded: the files hold plain numbers, which are rounded as they are loaded.
    """

    source: str
    format: Format
    excluded: tuple[str, ...] = ()
    table: Mapping[str, Format] = field(default_factory=dict)
    kv_fp8: bool = False
    rounded: bool = False

    def store(self, model: nn.Module, head_prefix: str) -> None:
        """Give the matrices of a model on the meta device their formats. head_prefix: of names of a
        draft head, whose matrices are plain.

        Raises:
            ValueError: routed experts of a layer would have several, or the table names what is no
                matrix.
        """
        found = matrices(model)
        known = {*map(_plainly, found)}
        for name, part in model.named_modules():
            if isinstance(part, Experts):
                names = [f"{name}.{i}.{p}" for i in range(part.count) for p in part.projections]
                known.update(map(_plainly, names))
                part.store_as(self._common_format(names), "meta")
        for name, format in self.table.items():
            if name not in known and not (head_prefix and name.startswith(head_prefix)):
                raise ValueError(
                    f"{self.source}: module {one_line(name)} is {format.algorithm}, but the model "
                    "has no matrix of that name that may be"
                )
        for name, matrix in found.items():
            matrix.store_as(self.format_of(name), "meta")

    def format_of(self, name: str) -> Format:
        """That of a matrix, by its name in the checkpoint."""
        if _covered(self.excluded, name):
            return PLAIN
        return self.table.get(_plainly(name), self.format)

    def _common_format(self, names: list[str]) -> Format:
        """That of the matrices of a layer's routed experts."""
        first = self.format_of(names[0])
        for name in names:
            other = self.format_of(name)
            if other is not first:
                raise ValueError(
                    f"{self.source}: module {name} is {other.algorithm}, must be "
                    f"{first.algorithm} as {names[0]} is: routed experts of a layer have one format"
                )
        return first


def _plainly(name: str) -> str:
    """A name without what comes before the layers of the model: there exporters differ."""
    return re.sub(r"^(?:(?:model|backbone|language_model|layers)\.)+(?=layers\.\d)", "", name)


def _covered(patterns: tuple[str, ...], name: str) -> bool:
    """Whether any names a module or one that it is in; `layers.1` is not in `layers.14`."""
    exact, others = _forms(patterns)
    parts = name.split(".")
    names = {".".join(parts[: i + 1]) for i in range(len(parts))}
    names |= {_plainly(one) for one in names}
    return not exact.isdisjoint(names) or any(map(others.match, names))


@cache
def _forms(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """Names, and an expression for all that have wildcards: a model has ten thousands of matrices
    where it has experts."""
    forms = {form for pattern in patterns for form in (pattern, _plainly(pattern))}
    wild = {form for form in forms if not {*form}.isdisjoint("*?[")}
    return frozenset(forms - wild), re.compile("|".join(map(translate, wild)) or "(?!)")


def read_quantization(directory: Path, asked: str | None = None) -> Quantization | None:
    """What the files of a checkpoint say, or what is asked for; None: all numbers are plain.

    Args:
        directory: of the checkpoint.
        asked: what plain weights are to be rounded to, as of `ROUNDED_TO`.

    Raises:
        ValueError: a file says something that is wrong or not supported, both say something and do
            not agree, or rounding is asked for and the weights are quantised already.
    """
    decoded = read_json(directory, CONFIG)
    field = "quantization_config"
    said = []
    with named(directory / CONFIG):
        check_fields(decoded, {field: OBJECT})
    if decoded.get(field) is not None:
        given = decoded[field]
        said.append(_read(f"{directory / CONFIG}: {field}", given.get("quantization", given)))
    beside = read_optional(directory, BESIDE, {"quantization": OBJECT})
    about = beside.get("quantization")
    if beside and (about is None or about.get("quant_algo") is not None):
        said.append(_read(f"{directory / BESIDE}: quantization", about))
    if len(said) == 2 and not _agree(*said):
        raise ValueError(f"{said[1].source} says something else than {said[0].source}")
    if asked is None:
        return said[-1] if said else None
    if asked not in ROUNDED_TO:
        known = ", ".join(map(repr, ROUNDED_TO))
        raise ValueError(f"quantization is {asked!r}; it must be None or one of {known}")
    if said:
        raise ValueError(
            f"quantization is {asked!r}; it must be None, because the weights are quantised "
            f"already, as {said[-1].source} says"
        )
    return Quantization(f"quantization={asked!r}", ROUNDED_TO[asked], rounded=True)


def _agree(one: Quantization, other: Quantization) -> bool:
    return (one.format, one.table, {*one.excluded}, one.kv_fp8) == (
        other.format, other.table, {*other.excluded}, other.kv_fp8,
    )  # fmt: skip


def _read(source: str, given: Any) -> Quantization:
    """ModelOpt's fields, in either form."""
    with named(source):
        if not isinstance(given, Mapping):
            raise ValueError(f"is {shown(given)}, must be an object that names the format")
        check_fields(given, _KINDS)
        fields = {name: value for name, value in given.items() if value is not None}
        for name in sorted(fields.keys() - _KINDS.keys() - _UNREAD):
            raise ValueError(
                f"config field {one_line(name)} is {shown(fields[name])}, but this field is not "
                "known and might change results"
            )
        algorithm = fields.get("quant_algo")
        if algorithm is None:
            raise ValueError(f"has no quant_algo, must name the format, one of {_known()}")
        table: dict[str, Format] = {}
        if algorithm == _MIXED:
            table = _read_table(fields.get("quantized_layers"))
        elif algorithm not in FORMATS:
            raise ValueError(
                f"config field quant_algo is {shown(algorithm)}, must be one of {_known()}: no "
                "other format of quantised weights is supported"
            )
        elif "quantized_layers" in fields:
            raise ValueError(
                f"config field quantized_layers is {shown(fields['quantized_layers'])}, must be "
                f"absent with quant_algo {algorithm!r}"
            )
        _check_groups(fields.get("config_groups", {}), algorithm)
        return Quantization(
            source,
            PLAIN if algorithm == _MIXED else FORMATS[algorithm],
            (*fields.get("exclude_modules", ()), *fields.get("ignore", ())),
            table,
            kv_fp8="kv_cache_quant_algo" in fields or "kv_cache_scheme" in fields,
        )


def _read_table(given: Any) -> dict[str, Format]:
    if not given:
        raise ValueError(
            f"config field quantized_layers is {shown(given)}, must name the format of each module"
        )
    table = {}
    for name, about in given.items():
        algorithm = about.get("quant_algo") if isinstance(about, Mapping) else None
        if algorithm not in FORMATS:
            raise ValueError(
                f"module {one_line(name)} in quantized_layers is {shown(about)}, must have a "
                f"quant_algo of {', '.join(FORMATS)}: no other format of quantised weights is "
                "supported"
            )
        table[_plainly(name)] = FORMATS[algorithm]
    return table


def _check_groups(groups: Mapping[str, Any], algorithm: str) -> None:
    """What llm-compressor's fields say beside ModelOpt's own; a mixture's are its table's again."""
    for name, group in groups.items() if algorithm != _MIXED else ():
        for what in ("weights", "input_activations"):
            about = group.get(what) if isinstance(group, Mapping) else None
            if about is None:
                continue
            if not isinstance(about, Mapping) or not _EIGHT_BITS.items() <= about.items():
                raise ValueError(
                    f"config field config_groups.{one_line(name)}.{what} is {shown(about)}, must "
                    "have num_bits 8 and type 'float'"
                )
            if about.get("dynamic") and what == "input_activations" and algorithm == "FP8":
                raise ValueError(
                    f"config field config_groups.{one_line(name)}.{what} is {shown(about)}, must "
                    "not be dynamic with quant_algo 'FP8'"
                )


def _known() -> str:
    return ", ".join((*FORMATS, _MIXED))
