"""The broker's dead letters: what share groups gave up, on its way to the dead-letter topics.

For each share partition led here there is a `DeadLetterQueue` that says what comes next, and a task while there is
something to do: find or make the topic, reserve places in it, read the records, append their copies, store that they
are there. What fails is tried again for ever, after 1 s, 2 s, up to a minute, and at once when the target or the
settings of the group change; it is told of each time: in the log, in `/metrics`, and to whoever describes the group.

Owns who has dead letters, whose turn it is, and how long who failed rests; `dead_letter_sending` has the steps.

Always true: whatever goes wrong, the same batch is sent again and its target knows it. Of all share partitions together
at most `WRITERS_MAX` have records in memory.

Source: KIP-1191. Exactly once by the sequences of an idempotent producer (KIP-98): see `state.dead_letter`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.broker.share.dead_letter_sending import Letters, Sending
from mansio.broker.share.dead_letter_targets import Targets
from mansio.errors import (
    CoordinatorNotAvailable,
    MansioError,
)
from mansio.logs import fields
from mansio.state.dead_letter import RETRY_MAX_MS, RETRY_MS, Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.broker.machine import Machine
    from mansio.broker.partitions import PartitionSet
    from mansio.broker.records import RecordService
    from mansio.broker.share.dead_letter_sending import LivePartition
    from mansio.broker.topics import TopicAdmin
    from mansio.cluster.model import TopicChange
    from mansio.config import Settings
    from mansio.ports import Clock, Peers, Promise, Scheduler
    from mansio.state.share_types import Archiving, Producer, ShareKey

logger = logging.getLogger(__name__)

WRITERS_MAX: Final = 16


class _Share(Letters):
    """With the task that works on it."""

    __slots__ = ("rest_ms", "wake", "working")

    def __init__(self, live: LivePartition, topic: str, producer: Producer | None) -> None:
        super().__init__(live, topic, producer)
        self.working = False
        self.rest_ms = RETRY_MS
        self.wake: Promise[None] | None = None


class DeadLetters:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        targets: Targets,
        topics: TopicAdmin,
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
        self._sending = Sending(
            targets=targets,
            topics=topics,
            partitions=partitions,
            new_producer_id=new_producer_id,
            clock=clock,
        )
        self.counts = self._sending.counts

    # What share partitions tell

    def opened(self, live: LivePartition, producer: Producer | None) -> None:
        """It is led here from now on; what was on its way when it was loaded goes on. `producer`: as it is stored."""
        if (before := self._shares.get(live.key)) is not None:
            _end(before)
        topic = self._topics.state.topics_by_id.get(UUID(bytes=live.key.topic_id))
        share = self._shares[live.key] = _Share(live, "" if topic is None else topic.name, producer)
        self._add(share, live.core.archiving())

    def add(self, live: LivePartition, letters: Sequence[Archiving]) -> None:
        """These were given up, and that is stored."""
        share = self._shares.get(live.key)
        if share is not None and share.live is live:
            self._add(share, letters)

    def _add(self, share: _Share, letters: Sequence[Archiving]) -> None:
        for letter in letters:
            share.queue.add(letter)
        if letters and not share.working and not self._closed:
            share.working = True
            key = share.live.key
            name = f"dead letters of group {key.group}, partition {key.partition}"
            self._scheduler.spawn(self._work(share), name=name)

    def dropped(self, live: LivePartition) -> None:
        """It is led here no more, or its state is to be loaded anew."""
        share = self._shares.get(live.key)
        if share is not None and share.live is live:
            del self._shares[live.key]
            _end(share)
            is_deleted = UUID(bytes=live.key.topic_id) not in self._topics.state.topics_by_id
            if is_deleted and share.queue.waiting:
                known = fields(**share.known(), records=share.queue.waiting)
                logger.warning("dead letters given up with their topic", extra=known)

    def topic_changed(self, change: TopicChange) -> None:
        """What failed to get into it is tried again: it may be there by now, be led again, or take what it refused."""
        names = [topic.name for topic in (change.before, change.after) if topic is not None]
        for share in self._shares.values():
            if share.trouble and self._targets.name_of(share.live.key.group, share.topic) in names:
                _hurry(share)

    def settings_changed(self, group: str) -> None:
        """The group's settings are others now, maybe with another target."""
        for share in self._shares.values():
            if share.trouble and share.live.key.group == group:
                _hurry(share)

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

    def troubles(self) -> list[tuple[ShareKey, int, str]]:
        """Where it failed the last time: how many records wait, and why."""
        return [
            (key, share.queue.waiting, share.trouble) for key, share in self._shares.items() if share.trouble
        ]

    def trouble_of(self, key: ShareKey) -> str:
        """Why the dead letters of a share partition wait; "" when nothing failed."""
        share = self._shares.get(key)
        return "" if share is None else share.trouble

    # The work

    async def _work(self, share: _Share) -> None:
        try:
            while not share.ended and await self._step(share):
                pass
        except Exception as error:  # a defect: the queue is in no step that goes on by itself
            known = fields(**share.known(), records=share.queue.waiting, reason=error)
            logger.error("dead letters failed", extra=known, exc_info=error)
            share.live.end(CoordinatorNotAvailable(f"dead letters failed: {error!r}"))
        finally:
            share.working = False

    async def _step(self, share: _Share) -> bool:
        """Do what comes next. False: there is nothing to do, or nobody to do it for."""
        queue = share.queue
        if queue.phase is Phase.READY:
            await self._rest(share, queue.retry_at_ms - self._now_ms())
        elif not queue.wants_place:
            return False
        try:
            await self._in_turn(share)
        except MansioError as error:
            if share.ended or queue.phase not in (Phase.OPEN, Phase.READY):
                return False  # its state could not be stored: it is loaded anew, and goes on there
            self._sending.note(share, error)
            if queue.phase is Phase.OPEN:
                await self._rest(share, share.rest_ms)
                share.rest_ms = min(2 * share.rest_ms, RETRY_MAX_MS)
        else:
            share.rest_ms = RETRY_MS
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

    async def _rest(self, share: _Share, rest_ms: float) -> None:
        """Sleep, until that is over or the share partition is dropped."""
        if rest_ms <= 0 or share.ended:
            return
        wake = share.wake = self._scheduler.promise()
        timer = self._scheduler.call_later(rest_ms, _wake, share)
        try:
            await wake
        finally:
            timer.cancel()

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


def dead_letters(
    settings: Settings,
    machine: Machine,
    *,
    topics: TopicAdmin,
    partitions: PartitionSet,
    records: RecordService,
    overrides: Callable[[str], Mapping[str, str]],
    peers: Peers | None = None,
) -> DeadLetters:
    """Those of one broker. `overrides`: the settings a group has of its own; `peers`: a way to the other brokers on
    which nothing waits for long, None on a single node."""
    targets = Targets(
        node_id=settings.node_id,
        topics=topics,
        partitions=partitions,
        scheduler=machine.scheduler,
        overrides=overrides,
        prefix=settings.dead_letter_topic_prefix,
        peers=peers,
    )
    return DeadLetters(
        targets=targets,
        topics=topics,
        partitions=partitions,
        new_producer_id=records.new_producer_id,
        clock=machine.clock,
        scheduler=machine.scheduler,
    )


def _end(share: _Share) -> None:
    share.ended = True
    _wake(share)


def _hurry(share: _Share) -> None:
    share.rest_ms = RETRY_MS
    share.queue.hurry()
    _wake(share)


def _wake(share: _Share) -> None:
    if share.wake is not None and not share.wake.done():
        share.wake.set_result(None)
