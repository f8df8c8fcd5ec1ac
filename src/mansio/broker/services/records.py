"""Record service: lists offsets, returns end offsets of leader epochs, describes producers, and deletes records.

Invariants:
* A result is returned for each item, in the order of the request; an error of one item does not affect the others. It
  is `TopicAuthorizationFailed` for a topic on which the caller may not do what the method names.
* A search by timestamp may decompress a large batch. Therefore a request with many items asks the clock after each.
* Results include all records that were acknowledged before the request, although records with acks=1 are acknowledged
  before their flush. If there are such records, the request starts the flush and waits for it, at most
  `COMMIT_WAIT_MS_MAX`, or `REPLICATION_WAIT_MS_MAX` if followers have to flush them too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.features.holds.retention_holds import RetentionHoldHook
from mansio.broker.partition.partition import HIGH_WATERMARK
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.errors import InvalidRequest, InvalidTopic, MansioError, PolicyViolation, RequestTimedOut
from mansio.host.item_turns import ItemTurns
from mansio.ports import complete, complete_with_error
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.tracebacks import without_traceback
from mansio.wire.field_values import (
    EARLIEST_LOCAL_TIMESTAMP,
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.ports import Promise, Scheduler
    from mansio.state.producers import Producer


TIMESTAMPS_INDEPENDENT_OF_LOG_END: Final = frozenset(
    (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP, LATEST_TIERED_TIMESTAMP)
)
"""Positions that do not depend on the end of the log."""

COMMIT_WAIT_MS_MAX: Final = 5_000
"""Maximum wait for the commit of records that were acknowledged before the request; afterwards the request uses the
records that are committed."""

MARKER_WAIT_MS: Final = 10
MARKER_WAITS_MAX: Final = 50
"""Pauses of a request to delete records in which it waits for the markers of transactions."""

REPLICATION_WAIT_MS_MAX: Final = 500
"""Maximum wait for the commit if followers have to flush the records too. It is shorter because a follower that is down
stays in sync for seconds. Kafka does not wait."""


@dataclass(frozen=True, slots=True)
class OffsetQuery:
    """Search for an offset in one partition: of the first record with a timestamp of at least `timestamp_ms`, or of a
    position such as `LATEST_TIMESTAMP`. `leader_epoch`: the epoch that the client knows, -1 if unknown."""

    topic: str
    partition: int
    timestamp_ms: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """Offset that was found by timestamp or position in the log. All values are -1 if there is none."""

    offset: int = -1
    timestamp_ms: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class RecordsToDelete:
    """Request to delete the records of one partition below `before_offset`; -1 stands for the high watermark."""

    topic: str
    partition: int
    before_offset: int


@dataclass(frozen=True, slots=True)
class EpochEndOffset:
    """End offset of a leader epoch. Both values are -1 if it is unknown."""

    leader_epoch: int
    end_offset: int


class DescribedProducer(NamedTuple):
    """A producer of a partition. `transaction_start_offset`: that of its open transaction, None without one."""

    producer_id: int
    producer: Producer
    transaction_start_offset: int | None


class RecordService:
    """Lists offsets and deletes records. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_partitions", "_scheduler", "_wait_ms_max")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        scheduler: Scheduler,
        wait_ms_max: int,
        authorization: Authorization,
    ) -> None:
        """`wait_ms_max`: upper bound of the timeout of a deletion."""
        self._partitions = partitions
        self._scheduler = scheduler
        self._wait_ms_max = wait_ms_max
        self._authorization = authorization

    async def list_offsets(
        self, queries: Sequence[OffsetQuery], *, isolation_level: int = 0, caller: Caller
    ) -> list[ListedOffset | MansioError]:
        """Return the offset or the error of each query, which needs DESCRIBE. Errors: those of `list_offset`, and
        `InvalidRequest` for all queries of a partition that occurs more than once, as in Kafka."""
        return await self._authorization.do_for_allowed(
            caller,
            Operation.DESCRIBE,
            ResourceType.TOPIC,
            queries,
            lambda query: query.topic,
            partial(self._list_offsets, isolation_level=isolation_level),
        )

    async def _list_offsets(
        self, queries: Sequence[OffsetQuery], *, isolation_level: int
    ) -> list[ListedOffset | MansioError]:
        count = Counter((query.topic, query.partition) for query in queries)
        await self._wait_for_acknowledged(
            (query.topic, query.partition)
            for query in queries
            if query.timestamp_ms not in TIMESTAMPS_INDEPENDENT_OF_LOG_END
        )
        turns = ItemTurns(self._scheduler, items_per_look=1)
        results: list[ListedOffset | MansioError] = []
        for query in queries:
            await turns.next()
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
                results.append(without_traceback(error))
            else:
                results.append(found)
        return results

    async def _wait_for_acknowledged(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Wait until the records that these partitions have acknowledged are committed, or cannot be, or time is up."""
        turns = ItemTurns(self._scheduler)
        behind: dict[Partition, int] = {}
        for topic, index in wanted:
            await turns.next()
            partition = self._partitions.get(topic, index)
            if partition is not None and (end := partition.uncommitted_end):
                behind[partition] = end
        # Some may have committed their records between two turns; nothing would report that again.
        behind = {
            partition: end
            for partition, end in behind.items()
            if partition.uncommitted_end and partition.high_watermark < end
        }
        if behind:
            await _CommitWait(behind, self._scheduler).wait()

    async def _wait_for_markers(self, deletions: Sequence[RecordsToDelete]) -> None:
        """Wait until the records to delete are below the last stable offsets, or time is up. The markers of a
        transaction are written shortly after the answer to EndTxn, and a client may delete the records in between."""
        waits = 0
        turns = ItemTurns(self._scheduler)
        for each in deletions:
            await turns.next()
            partition = self._partitions.get(each.topic, each.partition)
            while (
                partition is not None
                and partition.last_stable_offset < each.before_offset <= partition.high_watermark
                and waits < MARKER_WAITS_MAX
            ):
                waits += 1
                await self._scheduler.sleep(MARKER_WAIT_MS)

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
        """Return the offset of the first record with a timestamp of at least `timestamp_ms`, or of a position such as
        `LATEST_TIMESTAMP`.

        Raises `OffsetNotAvailable` while a new leader does not know the high watermark, `NotLeaderOrFollower`,
        `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `UnknownTopicOrPartition`, `CorruptLog`.
        """
        partition = self._partitions.find(topic, topic_id, index)
        partition.check_leader_epoch(leader_epoch)
        end = partition.readable_end(isolation_level)
        if timestamp_ms == LATEST_TIMESTAMP:
            partition.ensure_high_watermark_known()
            return ListedOffset(end, -1, partition.leader_epoch)
        if timestamp_ms in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):
            return ListedOffset(partition.start_offset, -1, partition.leader_epoch)
        if timestamp_ms == LATEST_TIERED_TIMESTAMP:
            return ListedOffset()
        if timestamp_ms == MAX_TIMESTAMP:
            partition.ensure_high_watermark_known()
            found = partition.max_timestamp_offset(end)
        else:
            found = partition.offset_at_timestamp(timestamp_ms, end)
            if found is None:  # a reader then continues at the end of the log, so the result must be certain
                partition.ensure_high_watermark_known()
        return ListedOffset() if found is None else ListedOffset(*found)

    def count_records(self, topic: str, index: int, start_offset: int, *, batches_max: int) -> int:
        """Return the number of records from an offset on, without offsets that have none. Exact if they are in at most
        `batches_max` batches, otherwise estimated from those. Raises the errors of `list_offset`."""
        partition = self._partitions.find(topic, None, index)
        partition.ensure_leader()
        end = partition.readable_end()
        found, position = 0, max(start_offset, partition.start_offset)
        begin = position
        for header in islice(partition.log.batch_headers(position), batches_max):
            if header.base_offset >= end:
                return found
            skipped = max(position - header.base_offset, 0)
            if not header.is_control:
                found += max(header.record_count - skipped, 0)
            position = header.last_offset + 1
        return found if position >= end else found * (end - begin) // max(position - begin, 1)

    def offset_for_leader_epoch(
        self,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        epoch: int,
        *,
        current_leader_epoch: int = -1,
        caller: Caller,
    ) -> EpochEndOffset:
        """Return the largest leader epoch at or below `epoch` with its end offset (KIP-101, KIP-279), which needs
        DESCRIBE. Raises `TopicAuthorizationFailed` and the errors of `list_offset`."""
        if topic is not None:
            self._authorization.check(caller, Operation.DESCRIBE, ResourceType.TOPIC, topic)
        partition = self._partitions.find(topic, topic_id, index)
        partition.check_leader_epoch(current_leader_epoch)
        return EpochEndOffset(*partition.log.end_offset_for_epoch(epoch))

    def delete_partition_records(self, topic: str, index: int, before_offset: int) -> Promise[int]:
        """Delete the records of one partition below an offset; -1 stands for the high watermark.

        Returns a promise of the new low watermark; see `Partition.delete_records`, whose errors this raises too. Raises
        `InvalidTopic` for an internal topic, and `PolicyViolation` if records are deleted by compaction only, or if a
        pipeline still needs some of them.
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

    def describe_producers(
        self, topic: str, index: int, *, producers_max: int, caller: Caller
    ) -> list[DescribedProducer]:
        """Return the idempotent producers of a partition (KIP-664), which needs READ. Raises
        `TopicAuthorizationFailed`, `InvalidRequest` if there are more than `producers_max`, and the errors of
        `PartitionSet.find`."""
        self._authorization.check(caller, Operation.READ, ResourceType.TOPIC, topic)
        hook = self._partitions.find(topic, None, index).find_hook(ProducerHook)
        if hook is None:
            return []
        if len(hook.table) > producers_max:
            raise InvalidRequest("too many producers for one answer: ask for fewer partitions at a time")
        is_open = hook.transactions.open
        return [
            DescribedProducer(producer_id, producer, is_open.get(producer_id))
            for producer_id, producer in hook.table.items()
        ]

    async def delete_records(
        self, deletions: Sequence[RecordsToDelete], *, timeout_ms: int, caller: Caller
    ) -> list[int | MansioError]:
        """Delete records of several partitions, which needs DELETE. Return the new low watermark of each partition once
        every in-sync replica has flushed it, or an error.

        Errors: those of `delete_partition_records`, and `RequestTimedOut` if not all in-sync replicas have flushed the
        deletion after `timeout_ms`; the records are deleted nevertheless. As in Kafka, `timeout_ms` is a limit for
        other replicas: if this broker has the only replica, its flush is awaited even if `timeout_ms` is 0.
        """
        return await self._authorization.do_for_allowed(
            caller,
            Operation.DELETE,
            ResourceType.TOPIC,
            deletions,
            lambda deletion: deletion.topic,
            partial(self._delete_records, timeout_ms=timeout_ms),
        )

    async def _delete_records(
        self, deletions: Sequence[RecordsToDelete], *, timeout_ms: int
    ) -> list[int | MansioError]:
        await self._wait_for_acknowledged((each.topic, each.partition) for each in deletions)
        await self._wait_for_markers(deletions)
        await self._copy_what_is_needed(deletions)
        pending: list[Promise[int] | MansioError] = []
        replicated: list[Promise[int]] = []
        turns = ItemTurns(self._scheduler)
        for each in deletions:
            await turns.next()
            try:
                promise = self.delete_partition_records(each.topic, each.partition, each.before_offset)
            except MansioError as error:
                pending.append(without_traceback(error))
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
                    results.append(without_traceback(error))
        finally:
            for timer in timers:
                timer.cancel()
        return results

    async def _copy_what_is_needed(self, deletions: Sequence[RecordsToDelete]) -> None:
        """Copy what features need from below the offsets to the ends of the logs: a deletion does not concern records
        that are not due yet, and a repeat of a deleted record is still one. If that fails, they keep what they need."""
        turns = ItemTurns(self._scheduler)
        for each in deletions:
            await turns.next()
            partition = self._partitions.get(each.topic, each.partition)
            if partition is None:
                continue
            before_offset = each.before_offset
            if before_offset == HIGH_WATERMARK:
                before_offset = partition.high_watermark
            with contextlib.suppress(MansioError):
                await partition.release_below(min(before_offset, partition.high_watermark))


class _CommitWait:
    """Waits until each of several partitions has committed all records below an offset. The wait is parked at the
    partitions like a fetch, which starts the flush."""

    __slots__ = ("_behind", "_promise", "_scheduler")

    def __init__(self, behind: dict[Partition, int], scheduler: Scheduler) -> None:
        self._behind = behind
        self._scheduler = scheduler
        self._promise: Promise[None] = scheduler.promise()

    async def wait(self) -> None:
        """Return when all partitions have committed the records or can no longer do so, or after the maximum time."""
        parked = {partition: partial(self._on_advanced, partition) for partition in self._behind}
        for partition, wake in parked.items():
            partition.park(wake)
        is_replicated = any(partition.replica.waits_for_followers for partition in self._behind)
        wait_ms = REPLICATION_WAIT_MS_MAX if is_replicated else COMMIT_WAIT_MS_MAX
        timer = self._scheduler.call_later(wait_ms, complete, self._promise, None)
        try:
            await self._promise
        finally:
            timer.cancel()
            for partition, wake in parked.items():
                partition.waits.unpark(wake)

    def _on_advanced(self, partition: Partition) -> None:
        end = self._behind.get(partition, 0)
        if partition.high_watermark >= end or not partition.uncommitted_end:
            self._behind.pop(partition, None)
            if not self._behind:
                complete(self._promise, None)


def _time_out(pending: Sequence[Promise[int] | MansioError]) -> None:
    for one in pending:
        if not isinstance(one, MansioError):
            complete_with_error(
                one,
                RequestTimedOut("the records are deleted, but not all replicas flushed the deletion in time"),
            )
