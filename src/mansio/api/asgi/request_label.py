"""Names of a request in log lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

PATH_CHARACTERS_MAX = 200


def request_label(request: Request) -> tuple[str, str]:
    """Return method and path, or the action in AWS JSON, and the address of the client."""
    client = request.client
    action = request.headers.get("x-amz-target")
    found = f"{request.method} {request.url.path}" if action is None else action
    return found[:PATH_CHARACTERS_MAX], "" if client is None else f"{client.host}:{client.port}"
