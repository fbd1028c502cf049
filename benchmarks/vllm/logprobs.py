"""Log-probabilities of vLLM (0.25.1, GPU needed) with replay and without, in bfloat16.

    HYBRID_RUNTIME_VLLM=0 python benchmarks/vllm/logprobs.py run --out without.json
    HYBRID_RUNTIME_VLLM=replay python benchmarks/vllm/logprobs.py run --out replay.json
    python benchmarks/vllm/logprobs.py compare without.json replay.json --out logprobs.json

The same requests run in batches of several sizes, greedily, across a block's boundary. Between its
own batch sizes vLLM's matrix products round otherwise; that spread is what replay is held against.
Weights are random, but the output head knows each token's successor: the text is the same however
anything is rounded, and so are the drafts, while all layers have a say in the probability. How many
drafts are accepted is drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import nemotron
import torch
import workload
from record import environment, save
from shapes import SHAPES, config
from torch import Tensor
from traffic import empty

ENVIRONMENT = nemotron.ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
HEAD = 0.0087
"""Scale of the output head's rows over the embedding's, whose entries have variance 1: about one in
four tokens' probability."""


@torch.inference_mode()
def fill(worker: Any) -> int:
    """Weights as training begins with them, but for embedding, output head and draft head; how many
    there are."""
    runner = worker.model_runner
    generator = torch.Generator(worker.device).manual_seed(0)
    count = 0
    for model in (runner.model, runner.speculator.model):
        depth = model.config.num_hidden_layers
        for name, weight in model.named_parameters():
            fill_one(name, weight.data, depth, generator)
            count += weight.numel()
    embedding = torch.empty_like(parameter(runner.model, "embed")).normal_(generator=generator)
    for model in (runner.model, runner.speculator.model):
        parameter(model, "embed").copy_(embedding)
        parameter(model, "lm_head").copy_(embedding.roll(1, 0) * HEAD)
    if hasattr(runner.model, "replay_layers"):
        runner.model.replay_layers.take_weights()
    return count


def parameter(model: Any, part: str) -> Tensor:
    (found,) = (weight.data for name, weight in model.named_parameters() if part in name)
    return found


def fill_one(name: str, weight: Tensor, depth: int, generator: torch.Generator) -> None:
    if name.endswith("mixer.A"):
        weight.uniform_(1, 16, generator=generator).neg_()
    elif name.endswith("dt_bias"):
        steps = torch.empty_like(weight, dtype=torch.float32)
        steps.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        weight.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the time step
    elif name.endswith(".D") or "norm" in name:
        weight.fill_(1)
    elif name.endswith("bias"):
        weight.zero_()
    elif "conv1d" in name:
        weight.uniform_(-0.5, 0.5, generator=generator)
    elif "eh_proj" in name:
        weight.zero_()[:, : len(weight)].fill_diagonal_(1)
    else:
        adds = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
        weight.normal_(0, 0.02 / math.sqrt(2 * depth) if adds else 0.02, generator=generator)


def options(args: argparse.Namespace) -> dict[str, Any]:
    sizes = asdict(config(SHAPES[args.shape]))
    del sizes["time_step_limit"]
    return nemotron.options(
        {
            "model": sizes,
            "dtype": "bfloat16",
            "ssm_dtype": args.ssm_dtype,
            "drafts": args.drafts,
            "rates": list(workload.acceptance("qwen3.5", args.drafts) or ()) or None,
            "max_requests": max(args.batches),
            "max_tokens_per_step": 4096,
            "max_model_len": 4096,
            "vllm": {
                "gpu_memory_utilization": 0.3,
                "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
            },
        }
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    chosen = options(args)
    llm = LLM(**chosen)
    (weights,) = llm.collective_rpc(fill)
    block = llm.llm_engine.vllm_config.cache_config.mamba_block_size
    params = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False, logprobs=1
    )
    rng = random.Random(0)
    size = max(args.tokens, block - args.tokens)
    prompts = [
        [rng.randrange(1000, 100_000) for _ in range(rng.randint(size, block))]
        for _ in range(max(args.batches))
    ]
    result: dict[str, Any] = {
        "environment": environment(),
        "options": {name: value for name, value in vars(args).items() if name not in ("out", "do")},
        "model_state": llm.collective_rpc(lambda w: type(w.model_runner.model_state).__name__)[0],
        "weights": weights,
        "block_size": block,
        "batches": {},
    }
    for batch in args.batches:
        empty(llm)
        texts, values = [], []
        for first in range(0, len(prompts), batch):
            asked = [{"prompt_token_ids": p} for p in prompts[first : first + batch]]
            for output in llm.generate(asked, params, use_tqdm=False):
                tokens = list(output.outputs[0].token_ids)
                texts.append(tokens)
                found = zip(tokens, output.outputs[0].logprobs, strict=True)
                values.append([one[token].logprob for token, one in found])
        expected = [[p[-1] + 1 + i for i in range(args.tokens)] for p in prompts]
        wrong = sum(
            a != b for x, y in zip(texts, expected, strict=True) for a, b in zip(x, y, strict=True)
        )
        result["batches"][str(batch)] = {"values": values, "unexpected_tokens": wrong}
        mean = statistics.fmean(v for row in values for v in row)
        print(f"batch {batch}: {wrong} unexpected tokens, mean {mean:.3f}", flush=True)
        if args.out:
            save("vllm_logprobs", result, args.out)
    return result


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's spread between its batch sizes; replay's; and of replay from vLLM, batch by batch."""
    theirs, ours = (json.loads(Path(path).read_text()) for path in args.files)
    batches = list(theirs["batches"])

    def values(file: dict[str, Any], batch: str) -> list[float]:
        return [value for row in file["batches"][batch]["values"] for value in row]

    pairs = [(a, b) for a, b in combinations(batches, 2)]
    found = {
        "vLLM, between batch sizes": [(values(theirs, a), values(theirs, b)) for a, b in pairs],
        "replay, between batch sizes": [(values(ours, a), values(ours, b)) for a, b in pairs],
        "replay from vLLM, same batch size": [
            (values(ours, b), values(theirs, b)) for b in batches
        ],
    }
    result: dict[str, Any] = {
        "environment": theirs["environment"],
        "options": theirs["options"],
        "model_states": [file["model_state"] for file in (theirs, ours)],
        "unexpected_tokens": sum(
            file["batches"][b]["unexpected_tokens"] for file in (theirs, ours) for b in batches
        ),
        "mean": statistics.fmean(values(theirs, batches[0])),
        "spread": {name: spread(each) for name, each in found.items()},
    }
    for name, numbers in result["spread"].items():
        print(name, numbers)
    return result


def spread(pairs: list[tuple[list[float], list[float]]]) -> dict[str, float]:
    apart = sorted(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))
    return {
        "compared": len(apart),
        "mean": statistics.fmean(apart),
        "p50": apart[len(apart) // 2],
        "p99": apart[len(apart) * 99 // 100],
        "max": apart[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--shape", choices=SHAPES, default="8b")
    one.add_argument("--ssm-dtype", default="float32")
    one.add_argument("--drafts", type=int, default=3)
    one.add_argument("--tokens", type=int, default=64, help="of each request")
    one.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16]
    )
    one.add_argument("--kv-gib", type=float, default=12)
    one.set_defaults(do=run)
    two = commands.add_parser("compare")
    two.add_argument("files", nargs=2, help="vLLM's, then replay's")
    two.set_defaults(do=compare)
    for command in (one, two):
        command.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    result = args.do(args)
    if args.out:
        save("vllm_logprobs", result, args.out)


if __name__ == "__main__":
    main()
