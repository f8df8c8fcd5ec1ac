"""The broker's dead letters: what share groups gave up, on its way to the dead-letter topics.

For each share partition led here there is a `DeadLetterQueue` that says what comes next, and a task while there is
something to do: find or make the topic, reserve places in it, read the records, append their copies, store that they
are there. What fails is tried again for ever, after 1 s, 2 s, up to a minute, and at once when the target or the
settings of the group change; it is told of each time: in the log, in `/metrics`, and to whoever describes the group.

Owns who has dead letters, whose turn it is, and how long who failed rests; `dead_letter_sending` has the steps.

Always true: whatever goes wrong, the same batch is sent again and its target knows it. Of all share partitions together
at most `WRITERS_MAX` have records in memory.

Source: KIP-1191. Exactly once by the sequences of an idempotent producer (KIP-98): see
`state.share_partition.dead_letters`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.broker.coordinator.share.dead_letter_writer import DeadLetterTask, DeadLetterWriter
from mansio.errors import (
    CoordinatorNotAvailable,
    MansioError,
)
from mansio.logs import fields
from mansio.state.share_partition.dead_letters import RETRY_MAX_MS, RETRY_MS, Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.broker.coordinator.share.dead_letter_writer import DeadLetterSource
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.producer_ids import ProducerIdAllocator
    from mansio.broker.services.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.model import TopicChange
    from mansio.ports import Clock, Peers, Promise, Scheduler
    from mansio.state.share_partition.types import ArchivingRange, Producer, ShareKey

logger = logging.getLogger(__name__)

WRITERS_MAX: Final = 16


class _Share(DeadLetterTask):
    """With the task that works on it."""

    __slots__ = ("backoff_ms", "wake", "working")

    def __init__(self, share_partition: DeadLetterSource, topic: str, producer: Producer | None) -> None:
        super().__init__(share_partition, topic, producer)
        self.working = False
        self.backoff_ms = RETRY_MS
        self.wake: Promise[None] | None = None


class DeadLetterManager:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        targets: DeadLetterTopics,
        topics: TopicService,
        partitions: PartitionSet,
        new_producer_id: Callable[[], Awaitable[int]],
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self._targets = targets
        self._topics = topics
        self._clock = clock
        self._scheduler = scheduler
        self._shares: dict[ShareKey, _Share] = {}
        self._writers = 0
        self._turns: deque[Promise[None]] = deque()
        self._closed = False
        self._sending = DeadLetterWriter(
            targets=targets,
            topics=topics,
            partitions=partitions,
            new_producer_id=new_producer_id,
            clock=clock,
        )
        self.counts = self._sending.counts

    # What share partitions tell

    def on_loaded(self, share_partition: DeadLetterSource, producer: Producer | None) -> None:
        """It is led here from now on; what was on its way when it was loaded goes on. `producer`: as it is stored."""
        if (before := self._shares.get(share_partition.key)) is not None:
            _end(before)
        topic = self._topics.state.topics_by_id.get(UUID(bytes=share_partition.key.topic_id))
        share = self._shares[share_partition.key] = _Share(
            share_partition, "" if topic is None else topic.name, producer
        )
        self._add(share, share_partition.state_machine.archiving())

    def add(self, share_partition: DeadLetterSource, letters: Sequence[ArchivingRange]) -> None:
        """These were given up, and that is stored."""
        share = self._shares.get(share_partition.key)
        if share is not None and share.share_partition is share_partition:
            self._add(share, letters)

    def _add(self, share: _Share, letters: Sequence[ArchivingRange]) -> None:
        for archiving_range in letters:
            share.queue.add(archiving_range)
        if letters and not share.working and not self._closed:
            share.working = True
            key = share.share_partition.key
            name = f"dead letters of group {key.group}, partition {key.partition}"
            self._scheduler.spawn(self._work(share), name=name)

    def on_closed(self, share_partition: DeadLetterSource) -> None:
        """It is led here no more, or its state is to be loaded anew."""
        share = self._shares.get(share_partition.key)
        if share is not None and share.share_partition is share_partition:
            del self._shares[share_partition.key]
            _end(share)
            is_deleted = UUID(bytes=share_partition.key.topic_id) not in self._topics.state.topics_by_id
            if is_deleted and share.queue.waiting:
                known = fields(**share.known(), records=share.queue.waiting)
                logger.warning("dead letters given up with their topic", extra=known)

    def topic_changed(self, change: TopicChange) -> None:
        """What failed to get into it is tried again: it may be there by now, be led again, or take what it refused."""
        names = [topic.name for topic in (change.before, change.after) if topic is not None]
        for share in self._shares.values():
            if (
                share.last_error
                and self._targets.name_of(share.share_partition.key.group, share.topic) in names
            ):
                _retry_now(share)

    def settings_changed(self, group: str) -> None:
        """The group's settings are others now, maybe with another target."""
        for share in self._shares.values():
            if share.last_error and share.share_partition.key.group == group:
                _retry_now(share)

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
        for share in self._shares.values():
            _end(share)
        self._shares.clear()

    # For people

    @property
    def waiting(self) -> int:
        """Records without a copy yet, of all share partitions led here."""
        return sum(share.queue.waiting for share in self._shares.values())

    def failing(self) -> list[tuple[ShareKey, int, str]]:
        """Where it failed the last time: how many records wait, and why."""
        return [
            (key, share.queue.waiting, share.last_error)
            for key, share in self._shares.items()
            if share.last_error
        ]

    def last_error_of(self, key: ShareKey) -> str:
        """Why the dead letters of a share partition wait; "" when nothing failed."""
        share = self._shares.get(key)
        return "" if share is None else share.last_error

    # The work

    async def _work(self, share: _Share) -> None:
        try:
            while not share.ended and await self._step(share):
                pass
        except Exception as error:  # a defect: the queue is in no step that goes on by itself
            known = fields(**share.known(), records=share.queue.waiting, reason=error)
            logger.error("dead letters failed", extra=known, exc_info=error)
            share.share_partition.end(CoordinatorNotAvailable(f"dead letters failed: {error!r}"))
        finally:
            share.working = False

    async def _step(self, share: _Share) -> bool:
        """Do what comes next. False: there is nothing to do, or nobody to do it for."""
        queue = share.queue
        if queue.phase is Phase.READY:
            await self._wait_backoff(share, queue.retry_at_ms - self._now_ms())
        elif not queue.needs_reservation:
            return False
        try:
            await self._in_turn(share)
        except MansioError as error:
            if share.ended or queue.phase not in (Phase.OPEN, Phase.READY):
                return False  # its state could not be stored: it is loaded anew, and goes on there
            self._sending.note(share, error)
            if queue.phase is Phase.OPEN:
                await self._wait_backoff(share, share.backoff_ms)
                share.backoff_ms = min(2 * share.backoff_ms, RETRY_MAX_MS)
        else:
            share.backoff_ms = RETRY_MS
        return True

    # Taking turns, resting

    async def _in_turn(self, share: _Share) -> None:
        if self._writers >= WRITERS_MAX:
            turn: Promise[None] = self._scheduler.promise()
            self._turns.append(turn)
            await turn
        else:
            self._writers += 1
        try:
            if not share.ended:
                await self._sending.next_batch(share)
        finally:
            while self._turns and self._turns[0].done():  # whoever waited was cancelled
                self._turns.popleft()
            if self._turns:
                self._turns.popleft().set_result(None)
            else:
                self._writers -= 1

    async def _wait_backoff(self, share: _Share, backoff_ms: float) -> None:
        """Sleep, until that is over or the share partition is dropped."""
        if backoff_ms <= 0 or share.ended:
            return
        wake = share.wake = self._scheduler.promise()
        timer = self._scheduler.call_later(backoff_ms, _wake, share)
        try:
            await wake
        finally:
            timer.cancel()

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


def dead_letters(
    settings: Settings,
    host_ports: HostPorts,
    *,
    topics: TopicService,
    partitions: PartitionSet,
    producer_ids: ProducerIdAllocator,
    overrides: Callable[[str], Mapping[str, str]],
    peers: Peers | None = None,
) -> DeadLetterManager:
    """Those of one broker. `overrides`: the settings a group has of its own; `peers`: a way to the other brokers on
    which nothing waits for long, None on a single node."""
    targets = DeadLetterTopics(
        node_id=settings.node_id,
        topics=topics,
        partitions=partitions,
        scheduler=host_ports.scheduler,
        overrides=overrides,
        prefix=settings.errors_deadletterqueue_topic_name_prefix,
        peers=peers,
    )
    return DeadLetterManager(
        targets=targets,
        topics=topics,
        partitions=partitions,
        new_producer_id=producer_ids.new_producer_id,
        clock=host_ports.clock,
        scheduler=host_ports.scheduler,
    )


def _end(share: _Share) -> None:
    share.ended = True
    _wake(share)


def _retry_now(share: _Share) -> None:
    share.backoff_ms = RETRY_MS
    share.queue.retry_now()
    _wake(share)


def _wake(share: _Share) -> None:
    if share.wake is not None and not share.wake.done():
        share.wake.set_result(None)
