"""vLLM's OpenAI server with the plug-in and without (0.25.1, GPU needed), under vLLM's own client.

    python benchmarks/vllm/openai_server.py --places 8,32,64,128 --out openai-server.json

Two `vllm serve` on one GPU, which take turns (ABBA) under `vllm bench serve`: in a closed loop so
many requests are always under way. Prompts of 128 to 2,048 tokens and outputs of 64 to 384, both
uniform. The model has random weights, so drafts are accepted by a curve, and its tokenizer knows
one word per token. `--kv-gib`: cache of the server with the plug-in, and of the other, whose
requests need more of it.

The client times what arrives together: ITL is from one such piece of a stream to the next, TPOT
divides by tokens. The JSON is written after every run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import nemotron
import workload
from record import arguments, numbers, save
from replay_steps import SIDES
from server_process import Server, Watch
from shapes import NAMES, measured

Row = dict[str, Any]
PROMPT, OUTPUT = workload.LENGTHS["uniform"]
ENVIRONMENT = nemotron.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
NOT_FLAGS = ("model", "tokenizer", "skip_tokenizer_init", "disable_log_stats")
TIMES = tuple(
    f"{part}_{what}_ms" for what in ("ttft", "tpot", "itl") for part in ("mean", "p50", "p99")
)
FIGURES = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "output_throughput", *TIMES,
)  # fmt: skip
"""What is kept of the client's result."""


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer of one word per token, beside config.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def options(args: argparse.Namespace) -> Row:
    """Of both servers: keywords of `vllm.LLM`, the model's folder among them."""
    sizes = measured(args.shape).in_vllm
    chosen = nemotron.options(
        {
            "model": sizes,
            "plain_modules": None,
            "dtype": "bfloat16",
            "ssm_dtype": "float32",
            "drafts": args.drafts,
            "rates": workload.acceptance(args.acceptance, args.drafts),
            "max_requests": max(args.places),
            "max_tokens_per_step": 8192,
            # Room for more characters than the tokenizer's longest words have, which vLLM refuses.
            "max_model_len": 8192,
            "vllm": {"gpu_memory_utilization": 0.3} | json.loads(args.vllm_options),
        }
    )
    write_tokenizer(Path(chosen["model"]), sizes["vocab_size"])
    return chosen


def flags(chosen: Row) -> list[str]:
    """The same as arguments of `vllm serve`."""
    found = [chosen["model"]]
    for name, value in chosen.items():
        flag = "--" + name.replace("_", "-")
        if name in NOT_FLAGS:
            continue
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            found += [flag, text]
    return found


def client(server: Server, model: str, places: int, count: int, seed: int) -> Row:
    """`vllm bench serve` in this process."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    means = [(part.low + part.high) / 2 for part in (PROMPT, OUTPUT)]
    ratios = [(part.high - m) / m for part, m in zip((PROMPT, OUTPUT), means, strict=True)]
    told = {
        "backend": "openai", "base-url": server.url, "endpoint": "/v1/completions", "model": model,
        "dataset-name": "random", "random-input-len": int(means[0]),
        "random-output-len": int(means[1]),
        "random-range-ratio": json.dumps(dict(zip(("input", "output"), ratios, strict=True))),
        "num-prompts": count, "max-concurrency": places, "seed": seed, "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl", "metric-percentiles": "50,99",
        "ready-check-timeout-sec": 0,
    }  # fmt: skip
    argv = [text for name, value in told.items() for text in (f"--{name}", str(value))]
    watch = Watch(server)
    found = serve.main(parser.parse_args([*argv, "--disable-tqdm"]))
    kept = {name: float(found[name]) for name in FIGURES if name in found}
    return kept | watch.stop()


def summary(runs: list[Row]) -> Row:
    """Medians of each side, and of neighbours' ratios: with the plug-in ÷ without."""
    names = [name for name in FIGURES if all(name in run for run in runs)]
    found: Row = {"ratio": {}}
    for side in SIDES:
        own = [run for run in runs if run["side"] == side]
        if own:
            found[side] = {n: statistics.median(run[n] for run in own) for n in names}
    pairs = [sorted(pair, key=lambda run: run["side"] != "replay") for pair in _pairs(runs)]
    for name in names if pairs else ():
        if all(other[name] for _, other in pairs):
            found["ratio"][name] = statistics.median(a[name] / b[name] for a, b in pairs)
    return found


def _pairs(runs: list[Row]) -> list[tuple[Row, Row]]:
    return list(zip(runs[::2], runs[1::2], strict=False))


def measure(args: argparse.Namespace) -> Row:
    chosen = options(args)
    result: Row = {
        "options": {**vars(args), "out": None},
        "vllm": importlib.metadata.version("vllm"),
        "flags": flags(chosen),
        "servers": {},
        "rows": {},
    }
    end = time.perf_counter() + args.seconds
    logs = args.out.parent if args.out else Path()
    servers: list[Server] = []
    try:
        for place, (side, gib) in enumerate(zip(SIDES, args.kv_gib, strict=True)):
            own = flags(chosen | {"kv_cache_memory_bytes": int(gib * 2**30)})
            servers.append(Server(side, own, args.port + place, logs / f"server-{side}.log"))
        for server in servers:
            result["servers"][server.side] = server.wait(args.ready_s)
            print(server.side, result["servers"][server.side], flush=True)
        for server in servers:
            client(server, chosen["model"], max(args.places), 2 * max(args.places), 10**6)
        for number in range(args.repeats):
            for places in args.places:
                runs = result["rows"].setdefault(str(places), {"runs": []})["runs"]
                for server in servers if number % 2 == 0 else servers[::-1]:
                    count, seed = args.per_place * places, 1000 * number + places
                    found = client(server, chosen["model"], places, count, seed)
                    runs.append({"side": server.side, **found})
                result["rows"][str(places)] |= summary(runs)
                print(places, result["rows"][str(places)]["ratio"], flush=True)
                if args.out:
                    save("vllm_openai_server", result, args.out)
                if time.perf_counter() > end:
                    return result
    finally:
        for server in servers:
            server.close()
    return result


def main() -> None:
    parser = arguments(__doc__, "default: none")
    parser.add_argument("--shape", choices=NAMES, default="8b")
    parser.add_argument("--places", type=numbers, default=[8, 32, 64, 128], help="under way")
    parser.add_argument("--per-place", type=int, default=4, help="requests of a run, per place")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=900, help="in all; no new pair after")
    parser.add_argument("--ready-s", type=float, default=400, help="to wait for a server's start")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--acceptance", default="qwen3.5", help="as of engine/serve.py")
    parser.add_argument("--kv-gib", type=numbers, default=[30, 58], help="of each server's cache")
    parser.add_argument("--vllm-options", default="{}", help="JSON, of both servers")
    parser.add_argument("--port", type=int, default=8190, help="of the first; the other's is next")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    result = measure(args)
    if args.out:
        save("vllm_openai_server", result, args.out)


if __name__ == "__main__":
    main()
