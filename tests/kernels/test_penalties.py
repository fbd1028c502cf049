"""Penalties and biases, against plain torch and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hopper import compiled
from helpers.interpreter import elsewhere, kernels, run_in_interpreter
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.sampling import penalties
from hybrid_runtime.kernels.sampling.penalties import Penalties, penalise, penalise_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LENGTH, V, K = 5, 1500, 40, 3


def case(seed: int, **off: float) -> tuple[Tensor, Penalties, Tensor, Tensor, Tensor]:
    """Arguments of `penalise`: rows in another order than slots, one of them padding; few tokens,
    so that all repeat; drafts that repeat and that were not made. `off`: penalties of all slots."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.tensor([0, 3, 1100, 20, 7])
    length = prompt + torch.tensor([5, 30, 300, 1, 0])
    # As in the sequences' lines, at a stride.
    lines = torch.rand(SLOTS, 4, generator=generator) + 0.5
    lines[3, :3] = torch.tensor([1.0, 0.0, 0.0])  # only biased
    for column, name in enumerate(("repetition", "presence", "frequency")):
        if name in off:
            lines[:, column] = off[name]
    lines.view(torch.int32)[:, 3] = prompt
    lines = lines.to(DEVICE)
    bias_tokens = torch.stack([torch.randperm(V, generator=generator)[:6] for _ in range(SLOTS)])
    bias_tokens[torch.rand(SLOTS, 6, generator=generator) < 0.4] = -1
    bias = torch.randn(SLOTS, 6, generator=generator)
    history = torch.randint(0, V // 2, (SLOTS, LENGTH), generator=generator)
    slot = torch.tensor([4, 2, -1, 0, 1, 3])
    drafts = torch.randint(-1, V, (6, K), generator=generator)
    drafts[0] = 30
    return (
        2 * torch.randn(6, K + 1, V, generator=generator).to(DEVICE),
        Penalties(
            history.int().to(DEVICE), lines.view(torch.int32)[:, 3], lines[:, 0], lines[:, 1],
            lines[:, 2], bias_tokens.int().to(DEVICE), bias.to(DEVICE),
        ),
        slot.int().to(DEVICE),
        length[slot].int().to(DEVICE),
        drafts.int().to(DEVICE),
    )  # fmt: skip


@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalties_equal_the_reference(dtype: torch.dtype) -> None:
    for seed in range(2):
        logits, given, slot, position, drafts = case(seed)
        logits = logits.to(dtype)
        got = penalise(logits, given, slot, position, drafts)
        wanted = penalise_reference(logits, given, slot, position, drafts)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got[slot >= 0], wanted[slot >= 0], rtol=1e-5, atol=1e-5)


def test_a_position_sees_the_drafts_before_it() -> None:
    """As if those had been decoded one by one."""
    logits, given, slot, position, drafts = case(3)
    got = penalise_reference(logits, given, slot, position, drafts.clamp(min=0))
    for row in (0, 1, 3, 4, 5):
        history = given.history.clone()
        for ahead in range(K + 1):
            at = int(position[row]) + ahead
            alone = penalise_reference(
                logits[row : row + 1, ahead : ahead + 1], given._replace(history=history),
                slot[row : row + 1], position[row : row + 1] + ahead, drafts[:1, :0],
            )  # fmt: skip
            torch.testing.assert_close(alone[0, 0], got[row, ahead])
            if ahead < K:
                history[slot[row], at] = drafts[row, ahead].clamp(min=0)


def test_repetition_equals_that_of_transformers() -> None:
    logits, given, slot, position, drafts = case(4, presence=0, frequency=0)
    given = given._replace(bias=0 * given.bias)
    got = penalise_reference(logits, given, slot, position, drafts)
    for row in (0, 1, 3, 4, 5):
        at = int(slot[row])
        processor = RepetitionPenaltyLogitsProcessor(float(given.repetition[at]))
        tokens = given.history[at, : int(position[row])].long()
        if len(tokens):
            wanted = processor(tokens[None], logits[row, :1])  # type: ignore[arg-type]
            torch.testing.assert_close(got[row, 0], wanted[0])


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits, given, slot, position, drafts = case(5, repetition=1)
    given = given._replace(bias=0 * given.bias)
    got = penalise_reference(logits, given, slot, position, drafts)
    for row in (0, 1, 3, 4, 5):
        at = int(slot[row])
        output = given.history[at, int(given.prompt_length[at]) : int(position[row])]
        count = torch.bincount(output.long(), minlength=V).to(DEVICE)
        penalty = count * given.frequency[at] + (count > 0) * given.presence[at]
        torch.testing.assert_close(got[row, 0], logits[row, 0] - penalty)


@pytest.mark.parametrize("name", ["_count_kernel", "_penalise_kernel", "_bias_kernel"])
def test_compiles_for_hopper(name: str) -> None:
    kernel = getattr(penalties, name)
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter is on")
    tile = {"_count_kernel": penalties.TOKENS, "_penalise_kernel": penalties.TILE}
    everything = {"V": 131072, "WIDTH": 4, "BIASES": 300, "TILE": tile.get(name, 512)}
    constants = {n: everything[n] for n in kernel.arg_names if n in everything}
    types: dict[str, Any] = {n: "i32" for n in kernel.arg_names if "stride" in n}
    types |= dict.fromkeys(
        ("history", "prompt_length", "slot", "position", "words", "drafts", "bias_tokens"), "*i32"
    )
    types |= dict.fromkeys(("repetition", "presence", "frequency", "bias", "out"), "*fp32")
    aligned = [n for n in ("logits", "logits_stride", "words", "out") if n in kernel.arg_names]
    code = compiled(kernel, constants, aligned, {"num_warps": 4}, **types | {"logits": "*bf16"})
    assert code.asm["cubin"]
    if name == "_penalise_kernel":
        assert "st.global.v4" in code.asm["ptx"]
