"""What a partition's leader and its followers ask of each other.

Functions of `Partition`, which hands itself in. As leader: reads for followers, whose requests say what they have
durable. As follower: appends of the leader's batches as they are, and cuts where the logs part.

A follower is given everything up to the end of the leader's log, durable there or not, so that all replicas sync at the
same time. That costs no safety: the high watermark counts what each has durable, the leader as well; and what a leader
lost in a crash is cut off the followers by epoch, because it leads again only in a new one (`roles`).

Always true:
* what a follower says counts only if it has this leader's epoch, and if its log is this leader's up to there;
* a follower's log is cut only where its epochs and its leader's part (KIP-101, KIP-279), never at a high watermark.

Sources: KIP-101, KIP-279, KIP-595 (diverging epochs in Fetch), KIP-903.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.partition import delete_records, leadership
from mansio.errors import (
    CorruptMessage,
    FencedLeaderEpoch,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    StorageError,
    UnknownLeaderEpoch,
)
from mansio.logs import fields
from mansio.state.replica import FollowerReplica
from mansio.storage import follower_append
from mansio.wire.batch.batch_reader import read_stored_batches
from mansio.wire.batch.record_batch import BatchHeader, encode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from mansio.storage.log_slice import LogSlice
    from mansio.wire.apis.fetch import FetchPartition

logger = logging.getLogger(__name__)

OFFSET_DELTA_MAX = (1 << 31) - 1


class FollowerReadResult(NamedTuple):
    """What a follower gets: `part` is a stretch of the log, or one batch without records; None when there is nothing.

    `diverging`: (epoch, end offset) where its log parts from this one, instead. `urgent`: it is to be told now, even
    if there is nothing to copy.
    """

    part: LogSlice | bytes | None = None
    diverging: tuple[int, int] | None = None
    urgent: bool = False


# As leader


def read(
    partition: Partition,
    node_id: int,
    broker_epoch: int,
    wanted: FetchPartition,
    max_bytes: int,
    *,
    first: bool,
) -> FollowerReadResult:
    """What a follower gets for its request. `first`: the request has just come; what it says is noted only then.

    Raises `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `NotLeaderOrFollower`, `OffsetOutOfRange`, `StorageError`.
    """
    replica, log = partition.replica, partition.log
    _check_request(partition, node_id, wanted.current_leader_epoch)
    assert leadership.is_leader(replica)
    offset = wanted.fetch_offset
    if wanted.last_fetched_epoch >= 0:
        epoch, end = log.end_offset_for_epoch(wanted.last_fetched_epoch)
        if epoch < 0:
            raise OffsetOutOfRange(
                f"{partition.name}: leader epoch {wanted.last_fetched_epoch} of broker {node_id} is unknown"
            )
        if epoch != wanted.last_fetched_epoch or end < offset:
            return FollowerReadResult(diverging=(epoch, end), urgent=True)
    if not log.start_offset <= offset <= log.end_offset:
        raise OffsetOutOfRange(
            f"{partition.name}: broker {node_id} asks for offset {offset}, "
            f"the log holds {log.start_offset} to {log.end_offset}"
        )
    if first:
        now_ms = leadership.now_ms(partition)
        if replica.fetched(node_id, broker_epoch, offset, log.end_offset, now_ms, wanted.log_start_offset):
            partition.high_watermark_advanced()
        if partition.start_offset_waits:
            delete_records.start_offset_confirmed(partition)
        if (
            node_id not in replica.in_sync
            and partition.on_isr_candidate is not None
            and replica.can_join_isr(node_id)
        ):
            partition.on_isr_candidate(partition, node_id)
    copy = replica.copies()[node_id]
    start_is_news, copy.reported_start_offset = (
        copy.reported_start_offset < log.start_offset,
        log.start_offset,
    )
    if max_bytes <= 0 or offset == log.end_offset:
        return FollowerReadResult(urgent=start_is_news)
    part = log.read(offset, max_bytes, log.end_offset) or _empty_compacted_batch(partition, offset)
    return FollowerReadResult(part, urgent=start_is_news)


def _check_request(partition: Partition, node_id: int, leader_epoch: int) -> None:
    current = partition.replica.leader_epoch
    if leader_epoch < current:
        raise FencedLeaderEpoch(f"{partition.name}: leader epoch {leader_epoch} is older than {current}")
    if leader_epoch > current:
        raise UnknownLeaderEpoch(f"{partition.name}: leader epoch {leader_epoch} is newer than {current}")
    replica = partition.replica
    if partition.closed or not leadership.is_leader(replica):
        raise leadership.not_leader_error(partition)
    if node_id not in replica.copies():
        raise NotLeaderOrFollower(f"{partition.name}: broker {node_id} keeps no replica of it")


def _empty_compacted_batch(partition: Partition, offset: int) -> bytes:
    """Compaction left nothing up to the end of the log: a batch without records stands for what was there."""
    log = partition.log
    delta = min(log.end_offset - 1 - offset, OFFSET_DELTA_MAX)
    epoch = log.leader_epochs.epoch_at(offset + delta)
    return encode_batch(BatchHeader(offset, 0, epoch, 2, 0, 0, delta, -1, -1, -1, -1, -1, 0), b"")


def park(partition: Partition, wake: Callable[[], None]) -> None:
    """Call `wake` after each append, when the log begins later, and when this broker leads no more, until `unpark`."""
    if not partition.parked_followers:
        partition.add_after_append(partition.wake_followers)
    partition.parked_followers[wake] = None


def unpark(partition: Partition, wake: Callable[[], None]) -> None:
    """It waits no more."""
    partition.parked_followers.pop(wake, None)
    if not partition.parked_followers:
        partition.remove_after_append(partition.wake_followers)


# As follower


def append(partition: Partition, records: memoryview, gaps_below: int) -> int:
    """Append the whole batches in what the leader sent; how many bytes. The caller has them synced.

    One that is not sound keeps all of them out, so that what is there was sent as it should be.

    `gaps_below`: the leader's high watermark; below, compaction may have left gaps. Raises `CorruptMessage` and its
    kind for bytes that are not the leader's next batches, `ConcurrentChange` when the log has to be begun anew and is
    busy, `StorageError` as an append does. What was appended before stays.
    """
    follower_replica(partition)
    log = partition.log
    headers, size = read_stored_batches(records)
    current = partition.replica.leader_epoch
    for header in headers:
        if header.leader_epoch > current:
            raise CorruptMessage(
                f"{partition.name}: a batch of leader epoch {header.leader_epoch} from a leader of {current}"
            )
    if not headers:
        raise CorruptMessage(f"{partition.name}: its leader sent {len(records)} bytes, and no whole batch")
    first = headers[0]
    if first.base_offset < log.end_offset <= first.last_offset and log.start_offset == log.end_offset:
        reset_to(partition, first.base_offset)  # the leader's log begins inside this batch
    before = log.end_offset
    try:
        follower_append.append_as_follower(log, records[:size], headers, gaps_below=gaps_below)
    except StorageError as error:
        raise partition.append_error(error) from error
    finally:
        end = log.end_offset
        if end > before:
            for header in headers:
                if header.base_offset + header.last_offset_delta < end:
                    for after in partition.after_append:
                        after(header, header.base_offset)
    return size


def heard(partition: Partition, leader_high_watermark: int, leader_start_offset: int) -> None:
    """The leader told its high watermark and where its log begins."""
    replica, log = follower_replica(partition), partition.log
    if replica.heard(leader_high_watermark):
        partition.high_watermark_advanced()
    if log.start_offset < leader_start_offset <= replica.high_watermark:
        delete_records.advance_start(partition, leader_start_offset)
        partition.group_commit.persist_start_offset(log, _report_in_next_fetch)


def _report_in_next_fetch(error: StorageError | None) -> None:
    """What follows from a start that is kept, or cannot be, the log itself shows."""


def agree(partition: Partition, diverging: tuple[int, int]) -> None:
    """The leader's epoch `diverging[0]`, the last one it knows of those here, ended at `diverging[1]`: take back what
    is beyond. The next request tells whether the logs agree then. Blocks.

    Raises `ConcurrentChange` while the log is being synced, `StorageError`.
    """
    epoch, leader_end = diverging
    log = partition.log
    _, own_end = log.end_offset_for_epoch(epoch)
    end = min(leader_end, own_end)
    if own_end < 0 or end >= log.end_offset:
        raise CorruptMessage(
            f"{partition.name}: its leader says that the logs part at {leader_end} of epoch {epoch}, "
            f"but there is nothing to take back"
        )
    before = log.end_offset
    if end < log.start_offset:
        reset_to(partition, end)
    else:
        log.truncate_to(end)
        _on_truncated(partition)
    logger.info(
        "log_truncated",
        extra=fields(
            topic=partition.topic, partition=partition.index, end=before, to=log.end_offset, epoch=epoch
        ),
    )


def reset_to(partition: Partition, offset: int) -> None:
    """Forget what is here, and go on at `offset`, where the leader's log has something. Blocks.

    Raises `ConcurrentChange` while the log is being synced, `StorageError`.
    """
    follower_replica(partition)
    log = partition.log
    was_empty = log.start_offset == log.end_offset
    follower_append.reset_to(log, offset)
    _on_truncated(partition, was_empty=was_empty)


def _on_truncated(partition: Partition, *, was_empty: bool = False) -> None:
    replica, log = follower_replica(partition), partition.log
    known = replica.high_watermark
    if not replica.cut(log.start_offset, log.end_offset) and not was_empty:
        logger.error(
            "committed_records_truncated",
            extra=fields(
                topic=partition.topic, partition=partition.index, high_watermark=known, to=log.end_offset
            ),
        )
    try:
        for hook in partition.hooks:
            hook.on_truncate(log.end_offset)
    except OSError as error:  # whatever a hook knows may be of what was taken back
        raise log.fail(error, f"cannot forget what was cut from {log.directory}") from error


def when_durable(partition: Partition, end_offset: int, callback: Callable[[], None]) -> bool:
    """True if everything below is on stable storage here. Otherwise `callback` is called once: when it is, when the log
    fails, or when the role ends."""
    log = partition.log
    if end_offset <= log.durable_end_offset or log.failure is not None or partition.closed:
        return True
    partition.flush_waits.append((end_offset, callback))
    return False


def notify_durable(partition: Partition, end_offset: int | None) -> None:
    """What waits for no more than this end is told; None: all."""
    if not partition.flush_waits:
        return
    waits, partition.flush_waits = partition.flush_waits, []
    for wanted, callback in waits:
        if end_offset is None or wanted <= end_offset:
            callback()
        else:
            partition.flush_waits.append((wanted, callback))


def follower_replica(partition: Partition) -> FollowerReplica:
    """What a follower knows; `NotLeaderOrFollower` when this is none (any more)."""
    replica = partition.replica
    if not isinstance(replica, FollowerReplica) or partition.closed:
        raise NotLeaderOrFollower(f"{partition.name} does not follow anybody here")
    return replica
