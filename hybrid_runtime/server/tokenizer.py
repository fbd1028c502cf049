"""`/tokenize` and `/detokenize`, as vLLM has them."""

import asyncio
from typing import Any

from fastapi import APIRouter
from tokenizers import Tokenizer

from hybrid_runtime.engine.tokenize import encoded
from hybrid_runtime.server.errors import ApiError
from hybrid_runtime.server.schemas import DetokenizeBody, TokenizeBody
from hybrid_runtime.server.service import Here, Service

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: Here) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    service.check_model(body.model)
    tokenizer = _tokenizer(service)
    if body.messages is not None:
        messages = [message.rendered() for message in body.messages]
        ids = (await service.conversation(messages, body.chat_template_kwargs)).tokens.tolist()
    else:
        special = body.add_special_tokens is not False
        text = body.prompt or ""
        ids = (await asyncio.to_thread(encoded, "prompt", text, tokenizer, special)).ids
    texts = [tokenizer.id_to_token(id) for id in ids] if body.return_token_strs else None
    most = service.max_model_len
    return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: Here) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    service.check_model(body.model)
    tokenizer, size = _tokenizer(service), service.engine.engine.model.vocab_size
    wrong = next((token for token in body.tokens if token >= size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens has {wrong}; it must be in 0..{size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.engine.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model is served without a tokenizer")
    return tokenizer
