"""Top-k routing: the kernel against its reference, and that against sorting in plain Python."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.interpreter import kernels, plain
from helpers.marks import cases

from hybrid_runtime.kernels.moe.topk import (
    softmax_topk,
    softmax_topk_reference,
    topk,
    topk_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Routing:
    tokens: int = 5
    count: int = 16
    top_k: int = 4
    groups: int = 1
    kept: int = 1
    renormalize: bool = True
    logits: str = "random"  # or "rounded": many ties; "equal"; "saturated"
    dtype: torch.dtype = torch.float32
    strided: bool = False


ROUTE = Routing()
ROUTINGS = {
    "base": ROUTE,
    **{f"{n} tokens": replace(ROUTE, tokens=n) for n in (0, 1, 40)},
    **{f"top {k}": replace(ROUTE, top_k=k) for k in (1, 2, 6, 16)},
    "nano": replace(ROUTE, count=128, top_k=6),
    "super": replace(ROUTE, count=512, top_k=22),
    "largest": replace(ROUTE, tokens=2, count=1024, top_k=32),
    "13 experts": replace(ROUTE, count=13),
    "without renormalising": replace(ROUTE, renormalize=False),
    "groups": replace(ROUTE, groups=4, kept=2),
    "one of 3 groups": replace(ROUTE, count=33, groups=3),
    "5 of 6 groups": replace(ROUTE, count=30, groups=6, kept=5, top_k=25),
    "all groups": replace(ROUTE, groups=4, kept=4),
    "ties": replace(ROUTE, tokens=40, count=40, logits="rounded"),
    "ties in groups": replace(ROUTE, tokens=40, count=40, groups=8, kept=3, logits="rounded"),
    "equal": replace(ROUTE, count=48, groups=3, kept=2, logits="equal"),
    "saturated": replace(ROUTE, logits="saturated"),
    "bf16 logits": replace(ROUTE, dtype=torch.bfloat16),
    "fp64": replace(ROUTE, dtype=torch.float64),
    "strided": replace(ROUTE, strided=True),
}


def routing(case: Routing) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(case.count, case.tokens, generator=generator, dtype=torch.float64).T
    bias = torch.randn(case.count, generator=generator, dtype=torch.float64) / 4
    if case.logits != "random":
        bias = bias.sign() / 4
    if case.logits == "rounded":
        logits = logits.round()
    elif case.logits == "equal":
        logits, bias = torch.zeros_like(logits), torch.zeros_like(bias)
    elif case.logits == "saturated":
        logits = logits * 100
    return {
        "logits": (logits if case.strided else logits.contiguous()).to(DEVICE, case.dtype),
        "bias": bias.to(DEVICE, torch.promote_types(case.dtype, torch.float32)),
        "top_k": case.top_k,
        "num_expert_group": case.groups,
        "topk_group": case.kept,
        "renormalize": case.renormalize,
        "routed_scaling_factor": 2.5,
    }


def ranked(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


@plain
@pytest.mark.parametrize("case", cases(ROUTINGS, {}))
def test_topk_reference(case: Routing) -> None:
    given = routing(case)
    scores = given["logits"].to(given["bias"].dtype).sigmoid()
    size = case.count // case.groups
    want = []
    for line in (scores + given["bias"]).tolist():
        best = [
            sum(sorted(line[i : i + size], reverse=True)[:2]) for i in range(0, case.count, size)
        ]
        # Added in the dtype of the scores, so that equal groups stay equal.
        best = torch.tensor(best, dtype=torch.float64).to(scores.dtype).tolist()
        kept = ranked(best, case.kept)
        line = [v if i // size in kept else float("-inf") for i, v in enumerate(line)]
        want.append(ranked(line, case.top_k))
    topk_weights, topk_ids = topk_reference(**given)
    assert topk_ids.tolist() == want
    found = scores.gather(1, topk_ids).double()
    if case.renormalize:
        found = found / found.sum(-1, keepdim=True)
    torch.testing.assert_close(topk_weights.double(), 2.5 * found, rtol=1e-6, atol=0)


@kernels
@pytest.mark.parametrize("case", cases(ROUTINGS, {"prefill": Routing(4096, 128, 6)}))
def test_topk(case: Routing) -> None:
    given = routing(case)
    topk_weights, topk_ids = topk(**given)
    want, chosen = topk_reference(**given)
    assert topk_weights.dtype == want.dtype
    assert topk_ids.dtype == chosen.dtype == torch.int64
    assert torch.equal(topk_ids, chosen)
    torch.testing.assert_close(topk_weights, want, rtol=1e-6, atol=1e-30)


SOFTMAX = {
    name: case
    for name, case in ROUTINGS.items()
    if case.groups == 1 and name not in ("largest", "equal", "super")
}


@plain
@pytest.mark.parametrize("case", cases(SOFTMAX, {}))
def test_softmax_topk_reference(case: Routing) -> None:
    logits = routing(case)["logits"]
    topk_weights, topk_ids = softmax_topk_reference(logits, case.top_k, case.renormalize)
    assert topk_ids.tolist() == [ranked(line, case.top_k) for line in logits.tolist()]
    found = logits.double().softmax(-1).gather(1, topk_ids)
    if case.renormalize:
        found = found / found.sum(-1, keepdim=True)
    torch.testing.assert_close(topk_weights.double(), found, rtol=3e-6, atol=1e-30)


@kernels
@pytest.mark.parametrize("case", cases(SOFTMAX, {"prefill": Routing(4096, 256, 8)}))
def test_softmax_topk(case: Routing) -> None:
    given = routing(case)["logits"], case.top_k, case.renormalize
    topk_weights, topk_ids = softmax_topk(*given)
    want, chosen = softmax_topk_reference(*given)
    assert topk_weights.dtype == want.dtype
    assert torch.equal(topk_ids, chosen)
    # A GPU's exp loses digits where its argument is large, and the weight nothing.
    torch.testing.assert_close(topk_weights, want, rtol=3e-6, atol=1e-9)


@kernels
def test_topk_of_nan_names_experts_that_exist() -> None:
    given = routing(replace(ROUTE, count=13, top_k=6))
    given["logits"][2] = float("nan")
    given["logits"][3, 4] = float("nan")
    _, topk_ids = topk(**given)
    assert ((topk_ids >= 0) & (topk_ids < 13)).all()
    _, others = softmax_topk(given["logits"], 6, True)
    assert ((others >= 0) & (others < 13)).all()
    given["logits"] = given["logits"].nan_to_num()
    assert torch.equal(topk_ids[:2], topk(**given)[1][:2])


@plain
def test_impossible_routings_are_refused() -> None:
    given = routing(ROUTE)
    for change, message in (
        ({"top_k": 17}, "top_k is 17, must be 1 to 16"),
        ({"top_k": 0}, "top_k is 0"),
        ({"num_expert_group": 4, "top_k": 5}, "top_k is 5, must be 1 to 4"),
        ({"num_expert_group": 3}, "must divide 16 experts"),
        ({"topk_group": 2}, "topk_group is 2, must be 1 to"),
        ({"num_expert_group": 16, "topk_group": 8}, "must leave 2 of 16 experts"),
        ({"bias": given["bias"][:3]}, "bias"),
    ):
        with pytest.raises(ValueError, match=message):
            topk(**(given | change))
