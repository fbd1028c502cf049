"""The ASGI application: gate, routes and errors around one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from hybrid_runtime.engine import AsyncEngine
from hybrid_runtime.server import about, chat, completions, embeddings, errors, tokenizer
from hybrid_runtime.server.gate import Gate
from hybrid_runtime.server.metrics import Metrics
from hybrid_runtime.server.options import ServerOptions
from hybrid_runtime.server.service import Service


def create_app(serving: AsyncEngine, options: ServerOptions) -> ASGIApp:
    """The application whose start-up and shutdown are those of `serving`."""
    metrics = Metrics(serving.engine, options.model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving:
            app.state.service = Service(serving, options, metrics, int(time.time()))
            yield

    app = FastAPI(title="hybrid-runtime", lifespan=lifespan, docs_url=None, redoc_url=None)
    routes = [completions.router, chat.router, embeddings.router, tokenizer.router, about.router]
    for router in routes:
        app.include_router(router)
    errors.install(app)
    paths = [
        route.path for router in routes for route in router.routes if isinstance(route, APIRoute)
    ]
    # Outside of everything, so that answers to unexpected failures pass it too.
    return Gate(app, options, metrics, paths)
