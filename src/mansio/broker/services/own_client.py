"""The broker's own client: connected to its Kafka listener, for requests that concern any broker of the cluster.

It finds leaders and coordinators, follows moves and repeats what can be repeated, as for every Kafka client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mansio.client
from mansio.config.cluster import WILDCARD_HOSTS
from mansio.config.settings import Address

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_TIMEOUT_MS: Final = 30_000
"""Time after which the outcome of a request is unknown."""


class OwnClient:
    """A client that is created at its first use. All methods run on the broker's event loop."""

    __slots__ = ("_address", "_client", "_client_id")

    def __init__(self, address: Callable[[], Address], client_id: str) -> None:
        """`address`: returns the address of the Kafka listener, or raises `Unavailable` while there is none."""
        self._address = address
        self._client_id = client_id
        self._client: mansio.client.Client | None = None

    def get(self) -> mansio.client.Client:
        """Return the client. Raises `Unavailable` while the broker starts or stops."""
        if self._client is None:
            host, port = self._address()
            address = Address("127.0.0.1" if host in WILDCARD_HOSTS else host, port)
            self._client = mansio.client.connect(
                str(address), client_id=self._client_id, request_timeout_ms=REQUEST_TIMEOUT_MS
            )
        return self._client

    async def close(self) -> None:
        """Close the client."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
