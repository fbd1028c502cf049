"""Checks on tensors of Gated DeltaNet: each raises `ValueError` that names one, what it was and
what it must be."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.kernels.gdn.records import Records


def check_heads(k: Tensor, v: Tensor, states: Tensor) -> int:
    """Value heads per key head, of k `[..., Hk, K]` and v `[..., Hv, V]`; raises `ValueError` where
    they or the states don't fit each other."""
    (key_heads, key), (heads, value) = k.shape[-2:], v.shape[-2:]
    if heads % key_heads:
        raise ValueError(f"v has {heads} heads, must be a multiple of k's {key_heads}")
    if tuple(states.shape[1:]) != (heads, value, key):
        raise ValueError(
            f"states is {tuple(states.shape)}, must be [blocks, {heads}, {value}, {key}]"
        )
    return heads // key_heads


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> None:
    """Check a step's inputs against each other: q as k, one gate per value head, or per value head
    and key channel (KDA).

    Raises:
        ValueError: one has another shape.
    """
    tokens, heads = v.shape[:2]
    channels = (heads, k.shape[2]) if a.dim() == 3 else (heads,)
    shapes = (
        ("k", k, (tokens, *k.shape[1:])), ("q", q, tuple(k.shape)), ("a", a, (tokens, *channels)),
        ("b", b, (tokens, heads)), ("A_log", A_log, (heads,)), ("dt_bias", dt_bias, channels),
    )  # fmt: skip
    for name, given, must in shapes:
        if tuple(given.shape) != must:
            raise ValueError(f"{name} is {tuple(given.shape)}, must be {list(must)}")


def check_records(k: Tensor, v: Tensor, states: Tensor, records: Records) -> int:
    """Check shapes of states and of a layer's records against the inputs'; value heads per key
    head.

    k: [..., Hk, K]. v: [..., Hv, V]. states: [blocks, Hv, V, K].

    Raises:
        ValueError: Hv is no multiple of Hk, or states or records have another shape.
    """
    group = check_heads(k, v, states)
    (key_heads, key), (heads, value) = k.shape[-2:], v.shape[-2:]
    slots, length = records.u.shape[0], records.length
    channels = (key,) if records.g.dim() == 4 else ()
    own = (
        (heads, length, value), (key_heads, length, key), (heads, length, *channels),
        (key_heads, length),
    )  # fmt: skip
    for name, part, shape in zip(records._fields, records, own, strict=True):
        if length < 1 or tuple(part.shape) != (slots, *shape):
            must = ", ".join(["slots", str(shape[0]), "length", *map(str, shape[2:])])
            raise ValueError(
                f"records.{name} is {tuple(part.shape)}, must be [{must}], with the same slots and "
                "length in all"
            )
    return group


def check_memory(states: Tensor, records: Records, dtype: torch.dtype) -> None:
    """Check what the kernels take for granted when they compute addresses.

    Raises:
        ValueError: a head's matrix in `states` is dense in neither order, or heads do not follow
            one another, or one of the records is not contiguous, or k of the records is not of
            the inputs' `dtype`, or another of them not fp32.
    """
    if not (states[:1].is_contiguous() or states[:1].mT.is_contiguous()):
        raise ValueError(
            f"states has strides {states.stride()}; each block must be contiguous as [Hv, V, K] or "
            "as [Hv, K, V]"
        )
    musts = (torch.float32, dtype, torch.float32, torch.float32)
    for name, part, must in zip(records._fields, records, musts, strict=True):
        if not part.is_contiguous() or part.dtype != must:
            raise ValueError(
                f"records.{name} is {part.dtype} with strides {part.stride()}, must be {must} "
                "and contiguous"
            )
    if records.g.dim() != 3:
        raise ValueError(
            f"records.g is {tuple(records.g.shape)}; the kernels have no decay per channel, it "
            "must be [slots, Hv, length]"
        )
