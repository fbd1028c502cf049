"""What the server tells of itself: models, health, version, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hybrid_runtime import __version__
from hybrid_runtime.server.service import Here, Service

router = APIRouter()


@router.get("/v1/models")
async def models(service: Here) -> dict[str, Any]:
    """The one model."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Here) -> dict[str, Any]:
    """The one model, by its name."""
    service.check_model(name)
    return _model(service)


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this package."""
    return {"version": __version__}


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(service: Here) -> Response:
    """200 as long as requests are taken."""
    if service.engine.closed:
        return JSONResponse({"status": "closed"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(service: Here) -> Response:
    """For Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "hybrid-runtime",
        "max_model_len": service.max_model_len,
    }
