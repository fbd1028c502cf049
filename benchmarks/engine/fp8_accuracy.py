"""What do weights in FP8 cost in accuracy: logits, greedy texts, acceptance and perplexity?

    python benchmarks/engine/fp8_accuracy.py
    python benchmarks/engine/fp8_accuracy.py --shapes 8b,nano-30b
    python benchmarks/engine/fp8_accuracy.py --shapes nano-30b --layers 4 --sequences 1

Two kinds: "per channel", as `quantization="fp8"` rounds at load, and "per tensor", with static
scales as ModelOpt makes them: the largest absolute number of a matrix, and of its inputs in the
plain run, as 448. Of both, the logits against the plain model's, in a prompt and in the steps
behind it, which verify 4 given tokens each; beside them the plain model's against its own weights
in float32, which is what rounding activations costs anyway. `share` says how many of the numbers
are in FP8.

The shipped checkpoint predicts files of the running Python's standard library that were left out of
its training; there also: greedy texts behind pieces of them, FP8 against plain under the same
drafter, acceptance with 3 drafts, and perplexity. `--shapes` are models of random weights, in
bfloat16, which read random tokens.
"""

from __future__ import annotations

import fnmatch
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
sys.path.append(str(Path(__file__).parents[2]))  # training

import torch
from record import arguments, numbers, save, show
from shapes import SHAPES, build, config
from torch import Tensor, nn

from hybrid_runtime.bench import perplexity
from hybrid_runtime.bench.measure import give_back
from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.engine.load import load
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.kernels.linear.quantize import E4M3, LARGEST, Quantizer, quantize_reference
from hybrid_runtime.models.formats import FP8_PER_TENSOR
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.linear import (
    Experts,
    MergedLinear,
    checkpoint_tensors,
    join,
    matrices,
    place,
)
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.quantization import Quantization
from training.corpus import default_root, read_files, windows

Row = dict[str, Any]
VERIFIED = 4
"""Tokens of a decode step."""
KV_BLOCK = 64
DRAFTERS = (None, "mtp", "eagle")
FLOAT32 = "float32"


class Model(NamedTuple):
    """What is compared. load: dtype and `quantization` to the model. tokens: int64 `[sequences,
    n]`."""

    name: str
    load: Callable[[torch.dtype, Any], NemotronH]
    tokens: Tensor


# -- logits ----------------------------------------------------------------------------------------


class Logits(NamedTuple):
    """float32 `[tokens, vocabulary]`, of all sequences."""

    prompt: Tensor
    decode: Tensor


@torch.inference_mode()
def logits_of(model: NemotronH, tokens: Tensor, prompt: int) -> Logits:
    """Of sequences `[sequences, n]`, each a prompt of so many tokens and steps behind it."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for sequence in tokens.to(model.device):
        caches = _caches(model, len(sequence))
        for start in (0, *range(prompt, len(sequence), VERIFIED)):
            end = start + VERIFIED if start else prompt
            hidden = model(sequence[start:end], *_row(start, end, model.device), caches)
            found[start > 0].append(model.logits(hidden).float())
    return Logits(*map(torch.cat, found))


def _row(start: int, end: int, device: torch.device) -> tuple[RowBatch, StatePositions]:
    """Of these tokens of slot 0, those behind the prompt as a row that decodes."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    update = int(start > 0)
    batch = RowBatch(
        slot=ints(0),
        cu_seqlens=ints(0, end - start),
        computed=ints(start),
        max_scheduled=end - start,
        max_context=end,
        num_update_rows=update,
        num_update_tokens=update * (end - start),
    )
    return batch, StatePositions(ints(0), ints(0 if start else -1), ints(0), ints(0))


def _caches(model: NemotronH, tokens: int) -> Caches:
    """For one sequence: its keys and values in blocks, its state in one."""
    c, device, dtype = model.config, model.device, model.dtype
    blocks = -(-tokens // KV_BLOCK)

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    matrix = (c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)
    keys = (blocks, KV_BLOCK, *model.kv_shape)
    window = (c.conv_kernel - 1, c.mamba2.conv_channels)
    return Caches(
        {i: (zeros(*keys), zeros(*keys)) for i in model.kv_layers},
        {i: (zeros(1, *window), zeros(1, *matrix, of=torch.float32)) for i in model.state_layers},
        torch.arange(blocks, dtype=torch.int32, device=device)[None],
        zeros(1, 1, of=torch.int32),
    )


def differ(wanted: Tensor, given: Tensor) -> Row:
    """How far logits `[tokens, vocabulary]` are from those wanted.

    rms: of the differences, over that of the logits wanted. largest: difference. same_best: share
    of tokens. kl: mean of a token, in nats, from the distribution wanted.
    """
    squares, whole, largest, same, divergence = 0.0, 0.0, 0.0, 0, 0.0
    for want, got in zip(wanted.split(128), given.split(128), strict=True):
        want, got = want.double(), got.double()
        difference = got - want
        squares += difference.square().sum().item()
        whole += want.square().sum().item()
        largest = max(largest, difference.abs().amax().item())
        same += int((want.argmax(-1) == got.argmax(-1)).sum())
        logs = want.log_softmax(-1)
        divergence += (logs.exp() * (logs - got.log_softmax(-1))).sum().item()
    count = len(wanted)
    return {
        "rms": (squares / whole) ** 0.5,
        "largest": largest,
        "same_best": same / count,
        "kl": divergence / count,
        "tokens": count,
    }


def compare(model: Model, dtype: torch.dtype, prompt: int) -> list[Row]:
    """A row for each way to round, in prompts and in decode."""
    name = str(dtype).removeprefix("torch.")
    plain = model.load(dtype, None)
    shape, device = plain.config, plain.device
    with watched(plain) as largest:
        wanted = logits_of(plain, model.tokens, prompt)
    weights = {name: tensor.cpu() for name, tensor in checkpoint_tensors(plain).items()}
    del plain
    give_back()
    rows: list[Row] = []

    def add(what: str, against: str, want: Logits, got: Logits, share: float) -> None:
        for phase in Logits._fields:
            about = {"model": model.name, "of": what, "against": against, "phase": phase}
            rows.append(
                about | differ(getattr(want, phase), getattr(got, phase)) | {"share": share}
            )

    ways: dict[str, Callable[[], NemotronH]] = {
        "per channel": lambda: model.load(dtype, "fp8"),
        "per tensor": lambda: per_tensor(shape, dtype, device, weights, largest),
    }
    for way, make in ways.items():
        rounded = make()
        share = share_of_8_bits(rounded)
        got = logits_of(rounded, model.tokens, prompt)
        del rounded
        give_back()
        add(f"FP8 {way}", name, wanted, got, share)
    if name != FLOAT32:
        try:
            fine = NemotronH(shape, device, torch.float32)
        except torch.OutOfMemoryError:
            print(f"{model.name} does not fit in {FLOAT32}: no such lines", file=sys.stderr)
            give_back()
            return rows
        for one, tensor in checkpoint_tensors(fine).items():
            tensor.copy_(weights[one])
        got = logits_of(fine, model.tokens, prompt)
        del fine
        give_back()
        add(name, FLOAT32, got, wanted, 0.0)
    return rows


def share_of_8_bits(model: nn.Module) -> float:
    """Of a model's numbers, scales aside."""
    found = [one for name, one in checkpoint_tensors(model).items() if not name.endswith("_scale")]
    whole = sum(one.numel() for one in found)
    return sum(one.numel() for one in found if one.dtype == E4M3) / whole


# -- static scales ---------------------------------------------------------------------------------


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, float]]:
    """The largest absolute input of each matrix, by its name, of what runs within."""
    found: dict[str, float] = {}
    tensors = checkpoint_tensors(model)
    names = {matrix: name for name, matrix in matrices(model).items()}

    def see(name: str, x: Tensor) -> None:
        if x.numel():
            found[name] = max(found.get(name, 0.0), x.abs().amax().item())

    def merged(part: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(part, MergedLinear)
        for one in part.parts.values():
            see(names[one], given[0])

    def routed(experts: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def each(part: Any, given: tuple[Tensor, ...]) -> None:
            x, _, chosen = given
            for i in chosen.unique().tolist():
                some = x[(chosen == i).any(-1)]
                see(f"{experts}.{i}.up_proj", some)
                inner = some @ tensors[f"{experts}.{i}.up_proj.weight"].T
                see(f"{experts}.{i}.down_proj", inner.relu().square())

        return each

    hooks = [
        matrix.register_forward_pre_hook(lambda part, given: see(names[part], given[0]))
        for matrix in names
    ]
    for name, part in model.named_modules():
        if isinstance(part, MergedLinear):
            hooks.append(part.register_forward_pre_hook(merged))
        if isinstance(part, Experts):
            hooks.append(part.register_forward_pre_hook(routed(name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def per_tensor(
    shape: Any,
    dtype: torch.dtype,
    device: torch.device,
    weights: dict[str, Tensor],
    largest: dict[str, float],
) -> NemotronH:
    """The model with these plain weights in FP8 with static scales. largest: by matrix; an expert
    that no token chose gets the largest of its layer's."""
    model = NemotronH(shape, "meta", dtype)
    Quantization("per tensor", FP8_PER_TENSOR).store(model, "")
    place(model, device)
    tensors = checkpoint_tensors(model)
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            continue  # with its matrix
        plain = weights[name].to(device)
        if tensor.dtype != E4M3:
            tensor.copy_(plain)
            continue
        matrix = name.removesuffix(".weight")
        scale = plain.abs().amax().float() / LARGEST
        tensor.copy_(quantize_reference(plain, Quantizer(scale)).values)
        tensors[f"{matrix}.weight_scale"].copy_(scale)
        seen = largest.get(matrix)
        if not seen:
            others = fnmatch.filter(largest, re.sub(r"\.experts\.\d+\.", ".experts.*.", matrix))
            seen = max(largest[other] for other in others)
        tensors[f"{matrix}.input_scale"].fill_(seen / LARGEST)
    join(model)
    return model.eval()


# -- models ----------------------------------------------------------------------------------------


def shipped(device: str, tokens: Tensor) -> Model:
    """The checkpoint that comes with the package."""

    def make(dtype: torch.dtype, quantization: Any) -> NemotronH:
        options = EngineConfig(drafter=None, max_requests=1)
        found: Any = load(SHIPPED, options, device, dtype, None, quantization).model
        use_threads(None, found)
        model: NemotronH = found
        return model

    return Model(SHIPPED.name, make, tokens)


def random_model(name: str, layers: int | None, device: str, count: int, length: int) -> Model:
    """A shape with random weights, and random tokens."""
    sizes = config(SHAPES[name], layers)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes.vocab_size, (count, length), generator=generator)
    return Model(
        SHAPES[name].name,
        lambda dtype, quantization: build(sizes, device, dtype, quantization=quantization)[0],
        tokens,
    )


# -- texts -----------------------------------------------------------------------------------------


def texts(device: str, dtype: torch.dtype, prompts: list[list[int]], max_tokens: int) -> list[Row]:
    """A row per drafter: acceptance of both, and how many greedy texts are the same.

    first_different: of the others, the first token that differs, each counted from 0.
    """
    rows = []
    for drafter in DRAFTERS:
        answers, lengths = [], []
        for quantization in (None, "fp8"):
            with Engine.from_pretrained(
                SHIPPED,
                device=device,
                dtype=dtype,
                quantization=quantization,
                drafter=drafter,
                num_speculative_tokens=3 if drafter else 0,
            ) as engine:
                use_threads(None, engine.model)
                asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                answers.append([list(one.tokens) for one in engine.generate(prompts, asked)])
                lengths.append(engine.stats().mean_acceptance_length if drafter else 1.0)
            give_back()
        different = [
            next(i for i, (a, b) in enumerate(zip(plain, rounded, strict=True)) if a != b)
            for plain, rounded in zip(*answers, strict=True)
            if plain != rounded
        ]
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "drafter": drafter or "none",
                "acceptance_plain": lengths[0],
                "acceptance_fp8": lengths[1],
                "texts": len(prompts),
                "same": len(prompts) - len(different),
                "first_different": sorted(different),
            }
        )
    return rows


def perplexities(device: str, dtype: torch.dtype, tokens: Tensor) -> list[Row]:
    """Of windows `[count, length]`, plain and in FP8; a token is a byte."""
    rows, length = [], tokens.shape[1]
    for quantization in (None, "fp8"):
        wanted = perplexity.config(length)
        loaded = load(SHIPPED, wanted, device, dtype, None, quantization)
        use_threads(None, loaded.model)
        flat = tokens.flatten().int().numpy()
        with Engine(loaded.model, loaded.config) as engine:
            total, scored = perplexity.negative_log_likelihood(engine, flat, length)
        about = {"dtype": str(dtype).removeprefix("torch."), "quantization": quantization}
        rows.append(about | perplexity.figures(total, scored, len(flat), len(flat)))
        give_back()
    return rows


def main(argv: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--shapes", default="", help="of random weights, separated by commas")
    add("--layers", type=int, help="of a shape the first so many only")
    add("--dtypes", default="bfloat16" if on_gpu else "float32,bfloat16", help="of the checkpoint")
    add("--sequences", type=int, default=4, help="whose logits are compared")
    add("--lengths", type=numbers, default=[256, 64], help="tokens of a prompt, and behind it")
    add("--texts", type=int, default=64, help="greedy ones; 0: the shapes alone")
    add("--windows", type=int, default=128, help="of 1024 bytes, for the perplexity")
    args = parser.parse_args(argv)
    device = "cuda" if on_gpu else "cpu"
    prompt, behind = args.lengths
    if prompt < 1 or behind < 1 or behind % VERIFIED:
        parser.error(f"--lengths: must be of at least 1, the second one a multiple of {VERIFIED}")
    left_out = read_files(default_root())[1]

    def pieces(length: int, count: int) -> Tensor:
        return torch.from_numpy(windows(left_out, length, count))

    result: Row = {
        "lengths": args.lengths,
        "sequences": args.sequences,
        "verified": VERIFIED,
        "layers": args.layers,
        "text": {
            "of": f"standard library of Python {platform.python_version()}, left-out files",
            "files": len(left_out),
            "bytes": sum(map(len, left_out)),
        },
        "logits": [],
        "texts": [],
        "perplexity": [],
    }
    if args.texts:
        # Without the tokens that end a file.
        prompts = [[t for t in row if t < 256] for row in pieces(256, args.texts).tolist()]
        for name in args.dtypes.split(","):
            dtype = getattr(torch, name)
            model = shipped(device, pieces(prompt + behind, args.sequences))
            result["logits"] += compare(model, dtype, prompt)
            result["texts"] += texts(device, dtype, prompts, 64)
            result["perplexity"] += perplexities(device, dtype, pieces(1024, args.windows))
            save("fp8-accuracy", result, args.out)
    for name in filter(None, args.shapes.split(",")):
        model = random_model(name, args.layers, device, args.sequences, prompt + behind)
        result["logits"] += compare(model, torch.bfloat16, prompt)
        save("fp8-accuracy", result, args.out)
    show("logits", result["logits"])
    if args.texts:
        middle = [
            {
                name: value if name != "first_different" else statistics.median(value or [-1])
                for name, value in row.items()
            }
            for row in result["texts"]
        ]
        show("greedy texts of 64 tokens", middle)
        show("perplexity", result["perplexity"])
    print(save("fp8-accuracy", result, args.out))


if __name__ == "__main__":
    main()
