"""The command `hybrid-runtime serve DIR`: options of the server and of the engine.

Importing it needs nothing of the extra `server`.
"""

import argparse
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hybrid_runtime.engine import Engine, EngineConfig
from hybrid_runtime.engine.load import QuantizationName
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.server.options import ServerOptions

KEY_VARIABLE = "HYBRID_RUNTIME_API_KEY"
"""Environment variable that holds a key, where no `--api-key` is given."""
DEFAULTS = {field.name: field.default for field in fields(ServerOptions)}
NOT_SERVED = {"synthetic_acceptance"}
"""Fields of `EngineConfig` that are no options, because texts would be wrong."""
MAX_WAITING = 256
"""Default of `--max-waiting`; the engine's own has no limit."""

ENGINE_HELP = {
    "drafter": "mtp, eagle, ngram, none, or auto: the first of these that there is",
    "num_speculative_tokens": "most drafts of a row per step, at most 15 (7 with a drafter)",
    "adaptive": "as many drafts as pay; no: always so many",
    "sampled_drafts": "draw drafts at the request's temperature (off: the likeliest)",
    "max_requests": "requests that run at once",
    "max_model_len": "most tokens of a request, prompt and output together",
    "max_tokens_per_step": "most tokens of a step",
    "max_prompt_tokens": "most prompt tokens of a step",
    "max_waiting": "most requests that wait; others get status 429",
    "steps_ahead": "steps queued before the results of the first are read, 0 or 1 (1 on a GPU)",
    "graphs": "capture CUDA graphs (on a GPU)",
    "strategy": "when states are saved: auto, blocking, defer or always",
    "state_layout": "replay: one state and a ring of records; columns: a state per draft",
    "ring_tokens": "replay: tokens in the ring before a state is written (15, with many drafts 31)",
    "kv_cache_dtype": "of keys and values: auto (the checkpoint's own), float32, bfloat16, float16 "
    "or fp8",
    "ssm_dtype": "of the SSM states: auto, float32, bfloat16 or float16 (the checkpoint's own)",
    "stochastic_rounding": "round half-precision states of decoding rows stochastically (off)",
    "conv_layout": "of conv_state in memory: SD or DS",
    "block_size": "tokens between states that can be hit (as many as take a state's memory)",
    "kv_block_size": "tokens of a block of keys and values (64 or 32)",
    "memory_fraction": "share of the GPU's memory that may be in use",
    "num_blocks": "KV blocks and state blocks (by --memory-fraction; on a CPU for all requests)",
    "prefix_caching": "start prompts from what earlier ones have left (on)",
    "retention": "states kept for that: all, prompt, or each so many tokens (all)",
    "host_blocks": "KV blocks and state blocks in pinned host memory (none)",
}
"""Help by field of `EngineConfig`; in brackets the default, where that is no number."""


def _value(text: str) -> str | int | float | None:
    """A number, None or a name; `EngineConfig` checks which of them it may be."""
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _add_engine_options(group: Any) -> None:
    """Add an option for every field of `EngineConfig`, which has the defaults."""
    for name, hint in get_type_hints(EngineConfig).items():
        if name in NOT_SERVED:
            continue
        kinds = {get_origin(kind) or kind for kind in (*get_args(hint), hint)}
        how: dict[str, Any] = {"type": _value}
        if bool in kinds:
            how = {"action": argparse.BooleanOptionalAction}
        elif tuple in kinds:
            how = {"type": int, "nargs": 2, "metavar": ("KV", "STATE")}
        default = MAX_WAITING if name == "max_waiting" else argparse.SUPPRESS
        group.add_argument(_flag(name), default=default, help=_engine_help(name), **how)


def _engine_help(name: str) -> str:
    """The field's help, with its default where that is a number."""
    default = MAX_WAITING if name == "max_waiting" else getattr(EngineConfig(), name)
    number = type(default) in (int, float)
    return ENGINE_HELP[name] + (f" ({default})" if number else "")


def add_command(commands: Any) -> None:
    """Add `serve` to a command line."""
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP, in OpenAI's form",
        description="Serve a checkpoint over HTTP, in OpenAI's form; docs/server.md explains every "
        "option.",
    )
    serve.add_argument("model", metavar="DIR", help="checkpoint directory or hub id")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="0 = a free one (%(default)s)")
    serve.add_argument("--model-name", help="what requests call the model (DIR's own name)")
    serve.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"let in only who has a key; may be repeated (default: ${KEY_VARIABLE}, if set)",
    )  # fmt: skip
    for name, kind, help in (
        ("max_body_bytes", int, "largest body of a request"),
        ("max_choices", int, "most completions or embeddings of one request"),
        ("max_concurrency", int, "most requests that are open at once"),
        ("body_seconds", float, "time in which a request's body must come"),
        ("drain_seconds", float, "time that open requests have to end after SIGTERM"),
    ):
        serve.add_argument(
            _flag(name), type=kind, default=DEFAULTS[name], help=f"{help} (%(default)s)"
        )
    serve.add_argument("--access-log", action="store_true", help="log a line per request")
    serve.add_argument("--device", help="a GPU where there is one")
    serve.add_argument("--dtype", help="of the weights; auto on a GPU, else float32")
    serve.add_argument(
        "--quantization", choices=get_args(QuantizationName),
        help="round weights to 8 bits as they are loaded (as the checkpoint says)",
    )  # fmt: skip
    serve.add_argument("--threads", type=int, help="of a CPU; 1 for a small model")
    serve.add_argument("--eagle-path", metavar="DIR", help="EAGLE head; sub-directory eagle of DIR")
    _add_engine_options(
        serve.add_argument_group("engine", "fields of EngineConfig, see docs/engine.md")
    )
    serve.set_defaults(run=serve_checkpoint)


def serve_checkpoint(args: argparse.Namespace) -> None:
    """Check the options, bind the address, load the weights, serve."""
    try:
        from hybrid_runtime.server import run
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve needs {error.name}, which comes with pip install 'hybrid-runtime[server]'"
        ) from error
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options = server_options(args)
    with run.bind(args.host, args.port) as bound:
        engine = Engine.from_pretrained(
            args.model, device=args.device, dtype=args.dtype, eagle_path=args.eagle_path,
            quantization=args.quantization, **engine_options(args),
        )  # fmt: skip
        use_threads(args.threads, engine.model)
        engine.capture(progress=sys.stderr.isatty())
        run.serve(engine, options, bound)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The server's own options."""
    keys = args.api_key
    if keys is None:
        keys = [os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else []
    return ServerOptions(
        model_name=args.model_name or Path(args.model).resolve().name,
        api_keys=tuple(keys),
        max_body_bytes=args.max_body_bytes,
        max_choices=args.max_choices,
        max_concurrency=args.max_concurrency,
        body_seconds=args.body_seconds,
        drain_seconds=args.drain_seconds,
        access_log=args.access_log,
    )


def engine_options(args: argparse.Namespace) -> Any:
    """The fields of `EngineConfig` that were given, unchecked."""
    names = [field.name for field in fields(EngineConfig)]
    chosen = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
