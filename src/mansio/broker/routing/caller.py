"""Caller of a service: principal, client id, address and deadline of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mansio.errors import InvalidRequest

ANONYMOUS_PRINCIPAL: Final = "ANONYMOUS"
"""Principal of a client that is not authenticated, as Kafka names it."""

CLIENT_ID_CHARACTERS_MAX: Final = 100
"""Maximum length of the id that a client of a protocol other than Kafka's states."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client for which a service is called. One object may be used for all requests of a connection.

    `client_id` is chosen by the client and selects its quota. `address` is the client's host, for logs and
    descriptions. `deadline` is in monotonic seconds; None for no deadline.
    """

    principal: str = ANONYMOUS_PRINCIPAL
    client_id: str = ""
    address: str = ""
    deadline: float | None = None

    def timeout_ms(self, timeout_ms: float, now: float) -> float:
        """Return `timeout_ms`, or the time until the deadline if it is shorter; never negative. `now`: monotonic
        seconds."""
        if self.deadline is None:
            return timeout_ms
        return max(0.0, min(timeout_ms, (self.deadline - now) * 1000))


def check_client_id(client_id: str) -> None:
    """Raise `InvalidRequest` unless a stated client id has 1 to `CLIENT_ID_CHARACTERS_MAX` printable characters."""
    if not 1 <= len(client_id) <= CLIENT_ID_CHARACTERS_MAX or not client_id.isprintable():
        raise InvalidRequest(f"client id: 1 to {CLIENT_ID_CHARACTERS_MAX} printable characters")


ANONYMOUS: Final = Caller()
"""Caller without authentication, client id, address and deadline."""
