"""`hybrid-runtime bench DIR --perplexity FILE`: how well a checkpoint predicts a text, and what
rounding its weights changes about that."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_runtime.bench.machine import machine
from hybrid_runtime.bench.measure import give_back
from hybrid_runtime.bench.report import show
from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.engine.checks import check_integer
from hybrid_runtime.engine.load import QuantizationName, load
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.engine.tokenize import Tokens, encode
from hybrid_runtime.models.checkpoint import Checkpoint

Row = dict[str, Any]
AT_ONCE = 8
"""Windows that run at once, if they fit a step together."""
_FIGURES = {"nll_per_token": 5, "perplexity": 4, "bits_per_byte": 5}
"""Of a row, with digits behind the point."""


def run(args: argparse.Namespace, save: Callable[[Row], object]) -> None:
    """Measure the checkpoint, and with `quantization` once more with its weights rounded; a table
    of what was measured, whatever ends the rest early.

    save: called with the result so far after each.

    Raises:
        ValueError: the text, the window, another option or the checkpoint is wrong.
    """
    text = read_text(args.perplexity)
    window = args.max_model_len if args.window is None else args.window
    check_integer("window", window, 2)
    if len(args.ssm_dtype) > 1:
        given = ",".join(args.ssm_dtype)
        raise ValueError(f"ssm_dtype is {given}; it must be one with a perplexity")
    # Wrong for weights that are quantised already, which is to be known before any run.
    Checkpoint(args.model, args.quantization)
    result: Row = {
        "environment": machine(),
        "model": str(args.model),
        "quantization": args.quantization,
        "text": str(args.perplexity),
        "window": window,
        "ssm_dtype": args.ssm_dtype[0],
        "kv_cache_dtype": args.kv_cache_dtype,
        "rows": [],
    }
    rows: list[Row] = result["rows"]
    try:
        for quantization in (None, args.quantization) if args.quantization else (None,):
            rows.append(_measured(args, text, window, quantization))
            if len(rows) == 2:
                result["difference"] = {name: rows[1][name] - rows[0][name] for name in _FIGURES}
            save(result)
    finally:
        if rows:
            _print(result)


def read_text(file: Path) -> str:
    """A text in UTF-8, line ends as they are; `ValueError` names the file and what is wrong."""
    name = f"perplexity is {str(file)!r}"
    try:
        given = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; it must be a text to read") from error
    try:
        text = given.decode()
    except UnicodeDecodeError as error:
        at = f"byte {given[error.start]:#04x} at {error.start}"
        raise ValueError(f"{name}, which has {at}; it must be UTF-8") from error
    if not text:
        raise ValueError(f"{name}, which is empty; it must hold a text")
    return text


def windows(tokens: Tokens, length: int) -> list[Tokens]:
    """Tokens cut into windows side by side, the last one perhaps shorter."""
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def config(window: int, **options: Any) -> EngineConfig:
    """Of an engine that scores windows. options: further ones."""
    one = EngineConfig(
        drafter=None, max_requests=1, max_model_len=window, prefix_caching=False, **options
    )
    most = min(one.max_prompt_tokens, one.max_tokens_per_step) // window
    return replace(one, max_requests=max(1, min(AT_ONCE, most)))


def negative_log_likelihood(
    engine: Engine, tokens: Tokens, window: int, say: Callable[[str], object] = lambda _: None
) -> tuple[float, int]:
    """Sum over all tokens but each window's first, in nats, and how many these are.

    Nothing comes before a window's first token, so nothing predicts it; each other token is
    predicted from those before it in its window. say: told how far it is.

    Raises:
        BrokenLogits: a log-probability is NaN or infinite.
    """
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    total, count, pieces = 0.0, 0, windows(tokens, window)
    # In groups, for each token's result is an object.
    group = 4 * engine.config.max_requests
    for start in range(0, len(pieces), group):
        for answer in engine.generate(pieces[start : start + group], scored):
            found = [one.logprob for one in answer.prompt_logprobs or [] if one is not None]
            total -= math.fsum(found)
            count += len(found)
        say(f"{min(start + group, len(pieces))} of {len(pieces)} windows")
    return total, count


def figures(total: float, scored: int, tokens: int, size: int) -> Row:
    """Of a negative log-likelihood.

    tokens: of the whole text, of which `scored` have a part in the total. size: bytes of the whole
    text; in bits per byte, tokens that are not scored count like the others on average.
    """
    mean = total / scored
    return {
        "tokens": tokens,
        "scored": scored,
        "bytes": size,
        "nll_per_token": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": mean / math.log(2) * tokens / size,
    }


def _measured(
    args: argparse.Namespace, text: str, window: int, quantization: QuantizationName | None
) -> Row:
    """One row: weights as they are, or rounded."""
    wanted = config(
        window,
        max_tokens_per_step=args.max_tokens_per_step,
        ssm_dtype=args.ssm_dtype[0],
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        graphs=False,  # of prompts alone there is nothing to replay
    )
    try:
        loaded = load(args.model, wanted, args.device, args.dtype, None, quantization)
        model = loaded.model
        use_threads(args.threads, model)
        tokens = encode(text, loaded.tokenizer, model.vocab_size)
        if len(tokens) < 2:
            raise ValueError(
                f"perplexity is {str(args.perplexity)!r}, which is {len(tokens)} token long; it "
                "must have at least 2, for nothing predicts the first"
            )
        weights = str(model.dtype).removeprefix("torch.")
        weights += f", {quantization}" if quantization else ""

        def say(done: str) -> None:
            print(f"{weights}: {done}", file=sys.stderr)

        with Engine(model, loaded.config, tokenizer=loaded.tokenizer) as engine:
            total, scored = negative_log_likelihood(engine, tokens, window, say)
        return {"weights": weights} | figures(total, scored, len(tokens), len(text.encode()))
    finally:
        give_back()


def _print(result: Row) -> None:
    def cells(row: Row) -> Row:
        return {name.replace("_", " "): f"{row[name]:.{n}f}" for name, n in _FIGURES.items()}

    rows = result["rows"]
    counted = "tokens", "scored", "bytes"
    lines = [
        {"weights": row["weights"]} | {name: str(row[name]) for name in counted} | cells(row)
        for row in rows
    ]
    if "difference" in result:
        empty = {"weights": "difference"} | dict.fromkeys(counted, "")
        signed = {name: f"{result['difference'][name]:+.{n}f}" for name, n in _FIGURES.items()}
        lines.append(empty | {name.replace("_", " "): value for name, value in signed.items()})
    name, text = (Path(result[of]).resolve().name for of in ("model", "text"))
    print(f"{name}, {result['environment']['device']}, {text} in windows of {result['window']}")
    show("", lines)
