"""Limits and counters of the Kafka listener."""

from __future__ import annotations

from typing import Final, NamedTuple

from mansio.wire.api_versions import SUPPORTED_APIS

REJECTION_REASONS: Final = (
    "max_connections",
    "max_connections_per_ip",
    "certificate",
    "descriptors",
    "stopping",
)
"""Reasons for which a connection is rejected: a limit with the name of a setting is reached (for `max_connections`, one
that has not authenticated may be closed instead of the new one), the subject of the client's certificate makes no user
(`certificate`), no file descriptor is left (`descriptors`), or the broker is stopping."""


AUTHENTICATION_FAILURES: Final = (
    "credentials",
    "mechanism",
    "state",
    "version",
    "timeout",
    "expired",
    "revoked",
    "changed",
    "stale",
    "unavailable",
    "queue_full",
    "too_many_wrong",
    "no_keys",
)
"""Reasons for which an authentication fails, or its session ends: wrong credentials, a mechanism that is not offered,
a request that is not allowed, an unknown version; the client did not authenticate in time; the session has ended, the
certificate was revoked, or the password was changed; this broker is cut off from the cluster (`stale`, `unavailable`);
the password was not checked (`password_checks`), or a token (`token_checks`)."""


class ServerLimits(NamedTuple):
    """Limits of the Kafka listener; each has the meaning of the broker setting with the same name, if there is one."""

    socket_request_max_bytes: int
    requests_max: int
    backlog_bytes_max: int
    unsent_bytes_max: int
    queued_max_request_bytes: int
    max_connections: int
    max_connections_per_ip: int
    """0 for no limit apart from `max_connections`."""
    idle_ms_max: int


class ServerCounters:
    """Counters for `/metrics`; incremented per request or per connection, never per record."""

    __slots__ = (
        "authentication_failures",
        "authentications",
        "closed_by_reason",
        "connections_accepted",
        "errors",
        "rejected_by_reason",
        "requests",
    )

    def __init__(self) -> None:
        self.connections_accepted = 0
        self.rejected_by_reason = dict.fromkeys(REJECTION_REASONS, 0)
        self.closed_by_reason: dict[str, int] = {"idle": 0, "send_failed": 0}
        """Number of connections that this broker closed, by reason: idle, send failed, or the name of the error."""
        self.authentications = 0
        """Number of times that a client has authenticated."""
        self.authentication_failures = dict.fromkeys(AUTHENTICATION_FAILURES, 0)
        self.requests: dict[int, int] = dict.fromkeys(map(int, SUPPORTED_APIS), 0)
        self.errors = 0

    @property
    def connections_rejected(self) -> int:
        return sum(self.rejected_by_reason.values())

    def count_closed(self, reason: str) -> None:
        """Count a connection that this broker closed. `reason` must not come from a peer."""
        self.closed_by_reason[reason] = self.closed_by_reason.get(reason, 0) + 1
