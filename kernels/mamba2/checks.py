"""Checks on tensors of Mamba-2: each raises `ValueError` that names one, what it was and what it
must be."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.kernels.mamba2.records import Records


def check_ssm_shapes(x: Tensor, B: Tensor, states: Tensor) -> int:
    """Heads per group of x `[..., H, P]` and B `[..., G, N]`; raises `ValueError` where they or the
    states don't fit each other."""
    (heads, dim), (groups, state) = x.shape[-2:], B.shape[-2:]
    if heads % groups:
        raise ValueError(f"x has {heads} heads, must be a multiple of B's {groups} groups")
    if tuple(states.shape[1:]) != (heads, dim, state):
        raise ValueError(
            f"states is {tuple(states.shape)}, must be [blocks, {heads}, {dim}, {state}]"
        )
    return heads // groups


def check_records(x: Tensor, B: Tensor, states: Tensor, records: Records) -> int:
    """Check shapes of states and of a layer's records against the inputs'; heads per group.

    x: [..., H, P]. B: [..., G, N]. states: [blocks, H, P, N].

    Raises:
        ValueError: H is no multiple of G, or states or records have another shape.
    """
    heads_per_group = check_ssm_shapes(x, B, states)
    (heads, dim), (groups, state) = x.shape[-2:], B.shape[-2:]
    slots, length = records.x.shape[0], records.x.shape[2]
    own = ((heads, length, dim), (groups, length, state), (heads, length))
    for name, part, shape in zip(records._fields, records, own, strict=True):
        if length < 1 or tuple(part.shape) != (slots, *shape):
            must = ", ".join(["slots", str(shape[0]), "length", *map(str, shape[2:])])
            raise ValueError(
                f"records.{name} is {tuple(part.shape)}, must be [{must}], with the same slots and "
                "length in all"
            )
    return heads_per_group


def check_contiguous(states: Tensor, records: Records, dtype: torch.dtype) -> None:
    """Check what the kernels take for granted when they compute addresses.

    Raises:
        ValueError: a block of states or one of the records is not contiguous, or x or B of the
            records is not of the inputs' `dtype`, or their dt not fp32.
    """
    if not states[:1].is_contiguous():
        raise ValueError(f"states has strides {states.stride()}, each block must be contiguous")
    musts = (dtype, dtype, torch.float32)
    for name, part, must in zip(records._fields, records, musts, strict=True):
        if not part.is_contiguous() or part.dtype != must:
            raise ValueError(
                f"records.{name} is {part.dtype} with strides {part.stride()}, must be {must} "
                "and contiguous"
            )
