"""Routes of the HTTP API: all operations, and the description of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from pydantic_core import to_json
from starlette.responses import HTMLResponse, Response

from mansio.api.asgi.request_label import request_label
from mansio.api.http.path_route import PathRoute
from mansio.api.http.v1 import (
    cluster,
    delays,
    groups,
    leases,
    openapi,
    publish,
    reading,
    topics,
    traces,
    transactions,
)
from mansio.api.required_rights import HTTP, check_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from mansio.api.http.v1.operation import ApiContext, Operation

OPERATIONS: Final = (
    *topics.OPERATIONS,
    *publish.OPERATIONS,
    *reading.OPERATIONS,
    *leases.OPERATIONS,
    *groups.OPERATIONS,
    *delays.OPERATIONS,
    *transactions.OPERATIONS,
    *traces.OPERATIONS,
    *cluster.OPERATIONS,
)

_FREQUENT: Final = (*publish.OPERATIONS, *leases.OPERATIONS)
"""Operations whose routes are tried first."""


def routes(context: ApiContext) -> list[PathRoute]:
    """Return the routes of the API of one broker."""

    check_rows("HTTP", HTTP, ((each.method, each.path) for each in OPERATIONS))

    def endpoint(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            holds = context.loop_holds()
            if holds is None:
                return await operation(context, request)
            return await holds.measured(
                partial(operation, context, request), "http", partial(request_label, request)
            )

        return call

    async def description(_request: Request) -> Response:
        return Response(to_json(openapi.describe(OPERATIONS)), media_type="application/json")

    async def page(_request: Request) -> Response:
        return HTMLResponse(openapi.page(OPERATIONS))

    return [
        *(
            PathRoute(openapi.PREFIX + each.path, endpoint(each), methods=[each.method])
            for each in sorted(OPERATIONS, key=lambda each: each not in _FREQUENT)
        ),
        PathRoute(f"{openapi.PREFIX}/openapi.json", description),
        PathRoute(f"{openapi.PREFIX}/docs", page),
    ]
