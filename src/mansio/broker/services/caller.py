"""Caller of a service: who calls, and until when the result is of use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ANONYMOUS_PRINCIPAL: Final = "ANONYMOUS"
"""Principal of a client that is not authenticated, as Kafka names it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Context of a call, passed where a decision depends on it. One object may serve all calls of a connection.

    `client_id` is chosen by the client and selects its quota. `address` is the client's host, for logs and
    descriptions. `deadline` is in monotonic seconds; None for no deadline.
    """

    principal: str = ANONYMOUS_PRINCIPAL
    client_id: str = ""
    address: str = ""
    deadline: float | None = None

    def timeout_ms(self, timeout_ms: float, now: float) -> float:
        """`timeout_ms`, shortened to the time until the deadline, never negative. `now` is monotonic seconds."""
        if self.deadline is None:
            return timeout_ms
        return max(0.0, min(timeout_ms, (self.deadline - now) * 1000))


ANONYMOUS: Final = Caller()
