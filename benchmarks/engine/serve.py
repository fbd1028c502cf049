"""A serving load: requests come and go, lengths vary, prompts mix into decode steps. This engine,
and vLLM beside it on the same GPU with the same requests, taking turns.

    python benchmarks/engine/serve.py --shape 8b --places 8,32,64 --vllm python
    python benchmarks/engine/serve.py --shape qwen3.5-9b --places 8,32,64 --vllm python
    python benchmarks/engine/serve.py --shape 8b --places 64 --rates 80% --lengths chat
    python benchmarks/engine/serve.py --turns '{"ours": [2560, {"steps_ahead": 0}]}' ...
    python benchmarks/engine/serve.py --shape tiny --lengths tiny --places 1,2

Closed loop: the next request is sent when one of so many places is free. `--rates` adds Poisson
arrivals: requests per second, or a share of what the engine itself served per second in the closed
loop with the most places. `--turns` has an engine serve each closed loop once with each of several
settings, of which a number is the most tokens that it runs a step; `--arriving` does so for
arrivals, which are served with the first one otherwise. Before anything is timed, each serves a
list once. Figures are medians over the repeats; order of the engines: ABBA. The JSON is written
after every repeat, so that nothing is lost where time runs out. `--before` has an older checkout of
this engine beside it instead of vLLM. What of Qwen's shapes vLLM runs is a little different:
`common/qwen.py`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import serve_rows
import workload
from record import arguments, environment, numbers, save, show
from serving import Child
from shapes import NAMES, measured

Row = dict[str, Any]
HERE = Path(__file__).parent
OURS = [sys.executable, str(HERE / "serve_ours.py")]
PEER = str(HERE.parent / "vllm" / "nemotron.py")


def measure(
    args: argparse.Namespace, commands: dict[str, list[str]], keep: Callable[[Row], object]
) -> Row:
    """Figures of every load and engine.

    commands: how each engine's process is started, by name; ratios are the first one's to the
        others'.
    keep: is called with what there is after every repeat.
    """
    settings = _settings(args)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings))
        children: list[Child] = []
        result: Row = {"settings": settings, "engines": {}, "rows": []}
        try:
            # Peers first: vLLM takes its share of the memory that is free when it starts.
            for name, command in reversed(commands.items()):
                started = time.perf_counter()
                children.insert(0, Child(name, [*command, str(file)]))
                said = children[0].hear()
                ready = time.perf_counter() - started
                # An older checkout says it under a name.
                result["engines"][name] = said.get("ready", said) | {"ready_s": ready}
                print(f"{name} ready: {ready:.0f} s", file=sys.stderr)
            for rows in _loads(args, settings, children, Path(folder)):
                result["rows"] = rows
                keep(result)
        finally:
            for child in children:
                child.close()
    return result


def _settings(args: argparse.Namespace) -> Row:
    """What the engines' processes are told."""
    shape = measured(args.shape, args.layers)
    extra = json.loads(args.vllm_options)
    return {
        "shape": args.shape,
        "layers": args.layers,
        "model": shape.in_vllm,
        "quantization": args.quantization,
        "plain_modules": shape.plain_modules(args.quantization),
        "dtype": args.dtype,
        "ssm_dtype": args.ssm_dtype,
        "drafts": args.drafts,
        "acceptance": args.acceptance,
        "rates": workload.acceptance(args.acceptance, args.drafts),
        "sampling": {"temperature": args.temperature, "top_p": args.top_p},
        "max_requests": max(args.places),
        "max_tokens_per_step": args.max_tokens_per_step,
        "max_model_len": workload.longest(args.lengths, args.prefix_tokens) + 16,
        "turns": args.turns,
        "ours": json.loads(args.options),
        "vllm": extra,
    }


def _loads(
    args: argparse.Namespace, settings: Row, children: list[Child], folder: Path
) -> Iterator[list[Row]]:
    """Rows so far, after every repeat. Closed loops come first, since arrivals may be a share of
    what they reach."""
    rows: list[Row] = []
    for places in args.places:
        made: list[Row] = []
        for made in _take_turns(args, settings, children, folder, places, {}):
            yield [*rows, *made]
        rows += made
    most = max(args.places)
    capacity = {row["engine"]: row["requests_s"] for row in reversed(rows) if row["places"] == most}
    for asked in args.rates:
        share = float(asked.removesuffix("%")) / 100
        rates = {
            name: capacity[name] * share if asked.endswith("%") else float(asked)
            for name in capacity
        }
        made = []
        for made in _take_turns(args, settings, children, folder, None, rates):
            made = [row | {"load": asked} for row in made]
            yield [*rows, *made]
        rows += made


def _take_turns(
    args: argparse.Namespace,
    settings: Row,
    children: list[Child],
    folder: Path,
    places: int | None,
    rates: dict[str, float],
) -> Iterator[list[Row]]:
    """One load, a row per engine and setting, after every repeat."""
    count = args.per_place * (places or max(args.places))
    given = args.arriving if places is None and args.arriving else args.turns
    turns = [(child, used) for child in children for used in given.get(child.name, [{}])]
    if places is None and not args.arriving:
        turns = [next(turn for turn in turns if turn[0] is child) for child in children]
    repeats: list[list[Row]] = [[] for _ in turns]
    for number in range(-1 if places else 0, args.repeats):
        for at in range(len(turns)) if number % 2 else reversed(range(len(turns))):
            child, used = turns[at]
            # An engine that is warm needs to meet the sizes of another setting only.
            short = number < 0 and at and turns[at - 1][0] is child
            asks = workload.make(
                args.lengths, count // args.per_place if short else count,
                settings["model"]["vocab_size"], args.seed + number, rates.get(child.name),
                args.prefixes, args.prefix_tokens,
            )  # fmt: skip
            path = folder / "requests.json"
            workload.write(path, asks)
            asked = {"requests": str(path), "places": places, "setting": used}
            said = child.ask(asked | {"objective": args.objective})
            if number >= 0:
                repeats[at].append(said)
        if number >= 0:
            load = {"places": places, "requests": count}
            yield serve_rows.compared(
                {"engine": child.name, "rate": rates.get(child.name), "setting": used}
                | load
                | serve_rows.medians(said)
                for (child, used), said in zip(turns, repeats, strict=True)
            )


def run(argv: Sequence[str]) -> Path:
    args = _parse(argv)
    commands = {"ours": OURS}
    if args.vllm:
        commands["vllm"] = [*shlex.split(args.vllm), PEER]
    if args.before:
        commands["before"] = shlex.split(args.before)
    chosen = {k: v for k, v in vars(args).items() if k != "out"}
    about = {"environment": environment(), "name": measured(args.shape).title, "options": chosen}

    def keep(measured: Row) -> Path:
        return save(f"serve-{args.shape}", about | measured, args.out)

    result = about | measure(args, commands, keep)
    path = keep(result)
    show(
        f"{result['name']}, {args.lengths} lengths, acceptance {args.acceptance}",
        serve_rows.lines(result),
    )
    return path


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--shape", choices=NAMES, default="8b")
    add("--layers", type=int, help="the first so many only")
    add("--dtype", help="of weights; default bfloat16, float32 for tiny shapes")
    add("--quantization", choices=["modelopt"], help="of the weights, as in FP8 checkpoints")
    add("--ssm-dtype", default="float32")
    add("--lengths", choices=workload.LENGTHS, default="uniform")
    add("--places", type=numbers, default=[8, 32, 64], help="of the closed loops")
    add("--per-place", type=int, default=4, help="requests per place")
    add("--rates", type=_words, default=[], help="Poisson: requests/s, or 80%% of capacity")
    add("--drafts", type=int, default=3)
    add("--acceptance", default="qwen3.5", help="a curve, mean tokens per step, or real")
    add("--temperature", type=float, default=0.0, help="above 0 needs --acceptance real")
    add("--top-p", type=float, default=1.0)
    add("--prefixes", type=int, default=0, help="every prompt starts with one of so many texts")
    add("--prefix-tokens", type=int, default=0, help="of so many tokens, besides its own")
    add("--turns", type=_turns, default=_turns("{}"), help="JSON, lists of settings by engine")
    add("--arriving", type=_turns, help="the same for arrivals; default: the first of --turns")
    add("--max-tokens-per-step", type=int, default=8192, help="of both engines")
    add("--objective", type=_objective, default={"ttft": 500.0, "itl": 25.0}, help="ttft=MS,itl=MS")
    add("--repeats", type=int, default=5)
    add("--options", default="{}", help="JSON, fields of EngineConfig")
    add("--vllm", help="how Python is started where vLLM is installed; left out: ours alone")
    add("--before", help="how serve_ours.py of an older checkout is started, to run beside")
    add("--vllm-options", default="{}", help="JSON, keywords of vllm.LLM")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("float32" if "tiny" in args.shape else "bfloat16")
    least = {"repeats": 1, "per_place": 1, "drafts": 0, "prefixes": 0, "prefix_tokens": 0}
    for name, low in least.items():
        if getattr(args, name) < low:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least {low}")
    if args.vllm and args.before:
        raise ValueError("vllm and before are both given; tables have one engine beside ours")
    if args.temperature and args.acceptance != "real":
        raise ValueError(
            f"temperature is {args.temperature} with acceptance {args.acceptance!r}; it must be 0 "
            "unless acceptance is real"
        )
    return args


def _words(text: str) -> list[str]:
    return text.split(",")


def _turns(text: str) -> dict[str, list[Row]]:
    """Settings of each engine; a number is its budget. What a setting may have, its engine knows:
    `Served.use`."""
    given = json.loads(text)
    if not given.keys() <= {"ours", "vllm"} or not all(given.values()):
        raise argparse.ArgumentTypeError(f"{text!r} must have lists of ours and vllm")
    return {"ours": [{}], "vllm": [{}]} | {
        name: [one if isinstance(one, dict) else {"budget": one} for one in several]
        for name, several in given.items()
    }


def _objective(text: str) -> dict[str, float]:
    given = {name: float(value) for name, _, value in (p.partition("=") for p in text.split(","))}
    if given.keys() != {"ttft", "itl"}:
        raise argparse.ArgumentTypeError(f"{text!r} must be ttft=MS,itl=MS")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """2 and one line on standard error for input that can't be used."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        print(run(given))
    except ValueError as error:
        print(f"serve.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
