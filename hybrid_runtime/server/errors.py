"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hybrid_runtime.engine import EngineClosed, QueueFull

CLIENT_GONE = 499
"""Status, in logs and metrics, of a request whose client has left."""

LONGEST = 500
"""Most characters of an error's message."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "unavailable",
}


class ApiError(Exception):
    """Answers a request with an error.

    status: HTTP status.
    message: one line for the user.
    param: the field that is wrong.
    code: OpenAI's name of the error; None = the usual one of the status.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def refused(error: ValueError, prompt: str = "prompt") -> ApiError:
    """The answer to a `ValueError` of the engine, whose message begins with the wrong argument.

    prompt: the field that holds what the engine calls the prompt.
    """
    param = str(error).split(" ", 1)[0]
    return ApiError(400, str(error), param=prompt if param == "prompt" else param)


_OURS = (ApiError, QueueFull, EngineClosed, ClientDisconnect)


def body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an error. What went wrong inside the server is only for the log."""
    match error:
        case ApiError():
            status, message = error.status, str(error)
        case QueueFull():
            status, message = 429, f"{error}; try again later"
        case EngineClosed():
            status, message = 503, "the engine is closed or has failed; the log says why"
        case HTTPException():
            status, message = error.status_code, str(error.detail)
        case RequestValidationError():
            return 400, _json(400, *_first(error))
        case _:
            status, message = 500, "the server failed on this request; its log says why"
    param = error.param if isinstance(error, ApiError) else None
    code = error.code if isinstance(error, ApiError) else None
    return status, _json(status, message, param, code)


def response(error: BaseException) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    status, content = body(error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONResponse(content, status, headers)


def install(app: FastAPI) -> None:
    """Have an application answer every failure in this form."""

    async def answer(_: Request, error: Exception) -> Response:
        return response(error)

    for kind in (*_OURS, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def _json(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = code or _CODES.get(status)
    param = None if param is None else _line(param)
    return {"error": {"message": _line(message), "type": kind, "param": param, "code": code}}


def _line(text: str) -> str:
    """One line of at most `LONGEST` characters in valid Unicode: what clients sent may be quoted in
    it, with line breaks and lone surrogates."""
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _first(error: RequestValidationError) -> tuple[str, str | None, str | None]:
    """Message, field and code of the first thing that is wrong with a body."""
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None, "invalid_json"
    # The first is "body". pydantic adds names of a union's members, which no field is called.
    names = [str(part) for part in first["loc"][1:] if part != "str" and "[" not in str(part)]
    param = ".".join(names) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if param is None and first["type"] == "value_error":  # fields that do not go together
        return message, message.split(" ", 1)[0], "invalid_value"
    if param is None and first["type"] == "string_unicode":  # a field's name
        param = str(first["input"])
        return f"Unrecognized request argument supplied: {param}", param, "unknown_parameter"
    if param is None:
        return "the body must be a JSON object, sent as application/json", None, "invalid_type"
    if first["type"] == "missing":
        return f"Missing required parameter: {param}", param, "missing_required_parameter"
    value = _shown(first["input"])
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}, which is {value}"
        return message, param, "unknown_parameter"
    must = re.sub("^[A-Z][a-z]+ should ", "it must ", message)  # pydantic's "Input should be ..."
    return f"{param} is {value}; {must}", param, "invalid_value"


def _shown(value: object) -> str:
    """A value as JSON, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
