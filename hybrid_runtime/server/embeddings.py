"""`/v1/embeddings`."""

import asyncio
import base64

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from hybrid_runtime.engine.tokenize import encode_instructed
from hybrid_runtime.server.errors import ApiError
from hybrid_runtime.server.generation import unless_gone
from hybrid_runtime.server.schemas import EmbeddingBody
from hybrid_runtime.server.service import Here, Service

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request, service: Here) -> Response:
    """One vector per input."""
    service.check_model(body.model)
    service.check_choices(len(body.input), "input")
    size = service.engine.engine.model.hidden_size
    if body.dimensions not in (None, size):
        raise ApiError(
            400, f"dimensions is {body.dimensions}; it must be {size}, the model's size",
            param="dimensions",
        )  # fmt: skip
    count = await asyncio.to_thread(_count, service, body)
    work = service.engine.embed(
        body.input, body.pooling or "last", body.instruction or "", body.normalize is not False,
        tenant=service.tenant(request),
    )  # fmt: skip
    vectors = await unless_gone(request, work)
    service.metrics.prompt_tokens.inc(count)
    service.metrics.ended.labels("embedded").inc(len(vectors))
    data = [
        {"object": "embedding", "index": i, "embedding": _shown(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse(
        {"object": "list", "data": data, "model": service.options.model_name, "usage": usage}
    )


def _count(service: Service, body: EmbeddingBody) -> int:
    """Tokens of all inputs; `ApiError` for one that is too long or cannot be embedded."""
    engine, count = service.engine.engine, 0
    for prompt in body.input:
        try:
            tokens, front = encode_instructed(
                prompt, body.instruction or "", engine.tokenizer, engine.model.vocab_size
            )
            service.check_length(len(tokens), 0, "input")
            engine.prepare_embedding(tokens[front:], body.pooling or "last", tokens[:front])
        except ValueError as error:
            raise ApiError(400, str(error), param="input") from error
        count += len(tokens)
    return count


def _shown(vector: Tensor, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
