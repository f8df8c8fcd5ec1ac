"""Request context: header fields and connection data that a handler may use in addition to the request's body."""

from __future__ import annotations

from typing import NamedTuple


class RequestContext(NamedTuple):
    """Of one request. `listener` is the (host, port) that this broker advertises to clients."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    listener: tuple[str, int]
