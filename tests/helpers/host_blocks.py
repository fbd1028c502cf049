"""Device blocks with random bytes, host tiers over them, and copies that fail."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from helpers.toy_recurrences import HashRule
from torch import Tensor

from hybrid_runtime.engine.offload.blocks import Usage
from hybrid_runtime.engine.offload.memcpy import Copies, CopyPath, paths
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.state import StateLayout

CPU = torch.device("cpu")
DEVICE_BLOCKS, HOST_BLOCKS = 9, 6


def random_(tensor: Tensor) -> Tensor:
    return tensor.copy_(torch.randint(-99, 99, tensor.shape, device=tensor.device))


def cache(
    conv_layout: Literal["SD", "DS"] = "SD", device: str = "cpu", channels: int = 10
) -> dict[str, list[Tensor]]:
    """Keys and values of two layers, states of three as kernels see them, all random.

    10 channels leave a gap behind each window of 5 positions, 16 leave none.
    """
    rule = HashRule(channels, (2, 3, 4), torch.float16, conv_layout=conv_layout)
    layout = StateLayout(rule.recurrence, 2, 16)
    kv = [torch.empty(DEVICE_BLOCKS, 16, 2, 4, device=device) for _ in range(4)]
    states = []
    for _ in range(3):
        windows, ssm = layout.allocate(DEVICE_BLOCKS, device)
        states += [layout.positions_first(windows), ssm]
    return {"kv": [random_(t) for t in kv], "state": [random_(t) for t in states]}


def tier_of(groups: dict[str, list[Tensor]], path: CopyPath | None = None) -> HostTier:
    return HostTier(groups, dict.fromkeys(groups, HOST_BLOCKS), path)


def bytes_of(tensors: list[Tensor], block: int) -> bytes:
    return b"".join(t[block].contiguous().cpu().numpy().tobytes() for t in tensors)


def store(tier: HostTier) -> None:
    tier.store("kv", [1, 2, 4])


def load(tier: HostTier) -> None:
    tier.load("kv", [0, 2], [6, 8])


BROKEN: dict[str, Callable[[Copies], int]] = {
    "before the first copy": lambda copies: 0,
    "half way": lambda copies: len(copies.size) // 2,
    "behind the last copy": lambda copies: len(copies.size),
}


def breaks(name: str, device: torch.device) -> tuple[CopyPath, list[int]]:
    """The device's best path, and a list: as long as it is not empty, the path fails."""
    armed: list[int] = []
    best = paths(device)[0]

    def submit(copies: Copies, stream: int) -> None:
        if not armed:
            return best.submit(copies, stream)
        best.submit(Copies(*(a[: BROKEN[name](copies)] for a in copies)), stream)
        raise RuntimeError("injected")

    return CopyPath(name, submit), armed


def check_failures(name: str, device: torch.device, move: Callable[[HostTier], None]) -> None:
    groups = cache(device=str(device))
    path, armed = breaks(name, device)
    tier = tier_of(groups, path)
    ticket = tier.store("kv", [0, 3, 5])
    assert ticket is not None
    wanted = [bytes_of(groups["kv"], b) for b in (0, 3, 5)]
    stats = str(tier.stats)
    armed.append(1)
    for _ in range(4):  # more often than there are blocks to lose
        with pytest.raises(RuntimeError, match="injected"):
            move(tier)
    armed.clear()
    if device.type == "cuda":
        tier.usage("kv")  # sets an event behind a batch that failed before its own
        torch.cuda.synchronize()
    assert tier.usage("kv") == Usage(3, 3, 0)
    assert str(tier.stats) == stats
    others = tier.store("kv", [1, 2, 4])
    assert others is not None
    assert sorted([*ticket.blocks, *others.blocks]) == list(range(HOST_BLOCKS))
    tier.load("kv", ticket.blocks, [6, 7, 8])
    assert [bytes_of(groups["kv"], b) for b in (6, 7, 8)] == wanted
    tier.free("kv", ticket.blocks)
    with pytest.raises(ValueError, match="is free"):
        tier.load("kv", ticket.blocks, [0, 1, 2])
