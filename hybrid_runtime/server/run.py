"""Runs the application on a socket under uvicorn, and drains it at the end."""

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
"""Seconds in which a stream that is cut off can send its end."""

_LOOPBACK = ("127.", "::1")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; it takes no connections until the server listens on it.

    host: name or IP address.
    port: 0 = a free one.

    `ValueError` for an address that cannot be bound.
    """
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
    """Serves one engine. SIGTERM and SIGINT let open requests end, for at most `drain_seconds`; a
    SIGINT after either aborts them at once.

    engine: what is served.
    options: of the server.
    ready: called when it listens.

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
        """When the drain is over, abort what is still open. uvicorn would cancel the tasks, which
        leaves streams without an end and tracebacks in the log."""
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
        """Does nothing, because `serve` has set the handlers. uvicorn would raise all signals again
        in the end, and so end the process by them."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal: drain, or end the drain."""
        if sig == signal.SIGINT and self.should_exit:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one kills, whatever hangs
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._hurry.set)
        self.interrupted |= sig == signal.SIGINT
        self.should_exit = True


def serve(engine: Engine, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; `KeyboardInterrupt` at the end if there was a SIGINT."""
    address = url(bound)
    if not options.api_keys and not bound.getsockname()[0].startswith(_LOOPBACK):
        logger.warning("%s can be reached from outside, and asks for no API key", address)
    server = Server(engine, options, lambda: logger.info("listening on %s", address))
    before = {sig: signal.signal(sig, server.handle_exit) for sig in _SIGNALS}
    # What was imported and built lives as long as the server: some 300,000 objects, which every
    # full garbage collection would visit while all requests wait.
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
