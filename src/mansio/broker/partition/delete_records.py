"""The start of a partition's log: who may move it, how far, and when that is kept.

Functions of `Partition`, which hands itself in. Always true: only the leader decides; a follower's log begins where its
leader's does. Nothing above the high watermark goes. What was deleted on request stays deleted whoever leads next: that
is said only when every in-sync replica has it on its disk that its log begins later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError, OffsetOutOfRange
from mansio.state.replica import ReplicationProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.errors import StorageError
    from mansio.ports import Promise

HIGH_WATERMARK: Final = -1  # as an offset in DeleteRecords


def trim(partition: Partition, start_offset: int) -> None:
    """See `Partition.trim`."""
    partition.ensure_leader()
    start, high_watermark = partition.log.start_offset, partition.high_watermark
    if not start <= start_offset <= high_watermark:
        raise OffsetOutOfRange(
            f"{partition.name}: cannot trim to {start_offset}, outside [{start}, {high_watermark}]"
        )
    advance_start(partition, start_offset)


def advance_start(partition: Partition, start_offset: int) -> None:
    """The log begins there from now on, and whoever plugged in is told."""
    partition.log.trim_to(start_offset)
    for hook in partition.hooks:
        hook.on_trim(start_offset)
    for wake in tuple(partition.parked_followers):  # a follower's log begins where this one does
        wake()


def delete_records(partition: Partition, before_offset: int) -> Promise[int]:
    """See `Partition.delete_records`."""
    partition.ensure_leader()
    if (failure := partition.failure) is not None:
        raise failure
    partition.ensure_high_watermark_known()
    high_watermark = partition.high_watermark
    if before_offset == HIGH_WATERMARK:
        before_offset = high_watermark
    if not 0 <= before_offset <= high_watermark:
        raise OffsetOutOfRange(
            f"{partition.name}: records can be deleted below {high_watermark}, the high watermark, "
            f"not {before_offset}"
        )
    promise: Promise[int] = partition.scheduler.promise()

    def kept(error: StorageError | None) -> None:
        if promise.done():
            return
        if error is None:
            partition.start_offset_waits.append((start_offset, promise))
            start_offset_confirmed(partition)
        else:
            promise.set_exception(error)

    start_offset = min(before_offset, *retention_floors(partition), high_watermark)
    if start_offset > partition.log.start_offset:
        trim(partition, start_offset)
    partition.group_commit.persist_start_offset(partition.log, kept)
    return promise


def start_offset_confirmed(partition: Partition) -> None:
    """Answer those who wait for a start that every in-sync replica has kept by now."""
    replica = partition.replica
    if not isinstance(replica, ReplicationProgress) or partition.closed:
        try:
            partition.ensure_leader()
        except MansioError as error:
            fail_waits(partition, error)
        return
    waits, partition.start_offset_waits = partition.start_offset_waits, []
    for start_offset, promise in waits:
        if promise.done():
            continue  # its time was over
        if replica.starts_at(start_offset):
            promise.set_result(partition.log.start_offset)
        else:
            partition.start_offset_waits.append((start_offset, promise))


def fail_waits(partition: Partition, error: MansioError) -> None:
    """Whether what was deleted stays so is not for this broker to say any more."""
    waits, partition.start_offset_waits = partition.start_offset_waits, []
    for _, promise in waits:
        if not promise.done():
            promise.set_exception(error)


def retention_floors(partition: Partition) -> Iterator[int]:
    """From which offsets on the features that are plugged in keep records."""
    for hook in partition.hooks:
        if (floor := hook.retention_floor()) is not None:
            yield floor
