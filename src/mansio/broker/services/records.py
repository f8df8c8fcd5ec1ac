"""Record use cases apart from produce and fetch: list offsets, end of a leader epoch, delete records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.retention_holds import RetentionHoldHook
from mansio.errors import InvalidTopic, PolicyViolation

if TYPE_CHECKING:
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.ports import Promise

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An offset found by timestamp or by position in the log; all values are -1 where there is none."""

    offset: int = -1
    timestamp_ms: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end offset of a leader epoch; -1 where it is unknown."""

    leader_epoch: int
    end_offset: int


class RecordService:
    """Offsets and deletion of records. All methods run on the broker's event loop."""

    __slots__ = ("_partitions",)

    def __init__(self, partitions: PartitionSet) -> None:
        self._partitions = partitions

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
        if not partition.settings.deletes:
            raise PolicyViolation(
                f"{topic} has cleanup.policy=compact: its records are deleted by compaction only"
            )
        if (hold := partition.find_hook(RetentionHoldHook)) is not None:
            hold.check_deletion(before_offset)
        return partition.delete_records(before_offset)
