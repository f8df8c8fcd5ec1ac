"""Record use cases apart from produce and fetch: list offsets, end of a leader epoch, delete records.

Invariants:
* A result is returned for each item, in the order of the call; one item's error does not affect the others.
* A search by timestamp may decompress a large batch, so a call with many items yields the event loop every `SLICE_S`.
* A call sees what was acknowledged before it, although acks=1 is answered before the flush: it starts the flush and
  waits for it, `COMMIT_WAIT_MS_MAX` at most, and `REPLICATION_WAIT_MS_MAX` where followers have to confirm. With
  acks=all traffic only it does not wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.retention_holds import RetentionHoldHook
from mansio.errors import InvalidRequest, InvalidTopic, MansioError, PolicyViolation, RequestTimedOut

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.ports import Clock, Promise, Scheduler

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5

AT_THE_START: Final = frozenset((EARLIEST, EARLIEST_LOCAL, LATEST_TIERED))
"""Positions that do not depend on where the log ends."""

SLICE_S: Final = 0.01
"""Time after which a call with many items yields the event loop."""

COMMIT_WAIT_MS_MAX: Final = 5_000
"""Maximum time for the commit of what was acknowledged before a call; afterwards it sees what is committed."""

REPLICATION_WAIT_MS_MAX: Final = 500
"""The same where followers have to confirm: one that is down counts as in sync for seconds. Kafka does not wait."""


@dataclass(frozen=True, slots=True)
class OffsetQuery:
    """Search for an offset of one partition: the first record at or after `timestamp_ms`, or the position that one of
    the constants above names. `leader_epoch` is the caller's, -1 where it is unknown."""

    topic: str
    partition: int
    timestamp_ms: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An offset found by timestamp or by position in the log; all values are -1 where there is none."""

    offset: int = -1
    timestamp_ms: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class RecordsToDelete:
    """Deletion of one partition's records below `before_offset` (-1: the high watermark)."""

    topic: str
    partition: int
    before_offset: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end offset of a leader epoch; -1 where it is unknown."""

    leader_epoch: int
    end_offset: int


class RecordService:
    """Offsets and deletion of records. All methods run on the broker's event loop."""

    __slots__ = ("_clock", "_partitions", "_scheduler", "_wait_ms_max")

    def __init__(
        self, partitions: PartitionSet, *, clock: Clock, scheduler: Scheduler, wait_ms_max: int
    ) -> None:
        """`wait_ms_max` bounds the timeout of a deletion, in ms."""
        self._partitions = partitions
        self._clock = clock
        self._scheduler = scheduler
        self._wait_ms_max = wait_ms_max

    async def list_offsets(
        self, queries: Sequence[OffsetQuery], *, isolation_level: int = 0
    ) -> list[ListedOffset | MansioError]:
        """The offset of each query, or its error: those of `list_offset`, and `InvalidRequest` for each query of a
        partition that occurs more than once, as in Kafka."""
        count = Counter((query.topic, query.partition) for query in queries)
        await self._wait_for_acknowledged(
            (query.topic, query.partition) for query in queries if query.timestamp_ms not in AT_THE_START
        )
        slice_end = self._clock.monotonic() + SLICE_S
        results: list[ListedOffset | MansioError] = []
        for query in queries:
            if count[query.topic, query.partition] > 1:
                results.append(
                    InvalidRequest(f"{query.topic}-{query.partition} is in the request more than once")
                )
                continue
            try:
                found = self.list_offset(
                    query.topic,
                    None,
                    query.partition,
                    query.timestamp_ms,
                    isolation_level=isolation_level,
                    leader_epoch=query.leader_epoch,
                )
            except MansioError as error:
                results.append(error)
            else:
                results.append(found)
            if self._clock.monotonic() >= slice_end:
                await self._yield_to_loop()
                slice_end = self._clock.monotonic() + SLICE_S
        return results

    async def _wait_for_acknowledged(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Wait until what these partitions have acknowledged is committed, or cannot be."""
        behind = {
            partition: end
            for topic, index in wanted
            if (partition := self._partitions.get(topic, index)) is not None
            and (end := partition.uncommitted_end)
        }
        if behind:
            await _CommitWait(behind, self._scheduler).wait()

    async def _yield_to_loop(self) -> None:
        promise: Promise[None] = self._scheduler.promise()
        self._scheduler.call_soon(_resume, promise)
        await promise

    def list_offset(
        self,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        timestamp_ms: int,
        *,
        isolation_level: int = 0,
        leader_epoch: int = -1,
    ) -> ListedOffset:
        """The first record at or after `timestamp_ms`, or the position that one of the constants above names.

        Raises `OffsetNotAvailable` while a new leader does not know the high watermark, `NotLeaderOrFollower`,
        `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `UnknownTopicOrPartition`, `CorruptLog`.
        """
        partition = self._partitions.find(topic, topic_id, index)
        partition.check_leader_epoch(leader_epoch)
        end = partition.readable_end(isolation_level)
        if timestamp_ms == LATEST:
            partition.ensure_high_watermark_known()
            return ListedOffset(end, -1, partition.leader_epoch)
        if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
            return ListedOffset(partition.start_offset, -1, partition.leader_epoch)
        if timestamp_ms == LATEST_TIERED:
            return ListedOffset()
        if timestamp_ms == MAX_TIMESTAMP:
            partition.ensure_high_watermark_known()
            found = partition.max_timestamp_offset(end)
        else:
            found = partition.offset_at_timestamp(timestamp_ms, end)
            if found is None:  # a reader continues at the end of the log then, so the answer must be certain
                partition.ensure_high_watermark_known()
        return ListedOffset() if found is None else ListedOffset(*found)

    def epoch_end(
        self,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        epoch: int,
        *,
        current_leader_epoch: int = -1,
    ) -> EpochEnd:
        """The end offset of the largest epoch at or below `epoch` (KIP-101, KIP-279). Raises as `list_offset`."""
        partition = self._partitions.find(topic, topic_id, index)
        partition.check_leader_epoch(current_leader_epoch)
        return EpochEnd(*partition.log.end_offset_for_epoch(epoch))

    def delete(self, topic: str, index: int, before_offset: int) -> Promise[int]:
        """Delete the records below an offset (-1: the high watermark); see `Partition.delete_records`.

        Raises what that raises, `InvalidTopic` for an internal topic, `PolicyViolation` where records are deleted only
        by compaction, or a pipeline still needs some of them.
        """
        partition = self._partitions.find(topic, None, index)
        if partition.internal:
            raise InvalidTopic(f"{topic} is an internal topic; its records cannot be deleted")
        if partition.settings.compacts and not partition.settings.deletes:
            raise PolicyViolation(
                f"{topic} has cleanup.policy=compact: its records are deleted by compaction only"
            )
        if (hold := partition.find_hook(RetentionHoldHook)) is not None:
            hold.check_deletion(before_offset)
        return partition.delete_records(before_offset)

    async def delete_records(
        self, deletions: Sequence[RecordsToDelete], *, timeout_ms: int
    ) -> list[int | MansioError]:
        """Delete records of several partitions. Returns the new low watermark of each one once it is flushed on every
        in-sync replica, or its error: those of `delete`, and `RequestTimedOut` after `timeout_ms`, when the records are
        deleted but not all replicas have flushed that. The timeout is for other replicas, as in Kafka: where this
        broker has the only one, its own flush is waited for even with a timeout of 0.
        """
        await self._wait_for_acknowledged((each.topic, each.partition) for each in deletions)
        pending: list[Promise[int] | MansioError] = []
        replicated: list[Promise[int]] = []
        for each in deletions:
            try:
                promise = self.delete(each.topic, each.partition, each.before_offset)
            except MansioError as error:
                pending.append(error)
                continue
            pending.append(promise)
            if self._partitions.find(each.topic, None, each.partition).replica.waits_for_followers:
                replicated.append(promise)
        timeout_ms = min(max(0, timeout_ms), self._wait_ms_max)
        timers = [
            self._scheduler.call_later(timeout_ms, _time_out, replicated),
            self._scheduler.call_later(self._wait_ms_max, _time_out, pending),
        ]
        results: list[int | MansioError] = []
        try:
            for one in pending:
                if isinstance(one, MansioError):
                    results.append(one)
                    continue
                try:
                    results.append(await one)
                except MansioError as error:
                    results.append(error)
        finally:
            for timer in timers:
                timer.cancel()
        return results


class _CommitWait:
    """Wait until each of several partitions has committed everything below an offset. It is parked at them like a
    fetch, which starts the flush."""

    __slots__ = ("_behind", "_promise", "_scheduler")

    def __init__(self, behind: dict[Partition, int], scheduler: Scheduler) -> None:
        self._behind = behind
        self._scheduler = scheduler
        self._promise: Promise[None] = scheduler.promise()

    async def wait(self) -> None:
        """Return when all have, or can no longer, or after the maximum time."""
        parked = {partition: partial(self._advanced, partition) for partition in self._behind}
        for partition, wake in parked.items():
            partition.park(wake)
        is_replicated = any(partition.replica.waits_for_followers for partition in self._behind)
        wait_ms = REPLICATION_WAIT_MS_MAX if is_replicated else COMMIT_WAIT_MS_MAX
        timer = self._scheduler.call_later(wait_ms, _resume, self._promise)
        try:
            await self._promise
        finally:
            timer.cancel()
            for partition, wake in parked.items():
                partition.unpark(wake)

    def _advanced(self, partition: Partition) -> None:
        end = self._behind.get(partition, 0)
        if partition.high_watermark >= end or not partition.uncommitted_end:
            self._behind.pop(partition, None)
            if not self._behind:
                _resume(self._promise)


def _resume(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)


def _time_out(pending: Sequence[Promise[int] | MansioError]) -> None:
    for one in pending:
        if not isinstance(one, MansioError) and not one.done():
            one.set_exception(
                RequestTimedOut("the records are deleted, but not all replicas flushed the deletion in time")
            )
