"""Who is asking, and how: what a handler may know of a request besides its body."""

from __future__ import annotations

from typing import NamedTuple


class RequestContext(NamedTuple):
    """One request's surroundings. `listener` is the (host, port) this broker tells clients to connect to."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    listener: tuple[str, int]
