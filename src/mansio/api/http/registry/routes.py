"""Routes of the schema registry's REST API.

Left out of Confluent's API: contexts other than the default one, exporters, the search of versions by metadata, and the
encryption of data contracts; a client that does not ask for them does not notice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mansio.api.asgi.request_label import request_label
from mansio.api.http.path_route import PathRoute
from mansio.api.http.registry.endpoint import MEDIA_TYPE, Endpoint, error_answer, error_response
from mansio.errors import MansioError
from mansio.state.registry.schema import SCHEMA_TYPES
from mansio.tracebacks import copied
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from mansio.api.http.v1.operation import ApiContext

PREFIX: Final = "/registry"
"""Path of the API on the HTTP listener."""

DEFAULT_CONTEXT: Final = "."

_SUBJECT, _VERSION = "/subjects/{subject}", "/subjects/{subject}/versions/{version}"


def _text_of(result: Any) -> bytes:
    """Return the schema itself, which is JSON or another text."""
    text: str = result["schema"]
    return text.encode("utf-8", "surrogatepass")


def _names_of(result: Any) -> dict[str, Any]:
    """Return what names a registered schema. Clients take a schema in this answer for what they have sent, which may
    have been in another format."""
    return {name: result[name] for name in ("id", "version", "guid")}


def _subjects_of(result: Any) -> list[str]:
    return list(dict.fromkeys(each["subject"] for each in result))


def _ids_of(result: Any) -> list[dict[str, Any]]:
    return [{"context": DEFAULT_CONTEXT, "id": result["id"]}]


def _only_one(result: Any) -> int:
    number: int = result[0]
    return number


ENDPOINTS: Final = (
    Endpoint("GET", "/schemas/ids/{id}", "by-id"),
    Endpoint("GET", "/schemas/ids/{id}/schema", "by-id", shape=_text_of),
    Endpoint("GET", "/schemas/ids/{id}/subjects", "uses", shape=_subjects_of),
    Endpoint("GET", "/schemas/ids/{id}/versions", "uses"),
    Endpoint("GET", "/schemas/guids/{guid}", "by-guid"),
    Endpoint("GET", "/schemas/guids/{guid}/ids", "by-guid", shape=_ids_of),
    Endpoint("GET", "/schemas", "schemas"),
    Endpoint("GET", "/subjects", "subjects"),
    Endpoint("POST", _SUBJECT, "look-up"),
    Endpoint("DELETE", _SUBJECT, "delete"),
    Endpoint("GET", f"{_SUBJECT}/versions", "versions"),
    Endpoint("POST", f"{_SUBJECT}/versions", "register", shape=_names_of),
    Endpoint("GET", _VERSION, "version"),
    Endpoint("GET", f"{_VERSION}/schema", "version", shape=_text_of),
    Endpoint("GET", f"{_VERSION}/referencedby", "referenced-by"),
    Endpoint("DELETE", _VERSION, "delete", shape=_only_one),
    Endpoint("POST", f"/compatibility{_VERSION}", "check"),
    Endpoint("POST", f"/compatibility{_SUBJECT}/versions", "check", fixed={"version": None}),
    Endpoint("GET", "/config", "settings"),
    Endpoint("PUT", "/config", "set-settings"),
    Endpoint("DELETE", "/config", "delete-settings"),
    Endpoint("GET", "/config/{subject}", "settings"),
    Endpoint("PUT", "/config/{subject}", "set-settings"),
    Endpoint("DELETE", "/config/{subject}", "delete-settings"),
    Endpoint("GET", "/mode", "mode"),
    Endpoint("PUT", "/mode", "set-mode"),
    Endpoint("DELETE", "/mode", "delete-mode"),
    Endpoint("GET", "/mode/{subject}", "mode"),
    Endpoint("PUT", "/mode/{subject}", "set-mode"),
    Endpoint("DELETE", "/mode/{subject}", "delete-mode"),
)


def routes(context: ApiContext, prefix: str = PREFIX) -> list[PathRoute]:
    """Return the routes of the API below a prefix."""

    def endpoint(one: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            holds = context.loop_holds()
            if holds is None:
                return await one(context, request)
            return await holds.measured(
                partial(one, context, request), "http", partial(request_label, request)
            )

        return call

    def constant(value: object) -> Callable[[Request], Awaitable[Response]]:
        async def call(_request: Request) -> Response:
            return JSONResponse(value, media_type=MEDIA_TYPE)

        return call

    async def cluster_id(_request: Request) -> Response:
        return JSONResponse(
            {
                "scope": {
                    "path": [],
                    "clusters": {"kafka-cluster": context.services.topics.state.cluster_id},
                }
            }
        )

    return [
        *(PathRoute(prefix + each.path, endpoint(each), methods=[each.method]) for each in ENDPOINTS),
        PathRoute(f"{prefix}/schemas/types", constant(SCHEMA_TYPES)),
        PathRoute(f"{prefix}/contexts", constant([DEFAULT_CONTEXT])),
        PathRoute(f"{prefix}/v1/metadata/id", cluster_id),
        PathRoute(f"{prefix}/v1/metadata/version", constant({"version": f"mansio {__version__}"})),
        PathRoute(prefix or "/", constant({})),
        PathRoute(f"{prefix}/", constant({})),
    ]


def root_app(context: ApiContext) -> Starlette:
    """Return an application that has nothing but the API, at the root."""

    async def on_error(_request: Request, error: Exception) -> Response:
        if not isinstance(error, MansioError):
            raise copied(error)
        return error_response(error)

    async def on_http_exception(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_answer(error.status_code, error.status_code, error.detail)

    handlers = {MansioError: on_error, HTTPException: on_http_exception}
    app = Starlette(routes=routes(context, ""), exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app
