"""What a request may ask for: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
