"""What every request passes before its route: API key, limits and counters."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_runtime.server.errors import CLIENT_GONE, ApiError, response
from hybrid_runtime.server.metrics import Metrics
from hybrid_runtime.server.options import ServerOptions

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Beginnings of the paths that do work; they need a key and have limits."""

logger = logging.getLogger(__name__)


class Gate:
    """An ASGI application around another.

    app: the inner application.
    options: keys and limits.
    metrics: counts requests.
    paths: paths that are counted by name; all others count as "other".
    """

    def __init__(
        self, app: ASGIApp, options: ServerOptions, metrics: Metrics, paths: Sequence[str]
    ) -> None:
        self.app, self._options, self._metrics = app, options, metrics
        self._keys = [key.encode() for key in options.api_keys]
        self._paths = frozenset(paths)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, ended = time.perf_counter(), CLIENT_GONE, False
        request_id = uuid4().hex

        async def named(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        self._metrics.http_open.inc()
        try:
            await self._pass(scope, receive, named)
        except Exception:
            logger.exception("%s %s failed (%s)", scope["method"], scope["path"], request_id)
            if not ended:  # uvicorn then closes the connection
                raise
        finally:
            self._metrics.http_open.dec()
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.http.labels(path, status).inc()
            self._metrics.seconds.observe(time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if not scope["path"].startswith(GUARDED):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await response(refusal)(scope, receive, send)
            return
        self._open += 1
        try:
            await self.app(scope, self._bounded(receive), send)
        finally:
            self._open -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused, or None; puts its key into the scope as `api_key`."""
        if self._keys:
            given = Headers(scope=scope).get("authorization", "")
            kind, _, key = given.partition(" ")
            known = [secrets.compare_digest(key.encode(), each) for each in self._keys]
            if kind.lower() != "bearer" or not any(known):
                return ApiError(
                    401, "the header Authorization must be 'Bearer KEY' with a key of this server"
                )
            scope["api_key"] = key
        if self._open >= self._options.max_concurrency:
            return ApiError(429, f"{self._open} requests are open, which is the most allowed")
        length = Headers(scope=scope).get("content-length", "0")
        return self._too_large() if int(length) > self._options.max_body_bytes else None

    def _too_large(self) -> ApiError:
        most = self._options.max_body_bytes
        return ApiError(413, f"the request's body is too large; it may have {most} bytes")

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` with limits on the body: 408 if it comes too late, 413 if it is too large."""
        end = asyncio.get_running_loop().time() + self._options.body_seconds
        size, more = 0, True

        async def bounded() -> Message:
            nonlocal size, more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the request's body did not come in time") from None
            size += len(message.get("body", b""))
            if size > self._options.max_body_bytes:
                raise HTTPException(413, str(self._too_large()))
            more = message.get("more_body", False)
            return message

        return bounded
