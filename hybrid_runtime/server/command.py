"""`hybrid-runtime serve DIR`: the command and its options."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hybrid_runtime.engine import Engine, EngineConfig
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.server.options import ServerOptions

KEY_VARIABLE = "HYBRID_RUNTIME_API_KEY"
DEFAULTS = {field.name: field.default for field in fields(ServerOptions)}
NOT_SERVED = {"synthetic_acceptance"}
"""Fields of `EngineConfig` that cannot be set: the text would be wrong."""
MAX_WAITING = 256
"""The queue must end somewhere; the engine's own default is that it does not."""


def _value(text: str) -> str | int | float | None:
    """A number, none, or a name; `EngineConfig` checks which it must be."""
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _add_engine_options(group: Any) -> None:
    """An option for every field of `EngineConfig`. What is not given is left to it."""
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
        group.add_argument(_flag(name), default=default, **how)


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
    serve.add_argument("--threads", type=int, help="of a CPU; 1 for a small model")
    serve.add_argument("--eagle-path", metavar="DIR", help="EAGLE head; sub-directory eagle of DIR")
    _add_engine_options(
        serve.add_argument_group("engine", "fields of EngineConfig, see docs/engine.md")
    )
    serve.set_defaults(run=serve_checkpoint)


def serve_checkpoint(args: argparse.Namespace) -> None:
    """Check everything, take the address, load the weights, serve."""
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
            **engine_options(args),
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
    """Those fields of `EngineConfig` that were chosen; it checks them."""
    names = [field.name for field in fields(EngineConfig)]
    chosen = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
