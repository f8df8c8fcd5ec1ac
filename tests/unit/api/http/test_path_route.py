"""Routes of the HTTP API: a name in a path is one segment, whatever characters it has."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from mansio.api.http.errors import EXCEPTION_HANDLERS
from mansio.api.http.path_route import PathRoute
from mansio.api.http.v1.openapi import PREFIX
from mansio.api.http.v1.routes import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from mansio.api.http.v1.operation import Operation

NAMED = [each for each in OPERATIONS if "{" in each.path]
LITERALS = sorted({segment for each in OPERATIONS for segment in each.path.split("/") if "{" not in segment})
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("/.%+;?#&= \0a\\2Fe", max_size=8),
    st.lists(st.sampled_from(["/", "..", ".", *LITERALS]), max_size=5).map("/".join),
)


def _endpoint(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse([operation.method, operation.path, request.path_params])

    return answer


def _app() -> Starlette:
    app = Starlette(
        routes=[PathRoute(PREFIX + each.path, _endpoint(each), methods=[each.method]) for each in OPERATIONS],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


APP = _app()


def _request(method: str, raw_path: str) -> tuple[int, bytes]:
    """Send a request as the server passes it on; return status and body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = raw_path.encode("ascii")
    scope = {
        "type": "http",
        "method": method,
        "path": raw.decode(),
        "raw_path": raw,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }
    asyncio.run(APP(scope, receive, send))
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def _path(operation: Operation, names: dict[str, str]) -> str:
    return PREFIX + re.sub(r"{(\w+)}", lambda found: quote(names[found[1]], safe=""), operation.path)


@given(st.sampled_from(NAMED), st.data())
def test_any_names_in_a_path_reach_the_operation_with_exactly_these_names(
    operation: Operation, data: st.DataObject
) -> None:
    names = {name: data.draw(NAMES, label=name) for name in re.findall(r"{(\w+)}", operation.path)}
    status, body = _request(operation.method, _path(operation, names))
    if all(names.values()):
        expected = JSONResponse([operation.method, operation.path, names]).body
        assert (status, body) == (200, bytes(expected))
    else:
        assert status == 404


@given(st.sampled_from(OPERATIONS))
def test_a_trailing_slash_is_no_other_spelling_of_a_path(operation: Operation) -> None:
    names = dict.fromkeys(re.findall(r"{(\w+)}", operation.path), "name")
    path = _path(operation, names)
    assert _request(operation.method, path)[0] == 200
    assert _request(operation.method, f"{path}/")[0] == 404


def test_literal_segments_are_found_in_any_encoding() -> None:
    assert _request("GET", "/v1/%67roups/a+b%2bc")[1] == bytes(
        JSONResponse(["GET", "/groups/{group}", {"group": "a+b+c"}]).body
    )


@pytest.mark.parametrize("path", ["/v1/groups/%", "/v1/groups/%2", "/v1/groups/%zz", "/v1/groups/a%ffb"])
def test_a_path_that_is_not_percent_encoded_utf8_is_refused(path: str) -> None:
    status, body = _request("GET", path)
    assert status == 400, body
    assert b"RFC 3986" in body
