"""From a socket to a server that drains: uvicorn around the application."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from hybrid_runtime.engine import AsyncEngine, Engine
from hybrid_runtime.server.app import create_app
from hybrid_runtime.server.options import ServerOptions

logger = logging.getLogger(__name__)

LAST_WORDS = 1.0
"""Seconds in which a stream that is cut off can tell its reader so."""

_LOOPBACK = ("127.", "::1")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
    second signal that is SIGINT cuts them off at once. ready: called once it listens.

    interrupted: there was a SIGINT.
    """

    def __init__(
        self, engine: Engine, options: ServerOptions, ready: Callable[[], None] | None = None
    ) -> None:
        self._engine = AsyncEngine(engine)
        super().__init__(
            uvicorn.Config(
                create_app(self._engine, options),
                log_config=None,
                access_log=options.access_log,
                lifespan="on",
                ws="none",
                server_header=False,
                proxy_headers=False,
            )
        )
        self._ready, self._drain_seconds = ready, options.drain_seconds
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)

    async def _cut_off(self) -> None:
        """When the drain is over, end what is still open. uvicorn would cancel the tasks, which
        leaves streams without an end and the log full of tracebacks."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._drain_seconds)
        if count := len(self.server_state.connections):
            logger.warning("%d connections are still open: their requests are aborted", count)
        await self._engine.close(drain=False)
        await asyncio.sleep(LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `serve` has done it. uvicorn would raise all signals again in the end, which
        ends the process by them."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal: drain, or cut the drain short."""
        if sig == signal.SIGINT and self.should_exit:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one kills, whatever hangs
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._hurry.set)
        self.interrupted |= sig == signal.SIGINT
        self.should_exit = True


def serve(engine: Engine, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; `KeyboardInterrupt` in the end if there was a SIGINT."""
    address = url(bound)
    if not options.api_keys and not bound.getsockname()[0].startswith(_LOOPBACK):
        logger.warning("%s can be reached from outside, and asks for no API key", address)
    server = Server(engine, options, lambda: logger.info("listening on %s", address))
    before = {sig: signal.signal(sig, server.handle_exit) for sig in _SIGNALS}
    # What was imported and built lives as long as the server. Without this, full collections would
    # stop all requests for as long as it takes to look at some 300,000 objects.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(server.serve([bound]))
    finally:
        gc.unfreeze()
        for sig, handler in before.items():
            signal.signal(sig, handler)
        bound.close()
    if server.interrupted:
        raise KeyboardInterrupt
