"""What a request may ask for: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_runtime.engine.tokenize import check_text
from hybrid_runtime.specdecode.sampling import SamplingParams


def check_service(tenant: object, deadline: Any) -> None:
    """`ValueError` for what cannot be the tenant or the deadline of a request."""
    if not isinstance(tenant, str):
        raise ValueError(f"tenant is {tenant!r}; it must be a str")
    check_text("tenant", tenant)
    if deadline is None:
        return
    number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if not (number and deadline >= 0):  # which nan is not
        raise ValueError(
            f"deadline is {deadline!r}; it must be None or seconds from now, at least 0"
        )


def check_positions(positions: Any, length: int) -> tuple[int, ...]:
    """Positions of checkpoints in a prompt of so many tokens, ascending; `ValueError` for what
    cannot be that."""
    if isinstance(positions, str | bytes | Mapping) or not isinstance(positions, Iterable):
        raise ValueError(f"checkpoints_at is {positions!r}; it must be a list of positions")
    found = list(positions)
    for at in found:
        whole = isinstance(at, int | np.integer) and not isinstance(at, bool)
        if not (whole and 1 <= at <= length):
            raise ValueError(
                f"checkpoints_at has {at!r}; it must hold token positions of the prompt, in "
                f"1..{length}"
            )
    return tuple(sorted({int(at) for at in found}))


def each_positions(
    positions: Sequence[Sequence[int]] | None, count: int
) -> Sequence[Sequence[int]]:
    """Those of each of `count` prompts."""
    if positions is None:
        return [()] * count
    if not isinstance(positions, list | tuple) or len(positions) != count:
        raise ValueError(
            f"checkpoints_at is {positions!r}; it must be None or a list of {count} lists, one per "
            "prompt"
        )
    return positions


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """`ValueError` for parameters that no request of the engine can have."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r}; it must be SamplingParams")
    params.check_vocabulary(vocabulary)
    if params.n != 1:
        raise ValueError(f"n is {params.n}, must be 1: submit each of `params.each()`")


def each_params(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise ValueError(f"params is {params!r}; it must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(f"params has {len(params)} entries; it must have {count}")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params has {one!r}; all must be SamplingParams")
    return params
