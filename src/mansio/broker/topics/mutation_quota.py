"""Quota of one request for the partitions that it creates and deletes (`controller_mutation_rate`).

A strict quota refuses a change while the bucket of the client is in debt, and executes it otherwise, whatever its size.
A permissive quota executes each change, and has a throttle time afterwards: clients with an old version of a request do
not know the error (KIP-599).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import ThrottlingQuotaExceeded

if TYPE_CHECKING:
    from mansio.ports import Clock
    from mansio.state.quota import RateLimiter


class MutationQuota:
    """Counts the partitions of one request of a client."""

    __slots__ = ("_client_id", "_clock", "_is_strict", "_limiter", "_user", "throttle_ms")

    def __init__(
        self, limiter: RateLimiter, clock: Clock, user: str, client_id: str, *, is_strict: bool
    ) -> None:
        self._limiter = limiter
        self._clock = clock
        self._user = user
        self._client_id = client_id
        self._is_strict = is_strict
        self.throttle_ms = 0
        """Time for which the client must pause; the longest that a change has led to."""

    def record(self, partitions: int) -> None:
        """Count partitions that are about to be created or deleted.

        Raises `ThrottlingQuotaExceeded` if the quota is strict and used up; the partitions are not counted then.
        """
        now = self._clock.monotonic()
        if not self._is_strict:
            throttle_ms = self._limiter.take(self._user, self._client_id, partitions, now)
            self.throttle_ms = max(self.throttle_ms, throttle_ms)
            return
        throttle_ms = self._limiter.take(self._user, self._client_id, 0, now)
        if throttle_ms:
            self.throttle_ms = max(self.throttle_ms, throttle_ms)
            raise ThrottlingQuotaExceeded(
                "the client exceeds its quota of changes of partitions and credentials (controller_mutation_rate); "
                f"try again in {-(-throttle_ms // 1000)} s"
            )
        self._limiter.take(self._user, self._client_id, partitions, now)
