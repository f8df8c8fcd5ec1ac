"""The share partitions of one topic partition and one group: one, or as many as their index has.

The index (`ShareIndex`) says which share partition has an offset, and in which order records of them are acquired. The
results of several share partitions are merged, because a response has one list of acquired ranges and one sequence of
batches for each topic partition.

Invariants:
* Deliveries that a share partition cannot use, for example because its next batch is damaged, go to the others.
* Nothing is acquired before the states of all share partitions are loaded; otherwise records would be delivered out of
  order, and a group that was reset to the end of the log could miss records.
* Acknowledgements of several share partitions are checked as a whole before one of them is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CoordinatorLoadInProgress, InvalidRecordState, MansioError
from mansio.state.share_partition.in_flight import NOT_PENDING
from mansio.state.share_partition.share_index import split_acknowledgements
from mansio.state.share_partition.types import (
    ACCEPT,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    REJECT,
    AlteredRanges,
    RedriveResult,
)
from mansio.storage.segment_list import LogSlice
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.coordinator.share.partition_leader import AcquiredRecords, SharePartitionLeader
    from mansio.state.share_partition.share_index import AcquisitionOrder
    from mansio.state.share_partition.types import AcknowledgementBatch, AcquiredRange, RangeOperation, Update

ARCHIVE_CHECKS_MAX: Final = 20
"""How often a redrive checks whether the state of recently archived records is stored."""

ARCHIVE_CHECK_INTERVAL_MS: Final = 250
"""Maximum time between two of these checks."""


@dataclass(frozen=True, slots=True)
class LeaseRange:
    """Range of offsets leased to one member, with one delivery count. `age_ms`: time since the records were leased or
    the lease was renewed; `lease_ms`: duration of the lease. With another `state` than `ACQUIRED` the offsets are not
    leased: they wait for a retry (`AVAILABLE`, due at the wall-clock time `due_ms`, -1 for at once), are being
    dead-lettered (`ARCHIVING`), or are dead-lettered (`ARCHIVED`)."""

    first_offset: int
    last_offset: int
    member_id: str
    delivery_count: int
    age_ms: int
    lease_ms: int
    state: int = ACQUIRED
    due_ms: int = -1


class HeldLeases(NamedTuple):
    """Number of records, and the sum of the times for which they are leased, in ms."""

    records: int
    held_ms: float


class SharePartitions:
    """The leaders of the share partitions of one topic partition and one group, in the order of its index. All methods
    run on the broker's event loop.

    A leader that has ended is not replaced: `SharePartitionManager.find` then returns another object."""

    __slots__ = (
        "_by_number",
        "_order",
        "index",
        "is_loaded",
        "leader_epoch",
        "leaders",
        "partition",
        "topic_index",
    )

    def __init__(self, leaders: Sequence[SharePartitionLeader]) -> None:
        """`leaders`: at least one, all with the same index."""
        self.leaders = tuple(leaders)
        self.partition = leaders[0].partition
        self.leader_epoch = leaders[0].leader_epoch
        self.topic_index = leaders[0].topic_index
        self.index = leaders[0].index if len(leaders) > 1 else None
        """The index of the share partitions; None if there is only one."""
        self.is_loaded = False
        """Whether it is known that the states of all share partitions are loaded."""
        self._by_number = {leader.key.number: leader for leader in leaders}
        self._order: AcquisitionOrder | None = None if self.index is None else self.index.new_order()

    async def wait_until_loaded(self) -> None:
        """Wait until the states of all share partitions are loaded. Raises the error with which one has ended."""
        for leader in self.leaders:
            await leader.wait_until_loaded()
        self.is_loaded = True

    def check_loaded(self) -> bool:
        """Return whether the states of all share partitions are loaded."""
        self.is_loaded = all(leader.is_ready for leader in self.leaders)
        return self.is_loaded

    # ------------------------------------------------------------------ acquisition

    def has_available(self, member: str, *, is_range: bool = False) -> bool:
        """Return whether the member can probably acquire a record now. `is_range`: by a range lease. The states must be
        loaded. Raises the errors of `SharePartitionLeader.count_available`."""
        order = self._order
        leased = self._lock_counts(is_range=is_range)
        return any(
            (
                order is None
                or not leader.state_machine.is_offering
                or order.free_locks(number, leased, _locks_max(leader, is_range=is_range)) > 0
            )
            and leader.count_available(member, 1, is_range=is_range)
            for number, leader in self._by_number.items()
        )

    def _lock_counts(self, *, is_range: bool) -> dict[int, int]:
        """Return the number of records that are leased now by range leases, or by the other ones, by share
        partition."""
        return {
            number: leader.state_machine.lock_count(is_range=is_range)
            for number, leader in self._by_number.items()
        }

    def acquire(
        self,
        member: str,
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
        is_first: bool,
        lease_ms: int = -1,
        ranges_max: int = 0,
    ) -> Sequence[AcquiredRecords]:
        """Lease available records to a member. The arguments and errors are those of `SharePartitionLeader.acquire`;
        the error of one share partition is raised if there are no records of the others. If not `strict`, whole batches
        are leased of the first share partition only: of the others, no more than their parts."""
        if self._order is not None:
            return self._acquire_in_order(
                self._order,
                member,
                max_records,
                max_bytes,
                strict=strict,
                is_first=is_first,
                lease_ms=lease_ms,
                ranges_max=ranges_max,
            )
        leader = self.leaders[0]
        # An unexpected error ends the leader; otherwise its changed records would stay pending for ever.
        acquired = leader.call_machine(
            leader.acquire,
            member,
            max_records,
            max_bytes,
            strict=strict,
            is_first=is_first,
            lease_ms=lease_ms,
            ranges_max=ranges_max,
        )
        return () if acquired is None else (acquired,)

    def _acquire_in_order(
        self,
        order: AcquisitionOrder,
        member: str,
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
        is_first: bool,
        lease_ms: int,
        ranges_max: int,
    ) -> list[AcquiredRecords]:
        for leader in self.leaders:
            if leader.end_error is not None:
                raise copied(leader.end_error)
            if not leader.is_ready:
                raise CoordinatorLoadInProgress(
                    f"{leader.partition.name}: the state of a share partition is being loaded"
                )
        leaders, is_range, ranges_left = self._by_number, ranges_max > 0, ranges_max
        failure: MansioError | None = None
        leased = self._lock_counts(is_range=is_range)
        available = dict.fromkeys(leaders, 0)
        for number, leader in leaders.items():
            locks = order.free_locks(number, leased, _locks_max(leader, is_range=is_range))
            if locks > 0 or not leader.state_machine.is_offering:
                # The keys of each are read even if it gets nothing: limits by key need the leases of all of them.
                try:
                    # One more than can be delivered: the order has to know which of them still have records then.
                    wanted = max(min(max_records + 1, locks), 1)
                    count = leader.count_available(member, wanted, is_range=is_range)
                    available[number] = count if locks > 0 else 0
                except MansioError as error:
                    failure = without_traceback(error)
        found: list[AcquiredRecords] = []
        delivered: dict[int, int] = {}
        left, space = max_records, max_bytes
        is_first_limit = is_unused = True
        remaining = dict(available)
        """By number, the records that can still be acquired for this member."""
        while is_unused and left > 0 and space > 0:
            is_unused = False
            for number, records in order.divide(left, remaining):
                leader = leaders[number]
                locks = order.free_locks(number, leased, _locks_max(leader, is_range=is_range))
                remaining[number] -= records
                if (
                    (wanted := min(records, locks, left)) <= 0
                    or space <= 0
                    or (is_range and ranges_left <= 0)
                ):
                    continue
                try:
                    acquired = leader.call_machine(
                        leader.acquire,
                        member,
                        wanted,
                        space,
                        strict=strict or not (order.may_exceed and is_first_limit),
                        is_first=is_first and not delivered,
                        lease_ms=lease_ms,
                        locks_max=locks,
                        ranges_max=ranges_left,
                    )
                except MansioError as error:
                    failure, acquired = without_traceback(error), None
                    available[number] = 0
                is_first_limit = False
                if acquired is not None:
                    found.append(acquired)
                if acquired is None or not acquired.acquired:
                    remaining[number] = 0
                    is_unused = True
                    continue
                delivered[number] = delivered.get(number, 0) + acquired.record_count
                leased[number] += acquired.record_count
                left -= acquired.record_count
                space -= acquired.size_bytes
                ranges_left -= len(acquired.acquired)
        order.record(delivered, available)
        if failure is not None and not found:
            raise copied(failure)
        return found

    # ------------------------------------------------------------------ acknowledging

    def acknowledge(
        self, member: str, batches: Sequence[AcknowledgementBatch]
    ) -> Sequence[tuple[SharePartitionLeader, Update]]:
        """Apply acknowledgements, all or none; return the updates to store. The states must be loaded. Raises the
        errors of `SharePartitionLeader.acknowledge`."""
        if self.index is None:
            leader = self.leaders[0]
            update = leader.call_machine(leader.acknowledge, member, batches)
            return () if update is None else ((leader, update),)
        parts = split_acknowledgements(batches, self.index)
        if not parts.keys() <= self._by_number.keys():
            raise InvalidRecordState("records of a backlog queue that has ended are not leased")
        if len(parts) > 1:
            for number, part in parts.items():
                self._by_number[number].check_acknowledgements(member, part)
        updates: list[tuple[SharePartitionLeader, Update]] = []
        try:
            for number, part in parts.items():
                leader = self._by_number[number]
                order = self._order
                held = None if order is None or not order.measures_leases else _held_leases(leader, part)
                update = leader.call_machine(leader.acknowledge, member, part)
                if update is not None:
                    updates.append((leader, update))
                if order is not None and held is not None and held.records:
                    order.record_end(number, *held)
        except MansioError:
            # All acknowledgements were checked, so this is a defect. The changes that were applied must be stored.
            for leader, update in updates:
                leader.persist_in_background(update)
            raise
        return updates

    def alter_range_leases(
        self,
        member: str,
        wanted: Sequence[AcquiredRange],
        operation: RangeOperation,
        lease_ms: int,
        *,
        releases_others: bool,
    ) -> tuple[AlteredRanges, Sequence[tuple[SharePartitionLeader, Update]]]:
        """Keep, claim or accept range leases; return the result without its update, and the updates to store. The
        states must be loaded. Arguments and errors: `SharePartition.alter_range_leases`. The ranges may contain offsets
        of several share partitions, of which each one takes its own."""
        altered: list[AcquiredRange] = []
        ended: list[AcquiredRange] = []
        updates: list[tuple[SharePartitionLeader, Update]] = []
        for leader in self.leaders:
            result = leader.alter_range_leases(
                member, wanted, operation, lease_ms, releases_others=releases_others
            )
            altered += result.altered
            ended += result.ended
            if result.update is not None:
                updates.append((leader, result.update))
        return AlteredRanges(sorted(altered), sorted(ended), None), updates

    # ------------------------------------------------------------------ inspection and redrive

    def leased_ranges(
        self, ranges_max: int, *, with_states: bool = False, from_offset: int = 0
    ) -> list[LeaseRange]:
        """Return the first leased ranges in the order of their offsets. `with_states`: also those that wait for a retry
        or are dead-lettered; `from_offset`: only those that begin at or above it. The states must be loaded."""
        found = [
            each
            for leader in self.leaders
            for each in _leased_ranges(leader, ranges_max, with_states=with_states, from_offset=from_offset)
        ]
        return sorted(found, key=lambda each: each.first_offset)[:ranges_max]

    async def redrive(
        self, redrive_id: str, offsets: Sequence[tuple[int, int]] | None, records_max: int
    ) -> tuple[RedriveResult, int]:
        """Offer at most `records_max` dead-lettered records to the group again; return the result, and the number of
        dead-lettered records that remain. See `ShareService.redrive`."""
        total, dead = RedriveResult(0, 0, 0), 0
        for leader in self.leaders:
            await _wait_until_archived(leader)
            leader.ready_state_machine()
            leader.ensure_leader()
            left = records_max - total.redriven
            if left > 0:
                update, result = leader.call_machine_and_set_timer(
                    leader.state_machine.redrive, redrive_id, offsets, left, leader.now_ms()
                )
                if update is not None:
                    await leader.persist(update)
                total = RedriveResult(*map(sum, zip(total, result, strict=True)))
            dead += leader.state_machine.counts(leader.now_ms()).dead
        return total, dead


def _locks_max(leader: SharePartitionLeader, *, is_range: bool) -> int:
    return leader.state_machine.settings.locks_max(is_range=is_range)


def _held_leases(leader: SharePartitionLeader, batches: Sequence[AcknowledgementBatch]) -> HeldLeases:
    """Return how many of the records are accepted or rejected, and for how long they have been leased together."""
    machine, now_ms = leader.state_machine, leader.now_ms()
    records, held_ms = 0, 0.0
    for batch in batches:
        if ACCEPT not in batch.types and REJECT not in batch.types:
            continue
        for each in machine.ranges.overlapping(batch.first, batch.last):
            if each.state == ACQUIRED:
                size = min(each.last, batch.last) - max(each.first, batch.first) + 1
                began_ms = each.deadline_ms - each.duration_ms(machine.settings.lock_ms)
                records += size
                held_ms += size * max(now_ms - began_ms, 0.0)
    return HeldLeases(records, held_ms)


def _leased_ranges(
    leader: SharePartitionLeader, ranges_max: int, *, with_states: bool, from_offset: int
) -> list[LeaseRange]:
    """Return the first leased ranges of one share partition, and with `with_states` as many of the other states."""
    machine = leader.ready_state_machine() or leader.state_machine
    ranges: list[LeaseRange] = []
    now_ms, lock_ms = leader.now_ms(), machine.settings.lock_ms
    for batch in machine.ranges:
        if len(ranges) >= ranges_max:
            break
        if batch.first < from_offset:
            continue
        if with_states and (batch.state == ARCHIVING or (batch.state == AVAILABLE and batch.deliveries)):
            ranges.append(
                LeaseRange(batch.first, batch.last, "", batch.deliveries, 0, -1, batch.state, batch.due_ms)
            )
        if batch.state == ACQUIRED:
            lease_ms = batch.duration_ms(lock_ms)
            age_ms = max(round(now_ms - batch.deadline_ms + lease_ms), 0)
            ranges.append(
                LeaseRange(batch.first, batch.last, batch.holder, batch.deliveries, age_ms, lease_ms)
            )
    if with_states:
        dead = [each for each in machine.dead_ranges() if each.first >= from_offset][:ranges_max]
        ranges += [LeaseRange(each.first, each.last, "", each.deliveries, 0, -1, ARCHIVED) for each in dead]
    return ranges


async def _wait_until_archived(leader: SharePartitionLeader) -> None:
    """Wait until the state of recently archived records is stored, for a limited time. Records can be redriven only
    afterwards."""
    for _ in range(ARCHIVE_CHECKS_MAX):
        ranges = leader.state_machine.ranges
        if leader.end_error is not None or all(
            each.pending_token == NOT_PENDING for each in ranges if each.state == ARCHIVED
        ):
            return
        await leader.wait_for_change(ARCHIVE_CHECK_INTERVAL_MS)


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
