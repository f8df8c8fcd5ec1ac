"""When to try again, and how long to wait before.

Owns the answer to "is this failure worth another attempt?" for every answer a Kafka broker may give, and the one
retry loop. Waits grow exponentially up to a bound and are jittered, so that clients which failed together do not
come back together (KIP-580).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mansio.errors import BY_KAFKA_CODE, MansioError, RequestTimedOut, Unavailable, error_for_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

RETRIABLE_CODES = frozenset(
    {
        9,  # REPLICA_NOT_AVAILABLE
        13,  # NETWORK_EXCEPTION
        70,  # FETCH_SESSION_ID_NOT_FOUND
        71,  # INVALID_FETCH_SESSION_EPOCH
        72,  # LISTENER_NOT_FOUND
        80,  # PREFERRED_LEADER_NOT_AVAILABLE
        83,  # ELIGIBLE_LEADERS_NOT_AVAILABLE
        89,  # THROTTLING_QUOTA_EXCEEDED
    }
)
"""Codes without an error class of their own that the protocol calls retriable."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts: the first, the longest, how fast they grow, and the share of chance in each."""

    first_ms: float = 50
    longest_ms: float = 1_000
    factor: float = 2.0
    jitter: float = 0.2

    def delay_seconds(self, failures: int) -> float:
        """The wait after the `failures`-th failure in a row (from 1)."""
        delay_ms = min(self.longest_ms, self.first_ms * self.factor ** min(failures - 1, 30))
        return delay_ms * random.uniform(1 - self.jitter, 1 + self.jitter) / 1000


DEFAULT_BACKOFF = Backoff()


def error_for(code: int, message: str | None = None) -> MansioError:
    """The typed error of a broker's error code (not 0)."""
    if code in BY_KAFKA_CODE or code not in RETRIABLE_CODES:
        return error_for_code(code, message or "")
    return Unavailable(message or f"the broker answered with error code {code}")


def raise_for(code: int, message: str | None = None) -> None:
    """Nothing for code 0, otherwise the typed error."""
    if code:
        raise error_for(code, message)


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    *,
    timeout_ms: float,
    backoff: Backoff = DEFAULT_BACKOFF,
    worth_retrying: Callable[[MansioError], bool] | None = None,
) -> T:
    """Call `attempt` until it returns. Retriable errors are waited out for `timeout_ms`, then the last one is
    raised; every other error is raised at once. An attempt under way is cut off at the end of the time as well."""
    deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
    failures = 0
    last: MansioError | None = None
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    return await attempt()
                except MansioError as error:
                    if not (worth_retrying(error) if worth_retrying else error.retriable):
                        raise
                    last = error
                failures += 1
                await asyncio.sleep(backoff.delay_seconds(failures))
    except TimeoutError:
        raise last or RequestTimedOut(f"no answer within {timeout_ms:.0f} ms") from None
