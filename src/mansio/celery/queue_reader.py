"""Reader of one queue: receives its records as a member of the queue's share group, and acknowledges them.

Invariants:
* At most as many records are leased as the worker prefetches.
* Leases are extended until the task is acknowledged, for at most `extend_max_ms`, and end when the worker does.
* A reader that has stopped keeps its leases until its last task is acknowledged. Then it leaves the group, by which
  records that no worker has started are released without counting as an attempt.
* A reader outlives a connection of kombu that failed (`kept_readers`), with the leases of the tasks that run.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.celery.inbox import Delivery, Source
from mansio.celery.task_records import message_of
from mansio.errors import InvalidRecord, LeaseLost, MansioError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.celery.client_thread import ClientThread
    from mansio.celery.inbox import Inbox
    from mansio.client.share.leased import Leased
    from mansio.client.share.receiver import Receiver

logger = logging.getLogger(__name__)

UNLIMITED_PREFETCH: Final = 500
"""Records that are leased where the worker's prefetch count is 0, which means no limit."""

RECEIVERS_MAX: Final = 16
"""Members of the group that one reader has at most: it adds one each time the prefetch count exceeds all before."""

FAILURES_MAX: Final = 5
"""Consecutive errors of a receiver after which the connection of kombu ends, and Celery connects again."""

FAILURE_PAUSE_S: Final = 0.5

REDELIVERED_COUNT: Final = 2
"""Delivery count of a task that the worker gets for the second time on one lease."""

REASON: Final = "rejected by its worker"


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Duration of a lease (None: of the group) and the longest time for which one is extended, in ms."""

    lease_ms: int | None
    extend_max_ms: float


class QueueReader:
    """Receives the records of one queue. Coroutines run on the client's thread, other methods on any."""

    def __init__(
        self, thread: ClientThread, queue: str, topic: str, options: LeaseOptions, inbox: Inbox
    ) -> None:
        self.source = Source(inbox, queue, self._on_taken)
        self._thread = thread
        self._topic = topic
        self._options = options
        self._inbox = inbox
        self._receivers: list[Receiver] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._has_room = asyncio.Semaphore(1)
        """One record waits in the source at a time: a record of a higher priority that arrives later is next."""
        self._prefetch = 0
        self._taken_count = 0
        """Number of records that the worker has and that are not acknowledged yet."""
        self._is_stopped = False
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._returned_count = 0
        """Number of deliveries that wait in the source for the second time."""
        self._ending: asyncio.TimerHandle | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the reader has left the group."""
        return self._is_closed

    @property
    def can_receive(self) -> bool:
        """Whether the reader gets further records: no receiver has failed, and the reader was not stopped."""
        return not self._is_stopped and not any(pump.done() for pump in self._pumps)

    async def prefetch(self, count: int) -> None:
        """Lease up to `count` records at a time (0: `UNLIMITED_PREFETCH`), but not fewer than before."""
        added = (count or UNLIMITED_PREFETCH) - self._prefetch
        if added <= 0 or self._is_stopped or len(self._receivers) >= RECEIVERS_MAX:
            return
        receiver = self._thread.client.receive(
            self._topic,
            group=self._topic,
            max_records=added,
            lease_ms=self._options.lease_ms,
            extend_max_ms=self._options.extend_max_ms,
            keeps_leases=True,
        )
        await receiver.start()
        self._prefetch += added
        self._receivers.append(receiver)
        self._pumps.append(asyncio.get_running_loop().create_task(self._pump(receiver)))

    async def _pump(self, receiver: Receiver) -> None:
        failures = 0
        while True:
            try:
                found = await receiver.poll(max_records=1)
            except MansioError as error:
                failures += 1
                logger.warning("queue %s: %s", self.source.queue, error)
                if failures >= FAILURES_MAX:
                    self._inbox.fail(error)
                    return
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            failures = 0
            if not found:
                return  # stopped
            try:
                payload = message_of(found[0], found[0].delivery_count)
            except InvalidRecord as error:
                logger.warning("queue %s: record rejected: %s", self.source.queue, error)
                await self._call(found[0].reject(str(error)))
                continue
            await self._has_room.acquire()
            self.source.add(Delivery(payload, found[0]))

    def _on_taken(self) -> None:
        self._thread.call_soon(self._count_taken)

    def _count_taken(self) -> None:
        self._taken_count += 1
        if self._returned_count:
            self._returned_count -= 1
        else:
            self._has_room.release()

    # Acknowledgement

    def accept(self, message: Leased) -> None:
        """Acknowledge a task as done, without waiting."""
        self._thread.start(lambda: self._finish(message.ack))

    def requeue(self, message: Leased) -> None:
        """Release a task, to any worker, after the group's backoff."""
        self._thread.start(lambda: self._finish(message.retry))

    def reject(self, message: Leased) -> None:
        """Reject a task: it goes to the dead-letter topic of its queue."""
        self._thread.start(lambda: self._finish(lambda: message.reject(REASON)))

    async def _finish(self, acknowledge: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._call(acknowledge())
        finally:
            self._taken_count -= 1
            self._close_if_idle()

    async def _call(self, acknowledging: Awaitable[None]) -> None:
        try:
            await acknowledging
        except LeaseLost as error:
            logger.warning("queue %s: %s: the task may run again", self.source.queue, error)
        except MansioError as error:
            logger.warning(
                "queue %s: a task was not acknowledged and may run again: %s", self.source.queue, error
            )

    # Connections

    async def put_back(self, messages: Sequence[Leased]) -> None:
        """Deliver tasks again that the worker has not started, before all others; their leases go on."""
        for message in reversed(messages):
            self._taken_count -= 1
            self._returned_count += 1
            self.source.put_back(Delivery(message_of(message, REDELIVERED_COUNT), message))

    def use(self, inbox: Inbox) -> None:
        """Deliver to another connection, after `end_after`."""
        self._inbox = inbox
        self.source.move(inbox)
        self._thread.call_soon(self._cancel_end)

    def end_after(self, seconds: float) -> None:
        """Call `end` in so many seconds, unless `use` is called before."""

        def start_timer() -> None:
            self._cancel_end()
            self._ending = asyncio.get_running_loop().call_later(seconds, self.end)

        self._thread.call_soon(start_timer)

    def _cancel_end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def end(self) -> None:
        """Lease no more records, release those that the worker has not started, and leave the group when the tasks that
        run are acknowledged."""
        self._thread.start(self._end)

    async def _end(self) -> None:
        self._cancel_end()
        waiting = self.source.drain()
        await self.stop()
        for delivery in (
            waiting if self._closing is None else ()
        ):  # otherwise all are released without counting
            if delivery.leased is not None:
                await self._call(delivery.leased.extend(0))

    # End

    async def stop(self) -> None:
        """Lease no more records; tasks that the worker has can still be acknowledged."""
        self._is_stopped = True
        for receiver in self._receivers:
            receiver.stop()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_stopped and self._taken_count <= 0 and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def close(self) -> None:
        """Send acknowledgements, release all other records, leave the group."""
        self._is_stopped = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(receiver.close() for receiver in self._receivers), return_exceptions=True)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._is_closed = True
