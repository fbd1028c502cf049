"""The ASGI application around one engine, and its paths about the server itself."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from hybrid_runtime import __version__
from hybrid_runtime.engine import AsyncEngine
from hybrid_runtime.server import chat, completions, embeddings, errors, tokenizer
from hybrid_runtime.server.gate import Gate
from hybrid_runtime.server.metrics import Metrics
from hybrid_runtime.server.options import ServerOptions
from hybrid_runtime.server.service import Here, Service

router = APIRouter()


@router.get("/v1/models")
async def models(service: Here) -> dict[str, Any]:
    """The one model that is served, as a list."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Here) -> dict[str, Any]:
    """The same by its name; status 404 for another name."""
    service.check_model(name)
    return _model(service)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this package."""
    return {"version": __version__}


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(service: Here) -> Response:
    """Status 200 while requests are taken, 503 once the engine is closed."""
    if service.engine.closed:
        return JSONResponse({"status": "closed"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(service: Here) -> Response:
    """Counters for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "hybrid-runtime",
        "max_model_len": service.max_model_len,
    }


def create_app(serving: AsyncEngine, options: ServerOptions) -> ASGIApp:
    """Gate, routes and errors around `serving`, which starts and closes with the application."""
    metrics = Metrics(serving.engine, options.model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving:
            app.state.service = Service(serving, options, metrics, int(time.time()))
            yield

    app = FastAPI(title="hybrid-runtime", lifespan=lifespan, docs_url=None, redoc_url=None)
    routes = [completions.router, chat.router, embeddings.router, tokenizer.router, router]
    for each in routes:
        app.include_router(each)
    errors.install(app)
    paths = [route.path for each in routes for route in each.routes if isinstance(route, APIRoute)]
    # The outermost layer, so that answers to unexpected failures pass it too.
    return Gate(app, options, metrics, paths)
