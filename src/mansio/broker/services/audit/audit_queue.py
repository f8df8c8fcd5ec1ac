"""Queue of audit lines on their way to a file or a topic.

Lines are delivered in batches and in their order. A batch whose delivery fails is delivered again, so after an unknown
outcome a line may be there twice. Lines that find the queue full, or that are left when the broker stops, are lost, and
counted.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from mansio.backoff import grown_delay
from mansio.errors import MansioError
from mansio.logs import fields
from mansio.ports import complete, result_within
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.ports import Promise, Scheduler

logger = logging.getLogger(__name__)

LINES_MAX: Final = 10_000
"""Maximum number of lines in a queue."""

BATCH_LINES_MAX: Final = 200
BATCH_BYTES_MAX: Final = 256 << 10
"""Maximum size of the lines that are delivered together, well below `max.message.bytes`."""

LINGER_MS: Final = 50.0
"""Time for which lines are collected before they are delivered together."""

RETRY_MS_MIN: Final = 200.0
RETRY_MS_MAX: Final = 30_000.0
LOGGED_FAILURE: Final = 3
CLOSE_MS: Final = 2_000.0
"""Time that the end of the broker waits for the delivery of the last lines."""


class AuditQueue:
    """A bounded queue of lines, and the task that delivers them. All methods run on the broker's event loop."""

    __slots__ = (
        "_closed",
        "_deliver",
        "_destination",
        "_lines",
        "_scheduler",
        "_wake",
        "_works",
        "delivered_count",
        "lost_count",
    )

    def __init__(
        self, destination: str, deliver: Callable[[Sequence[str]], Awaitable[None]], scheduler: Scheduler
    ) -> None:
        """`destination`: in log lines and metrics. `deliver` returns when the lines are stored; it raises
        `MansioError`."""
        self._destination = destination
        self._deliver = deliver
        self._scheduler = scheduler
        self._lines: deque[str] = deque()
        self._works = False
        self._wake: Promise[None] | None = None
        self._closed: Promise[None] | None = None
        self.delivered_count = 0
        """Number of lines that are stored."""
        self.lost_count = 0
        """Number of lines that are not stored, and will not be."""

    def put(self, line: str) -> None:
        """Add a line."""
        if self._closed is not None or len(self._lines) >= LINES_MAX:
            self.lost_count += 1
            return
        self._lines.append(line)
        if not self._works:
            self._works = True
            self._scheduler.spawn(self._work(), name=f"audit to {self._destination}")

    async def _work(self) -> None:
        failures = 0
        try:
            while self._lines:
                if failures:
                    await self._sleep(grown_delay(failures, RETRY_MS_MIN, RETRY_MS_MAX))
                elif len(self._lines) < BATCH_LINES_MAX:
                    await self._sleep(LINGER_MS)
                if not self._lines:  # `close` has given them up
                    break
                batch = self._next_batch()
                try:
                    await self._deliver(batch)
                except MansioError as error:
                    failures += 1
                    if failures == LOGGED_FAILURE:  # the first ones are normal while the topic is created
                        logger.error(
                            "audit_not_written",
                            extra=fields(destination=self._destination, reason=without_traceback(error)),
                        )
                    continue
                failures = 0
                if not self._lines:  # `close` has given them up
                    break
                self.delivered_count += len(batch)
                for _ in batch:
                    self._lines.popleft()
        finally:
            self._works = False
            if self._closed is not None:
                complete(self._closed, None)

    def _next_batch(self) -> list[str]:
        """Return the first lines, at least one."""
        batch: list[str] = []
        size_bytes = 0
        for line in islice(self._lines, BATCH_LINES_MAX):
            size_bytes += len(line)  # lines are ASCII
            if batch and size_bytes > BATCH_BYTES_MAX:
                break
            batch.append(line)
        return batch

    async def _sleep(self, delay_ms: float) -> None:
        """Wait, but after the first attempt of `close` no longer than `RETRY_MS_MIN`."""
        if self._closed is not None:
            await self._scheduler.sleep(min(delay_ms, RETRY_MS_MIN))
            return
        wake = self._wake = self._scheduler.promise()
        timer = self._scheduler.call_later(delay_ms, complete, wake, None)
        try:
            await wake
        finally:
            timer.cancel()
            self._wake = None

    async def close(self) -> None:
        """Deliver the lines of the queue within `CLOSE_MS`; those that are left then are lost."""
        self._closed = self._scheduler.promise()
        if self._wake is not None:
            complete(self._wake, None)
        if self._works:
            try:
                await result_within(
                    self._scheduler, self._closed, CLOSE_MS, "the audit is not stored in time"
                )
            except MansioError as error:
                self.lost_count += len(self._lines)
                logger.error(
                    "audit_lost",
                    extra=fields(destination=self._destination, lines=len(self._lines), reason=error),
                )
                self._lines.clear()
