"""What every door may do with records: append, read, look up offsets, get a producer id.

Handlers and other doors translate; the rules are here and in `partition.py`. Owns the producer ids this broker may
hand out and the requests that wait (`pending_produces`, `parked_fetches`), so that a stopping broker can end them.

Always true: a producer id is handed out once in the life of the cluster (ids come in blocks, taken from the metadata
store by compare-and-set before the first of them is used).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.partition.retention_hold_hook import RetentionHoldHook
from mansio.broker.replication.fetch_coalescing import FetchCoalescer
from mansio.errors import InvalidTopic, PolicyViolation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.api.kafka.handlers.fetch import ParkedFetch
    from mansio.api.kafka.handlers.produce import PendingBatch, PendingProduce
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.ports import Promise

PRODUCER_IDS_PER_BLOCK = 1000

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5


class RecordCounters:
    """Bumped per batch or per request, never per record."""

    __slots__ = ("appended_batches", "appended_bytes", "fetched_bytes", "fetches", "rejected_batches")

    def __init__(self) -> None:
        self.appended_batches = 0
        self.appended_bytes = 0
        self.rejected_batches = 0
        self.fetches = 0
        self.fetched_bytes = 0

    def appended(self, size_bytes: int) -> None:
        self.appended_batches += 1
        self.appended_bytes += size_bytes

    def fetched(self, size_bytes: int) -> None:
        self.fetches += 1
        self.fetched_bytes += size_bytes


class RecordService:
    """See the module."""

    def __init__(
        self,
        partitions: PartitionSet,
        take_producer_ids: Callable[[int], Awaitable[int]],
        produce_wait_ms_max: int,
    ) -> None:
        self._partitions = partitions
        self._take_producer_ids = take_producer_ids
        self._produce_wait_ms_max = produce_wait_ms_max
        self._next_producer_id = 0
        self._producer_ids_end = 0
        self.counters = RecordCounters()
        self.pending_produces: dict[PendingProduce | PendingBatch, None] = {}
        self.fetch_coalescer = FetchCoalescer(self.pending_produces)
        self.now = 0.0
        """Monotonic seconds, as of the server's last look at deadlines, which comes every
        `timeout_check_interval_s`."""
        self.timeout_check_interval_s = 1.0
        self.parked_fetches: dict[ParkedFetch, None] = {}
        self.follower_notification_scheduled = False
        """They are about to be answered because of partitions that are led here from now on."""

    def readable(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """The partition by the topic's name or id, or raise why not."""
        return self._partitions.find(topic, topic_id, index)

    def writable(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """The same for a client that wants to write: internal topics are the broker's own."""
        partition = self._partitions.find(topic, topic_id, index)
        if partition.internal:
            raise InvalidTopic(f"{partition.topic} is an internal topic; clients may not write to it")
        return partition

    def delete(self, topic: str, index: int, before_offset: int) -> Promise[int]:
        """Delete the records below an offset (-1: all that are committed): see `Partition.delete_records`.

        Raises what that raises, `InvalidTopic` for an internal topic, `PolicyViolation` where records leave only by
        compaction, or a pipeline still needs some of them.
        """
        partition = self._partitions.find(topic, None, index)
        if partition.internal:
            raise InvalidTopic(f"{topic} is an internal topic; its records cannot be deleted")
        if not partition.settings.deletes:
            raise PolicyViolation(f"{topic} has cleanup.policy=compact: its records leave by compaction only")
        if (hold := partition.find_hook(RetentionHoldHook)) is not None:
            hold.check_deletion(before_offset)
        return partition.delete_records(before_offset)

    async def new_producer_id(self) -> int:
        """A producer id nobody had before."""
        if self._next_producer_id == self._producer_ids_end:
            first = await self._take_producer_ids(PRODUCER_IDS_PER_BLOCK)
            if self._next_producer_id == self._producer_ids_end:  # nobody else fetched a block meanwhile
                self._next_producer_id, self._producer_ids_end = first, first + PRODUCER_IDS_PER_BLOCK
        producer_id = self._next_producer_id
        self._next_producer_id += 1
        return producer_id

    def deadline(self, timeout_ms: int) -> float:
        """When a produce request that comes now has waited for `timeout_ms` (bounded), in monotonic seconds. Late by
        at most the interval of looking, and never early."""
        return self.now + self.timeout_check_interval_s + min(timeout_ms, self._produce_wait_ms_max) / 1000

    def look_up(self, partition: Partition, timestamp_ms: int, isolation_level: int) -> tuple[int, int, int]:
        """ListOffsets for one partition: (offset, timestamp in ms, leader epoch), -1 where there is none.

        `timestamp_ms` is a time (the first record at or after it) or one of the constants above. Raises
        `OffsetNotAvailable` while a new leader does not know yet what was committed before it.
        """
        log = partition.log
        end = partition.readable_end(isolation_level)
        if timestamp_ms == LATEST:
            partition.ensure_high_watermark_known()
            return end, -1, partition.leader_epoch
        if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
            return log.start_offset, -1, partition.leader_epoch
        if timestamp_ms == LATEST_TIERED:
            return -1, -1, -1
        if timestamp_ms == MAX_TIMESTAMP:
            partition.ensure_high_watermark_known()
            return partition.max_timestamp_offset(end) or (-1, -1, -1)
        found = partition.offset_at_timestamp(timestamp_ms, end)
        if (
            found is None
        ):  # "there is none" sends a reader to the end of the log: to be said only by who knows
            partition.ensure_high_watermark_known()
        return found or (-1, -1, -1)
