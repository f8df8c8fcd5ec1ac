"""Endpoint of the schema registry's REST API: one method on one path, which calls one operation of the service."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mansio.api.asgi.bodies import read_body
from mansio.api.asgi.problems import RETRY_AFTER_S
from mansio.api.asgi.request_guard import check_form_body, check_host_and_origin
from mansio.api.http.v1.operation import Call
from mansio.errors import AuthorizationFailed, InvalidRequest, MansioError, SchemaRegistryRefusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from mansio.api.http.v1.operation import ApiContext

MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
BODY_BYTES_MAX: Final = 4 << 20

UNPROCESSABLE: Final = 422
FORBIDDEN: Final = 40301
STORE_ERROR: Final = 50001
STORE_TIMEOUT: Final = 50002
NO_LEADER: Final = 50003
"""Error codes of the REST API, besides those of refusals."""

_FLAGS: Final = frozenset(
    {
        "deleted",
        "deletedOnly",
        "permanent",
        "normalize",
        "verbose",
        "defaultToGlobal",
        "force",
        "latestOnly",
        "fetchMaxId",
    }
)
_NUMBERS: Final = frozenset({"offset", "limit"})
_NAMES: Final = {"subjectPrefix": "prefix", "format": "format"}
"""Query parameters; of others, which other versions of the API have, none is an error."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`method` and `path`, which may have the parameters `subject`, `version`, `id` and `guid`; `operation` of
    `mansio.broker.services.schema_registry`. `shape`: makes the answer of the result, as bytes or a value. `fixed`:
    arguments of the operation that the request does not have."""

    method: str
    path: str
    operation: str
    shape: Callable[[Any], Any] | None = None
    fixed: Mapping[str, Any] | None = None

    @property
    def changes(self) -> bool:
        """Whether the operation changes something."""
        return self.operation in ("register", "delete") or self.operation.startswith(("set-", "delete-"))

    async def __call__(self, context: ApiContext, request: Request) -> Response:
        """Decode the request, call the service on the broker that answers, encode the result or error."""
        try:
            check_host_and_origin(request, context.host_names)
            check_form_body(request)
            async with read_body(request, context.budget) as data:
                arguments = self._arguments(request, data)
            client = Call(context, request, None, None, b"").client
            result = await client.admin.schemas.request(
                self.operation, request.path_params.get("subject"), arguments, changes=self.changes
            )
        except MansioError as error:
            return error_response(error)
        except HTTPException as error:
            return error_answer(error.status_code, error.status_code, error.detail)
        except ClientDisconnect:
            return Response(status_code=499)  # its client is gone
        except TimeoutError:
            return error_answer(500, STORE_TIMEOUT, "no answer in time")
        answer = result if self.shape is None else self.shape(result)
        return Response(answer if isinstance(answer, bytes) else to_json(answer), media_type=MEDIA_TYPE)

    def _arguments(self, request: Request, data: bytes) -> dict[str, Any]:
        """Return the arguments of the operation: those of the body, the query and the path. Raises `InvalidRequest`."""
        arguments = _body(data) if data else {}
        query = request.query_params
        for name in _FLAGS & query.keys():
            arguments[name] = query[name].lower() in ("true", "")
        for name in _NUMBERS & query.keys():
            arguments[name] = _number(name, query[name])
        for name, argument in _NAMES.items():
            if name in query:
                arguments[argument] = query[name]
        parameters = request.path_params
        if "id" in parameters:
            arguments["id"] = _number("id", parameters["id"])
        for name in ("version", "guid"):
            if name in parameters:
                arguments[name] = parameters[name]
        return {**arguments, **(self.fixed or {})}


def error_response(error: MansioError) -> Response:
    """Return the response for an error: `error_code` of the REST API, and `message`."""
    if isinstance(error, SchemaRegistryRefusal):
        return error_answer(_status(error.code), error.code, error.message)
    if isinstance(error, AuthorizationFailed):
        return error_answer(403, FORBIDDEN, error.message)
    if error.retriable:
        return error_answer(503, NO_LEADER, error.message)
    if error.http_status >= 500:
        return error_answer(500, STORE_ERROR, error.message)
    status = UNPROCESSABLE if error.http_status == HTTPStatus.BAD_REQUEST else error.http_status
    return error_answer(status, status, error.message)


def _status(code: int) -> int:
    return code if code < 1_000 else code // 100


def error_answer(status: int, code: int, message: str) -> Response:
    """Return the response for an error with its code in the REST API."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None
    body = to_json({"error_code": code, "message": message})
    return Response(body, status, headers, media_type=MEDIA_TYPE)


def _body(data: bytes) -> dict[str, Any]:
    if len(data) > BODY_BYTES_MAX:
        raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
    try:
        found = from_json(data, allow_inf_nan=False)
    except ValueError:
        raise InvalidRequest("the body is not JSON") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body is a JSON object")
    return found


def _number(name: str, text: str) -> int:
    if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > 11:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a number")
    return int(text)
