"""Fields of a checkpoint's JSON files: read, and held against a table of what each may be."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

SIZE = 2**20
"""Largest width of a model that is taken. With this and `COUNT` no tensor's bytes overflow 63 bits,
and a number that a damaged file has is refused as that field, not as memory that is not there."""
COUNT = 2**16
"""Most heads, groups, experts, or elements of one of them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may be. must: in words. holds: whether a value (not null) is that."""

    must: str
    holds: Callable[[Any], bool]


FLAG = Kind("true or false", lambda value: type(value) is bool)
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))


def integer(least: int, most: int) -> Kind:
    """An integer of JSON: neither true nor 1.0."""
    return Kind(
        f"an integer in {least}..{most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def positive(most: float) -> Kind:
    """A number above 0, which NaN is not."""
    return Kind(
        f"a number above 0 and at most {most:g}",
        lambda value: type(value) in (int, float) and 0 < value <= most,
    )


def one_of(*names: str) -> Kind:
    """A text of a list."""
    return Kind(f"one of {', '.join(names)}", lambda value: value in names)


def only(wanted: object) -> Kind:
    """A field with one implemented value; null stands for None."""
    return Kind(
        f"{wanted!r}: nothing else is supported",
        lambda value: type(value) is type(wanted) and value == wanted,
    )


def or_list_of(kind: Kind, plural: str) -> Kind:
    """One value of a kind, or a list of them."""
    return Kind(
        f"{kind.must}, or a list of {plural}",
        lambda value: all(map(kind.holds, value if isinstance(value, list | tuple) else [value])),
    )


# fmt: off
UNREAD = frozenset([
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "max_length", "min_length", "name_or_path", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
])
# fmt: on
"""Fields of transformers' configs of any family that cannot change the logits of a given checkpoint
at inference."""

_shorten = Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 160


def shown(value: object) -> str:
    """A value in an error message, one line of bounded length."""
    return _shorten.repr(value)


def one_line(words: object) -> str:
    """What a library says, or a name that a file gives, as one line of bounded length."""
    line = " ".join(str(words).split())
    return line if len(line) <= 400 else f"{line[:400]} ..."


def check_fields(given: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """`ValueError` names the first field that is not of its kind; null and missing ones pass."""
    for name, kind in kinds.items():
        value = given.get(name)
        if value is not None and not kind.holds(value):
            raise ValueError(f"config field {name} is {shown(value)}, must be {kind.must}")


def unpacked(value: Any) -> Any:
    """A field's value. transformers >= 5 writes numbers that JSON lacks as
    `{"__float__": "Infinity"}`."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        try:
            return float(value["__float__"])
        except (TypeError, ValueError):
            return value
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    return value


def merge(known: dict[str, Any], spelled: dict[str, str], own: str, name: str, value: Any) -> None:
    """Have a file's field `name` as our field `own`; `ValueError` if another spelling of it says
    something else.

    known: our fields so far. spelled: what the file calls them. Both are changed.
    """
    if own in known and known[own] != value:
        raise ValueError(
            f"config field {name} is {shown(value)}, but another spelling of the same field "
            f"({spelled[own]}) is {shown(known[own])}; they must agree"
        )
    known[own], spelled[own] = value, name


def check_unquantised(config: Mapping[str, Any], field: str = "quantization_config") -> None:
    """`ValueError` names the format of a config that says by this field that weights are quantised:
    such tensors are not what their values say."""
    given = config.get(field)
    if given is None:
        return
    about = given if isinstance(given, Mapping) else {}
    names = [about[name] for name in ("quant_method", "quant_algo") if about.get(name) is not None]
    raise ValueError(
        f"config field {field} is {shown(given)}, must be absent: the weights are quantised "
        f"({', '.join(map(shown, names)) or 'format not named'}), only float32, bfloat16 and "
        "float16 are supported"
    )


@contextmanager
def named(file: Path | str) -> Iterator[None]:
    """Put the file (or the field around it) in front of what a `ValueError` inside says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read_text(file: Path) -> str:
    """The text of a file. Raises `ValueError` if it is none, or no UTF-8, `OSError` if it cannot be
    read."""
    if not os.path.lexists(file):
        raise ValueError(f"{file} does not exist, must be a file of the checkpoint")
    if file.is_dir():
        raise ValueError(f"{file} is a directory, must be a file")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} has no UTF-8 text: {error}") from error


def read_json(
    path: str | Path, name: str, kinds: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """The object in JSON file `name` of directory `path` (or in `path` itself if it is a file), its
    fields held against `kinds`.

    Raises:
        ValueError: no such file, it does not hold a JSON object, or a field is not of its kind.
        OSError: it cannot be read.
    """
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    text = read_text(file)
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {one_line(error)}") from error
    if not isinstance(decoded, dict):
        raise ValueError(f"{file} holds a {type(decoded).__name__}, must hold a JSON object")
    with named(file):
        check_fields(decoded, kinds or {})
    return decoded


def read_optional(directory: Path, name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The same of a file that a checkpoint may lack: then it has no fields."""
    if not os.path.lexists(directory / name):
        return {}
    return read_json(directory, name, kinds)
