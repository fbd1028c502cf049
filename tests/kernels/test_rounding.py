"""Stochastic rounding of states: keyed by request, layer, position, element, and nothing else."""

from typing import Any

import pytest
import torch
from helpers.marks import slow
from helpers.small_engine import (
    VOCABULARY,
    engine,
    hf,
    tokenizer,
)
from tokenizers import Tokenizer
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.request import Request
from hybrid_runtime.engine.state_blocks import RoleBlocks
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

__all__ = ["hf", "tokenizer"]  # fixtures

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, GROUPS, STATE, DRAFTS, SLOTS = 4, 8, 2, 16, 3, 5


def update(tenants: list[int], slots: list[int], dtype: torch.dtype) -> Tensor:
    """States `[len(tenants), H, P, N]` of these requests, in these slots, after one step in which
    each folds two drafts and stores a checkpoint; a request's values are the same in any slot."""

    def values(tenant: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(tenant)
        return torch.randn(shape, generator=generator).to(DEVICE)

    def by_slot(shape: tuple[int, ...]) -> Tensor:
        out = torch.full((SLOTS, *shape), float("nan"), device=DEVICE)
        for tenant, slot in zip(tenants, slots, strict=True):
            out[slot] = values(tenant, *shape).abs()
        return out

    def ints(*many: int) -> Tensor:
        return torch.tensor(many, dtype=torch.int32, device=DEVICE)

    def tokens(*shape: int) -> Tensor:
        return torch.cat([values(t, DRAFTS + 1, *shape) for t in tenants])

    states = torch.full((2 * SLOTS, HEADS, DIM, STATE), float("nan"), device=DEVICE).to(dtype)
    seed = ints(*range(900, 900 + SLOTS))
    for tenant, slot in zip(tenants, slots, strict=True):
        states[slot] = values(tenant, HEADS, DIM, STATE).to(dtype)
        seed[slot] = 17 * tenant - 40
    n = len(tenants)
    ring = ring_length(DRAFTS, 15)
    shapes = ((HEADS, ring, DIM), (GROUPS, ring, STATE), (HEADS, ring))
    every = torch.ones(n, dtype=torch.int32, device=DEVICE)
    vectors = values(99, 3, HEADS)
    replay_update(
        x=tokens(HEADS, DIM),
        dt=tokens(HEADS),
        A_log=vectors[0],
        B=tokens(GROUPS, STATE),
        C=tokens(GROUPS, STATE),
        D=vectors[1],
        dt_bias=vectors[2],
        states=states,
        records=Records(*(by_slot(shape) for shape in shapes)),
        rows=ReplayRows(
            block_table=ints(*range(2 * SLOTS)).view(2, SLOTS).T.contiguous(),
            slot=ints(*slots),
            cu_seqlens=ints(*range(0, 4 * n + 1, 4)),
            draft=every * DRAFTS,
            positions=ReplayPositions(
                read_column=every * 0,
                offset=every * 2,
                pending=every * 5,
                cursor=every * 17,
                write_column=every * 0,
                writes=every,
                checkpoint_column=every,
                checkpoint_after=every * -1,
                certain=ints(*(100 + t for t in tenants)),
            ),
        ),
        max_scheduled=DRAFTS + 1,
        rounding=Rounding(seed, layer=6),
    )
    at = torch.tensor(slots, device=DEVICE)
    return torch.stack([states[at], states[SLOTS + at]], 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slot_row_and_batch_change_no_byte(dtype: torch.dtype) -> None:
    alone = [update([tenant], [0], dtype)[0] for tenant in range(3)]
    assert all(state.isfinite().all() for state in alone)
    for tenants, slots in (([0, 1, 2], [4, 0, 2]), ([2, 0], [1, 3])):
        for tenant, state in zip(tenants, update(tenants, slots, dtype), strict=True):
            assert torch.equal(state, alone[tenant])


MTP: dict[str, Any] = {
    "drafter": "mtp",
    "num_speculative_tokens": 3,
    "ssm_dtype": torch.float16,
    "stochastic_rounding": True,
}


def live_states(runs: Engine, request: Request) -> Tensor:
    """What its Mamba layers hold, `[layers, H, P, N]`."""
    blocks = runs.scheduler.state
    assert isinstance(blocks, RoleBlocks)
    block = int(blocks.device_table[request.slot, RoleBlocks.LIVE])
    return torch.stack([ssm[block] for _, ssm in runs.runner.caches.states.values()])


def serve(runs: Engine, order: list[int], seeds: list[int]) -> dict[int, tuple[list[int], Tensor]]:
    """Texts of these prompts, and their states before they end."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, VOCABULARY, (4, 21), generator=generator).tolist()
    requests = {
        n: runs.submit(prompts[n], SamplingParams(max_tokens=24, temperature=0.7, seed=seeds[n]))
        for n in order
    }
    states: dict[int, Tensor] = {}
    while not runs.idle:
        runs.step()
        for n, request in requests.items():
            if len(request.output) >= 10 and n not in states:
                states[n] = live_states(runs, request)
    return {n: (request.output, states[n]) for n, request in requests.items()}


@pytest.mark.parametrize("ahead", [*slow(0), 1])
def test_a_request_keeps_its_text_wherever_it_runs(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, ahead: int
) -> None:
    """States are compared where batches are of one size: products of other sizes sum otherwise.
    Without a ring every step rounds them."""
    options = MTP | {"steps_ahead": ahead, "prefix_caching": False, "ring_tokens": 0}
    seeds = [5, 6, 7, 8]
    first = serve(engine(hf, tokenizer, **options), [0, 1, 2, 3], seeds)
    moved = serve(engine(hf, tokenizer, **options), [2, 3, 1, 0], seeds)
    for n in range(4):
        assert moved[n][0] == first[n][0]
        assert (moved[n][1] == first[n][1]).float().mean() > 0.99
    alone = serve(engine(hf, tokenizer, **options), [3], seeds)
    assert alone[3][0] == first[3][0]
    nearest = serve(engine(hf, tokenizer, **options | {"stochastic_rounding": False}), [0], seeds)
    assert 0.2 < (nearest[0][1] == first[0][1]).float().mean() < 0.9


def test_seeds_reach_the_device_with_the_request(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = engine(hf, tokenizer, **MTP)
    requests = [runs.submit([n + 1], SamplingParams(seed=2**40 + 3 + n)) for n in range(3)]
    runs.step()
    assert [int(runs.sequences.rounding_seed[r.slot]) for r in requests] == [3, 4, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"ssm_dtype": torch.float32},
        {"state_layout": "columns"},
        {"drafter": None, "num_speculative_tokens": 0, "state_layout": "columns"},
    ],
    ids=str,
)
def test_what_cannot_be_stochastically_rounded_is_refused(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="stochastic_rounding is True with ssm_dtype="):
        engine(hf, tokenizer, **MTP | options)
