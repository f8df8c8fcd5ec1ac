"""Reads that wait while the batches are verified, for readers that do not park like a fetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from mansio.errors import VerificationPending

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Scheduler

T = TypeVar("T")

PAUSE_MS: Final = 2.0
"""Time after which the batches are read again."""

PAUSES_MAX: Final = 10_000


async def read_when_verified(scheduler: Scheduler, read: Callable[[], T]) -> T:
    """Return the result of `read`, which is called again while it raises `VerificationPending`, for at most
    `PAUSES_MAX` pauses."""
    for _ in range(PAUSES_MAX):
        try:
            return read()
        except VerificationPending:
            await scheduler.sleep(PAUSE_MS)
    return read()
