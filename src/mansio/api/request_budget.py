"""Memory of the requests of one listener, and the turns of large ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from mansio.api.turns import Turns
from mansio.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET_BYTES: Final = 256 << 20


class TooManyRequests(Unavailable):
    """Other requests use all memory or connections that are reserved for them; repeat the request later."""

    kafka_code = 89  # THROTTLING_QUOTA_EXCEEDED
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class RequestBudget:
    """Bytes of the requests that are in memory, at most `BUDGET_BYTES`, and the turns of large ones."""

    __slots__ = ("turns", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.turns = Turns()

    def take(self, size_bytes: int) -> None:
        """Count bytes. Raises `TooManyRequests`."""
        if self.used_bytes + size_bytes > BUDGET_BYTES:
            raise TooManyRequests("the bodies of other requests use all memory that is reserved for them")
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes no longer."""
        self.used_bytes -= size_bytes

    @contextlib.contextmanager
    def parsed(self, size_bytes: int) -> Iterator[None]:
        """Count the memory of parsing a body of this size, until the end of the context. Raises `TooManyRequests`."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)
