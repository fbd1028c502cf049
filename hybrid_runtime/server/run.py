"""From a socket to a server that drains: uvicorn around the application."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from math import ceil

import uvicorn

from hybrid_runtime.engine import Engine
from hybrid_runtime.server.app import create_app
from hybrid_runtime.server.options import ServerOptions

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.", "::1")


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which nobody can reach until the server listens on it; port 0 is a
    free one. `ValueError` for an address that can't be had."""
    if not 0 <= port < 2**16:  # getaddrinfo would take the rest of the division
        raise ValueError(f"port is {port}; it must be in 0..{2**16 - 1}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves one engine. SIGTERM and SIGINT let open requests end, for `drain_seconds` at most; a
    second SIGINT does not wait. ready: called once it listens."""

    def __init__(
        self, engine: Engine, options: ServerOptions, ready: Callable[[], None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(engine, options),
                log_config=None,
                access_log=options.access_log,
                lifespan="on",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=ceil(options.drain_seconds),
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()


def serve(engine: Engine, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    address = url(bound)
    if not options.api_keys and not bound.getsockname()[0].startswith(_LOOPBACK):
        logger.warning("%s can be reached from outside, and asks for no API key", address)
    server = Server(engine, options, lambda: logger.info("listening on %s", address))
    # uvicorn raises the signal again when it has drained: that is no failure then.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    # What was imported and built lives as long as the server. Without this, full collections would
    # stop all requests for as long as it takes to look at some 300,000 objects.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(server.serve([bound]))
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGTERM, before)
        bound.close()
