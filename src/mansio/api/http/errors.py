"""HTTP errors: one JSON format for the errors of all routes, except those of the API (`/v1`): problem details.

    {"error": {"type": "UnknownTopicOrPartition", "message": "...", "kafka_code": 3, "retriable": true}}

`type` is the name of the class in `mansio.errors` (or the HTTP reason phrase without blanks for an error of HTTP
itself), `kafka_code` is Kafka's error code (null for errors of HTTP). The class determines the HTTP status.

Invariant: the response to an unexpected exception is 500 without details; the details are logged.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mansio.api.asgi.problems import RETRY_AFTER_S, http_problem, problem
from mansio.errors import MansioError
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

API_PATH = "/v1"


def error_body(kind: str, message: str, kafka_code: int | None, *, retriable: bool) -> dict[str, Any]:
    """Return the JSON value of one error."""
    return {
        "error": {"type": kind, "message": message, "kafka_code": kafka_code, "retriable": retriable},
    }


def error_response(error: MansioError) -> JSONResponse:
    """Return the response for a `MansioError`; with status 429 or 503 it has a Retry-After header."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.http_status in (429, 503) else None
    body = error_body(type(error).__name__, error.message, error.kafka_code, retriable=error.retriable)
    return JSONResponse(body, status_code=error.http_status, headers=headers)


async def on_mansio_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, MansioError):
        raise copied(error)
    return problem(error) if _is_in_api(request) else error_response(error)


def _is_in_api(request: Request) -> bool:
    """Whether a path is one of the API, known or not, which answers with problem details (RFC 9457)."""
    return request.url.path.startswith(API_PATH)


async def on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise copied(error)
    kind = HTTPStatus(error.status_code).phrase.replace(" ", "")
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"nothing answers at {request.url.path}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {request.url.path}"
    if _is_in_api(request):
        return http_problem(HTTPException(error.status_code, message, dict(error.headers or {})))
    body = error_body(kind, message, None, retriable=False)
    return JSONResponse(body, status_code=error.status_code, headers=_headers(error.headers))


async def on_unexpected_error(request: Request, _error: Exception) -> Response:
    """Return the response to an unexpected exception. Starlette raises the exception again afterwards, so that the HTTP
    server logs it."""
    if _is_in_api(request):
        return http_problem(HTTPException(500, "internal error"))
    return JSONResponse(error_body("InternalError", "internal error", -1, retriable=False), status_code=500)


def _headers(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    return dict(headers) if headers else None


EXCEPTION_HANDLERS: dict[Any, Any] = {
    MansioError: on_mansio_error,
    HTTPException: on_http_exception,
    Exception: on_unexpected_error,
}
"""For `Starlette(exception_handlers=...)`."""
