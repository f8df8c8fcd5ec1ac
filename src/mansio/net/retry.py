"""Retries: which broker errors are retriable, and how long to wait before the next attempt.

Delays grow exponentially up to a bound and are jittered, so that clients that failed together do not retry together
(KIP-580).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from mansio.errors import BY_KAFKA_CODE, MansioError, RequestTimedOut, Unavailable, error_for_code
from mansio.ports import Backoff

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
"""Retriable error codes of the protocol that have no error class here."""


DEFAULT_BACKOFF = Backoff()


def error_for(code: int, message: str | None = None) -> MansioError:
    """The typed error of a broker's error code (not 0)."""
    if code in BY_KAFKA_CODE or code not in RETRIABLE_CODES:
        return error_for_code(code, message or "")
    return Unavailable(message or f"the broker returned error code {code}")


def raise_for(code: int, message: str | None = None) -> None:
    """Raise the typed error of a code; nothing for code 0."""
    if code:
        raise error_for(code, message)


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    *,
    timeout_ms: float,
    backoff: Backoff = DEFAULT_BACKOFF,
    worth_retrying: Callable[[MansioError], bool] | None = None,
) -> T:
    """Call `attempt` until it returns. Retriable errors are retried for `timeout_ms`, then the last one is raised;
    other errors are raised immediately. An attempt in progress is cancelled at the timeout."""
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
        raise last or RequestTimedOut(f"no response within {timeout_ms:.0f} ms") from None
