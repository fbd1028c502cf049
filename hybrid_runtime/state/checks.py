"""Checks on what a runner hands over, and the address table of the tensors that it binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state.layout import StateLayout

Strategy = Literal["blocking", "defer", "always", "auto"]


def check_options(
    layout: StateLayout,
    max_requests: int,
    num_speculative_tokens: int,
    strategy: str,
    in_place: bool,
    steps_in_flight: int,
    readback: bool,
) -> None:
    """Raise `ValueError` for a manager that cannot be."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy is {strategy!r}; it must be one of {get_args(Strategy)}")
    if max_requests < 1:
        raise ValueError(f"max_requests is {max_requests}; it must be at least 1")
    if num_speculative_tokens != layout.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens}; it must be the layout's "
            f"({layout.num_speculative_tokens}), which sizes the convolution window"
        )
    if in_place and layout.replays:
        raise ValueError(
            "in_place is True; it must be False in the replay layout, whose kernels read and write "
            "separate columns"
        )
    if not 0 <= steps_in_flight <= 8:
        raise ValueError(f"steps_in_flight is {steps_in_flight}; it must be in 0..8")
    if strategy in ("blocking", "defer") and not readback:
        raise ValueError(f"readback is False; strategy {strategy!r} decides on counts it reads")


def bind_states(
    layout: StateLayout,
    max_requests: int,
    device: torch.device,
    states: Mapping[int, tuple[Tensor, Tensor]],
    tables: Sequence[Tensor],
    groups: Mapping[int, int] | None,
) -> StateTable:
    """`StateTable` over all layers; `ValueError` names whatever does not fit the layout."""
    if not states:
        raise ValueError("states is empty; it must hold one (window, ssm) pair per Mamba layer")
    for i, table in enumerate(tables):
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] < max_requests:
            raise ValueError(
                f"block_tables[{i}] is {table.dtype} {tuple(table.shape)}; it must be int32 "
                f"[>= {max_requests}, columns], one row per slot"
            )
        if table.stride(1) != 1:
            raise ValueError(f"block_tables[{i}] has strides {table.stride()}; rows must be dense")
        _check_device(f"block_tables[{i}]", table, device)
    windows, ssm, chosen = [], [], []
    for layer, pair in states.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = f"a {type(pair).__name__}"
            raise ValueError(f"states[{layer}] is {got}; it must be a (window, ssm) pair")
        for component, tensor in zip(layout.components, pair, strict=True):
            name = f"states[{layer}].{component.name}"
            _check_device(name, tensor, device)
            if tensor.dtype != component.dtype or tuple(tensor.shape[1:]) != component.shape:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be "
                    f"{component.dtype} [blocks, {', '.join(map(str, component.shape))}]"
                )
            if not tensor[0].is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; blocks must be dense")
        group = 0 if groups is None else groups.get(layer, -1)
        if not 0 <= group < len(tables):
            raise ValueError(f"groups[{layer}] is {group}; it must be in 0..{len(tables) - 1}")
        windows.append(layout.positions_first(pair[0]))
        ssm.append(pair[1])
        chosen.append(tables[group])
    return StateTable.build(windows, ssm, chosen, layout.conv_width - 1)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device.type != device.type:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")


def check_counts(counts: Tensor, rows: int, device: torch.device) -> None:
    """Accepted counts must be contiguous int32 `[>= rows]` on the manager's device."""
    fits = counts.dtype == torch.int32 and counts.dim() == 1 and counts.shape[0] >= rows
    if not fits or not counts.is_contiguous() or counts.device.type != device.type:
        raise ValueError(
            f"num_accepted is {counts.dtype} {tuple(counts.shape)} on {counts.device}; "
            f"it must be contiguous int32 [>= {rows}] on {device}"
        )
