"""Acquisition of records of a topic partition with priorities: from the share partitions of all priorities.

`PriorityShares` decides how many records of each priority a member gets. The results are merged, because a response has
one list of acquired ranges and one sequence of batches per topic partition.

Invariants:
* Deliveries that a priority cannot use, for example because its next batch is damaged, go to the others.
* Nothing is acquired before the share partitions of all priorities are loaded; otherwise records of a lower
  priority would be delivered first, and a group that was reset to the end of the log could miss records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CoordinatorLoadInProgress, MansioError
from mansio.state.share_partition.priority_shares import free_locks
from mansio.storage.segment_list import LogSlice
from mansio.tracebacks import copied, without_traceback
from mansio.wire.batch.priority_header import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords, SharePartitionLeader


def acquire_by_priority(
    leaders: Mapping[Priority, SharePartitionLeader],
    member: str,
    max_records: int,
    max_bytes: int,
    *,
    strict: bool,
    is_first: bool,
    lease_ms: int = -1,
) -> list[tuple[SharePartitionLeader, AcquiredRecords]]:
    """Lease available records of all priorities to a member. The arguments and errors are those of
    `SharePartitionLeader.acquire`; the error of one priority is raised if there are no records of the others. If not
    `strict`, whole batches are leased of the first priority only: of the others, no more than their parts."""
    for leader in leaders.values():
        if leader.end_error is not None:
            raise copied(leader.end_error)
        if not leader.is_ready:
            raise CoordinatorLoadInProgress(
                f"{leader.partition.name}: the state of a priority is being loaded"
            )
    shares = leaders[Priority.NORMAL].priority_shares
    failure: MansioError | None = None
    leased = {priority: leader.state_machine.leased_count for priority, leader in leaders.items()}
    available = dict.fromkeys(leaders, 0)
    for priority, leader in leaders.items():
        locks = free_locks(priority, leased, leader.state_machine.settings.record_locks_max)
        if locks > 0:
            try:
                available[priority] = leader.count_available(member, min(max_records, locks))
            except MansioError as error:
                failure = without_traceback(error)
    found: list[tuple[SharePartitionLeader, AcquiredRecords]] = []
    delivered: dict[Priority, int] = {}
    left, space = max_records, max_bytes
    is_first_limit = is_unused = True
    remaining = dict(available)
    """Of each priority, the records that can still be acquired for this member."""
    while is_unused and left > 0 and space > 0:
        is_unused = False
        for priority, records in shares.divide(left, remaining):
            leader = leaders[priority]
            locks = free_locks(priority, leased, leader.state_machine.settings.record_locks_max)
            remaining[priority] -= records
            if (wanted := min(records, locks, left)) <= 0 or space <= 0:
                continue
            try:
                acquired = leader.call_machine(
                    leader.acquire,
                    member,
                    wanted,
                    space,
                    strict=strict or not is_first_limit or locks <= records,
                    is_first=is_first and not delivered,
                    lease_ms=lease_ms,
                )
            except MansioError as error:
                failure, acquired = without_traceback(error), None
                available[priority] = 0
            is_first_limit = False
            if acquired is not None:
                found.append((leader, acquired))
            if acquired is None or not acquired.acquired:
                remaining[priority] = 0
                is_unused = True
                continue
            delivered[priority] = delivered.get(priority, 0) + acquired.record_count
            leased[priority] += acquired.record_count
            left -= acquired.record_count
            space -= acquired.size_bytes
    shares.record(delivered, available)
    if failure is not None and not found:
        raise copied(failure)
    return found


def merge_slices(slices: Iterable[LogSlice]) -> list[LogSlice]:
    """Return slices of one log in ascending order, each batch once: overlapping and adjacent ones are one slice."""
    merged: list[LogSlice] = []
    for each in sorted(slices, key=lambda one: one.next_offset):
        position, end = each.position, each.position + each.length
        while merged and merged[-1].file is each.file and merged[-1].position + merged[-1].length >= position:
            last = merged.pop()
            position, end = min(position, last.position), max(end, last.position + last.length)
        merged.append(LogSlice(each.file, position, end - position, each.next_offset))
    return merged
