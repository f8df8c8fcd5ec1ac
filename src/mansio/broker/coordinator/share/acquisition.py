"""Leasing records of one share partition to a member that fetches: what is free is read, and what was read is leased.

Always true: nothing is leased whose bytes are not in the answer; nothing at or above the readable end is; records are
slices of the log's files, which nobody opens or copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import CorruptLog

if TYPE_CHECKING:
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.partition.partition import Partition
    from mansio.state.share_partition.types import AcquiredRange, Update
    from mansio.storage.log import LogSlice


class AcquiredRecords(NamedTuple):
    """What a member is about to be given: leases, once `update` is stored, and the bytes of the records."""

    acquired: list[AcquiredRange]
    update: Update | None
    slices: list[LogSlice]
    size_bytes: int

    @property
    def records(self) -> int:
        """How many offsets."""
        return sum(last - first + 1 for first, last, _ in self.acquired)


def acquire_records(
    share_partition: SharePartitionLeader,
    member: str,
    max_records: int,
    max_bytes: int,
    *,
    strict: bool,
    first: bool,
) -> AcquiredRecords | None:
    """Lease what there is for this member, or None. `first`: the answer has no records yet, so one batch may be larger
    than `max_bytes`. Raises `NotLeaderOrFollower`, `CorruptLog`, `StorageError`."""
    state_machine = share_partition.ready_state_machine()
    if state_machine is None:
        return None
    share_partition.ensure_leader()
    partition, now_ms = share_partition.partition, share_partition.now_ms()
    end = partition.readable_end()
    read_ranges = share_partition.call(state_machine.acquirable_ranges, member, max_records, end, now_ms)
    read, slices = _read(partition, read_ranges, max_bytes, end, first=first) if read_ranges else ([], [])
    acquired, update = share_partition.call(
        state_machine.acquire,
        member,
        read,
        max_records,
        strict=strict,
        batch_ends=[last for _, last in read],
        now_ms=now_ms,
    )
    if not acquired and update is None:
        return None
    if len(slices) > 1 or not acquired:
        slices = _needed(read, slices, acquired)
    return AcquiredRecords(acquired, update, slices, sum(each.length for each in slices))


def _read(
    partition: Partition, read_ranges: list[tuple[int, int]], max_bytes: int, limit: int, *, first: bool
) -> tuple[list[tuple[int, int]], list[LogSlice]]:
    """What of these stretches is in the slices, each to the end of its last batch."""
    read: list[tuple[int, int]] = []
    slices: list[LogSlice] = []
    room, next_offset = max_bytes, -1
    for begin, last in read_ranges:
        if last < next_offset:
            continue  # the batch before goes so far
        start = max(begin, next_offset)
        if room <= 0:
            break
        try:
            part = partition.log.read_range(start, last, room, limit)
        except CorruptLog as error:
            partition.storage_health.corrupt(partition.topic, partition.index, start, error)
            if read:
                break
            raise
        if part is None or (part.length > room and (slices or not first)):
            break
        slices.append(part)
        room -= part.length
        next_offset = part.next_offset
        read.append((start, next_offset - 1))
    return read, slices


def _needed(
    read: list[tuple[int, int]], slices: list[LogSlice], acquired: list[AcquiredRange]
) -> list[LogSlice]:
    """Those that hold something that was leased. A stretch goes from one range of `read` into the next when a batch
    does."""
    return [
        part
        for (begin, last), part in zip(read, slices, strict=True)
        if any(each.first <= last and each.last >= begin for each in acquired)
    ]
