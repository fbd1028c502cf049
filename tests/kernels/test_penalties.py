"""Penalties, biases and bans, against plain torch and transformers."""

from typing import Any

import pytest
import torch
from helpers.hopper import compiled
from helpers.interpreter import kernels, plain
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from hybrid_runtime.kernels.sampling import penalties
from hybrid_runtime.kernels.sampling.penalties import Penalties, penalise, penalise_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LENGTH, V, K = 5, 1500, 40, 3
FOREVER = 2**31 - 1
Bans = list[tuple[list[int], int]]
"""Tokens of each, and the position before which it holds."""


def table(biases: list[dict[int, float]], bans: list[Bans]) -> tuple[Tensor, ...]:
    """Biases and bans of all slots, as `Penalties` has them, at one stride."""
    sizes = 6, 6, 9, 9, 40
    lines = torch.zeros(len(bans), sum(sizes) + 3, dtype=torch.int32)
    tokens, values, until, end, flat = lines[:, :-3].split(sizes, 1)
    tokens.fill_(-1)
    for slot, (some, banned) in enumerate(zip(biases, bans, strict=True)):
        tokens[slot, : len(some)] = torch.tensor(list(some))
        values.view(torch.float32)[slot, : len(some)] = torch.tensor(list(some.values()))
        until[slot, : len(banned)] = torch.tensor([position for _, position in banned])
        all_tokens = [token for ban, _ in banned for token in ban]
        end[slot] = len(all_tokens)
        end[slot, : len(banned)] = torch.tensor([len(ban) for ban, _ in banned]).cumsum(0)
        flat[slot, : len(all_tokens)] = torch.tensor(all_tokens)
    tokens, values, until, end, flat = lines.to(DEVICE)[:, :-3].split(sizes, 1)
    return tokens, values.view(torch.float32), until, end, flat


def bits(allowed: list[set[int]]) -> Tensor:
    """`Penalties.allowed` of slots that can draw these tokens."""
    words = [[sum(1 << t % 32 for t in some if t // 32 == w) for w in (0, 1)] for some in allowed]
    return torch.tensor(words, dtype=torch.int64, device=DEVICE).to(torch.int32)


def case(
    seed: int, allows: bool = False, **off: float
) -> tuple[Tensor, Penalties, Tensor, Tensor, Tensor]:
    """Arguments of `penalise`: rows in another order than slots, one of them padding; few tokens,
    so that all repeat; drafts that repeat and that were not made; bans that hold and that do not.
    `off`: penalties of all slots."""
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
    biases = []
    for at in range(SLOTS):
        some = torch.randperm(V, generator=generator)[: at + 1].tolist()
        values = torch.randn(at + 1, generator=generator).tolist()
        biases.append(dict(zip(some, values, strict=True)))
    history = torch.randint(0, V // 2, (SLOTS, LENGTH), generator=generator)
    slot = torch.tensor([4, 2, -1, 0, 1, 3])
    drafts = torch.randint(-1, V, (6, K), generator=generator)
    drafts[0] = 30
    bans: list[Bans] = [[] for _ in range(SLOTS)]
    for at in range(SLOTS):
        # What stands behind the history, or behind it and drafts; too long for the output, wrong.
        known = int(length[at])
        for n, until in ((0, known + 2), (1, FOREVER), (2, known + 1), (4, FOREVER), (9, FOREVER)):
            tail = history[at, known - n : known].tolist() if n <= known else [5] * n
            bans[at].append(([*tail, (7 * n + at) % V], until))
        row = slot.tolist().index(at)
        tail = [int(history[at, known - 1]), *drafts[row].clamp(min=0).tolist()]
        bans[at] += [
            ([*tail[:2], 11], FOREVER),
            ([*tail[1:], 12], FOREVER),
            ([39, 38, 13], FOREVER),
        ]
    biased_and_banned = bans[4][0][0][-1]
    biases[4][biased_and_banned] = 3.0
    return (
        2 * torch.randn(6, K + 1, V, generator=generator).to(DEVICE),
        Penalties(
            history.int().to(DEVICE), lines.view(torch.int32)[:, 3], lines[:, 0], lines[:, 1],
            lines[:, 2], *table(biases, bans),
            bits([set(range(at, V, at + 1)) for at in range(SLOTS)]) if allows else None,
        ),
        slot.int().to(DEVICE),
        length[slot].int().to(DEVICE),
        # Columns of a wider table, as where no row of a step has K drafts.
        torch.cat([drafts, drafts], 1).int().to(DEVICE)[:, :K],
    )  # fmt: skip


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalties_equal_the_reference(dtype: torch.dtype) -> None:
    for seed in range(2):
        logits, given, slot, position, drafts = case(seed, allows=seed == 1)
        logits = logits.to(dtype)
        got = penalise(logits, given, slot, position, drafts)
        wanted = penalise_reference(logits, given, slot, position, drafts)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got[slot >= 0], wanted[slot >= 0], rtol=1e-5, atol=1e-5)


@plain
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


@plain
@pytest.mark.parametrize("allows", [False, True])
def test_banned_is_what_would_complete_a_ban(allows: bool) -> None:
    """A plain search in the output and the drafts before a position; the prompt does not count."""
    logits, given, slot, position, drafts = case(6, allows)
    got = penalise_reference(logits, given, slot, position, drafts)
    held = set()
    for row in (0, 1, 3, 4, 5):
        at = int(slot[row])
        end = [0, *given.ban_end[at].tolist()]
        output = given.history[at, int(given.prompt_length[at]) : int(position[row])].tolist()
        for ahead in range(K + 1):
            text = [*output, *drafts[row, :ahead].tolist()]
            here = int(position[row]) + ahead
            allowed = range(at, V, at + 1) if allows else range(V)
            banned = set(range(V)) - set(allowed)
            for i, until in enumerate(given.ban_until[at].tolist()):
                *before, last = given.ban_tokens[at, end[i] : end[i + 1]].tolist() or [0]
                if here < until and text[len(text) - len(before) :] == before:
                    banned.add(last)
                    held.add((i, ahead))
            assert set((got[row, ahead] == -torch.inf).nonzero()[:, 0].tolist()) == banned
    assert {i for i, _ in held} == {0, 1, 2, 3, 4, 5, 6}
    assert {(0, 1), (5, 1), (6, 3)} <= held
    assert not {(0, 2), (2, 1)} & held


@plain
def test_repetition_equals_that_of_transformers() -> None:
    logits, given, slot, position, drafts = case(4, presence=0, frequency=0)
    given = given._replace(bias=0 * given.bias, ban_until=0 * given.ban_until)
    got = penalise_reference(logits, given, slot, position, drafts)
    for row in (0, 1, 3, 4, 5):
        at = int(slot[row])
        processor = RepetitionPenaltyLogitsProcessor(float(given.repetition[at]))
        tokens = given.history[at, : int(position[row])].long()
        if len(tokens):
            wanted = processor(tokens[None], logits[row, :1])  # type: ignore[arg-type]
            torch.testing.assert_close(got[row, 0], wanted[0])


@plain
def test_presence_and_frequency_count_the_output_alone() -> None:
    logits, given, slot, position, drafts = case(5, repetition=1)
    given = given._replace(bias=0 * given.bias, ban_until=0 * given.ban_until)
    got = penalise_reference(logits, given, slot, position, drafts)
    for row in (0, 1, 3, 4, 5):
        at = int(slot[row])
        output = given.history[at, int(given.prompt_length[at]) : int(position[row])]
        count = torch.bincount(output.long(), minlength=V).to(DEVICE)
        penalty = count * given.frequency[at] + (count > 0) * given.presence[at]
        torch.testing.assert_close(got[row, 0], logits[row, 0] - penalty)


@plain
@pytest.mark.parametrize("name", ["_count_kernel", "_penalise_kernel", "_bias_kernel"])
def test_compiles_for_hopper(name: str) -> None:
    kernel = getattr(penalties, name)
    tile = {"_count_kernel": penalties.TOKENS, "_penalise_kernel": penalties.TILE}
    everything = {
        "V": 131072, "WIDTH": 4, "TILE": tile.get(name, 512), "ALLOWS": True,
        "BIASES": 300, "BIAS_TILE": 512, "BANS": 384, "BAN_TILE": 512,
    }  # fmt: skip
    constants = {n: everything[n] for n in kernel.arg_names if n in everything}
    types: dict[str, Any] = {n: "i32" for n in kernel.arg_names if "stride" in n}
    integers = "history", "prompt_length", "slot", "position", "words", "drafts", "allowed"
    tables = "bias_tokens", "ban_until", "ban_end", "ban_tokens"
    types |= dict.fromkeys((*integers, *tables), "*i32")
    types |= dict.fromkeys(("repetition", "presence", "frequency", "bias", "out"), "*fp32")
    aligned = [n for n in ("logits", "logits_stride", "words", "out") if n in kernel.arg_names]
    code = compiled(kernel, constants, aligned, {"num_warps": 4}, **types | {"logits": "*bf16"})
    assert code.asm["cubin"]
    if name == "_penalise_kernel":
        assert "st.global.v4" in code.asm["ptx"]
