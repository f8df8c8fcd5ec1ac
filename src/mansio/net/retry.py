"""Retries: which broker errors are retriable, and how long to wait before the next attempt.

Delays grow exponentially up to a bound and are jittered, so that clients that failed together do not retry together
(KIP-580).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from mansio.errors import (
    BY_KAFKA_CODE,
    MansioError,
    RequestTimedOut,
    TopicAuthorizationFailed,
    Unavailable,
    error_for_code,
)
from mansio.ports import Backoff
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

UNTYPED_RETRIABLE_CODES = frozenset(
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
"""Retriable error codes of the Kafka protocol that have no class in `mansio.errors`."""


DEFAULT_BACKOFF = Backoff()


def client_error_for_code(code: int, message: str | None = None) -> MansioError:
    """Return the typed error for an error code of a response (not 0); `Unavailable` for a retriable code without a
    class."""
    if code in BY_KAFKA_CODE or code not in UNTYPED_RETRIABLE_CODES:
        return error_for_code(code, message or "")
    return Unavailable(message or f"the broker returned error code {code}")


def topic_error_for_code(code: int, topic: str, operation: str) -> MansioError:
    """Return the typed error for an error code (not 0) of a topic in a response without messages. `operation`: the one
    that the request needs, which the error of a refusal names."""
    if code == TopicAuthorizationFailed.kafka_code:
        return TopicAuthorizationFailed(f"the user is not allowed to {operation} the topic {topic}")
    return client_error_for_code(code)


def raise_for_code(code: int, message: str | None = None) -> None:
    """Raise the typed error for an error code of a response; do nothing for code 0."""
    if code:
        raise client_error_for_code(code, message)


async def call_with_retries(
    attempt: Callable[[], Awaitable[T]],
    *,
    timeout_ms: float,
    backoff: Backoff = DEFAULT_BACKOFF,
    should_retry: Callable[[MansioError], bool] | None = None,
) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Errors for which `should_retry` is true (default: retriable errors) are retried, after a backoff; other errors are
    raised immediately. After `timeout_ms` the attempt in progress is cancelled and the last error is raised,
    `RequestTimedOut` if there was none.
    """
    deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
    failures = 0
    last: MansioError | None = None
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    return await attempt()
                except MansioError as error:
                    if not (should_retry(error) if should_retry else error.retriable):
                        raise
                    last = without_traceback(error)
                failures += 1
                await asyncio.sleep(backoff.delay_seconds(failures))
    except TimeoutError:
        raise copied(last) if last else RequestTimedOut(f"no response within {timeout_ms:.0f} ms") from None
