"""The replay layout's convolution window: the kernel against its reference, and that against inputs
kept in a list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.interpreter import elsewhere, kernels, plain, run_in_interpreter
from helpers.replay_cases import SEEDS, Rows
from helpers.tensors import DEVICE, ints, noise, same_bytes
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.conv.naive import conv1d_reference
from hybrid_runtime.kernels.conv.replay import replay_conv1d_reference, replay_conv1d_update
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@dataclass(frozen=True)
class Window:
    """One configuration of the convolution; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    window: torch.dtype = torch.bfloat16
    layout: str = "SD"
    drafts: int = 3
    tokens: int = 4
    channels: int = 40
    taps: int = 4


WINDOWS = [
    Window(),
    Window(x=torch.float32, window=torch.float32),
    Window(layout="DS"),
    Window(window=torch.float32),
    Window(drafts=0, tokens=1),
    Window(drafts=5, tokens=6),
    Window(tokens=8),
    Window(drafts=15, tokens=16),
    Window(taps=2),
    Window(taps=1),
    Window(channels=300, layout="DS"),
]


@kernels
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_replay_window(shape: Window) -> None:
    for seed in SEEDS:
        rows = Rows(shape.drafts, shape.tokens, seed)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        history, channels = shape.taps - 1, shape.channels
        length = history + shape.drafts
        conv_states = torch.full((rows.blocks, length, channels), float("nan"), device=DEVICE)
        conv_states = conv_states.to(shape.window)
        if shape.layout == "DS":
            conv_states = conv_states.mT.contiguous().mT
        for row in rows.active:
            if row.read >= 0:
                known = history + row.offset
                old = noise(generator, known, channels, dtype=shape.window)
                conv_states[rows.table[row.slot, row.read], :known] = old
        x = noise(generator, rows.tokens, channels + 8, dtype=shape.x)[:, 8:]
        weight = noise(generator, channels, shape.taps, dtype=shape.x)
        before = conv_states.clone()
        y = replay_conv1d_update(x, weight, None, conv_states, **rows.arguments)
        after = conv_states.clone()
        conv_states.copy_(before)
        want = replay_conv1d_reference(x, weight, None, conv_states, **rows.arguments)
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[shape.x]
        torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
        assert same_bytes(after, conv_states)


def test_windows_of_another_shape_are_refused_before_a_checkpoint_is_stored() -> None:
    rows = Rows(3, 4, 0)
    x = torch.ones(rows.tokens, 6, device=DEVICE)
    for bad, weight in (
        (torch.zeros(rows.blocks, 6, 8, device=DEVICE), x.new_ones(6, 4)),
        (torch.zeros(rows.blocks, 6, 6, device=DEVICE), x.new_ones(6, 8)),
    ):
        with pytest.raises(ValueError, match="conv_states is"):
            replay_conv1d_update(x, weight, None, bad, **rows.arguments)
        assert not bad.any()


@plain
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_window_reference_keeps_the_last_inputs(drafts: int) -> None:
    """Against lists of all inputs: the window at every step, and every boundary's."""
    pick = torch.Generator().manual_seed(drafts)
    taps, channels, block = 4, 2, drafts + 2

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=pick))

    def cpu(*values: int) -> Tensor:
        return ints(*values).cpu()

    conv_states = torch.full((2, taps - 1 + drafts, channels), float("nan"), dtype=torch.float64)
    table, weight = (
        torch.tensor([[1, 0]], dtype=torch.int32),
        torch.rand(channels, taps, generator=pick).double(),
    )
    inputs = torch.zeros(taps - 1, channels, dtype=torch.float64)  # zeros before the first token
    fold, certain, saved = 0, 0, 0
    for _ in range(40):
        draft = below(drafts + 1)
        count = 1 + below(2)
        running = certain + fold + count
        boundary = running // block * block
        crosses = boundary > certain
        x = torch.rand(count + draft, channels, generator=pick).double()
        positions = ReplayPositions(
            read_column=cpu(0 if certain else -1), offset=cpu(fold), pending=cpu(fold),
            cursor=cpu(0), write_column=cpu(0), writes=cpu(int(crosses)),
            checkpoint_column=cpu(1 if crosses else -1),
            checkpoint_after=cpu(boundary - certain - fold), certain=cpu(running),
        )  # fmt: skip
        rows = ReplayRows(table, cpu(0), cpu(0, count + draft), cpu(draft), positions)
        history = inputs[: taps - 1 + certain + fold]
        y = replay_conv1d_reference(x, weight, None, conv_states, rows, drafts + 2)
        inputs = torch.cat([history, x])
        whole = StateRows(
            block_table=table * 0,
            slot=cpu(0),
            cu_seqlens=rows.cu_seqlens + cpu(0, taps - 1),
            draft=cpu(0),
            read_column=cpu(-1),
            read_offset=cpu(0),
            write_column=cpu(0),
        )
        fresh = torch.zeros(1, taps - 1, channels).double()
        want = conv1d_reference(
            inputs[certain + fold :], weight, None, fresh, whole, taps + drafts + 2
        )
        torch.testing.assert_close(y, want[taps - 1 :])
        assert torch.equal(conv_states[1, : taps - 1 + draft], inputs[running:])
        if crosses:
            saved += 1
            assert torch.equal(conv_states[0, : taps - 1], inputs[boundary : boundary + taps - 1])
        certain, fold = running, below(draft + 1)
    assert saved > 5
