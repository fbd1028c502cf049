"""Logits of random models against transformers, prefill and T-token continuation, on the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.oracle import (
    hf_model,
    make_caches,
    our_model,
    random_config,
    row_batch,
    run_prompt,
    state_positions,
)
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.models.forward_batch import RowBatch
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

TOLERANCE = 1e-5
MARGIN = 1e-4

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("M", {}),
    "mamba-one-group": ("MM", {"n_groups": 1, "ssm_state_size": 16, "conv_kernel": 2}),
    "mamba-biases": ("MM", {"use_bias": True, "use_conv_bias": False, "n_groups": 4}),
    "attention": ("*", {}),
    "attention-one-kv": ("**", {"num_key_value_heads": 1, "head_dim": 16}),
    "mlp": ("-", {"mlp_bias": True}),
    "moe": ("E", {}),
    "moe-latent": ("EE", {"moe_latent_size": 16, "mlp_bias": True}),
    "moe-groups": ("E", {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}),
    "moe-unnormalised": ("EE", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "hybrid-mlp": ("M-M*M-", {}),
    "hybrid-moe": ("MEM*ME", {"moe_latent_size": 16, "n_group": 2, "topk_group": 1}),
    "hybrid-all": ("M-M*ME", {}),
}


def router_margin(hf: NemotronHForCausalLM, tokens: Tensor) -> tuple[Tensor, float]:
    """transformers' logits [T, vocab], and the smallest gap that a routing decision hung on."""
    gaps = [float("inf")]

    def observe(gate: Any, inputs: tuple[Tensor, ...], _: Any) -> None:
        scores = (inputs[0].flatten(0, -2) @ gate.weight.T).sigmoid()
        scores = (scores + gate.e_score_correction_bias).unflatten(-1, (gate.num_group, -1))
        if gate.topk_group < gate.num_group:
            best = scores.topk(2, dim=-1)[0].sum(-1).sort(-1, descending=True)
            ordered = best.values
            gaps.append(
                float((ordered[:, gate.topk_group - 1] - ordered[:, gate.topk_group]).min())
            )
            kept = best.indices[:, : gate.topk_group]
            scores = scores.gather(1, kept[..., None].expand(-1, -1, scores.shape[-1]))
        ordered = scores.flatten(1).sort(-1, descending=True).values
        if gate.top_k < ordered.shape[1]:
            gaps.append(float((ordered[:, gate.top_k - 1] - ordered[:, gate.top_k]).min()))

    gates = [layer.mixer.gate for layer in hf.model.layers if hasattr(layer.mixer, "gate")]
    hooks = [gate.register_forward_hook(observe) for gate in gates]
    logits = hf(tokens[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, min(gaps)


def clear_cases(
    case: str, length: int, count: int = 1
) -> list[tuple[NemotronHForCausalLM, NemotronH, Tensor, Tensor]]:
    """Random (theirs, ours, tokens, logits) in which no routing decision is closer than MARGIN."""
    pattern, changes = CASES[case]
    config = random_config(pattern, **changes)
    found = []
    for seed in range(40):
        hf = hf_model(config, seed)
        tokens = torch.randint(0, config["vocab_size"], (length,))
        logits, margin = router_margin(hf, tokens)
        if margin >= MARGIN:
            found.append((hf, our_model(config, hf), tokens, logits))
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} of 40 seeds have a routing margin of {MARGIN}")


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def random_cuts(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    cuts: list[int] = []
    while sum(cuts) < length:
        cuts.append(int(torch.randint(1, max(length // 3, 1) + 1, (), generator=generator)))
    cuts[-1] -= sum(cuts) - length
    return cuts


@pytest.mark.parametrize("length", [1, 2, 17, 97, 300])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_prefill_equals_transformers(case: str, length: int) -> None:
    for _, ours, tokens, want in clear_cases(case, length, count=3):
        for chunks, update in (
            ([length], False),
            (random_cuts(length, length), False),
            (random_cuts(length, length + 1), True),
        ):
            caches = make_caches(ours, slots=2, block_size=16, max_tokens=length)
            hidden = run_prompt(ours, tokens, chunks, caches, 16, slot=1, update=update)
            assert distance(ours.logits(hidden), want) < TOLERANCE, (chunks, update)


@torch.inference_mode()
def test_tied_embeddings() -> None:
    config = random_config("M*", tie_word_embeddings=True)
    hf = hf_model(config, 0)
    hf.lm_head.weight.data.copy_(hf.model.embeddings.weight)
    ours = our_model(config, hf)
    assert ours.lm_head is None
    tokens = torch.randint(0, 96, (20,))
    caches = make_caches(ours, slots=1, block_size=16, max_tokens=20)
    hidden = run_prompt(ours, tokens, [20], caches, 16)
    assert distance(ours.logits(hidden), hf(tokens[None], use_cache=False).logits[0]) < TOLERANCE


@pytest.mark.parametrize("case", ["mamba", "attention", "hybrid-mlp", "hybrid-moe", "hybrid-all"])
@pytest.mark.parametrize(("prompt", "draft"), [(6, 3), (5, 1), (13, 3), (15, 2), (31, 5), (4, 4)])
@torch.inference_mode()
def test_continuation_with_drafts(case: str, prompt: int, draft: int) -> None:
    """A verify step gives every position's logits; after any acceptance the next step is exact."""
    block_size, after, checked = 8, 4, 0
    for hf, ours, tokens, want in clear_cases(case, prompt + 1 + draft):
        n, s = prompt, 1 + draft
        for accepted in range(draft + 1):
            caches = make_caches(ours, 3, block_size, 64, num_draft=draft, seed=accepted)
            run_prompt(ours, tokens[:n], random_cuts(n, draft), caches, block_size, slot=2)
            read, write = -(-n // block_size) - 1, -(-(n + s) // block_size) - 1
            hidden = ours(
                tokens[n:],
                row_batch([(2, n, s)]),
                state_positions([(draft, read, 0, write)]),
                caches,
            )
            assert distance(ours.logits(hidden), want[n:]) < TOLERANCE

            certain = n + 1 + accepted
            other = torch.randint(0, 96, (after,))
            whole = torch.cat([tokens[:certain], other])
            logits, margin = router_margin(hf, whole)
            if margin < MARGIN:
                continue
            column = -(-(certain + after) // block_size) - 1
            hidden = ours(
                other,
                row_batch([(2, certain, after)]),
                state_positions([(min(after - 1, draft), write, accepted, column)]),
                caches,
            )
            assert distance(ours.logits(hidden), logits[certain:]) < TOLERANCE
            checked += 1
    assert checked >= draft, "too many continuations had a close routing decision"


@pytest.mark.parametrize("case", ["hybrid-mlp", "hybrid-all"])
@torch.inference_mode()
def test_mixed_batch(case: str) -> None:
    """Verify rows, a decode row, padded rows, a first and a later prefill chunk in one pass."""
    block_size, draft = 16, 3
    # (slot, computed before, scheduled, draft); update rows first.
    rows: Sequence[tuple[int, int, int, int]] = [
        (4, 30, 4, 3),
        (0, 17, 1, 0),
        (-1, 5, 2, 0),
        (2, 8, 3, 2),
        (1, 0, 37, 0),
        (5, 16, 21, 0),
        (-1, 0, 6, 0),
    ]
    config = random_config(*[CASES[case][0]], **CASES[case][1])
    checked = 0
    for seed in range(12):
        hf = hf_model(config, seed)
        ours = our_model(config, hf)
        caches = make_caches(ours, 6, block_size, 64, num_draft=draft)
        step, positions = [], []
        wanted: list[Tensor | None] = []
        for slot, n, s, d in rows:
            tokens = torch.randint(0, 96, (n + s,))
            step.append(tokens[n:])
            if slot < 0:
                positions.append((d, -1, 0, -1))
                wanted.append(None)
                continue
            if n:
                run_prompt(ours, tokens[:n], [n], caches, block_size, slot=slot)
            positions.append((d, -(-n // block_size) - 1, 0, -(-(n + s) // block_size) - 1))
            logits, margin = router_margin(hf, tokens)
            wanted.append(logits[n:] if margin >= MARGIN else None)
        batch = row_batch([row[:3] for row in rows], num_update_rows=4)
        hidden = ours(torch.cat(step), batch, state_positions(positions), caches)
        logits = ours.logits(hidden)
        for i, want in enumerate(wanted):
            if want is not None:
                part = logits[int(batch.cu_seqlens[i]) : int(batch.cu_seqlens[i + 1])]
                assert distance(part, want) < TOLERANCE
                checked += 1
    assert checked >= 30


@torch.inference_mode()
def test_padded_rows_leave_every_cache_byte() -> None:
    config = random_config("M*")
    ours = our_model(config, hf_model(config, 0))
    caches = make_caches(ours, 2, 16, 32)
    run_prompt(ours, torch.arange(20), [20], caches, 16)
    memory = [t for pair in (*caches.kv.values(), *caches.states.values()) for t in pair]
    before = [t.clone().view(torch.uint8) for t in memory]
    positions = state_positions([(0, -1, 0, -1), (0, -1, 0, -1)])
    ours(torch.arange(3), row_batch([(-1, 20, 1), (-1, 0, 2)]), positions, caches)
    for t, old in zip(memory, before, strict=True):
        assert torch.equal(t.view(torch.uint8), old)


@torch.inference_mode()
def test_fp64_is_kept_and_bfloat16_is_close() -> None:
    config = random_config("M-M*M-")
    hf = hf_model(config, 3)
    tokens = torch.randint(0, 96, (50,))
    logits = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ours = NemotronH(NemotronHConfig.from_dict(config), "cpu", dtype)
        source = our_model(config, hf).state_dict()
        ours.load_state_dict(source)
        fine = torch.promote_types(dtype, torch.float32)
        for layer in ours.state_layers:
            assert ours.get_parameter(f"backbone.layers.{layer}.mixer.A_log").dtype == fine
        caches = make_caches(ours, 1, 16, 50)
        logits[dtype] = ours.logits(run_prompt(ours, tokens, [20, 30], caches, 16))
    exact = logits[torch.float64]
    assert exact.dtype == torch.float64
    assert distance(logits[torch.float32].double(), exact) < 5e-6
    assert distance(logits[torch.bfloat16].double(), exact) < 0.1


def test_batches_that_contradict_themselves_are_refused() -> None:
    slot = torch.zeros(2, dtype=torch.int32)
    start = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens has shape"):
        RowBatch(slot, start[:2], slot, 1, 1)
    with pytest.raises(ValueError, match="computed has shape"):
        RowBatch(slot, start, slot[:1], 1, 1)
    with pytest.raises(ValueError, match="num_update_rows is 3"):
        RowBatch(slot, start, slot, 1, 1, num_update_rows=3)
    with pytest.raises(ValueError, match="num_update_tokens is -1"):
        RowBatch(slot, start, slot, 1, 1, num_update_rows=1)


def test_states_are_one_group_with_the_layers_own_rates() -> None:
    model = NemotronH(NemotronHConfig.from_dict(random_config("M*-M")), "meta", torch.float32)
    (group,) = model.groups
    assert group.layers == (0, 3)
    made = group.recurrence(torch.float32, torch.float16, "SD")
    assert made.checkpoint.matrix[1:3] == ((4, 8, 8), torch.float16)
    layers = [model.get_parameter(f"backbone.layers.{i}.mixer.A_log") for i in (0, 3)]
    assert all(a is b for a, b in zip(*group.params, layers, strict=True))
    attends = NemotronHConfig.from_dict(random_config("*-"))
    assert NemotronH(attends, "meta", torch.float32).groups == ()


def test_mamba_layers_are_numbered_as_their_states_are() -> None:
    """From 0: the number enters the key of stochastic rounding, here and in `flush`."""
    model = NemotronH(NemotronHConfig.from_dict(random_config("-M*MM")), "meta", torch.float32)
    mixers = [model.get_submodule(f"backbone.layers.{i}.mixer") for i in model.state_layers]
    assert [mixer.mamba_layer for mixer in mixers] == [0, 1, 2]
