"""What an option may be: each check names the option, its value and what it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Literal, get_args

import torch

from hybrid_runtime.kernels.linear.quantize import E4M3

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
"""A dtype by name; "auto" is the checkpoint's own."""
DTYPES = {name: getattr(torch, name) for name in get_args(DTypeName) if name != "auto"}
KVDTypeName = Literal[DTypeName, "fp8"]
"""A dtype of keys and values: "fp8" is e4m3."""
KV_DTYPES = DTYPES | {"fp8": E4M3}
_CAPABILITY = (8, 9)


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that are not among `known`, with the one that was probably meant."""
    known = list(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.0)[0]
            raise ValueError(
                f"{what} {name} is not known; the nearest is {near} (all: {', '.join(known)})"
            )


def check_choice(name: str, value: object, known: Iterable[object]) -> None:
    """Refuse what is not among `known`; True is not 1."""
    known = tuple(known)
    if not any(type(value) is type(choice) and value == choice for choice in known):
        shown = ", ".join(map(repr, known))
        raise ValueError(f"{name} is {value!r}; it must be one of {shown}")


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse what is not an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r}; it must be True or False")


def check_number(name: str, value: object) -> None:
    """Refuse what is no number."""
    if type(value) not in (int, float):
        raise ValueError(f"{name} is {value!r}; it must be a number")


def check_blocks(name: str, value: object) -> None:
    """Refuse what is not (KV blocks, state blocks), each at least 1."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; it must be (KV blocks, state blocks)")
    for size in value:
        check_integer(f"a size in {name}", size, 1)


def check_dtype(name: str, value: object, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
    """Refuse what is neither "auto" nor a dtype of `dtypes` or its name."""
    if not (isinstance(value, torch.dtype) and value in dtypes.values()):
        known = ("auto", *dtypes)
        if not isinstance(value, str) or value not in known:
            raise ValueError(
                f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}, or such a "
                "torch.dtype"
            )


def resolve_dtype(
    name: str,
    value: torch.dtype | str,
    own: torch.dtype,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
) -> torch.dtype:
    """The dtype that `value` means where "auto" is `own`."""
    check_dtype(name, value, dtypes)
    if isinstance(value, torch.dtype):
        return value
    return own if value == "auto" else dtypes[value]


def check_fp8(what: str, device: torch.device) -> None:
    """Refuse GPUs without numbers in 8 bits. what: needs them."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY or torch.version.hip is not None:
        raise ValueError(
            f"{what} in FP8 need an NVIDIA GPU of compute capability {_CAPABILITY[0]}."
            f"{_CAPABILITY[1]} or more, device {device} has {found[0]}.{found[1]}"
        )
