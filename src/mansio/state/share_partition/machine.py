"""State machine of one share partition: acquisition and delivery state of the offsets of a topic partition for one
share group.

A member *acquires* offsets whose bytes are in the response being built. The offsets are leased to the member until it
*acknowledges* them or the lease ends. Accepted records are done. Released and expired records are offered again after a
backoff. Rejected records, and records that have reached the delivery limit, are copied to the dead-letter topic and are
done once the copy is committed.

                     acquire                  accept
      AVAILABLE ────────────────► ACQUIRED ──────────► ACKNOWLEDGED
       ▲  ▲  ▲                     │ │ ▲ │                  ▲
       │  │  └─────────────────────┘ │ └─┘ renew            │ accept
       │  │    release, expiry       │                      │
       │  │                          │ reject,           WITHHELD  possibly leased before a loss
       │  └── withholding ends ──────┼── attempts used up ──┤
       │                             ▼                      ▼
       │        redrive           ARCHIVING ──────────► ARCHIVED
       └─────────────────────────────── (ARCHIVED) ◄── the copy is in the dead-letter topic

(`in_flight.TRANSITIONS` holds these transitions as a table.)

If a topic partition has several share partitions (`share_index`), each of them has only its own offsets (`own`). It
passes the other offsets as if they were acknowledged when it leases an own one above them, so that its start offset
advances and its state does not grow with the number of records of the others.

The state machine does no I/O. Methods take the time (`now_ms` of any steady clock, `wall_ms` of the wall clock) and a
random number, and return an `Update`. The caller stores the update and then calls `mark_persisted`. An invalid request
raises its typed error and changes nothing. If storing an update fails, or its outcome is unknown, the caller discards
the object and loads the state again.

An update with `is_snapshot` set is the whole state: the caller stores it after all earlier updates and before all later
ones. Other updates may be stored concurrently, because they concern different offsets.

Invariants:
* An offset has at most one holder. Offsets of an update that is not stored yet are offered to no member.
* The delivery count (`deliveries`) never decreases; `uncounted_deliveries` of them do not count as attempts. The update
  of a second or later delivery is durable before members receive the records.
* Terminal states are final, except that an operator may offer dead-lettered records again (redrive).
* A renewal is answered after a durable update, also if it changes nothing that is stored: only the leader can store.
* No offset at or above the durable lease bound is leased. At most `range_locks_max` records are leased by range
  leases, and at most `record_locks_max` by others. An update of a range lease is durable.
* The start offset advances over records that are done and stored, and over records deleted from the log, but never
  over ARCHIVING records.

Source: KIP-932, KIP-1206 (record limit), KIP-1222 (renewal), KIP-1191 (dead letters). Differences from Kafka:
docs/reference/delivery.md.
"""

from __future__ import annotations

import math
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import CoordinatorLoadInProgress, InvalidRecordState, InvalidRequest
from mansio.state.share_partition import acquisition
from mansio.state.share_partition.acquisition import LowestOffsetFirst, OrderedAcquisition
from mansio.state.share_partition.dead_letters import (
    DeadRanges,
    count_offsets,
    difference,
    intersection,
    merge_intervals,
)
from mansio.state.share_partition.in_flight import (
    DELIVERIES_MAX,
    NEVER_MS,
    NOT_PENDING,
    TERMINAL,
    InFlightBatch,
    acquired_ranges,
    delivered_ranges,
    shift_reservation,
    state_batches,
)
from mansio.state.share_partition.key_index import (
    DONE,
    FREE,
    RUN_RECORDS_MAX,
    HeldBack,
    KeyIndex,
    LimitedKeys,
)
from mansio.state.share_partition.key_limits import KeyLimits
from mansio.state.share_partition.snapshot import full_update, restore_in_flight_batches, stored_batches
from mansio.state.share_partition.types import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    BASE,
    BY_ACKNOWLEDGEMENT,
    BY_ACQUISITION,
    BY_CLAIM,
    BY_COPY,
    BY_DEADLINE,
    BY_EXCHANGE,
    BY_LOG_START,
    BY_MEMBER_END,
    BY_REDRIVE,
    CAUSE_DELIVERY_LIMIT,
    CAUSE_REJECTED,
    GAP,
    LEASE_MS_MAX,
    RELEASE,
    RENEW,
    WITHHELD,
    AcknowledgementBatch,
    AcquiredRange,
    AlteredRanges,
    ArchivingRange,
    DeadLetterReservation,
    DeadRange,
    LeaseHolder,
    LoadedState,
    RangeOperation,
    RedriveResult,
    ShareCounts,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.state.share_partition.acquisition import AcquisitionPolicy
    from mansio.state.share_partition.in_flight import BatchMap
    from mansio.state.share_partition.share_index import OwnOffsets
    from mansio.state.share_partition.types import Isolation, Producer, ShareKey, ShareSettings

ALREADY_DUE_MS: Final = -math.inf
"""Deadline that has always passed."""

REASON_CHARACTERS_MAX: Final = 1_000
"""Maximum length of a rejection reason that is stored; longer reasons are truncated."""

ACKNOWLEDGEMENT_TYPES_MAX: Final = 20_000
"""Maximum number of acknowledgement types in a request for one partition; greater than the number of records that can
be leased."""

LEASED_RANGES_MAX: Final = 4_096
"""Maximum number of ranges that are found for one acquisition by range leases."""

SCATTERED_READ_RANGES_MAX: Final = 32
"""Maximum number of offset ranges that are read for one request if records are ordered by key, or if there are
several share partitions: those that can be acquired are less often adjacent."""

_TYPES_MAX: Final = RENEW
_NO_TOPIC: Final = bytes(16)


class AcknowledgedRange(NamedTuple):
    """Offsets `first` to `last` with the same acknowledgement type, and the batch of the request that contains them."""

    first: int
    last: int
    type: int
    request_batch: AcknowledgementBatch


class RetriedRecord(NamedTuple):
    """A record that was given back or not acknowledged in time. `attempts`: counted deliveries, that of a lease
    included; `due_ms`: time until it is offered again, 0 if it is offered or leased."""

    offset: int
    attempts: int
    due_ms: float


class _UpdateContext(NamedTuple):
    """Token of the update that is being built, the current times, and a random number for the jitter of backoffs (0 to
    below 1)."""

    token: int
    now_ms: float
    wall_ms: int
    random_fraction: float


class LeaseBound:
    """Upper bound of leased offsets, stored durably before an offset at or above it is leased.

    The first lease of a record reaches its member before the update is durable. After stored state was lost it is
    therefore unknown which records without a stored delivery are leased, but all of them are below the bound. The bound
    advances in steps of `lease_bound_step` records; the next step is requested while half of the last one is left, so
    that leases rarely wait for it. A range lease of more records requests a wider step (`widen`).

    Invariants: the bound never decreases and advances only by a durable update; at most one such update is pending.
    """

    __slots__ = ("_due_from", "_own", "_requested", "_wanted_end", "offset")

    def __init__(self, offset: int, own: OwnOffsets | None) -> None:
        """`own`: the offsets of the share partition; None if it has all."""
        self.offset = offset
        self._own = own
        self._due_from = offset  # the bound is due when an own offset from here on is leased next
        self._wanted_end = 0  # the bound is due below this offset
        self._requested: tuple[int, int] | None = (
            None  # token of the update that advances the bound, and the new bound
        )

    def divide(self, own: OwnOffsets) -> None:
        """Set the offsets of the share partition."""
        self._own = own

    def is_due(self, ranges: BatchMap, settings: ShareSettings) -> bool:
        """Whether the bound has to be advanced now."""
        if self._requested is not None:
            return False
        if self.is_short:
            return True
        own = self._own
        if own is None or own.has_all:
            return 2 * (self.offset - ranges.end) < settings.lease_bound_step
        following = own.first_at_or_above(ranges.end)
        return following is not None and following >= self._due_from

    def widen(self, records: int, ranges: BatchMap, readable_end: int) -> None:
        """Make the bound due unless it allows a lease of so many records that were never delivered, as far as the log
        has them."""
        own = self._own
        end = ranges.end + records if own is None or own.has_all else own.bound_after(ranges.end, records)
        self._wanted_end = min(end, readable_end)

    @property
    def is_short(self) -> bool:
        """Whether the bound is due because of `widen`."""
        return self._requested is None and self.offset < self._wanted_end

    def request(self, token: int, ranges: BatchMap, settings: ShareSettings) -> int:
        """Start to advance the bound by the update with this token; returns the new bound, effective once the update is
        stored."""
        step, own = settings.lease_bound_step, self._own
        if own is None or own.has_all:
            bound = max(self.offset, ranges.end, self._wanted_end) + step
        else:
            bound = max(self.offset, own.bound_after(ranges.end, step), self._wanted_end)
            self._due_from = own.bound_after(ranges.end, step // 2)
        self._requested = (token, bound)
        return bound

    def mark_persisted(self, token: int) -> None:
        """Make the new bound effective if the update with this token, which is stored now, advances the bound."""
        if self._requested is not None and self._requested[0] == token:
            self.offset, self._requested, self._wanted_end = self._requested[1], None, 0

    def lease_end(self, ranges: BatchMap, settings: ShareSettings) -> int:
        """Offset below which leases must lie: the bound, or, if there are too many in-flight batches, their end."""
        return min(self.offset, ranges.end) if len(ranges) >= settings.in_flight_batches_max else self.offset


class SharePartition:
    """State machine of one share partition. Callers may read the attributes; only methods change them."""

    __slots__ = (
        "_dead",
        "_in_flight",
        "_isolations",
        "_lease_bound",
        "_limits",
        "_log_start",
        "_own",
        "_planned",
        "_policy",
        "_producer",
        "_state",
        "_wall_clock_offset_ms",
        "aged_out_record_count",
        "has_key_limits",
        "high_watermark",
        "key",
        "leader_epoch",
        "settings",
    )

    def __init__(
        self,
        key: ShareKey,
        settings: ShareSettings,
        state: LoadedState,
        *,
        leader_epoch: int,
        log_start: int,
        log_end: int,
        high_watermark: int,
        now_ms: float,
        wall_ms: int,
        own: OwnOffsets | None = None,
        limits: KeyLimits | None = None,
    ) -> None:
        """Restore the in-flight batches from stored state. `high_watermark`: offset below which the group may read the
        log. `log_end`: current end offset of this broker's log, at or
        above the high watermark of any earlier leader. `own`: the offsets of the share partition; None if it has
        all. `limits`: the limits by key of the topic partition, which its share partitions share; None if there is no
        other one."""
        self.key = key
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.aged_out_record_count = 0  # number of records deleted from the log before they were done
        self._state = state
        self._own = own
        self._lease_bound = LeaseBound(state.lease_bound, own)
        self._wall_clock_offset_ms = wall_ms - now_ms
        self._dead = DeadRanges(state)
        self._producer = state.producer
        self._isolations = state.isolations
        self._limits = KeyLimits(now_ms) if limits is None else limits
        self._planned: tuple[int, list[tuple[int, int]]] = (-1, [])
        """The last result of `acquirable_ranges` with an index of keys, and its `plan_id` then."""
        self._in_flight = restore_in_flight_batches(
            state, lock_ms=settings.lock_ms, log_end=log_end, now_ms=now_ms, wall_ms=wall_ms, own=own
        )
        self._log_start = -1
        self.settings = settings
        self.has_key_limits = settings.has_key_limits
        self.reconfigure(settings, now_ms)
        self.advance_log_start(log_start, store=False)

    def reconfigure(self, settings: ShareSettings, now_ms: float) -> None:
        """Apply new settings; running leases keep their deadlines."""
        before, self.settings = self.settings, settings
        self.has_key_limits = settings.has_key_limits
        if self.has_key_limits or before.has_key_limits:
            self._limits.configure(settings.key_leases_max, settings.key_rate, settings.key_burst, now_ms)
        index, has_index = self._in_flight.key_index, settings.is_ordered_by_key or self.has_key_limits
        if has_index != (index is not None) or (
            has_index and _index_settings(before) != _index_settings(settings)
        ):
            self._reset_key_index(now_ms)
        elif index is not None and before != settings:
            index.on_limits_changed(now_ms)
        self._policy: AcquisitionPolicy = OrderedAcquisition() if settings.is_ordered else LowestOffsetFirst()

    # ------------------------------------------------------------------ acquisition

    def acquirable_ranges(
        self,
        member: str,
        max_records: int,
        readable_end: int,
        now_ms: float,
        unreadable: Sequence[tuple[int, int]] = (),
        *,
        is_range: bool = False,
    ) -> list[tuple[int, int]]:
        """Return offset ranges (first, last) to read for this member: offsets below `readable_end` that it could
        acquire now, without the `unreadable` ranges (ascending). `is_range`: by a range lease, without reading them; at
        most `LEASED_RANGES_MAX`."""
        self.high_watermark = max(self.high_watermark, readable_end)
        space = min(max_records, self.free_lock_count(is_range=is_range))
        if is_range:
            self._lease_bound.widen(space, self._in_flight.ranges, readable_end)
        scattered_max = LEASED_RANGES_MAX if is_range else SCATTERED_READ_RANGES_MAX
        stop = min(self._lease_end, readable_end)
        key_index = self._in_flight.key_index
        if key_index is not None:
            key_index.advance(now_ms)
            if not key_index.is_offering:
                return []
            run_max = min(space, RUN_RECORDS_MAX)
            picked = key_index.pick(unreadable=unreadable, run_max=run_max, one_per_key=is_range)
            planned = acquisition.ranges_to_read(picked, space, stop, ranges_max=scattered_max)
            self._planned = (key_index.plan_id, planned)
            return planned
        picked = self._policy.pick(self._in_flight.ranges, member, now_ms)
        if self._own is not None:
            picked = _own_parts(picked, self._own)
        elif not is_range:
            return acquisition.ranges_to_read(picked, space, stop, unreadable)
        return acquisition.ranges_to_read(picked, space, stop, unreadable, ranges_max=scattered_max)

    def acquire(
        self,
        member: str,
        read: Sequence[tuple[int, int]],
        max_records: int,
        *,
        strict: bool,
        batch_ends: Sequence[int],
        now_ms: float,
        lease_ms: int = -1,
        locks_max: int | None = None,
        aborted: Sequence[tuple[int, int]] = (),
        ranges_max: int = 0,
    ) -> tuple[list[AcquiredRange], Update | None]:
        """Lease available offsets within the ranges `read`, whose records are in the response and below the high
        watermark.

        `strict`: lease at most `max_records`; otherwise all available records of the last record batch. `batch_ends`:
        ascending last offsets of the record batches in `read`. `lease_ms`: duration of the leases, -1 for the group's.
        `locks_max`: lease at most so many records, also if not `strict`; None for as many as there are free locks.
        `aborted`: ascending ranges in `read` of aborted records, which are never delivered. `ranges_max`: above 0,
        lease by range leases, at most so many ranges, whose records are not in the response; none while the lease bound
        is too low for them, and the caller has to repeat the call when the update is stored. Returns the leased ranges,
        and the update that stores the leases: the caller must call `mark_persisted` before the member receives the
        records.
        """
        in_flight, policy, is_range = self._in_flight, self._policy, ranges_max > 0
        token = NOT_PENDING
        changed: list[InFlightBatch] = []
        if aborted and (free := self._free_parts(aborted)):
            token = in_flight.begin_update()
            changed += self._pass(free, token, member)
        picked: Iterable[tuple[int, int]]
        key_index = in_flight.key_index
        if key_index is None:
            picked = policy.pick(in_flight.ranges, member, now_ms)
            if self._own is not None:
                picked = _own_parts(picked, self._own)
        elif strict and self._planned[0] == key_index.plan_id and _is_prefix(read, self._planned[1]):
            picked = self._planned[1]
        else:
            picked = key_index.pick(read, one_per_key=is_range)
        locks = self.free_lock_count(is_range=is_range)
        chosen = acquisition.choose_offsets(
            acquisition.restrict_to_read(picked, read, self._lease_end, may_skip=policy.may_skip),
            max_records,
            locks if locks_max is None or locks < locks_max else locks_max,
            strict=strict,
            batch_ends=batch_ends,
        )
        if is_range:
            # A lease of one large range costs less than that of two, so the bound is advanced first.
            is_short = self._lease_bound.is_short
            chosen = [] if is_short else acquisition.within_batches(chosen, in_flight.ranges, ranges_max)
        if not chosen and not changed and not self.is_lease_bound_due:
            return [], None
        if token == NOT_PENDING:
            token = in_flight.begin_update()
        lock_ms = self.settings.lock_ms
        deadline_ms = now_ms + (lock_ms if lease_ms < 0 else lease_ms)
        if self.has_key_limits and key_index is not None:
            key_index.take_tokens(chosen, now_ms)
        for first, last in chosen:
            if self._own is not None:
                changed += self._pass_others(self._own, first, token, member)
            for batch in in_flight.ranges.split(first, last):
                in_flight.change_state(
                    batch,
                    ACQUIRED,
                    token,
                    deliveries=batch.deliveries + 1,
                    holder=member,
                    deadline_ms=deadline_ms,
                    lease_ms=lease_ms,
                    is_range=is_range,
                )
                changed.append(batch)
        acquired = acquired_ranges(changed)
        # After a loss of updates, records are withheld for the group's lease duration: a longer lease must not be lost.
        # The member of a range lease may stay away and claim it later.
        durable = is_range or lease_ms > lock_ms or any(each.deliveries > 1 for each in acquired)
        return acquired, self._update(token, changed, durable=durable, lease_bound=True, cause=BY_ACQUISITION)

    # ------------------------------------------------------------------ accepting and leasing in one step

    @property
    def has_short_path(self) -> bool:
        """Whether `next_range` and `exchange` can be used: any record may be delivered at any time, except those of
        open and aborted transactions."""
        own = self._own
        return self._policy.may_skip and (own is None or own.has_all) and self._in_flight.key_index is None

    def are_leased(self, member: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether all offsets of the ranges, which are ascending and disjoint, are leased to the member, and no update
        of them is pending."""
        in_flight, end = self._in_flight, -1
        for first, last in ranges:
            if first <= end or not in_flight.are_leased(member, first, last):
                return False
            end = last
        return True

    def next_range(self, max_records: int, readable_end: int, freed_count: int) -> tuple[int, int]:
        """Return the offsets (first, last) that are leased next, at most `max_records`; `last` is below `first` if
        there are none. `freed_count`: number of leased records that the same step accepts."""
        self.high_watermark = max(self.high_watermark, readable_end)
        in_flight = self._in_flight
        free = in_flight.ranges.first_free()
        first, last = (in_flight.ranges.end, acquisition.UNBOUNDED_LAST) if free is None else free
        space = min(max_records, self.free_lock_count() + freed_count)
        return first, min(last, first + space - 1, self._lease_end - 1, readable_end - 1)

    def exchange(
        self,
        member: str,
        accepted: Sequence[tuple[int, int]],
        leased: tuple[int, int] | None,
        now_ms: float,
        wall_ms: int,
        lease_ms: int = -1,
    ) -> tuple[list[AcquiredRange], Update]:
        """Accept ranges for which `are_leased` is true, and lease offsets from the beginning of `next_range` on, in one
        update. The result is that of `acknowledge`, followed by `acquire`. Returns the leased ranges and the update."""
        in_flight = self._in_flight
        self._wall_clock_offset_ms = wall_ms - now_ms
        token = in_flight.begin_update()
        changed: list[InFlightBatch] = []
        for first, last in accepted:
            for batch in in_flight.ranges.split(first, last):
                in_flight.change_state(batch, ACKNOWLEDGED, token)
                changed.append(batch)
        durable = bool(changed)
        if leased is None:
            return [], self._update(token, changed, durable=durable, cause=BY_EXCHANGE)
        first, last = leased
        lock_ms = self.settings.lock_ms
        deadline_ms = now_ms + (lock_ms if lease_ms < 0 else lease_ms)
        if first == in_flight.ranges.end:
            changed.append(in_flight.lease_new(first, last, token, member, deadline_ms, lease_ms))
            acquired = [AcquiredRange(first, last, 1)]
        else:
            for batch in in_flight.ranges.split(first, last):
                deliveries = batch.deliveries + 1
                in_flight.change_state(
                    batch,
                    ACQUIRED,
                    token,
                    deliveries=deliveries,
                    holder=member,
                    deadline_ms=deadline_ms,
                    lease_ms=lease_ms,
                )
                changed.append(batch)
                durable |= deliveries > 1
            changed.sort(key=attrgetter("first"))
            acquired = acquired_ranges(changed)
        durable |= lease_ms > lock_ms
        return acquired, self._update(token, changed, durable=durable, lease_bound=True, cause=BY_EXCHANGE)

    def _pass_others(self, own: OwnOffsets, before: int, token: int, member: str) -> list[InFlightBatch]:
        """Pass the offsets of other share partitions below `before`, so that they become one range with own ones."""
        return self._pass(self._free_others(own, before), token, member)

    def _free_others(self, own: OwnOffsets, before: int) -> list[tuple[int, int]]:
        """Return the ranges of offsets of other share partitions below `before` that are not passed."""
        ranges = self._in_flight.ranges
        free = [
            (batch.first, min(batch.last, before - 1))
            for batch in takewhile(lambda batch: batch.first < before, ranges.free_batches())
        ]
        if before > ranges.end:
            free.append((ranges.end, before - 1))
        return [part for each in free for part in difference([each], [*own.within(*each)])]

    def pass_others(self, readable_end: int) -> Update | None:
        """Pass the offsets of other share partitions below the first own one that was never leased, and below
        `readable_end`: records that are not committed may be replaced by others. Returns the update, or None if there
        are none."""
        own, ranges = self._own, self._in_flight.ranges
        if own is None:
            return None
        following = own.first_at_or_above(ranges.end)
        before = own.end if following is None else following
        others = self._free_others(own, min(before, readable_end))
        if not others:
            return None
        token = self._in_flight.begin_update()
        return self._update(token, self._pass(others, token, ""), durable=False)

    def _pass(self, free: Iterable[tuple[int, int]], token: int, member: str) -> list[InFlightBatch]:
        """Pass free offsets, as if `member` had acknowledged them at their first delivery."""
        passed = []
        for first, last in free:
            for batch in self._in_flight.ranges.split(first, last):
                self._in_flight.change_state(batch, ACKNOWLEDGED, token, deliveries=1, holder=member)
                passed.append(batch)
        return passed

    def _free_parts(self, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of ascending ranges that can be leased at once."""
        ranges, stop = self._in_flight.ranges, self._lease_end
        free = [(batch.first, batch.last) for batch in ranges.free_batches()]
        free.append((ranges.end, acquisition.UNBOUNDED_LAST))
        return [(first, min(last, stop - 1)) for first, last in intersection(free, offsets) if first < stop]

    # ------------------------------------------------------------------ order and limits by key

    @property
    def is_offering(self) -> bool:
        """Whether records are offered: all keys that may hold one of them are known."""
        key_index = self._in_flight.key_index
        return key_index is None or key_index.is_offering

    @property
    def free_key_count(self) -> int:
        """Upper bound of the number of records with known keys that are offered now; 0 without order and limits by
        key."""
        key_index = self._in_flight.key_index
        return 0 if key_index is None or not key_index.is_offering else key_index.free_count

    @property
    def next_key_offset(self) -> int | None:
        """Offset from which the keys of the log are needed before more records are offered; None if none are, because
        there is no order and no limit by key, or too many records are not done."""
        key_index = self._in_flight.key_index
        if key_index is None or key_index.is_full:
            return None
        if self._own is None:
            return key_index.scanned_end
        following = self._own.first_at_or_above(key_index.scanned_end)
        return max(key_index.scanned_end, self._own.end) if following is None else following

    def add_keys(self, end: int, keys: Mapping[int, int]) -> None:
        """Add the keys of the offsets from `next_key_offset` to below `end`: hashes by offset, without the records that
        have no group key and the offsets that have no record. Offsets of others below `next_key_offset` are
        passed."""
        key_index, ranges = self._in_flight.key_index, self._in_flight.ranges
        if self._own is not None:
            end = min(end, self._own.end)  # it is not known yet who has the offsets from there on
        if key_index is None or end <= key_index.scanned_end:
            return
        begin = key_index.scanned_end
        undone = [
            (max(batch.first, begin), min(batch.last, end - 1), state)
            for batch in ranges.overlapping(begin, end - 1)
            if (state := batch.key_state) != DONE
        ]
        if end > ranges.end:
            undone.append((max(begin, ranges.end), end - 1, FREE))
        if self._own is not None:
            undone = [
                (*part, state) for first, last, state in undone for part in self._own.within(first, last)
            ]
        key_index.add(end, keys, undone)

    def limited_keys(self) -> LimitedKeys:
        """Return which keys have records that only a limit by key holds back."""
        key_index = self._in_flight.key_index
        return LimitedKeys(0, 0, ()) if key_index is None else key_index.limited_keys()

    def _reset_key_index(self, now_ms: float) -> None:
        """Forget all keys; they have to be added again from the start offset on. Nothing is offered before those of all
        records are known that are in flight now: each of them may hold another record of its key."""
        settings, number, ranges = self.settings, self.key.number, self._in_flight.ranges
        if not settings.is_ordered_by_key and not self.has_key_limits:
            self._in_flight.key_index = None
            self._limits.detach(number)
            return
        needed_until = max(
            (each.last + 1 for each in ranges if each.key_state not in (FREE, DONE)), default=0
        )
        index = self._in_flight.key_index = KeyIndex(
            max(ranges.start, self._log_start),
            needed_until,
            is_ordered=settings.is_ordered_by_key,
            limits=self._limits if self.has_key_limits else None,
            now_ms=now_ms,
        )
        if self.has_key_limits:
            self._limits.attach(number, index)
        else:
            self._limits.detach(number)

    @property
    def _lease_end(self) -> int:
        return self._lease_bound.lease_end(self._in_flight.ranges, self.settings)

    # ------------------------------------------------------------------ acknowledgement and expiry

    def check_acknowledgements(self, member: str, batches: Sequence[AcknowledgementBatch]) -> None:
        """Raise the error that `acknowledge` would raise; nothing is changed."""
        for run in split_by_type(batches, min(self._in_flight.ranges.start, self._log_start)):
            _check_leased(self._in_flight.ranges, member, run, renew=self.settings.renewal_enabled)

    def acknowledge(
        self,
        member: str,
        batches: Sequence[AcknowledgementBatch],
        now_ms: float,
        wall_ms: int,
        random_fraction: float,
    ) -> Update | None:
        """Apply the acknowledgements of a member, either all of them or none; returns the update, or None if there is
        nothing to acknowledge.

        A renewal changes nothing that is stored, and needs a durable update nevertheless: a leader that was replaced
        and does not know it must not answer it, because the next leader restores the lease as it was before.

        Raises `InvalidRequest` for malformed batches, `InvalidRecordState` for offsets that the member has not leased.
        """
        in_flight = self._in_flight
        self._wall_clock_offset_ms = wall_ms - now_ms
        runs = split_by_type(batches, min(in_flight.ranges.start, self._log_start))
        for run in runs:
            _check_leased(in_flight.ranges, member, run, renew=self.settings.renewal_enabled)
        if not runs:
            return None
        stored = []
        for run in runs:
            if run.type == RENEW and run.request_batch.delay_ms < 0:
                self._renew(run, now_ms)
            else:
                stored.append(run)
        step = _UpdateContext(in_flight.begin_update(), now_ms, wall_ms, random_fraction)
        changed: list[InFlightBatch] = []
        for run in stored:
            for batch in in_flight.ranges.split(run.first, run.last):
                if run.type == RENEW:
                    self._set_lease(batch, run.request_batch.delay_ms, member, step)
                else:
                    self._end_delivery(batch, run, member, step)
                changed.append(batch)
        # If the release of records that were not handed out is lost, the end of the lease counts their delivery.
        durable = (
            len(stored) < len(runs)
            or _must_be_durable(changed)
            or not all(run.request_batch.was_handed_out for run in stored)
        )
        return self._update(step.token, changed, durable=durable, cause=BY_ACKNOWLEDGEMENT)

    def _renew(self, run: AcknowledgedRange, now_ms: float) -> None:
        """Start leases again with their durations, which changes nothing that is stored."""
        in_flight, lock_ms = self._in_flight, self.settings.lock_ms
        for batch in in_flight.ranges.split(run.first, run.last):
            in_flight.change_state(
                batch,
                ACQUIRED,
                NOT_PENDING,
                deadline_ms=now_ms + batch.duration_ms(lock_ms),
                lease_ms=batch.lease_ms,
                is_range=batch.is_range,
            )
        in_flight.ranges.merge_around(run.first, run.last)

    def _set_lease(self, batch: InFlightBatch, lease_ms: int, member: str, step: _UpdateContext) -> None:
        """Renew a lease with another duration; 0 releases the records without a backoff."""
        if not lease_ms:
            self._retry_or_dead_letter(batch, 0, member, step)
            return
        self._in_flight.change_state(
            batch,
            ACQUIRED,
            step.token,
            deadline_ms=step.now_ms + lease_ms,
            lease_ms=lease_ms,
            is_range=batch.is_range,
        )

    def alter_range_leases(
        self,
        member: str,
        wanted: Sequence[AcquiredRange],
        operation: RangeOperation,
        lease_ms: int,
        now_ms: float,
        wall_ms: int,
        *,
        releases_others: bool,
    ) -> AlteredRanges:
        """Keep, claim or accept range leases of a member.

        `wanted`: ascending, disjoint ranges with the delivery counts that the member knows; parts that it has not
        leased are left out. KEEP: those with this delivery count last for `lease_ms` from now on. CLAIM: those with at
        least this count, too, and a delivery is counted; those without an attempt left are dead-lettered instead.
        ACCEPT: those with at least this count are done. `releases_others`: release the other range leases of the
        member, whose deliveries do not count as attempts.

        Raises `CoordinatorLoadInProgress` while a change of these leases is being stored, `InvalidRequest` for invalid
        ranges or durations.
        """
        in_flight, ranges = self._in_flight, self._in_flight.ranges
        self._wall_clock_offset_ms = wall_ms - now_ms
        if operation != RangeOperation.ACCEPT and not 0 < lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"a lease of {lease_ms} ms; 1 to {LEASE_MS_MAX}")
        end = -1
        for each in wanted:
            if each.first <= end or each.last < each.first:
                raise InvalidRequest("the ranges are not in order")
            end = each.last
        may_differ = operation != RangeOperation.KEEP
        found: list[tuple[int, int]] = []
        for first, last, known in wanted:
            for batch in ranges.overlapping(first, last):
                if batch.state != ACQUIRED or not batch.is_range or batch.holder != member:
                    continue
                if batch.pending_token != NOT_PENDING:
                    raise CoordinatorLoadInProgress("a change of these leases is being stored")
                if batch.deliveries == known or (may_differ and batch.deliveries > known):
                    found.append((max(first, batch.first), min(last, batch.last)))
        released: list[tuple[int, int]] = []
        if releases_others:
            held = [
                (batch.first, batch.last)
                for batch in ranges
                if batch.holder == member
                and batch.is_range
                and batch.state == ACQUIRED
                and batch.pending_token == NOT_PENDING
            ]
            released = difference(held, found)
        if not found and not released:
            return AlteredRanges([], self._ended_ranges(wanted), None)
        step = _UpdateContext(in_flight.begin_update(), now_ms, wall_ms, 0.0)
        changed: list[InFlightBatch] = []
        altered: list[InFlightBatch] = []
        parts = [(*each, True) for each in found] + [(*each, False) for each in released]
        for first, last, is_wanted in sorted(parts):
            for batch in ranges.split(first, last):
                changed.append(batch)
                if not is_wanted:
                    uncounted = batch.uncounted_deliveries + 1
                    self._retry_or_dead_letter(batch, 0, member, step, uncounted=uncounted)
                    continue
                self._alter_range_lease(batch, operation, lease_ms, member, step)
                if operation == RangeOperation.ACCEPT or batch.state == ACQUIRED:
                    altered.append(batch)
        cause = BY_CLAIM if operation == RangeOperation.CLAIM else BY_ACKNOWLEDGEMENT
        update = self._update(step.token, changed, durable=True, cause=cause)
        return AlteredRanges(delivered_ranges(altered), self._ended_ranges(wanted), update)

    def _ended_ranges(self, wanted: Sequence[AcquiredRange]) -> list[AcquiredRange]:
        """Return the parts of the ranges that are dead-lettered or discarded, as far as the state has them."""
        found = [
            (max(each.first, batch.first), min(each.last, batch.last))
            for each in wanted
            for batch in self._in_flight.ranges.overlapping(each.first, each.last)
            if batch.state in (ARCHIVING, ARCHIVED)
        ]
        dead = [(each.first, each.last) for each in self._dead.intersect([each[:2] for each in wanted])]
        return [AcquiredRange(first, last, 0) for first, last in merge_intervals([*found, *dead])]

    def _alter_range_lease(
        self,
        batch: InFlightBatch,
        operation: RangeOperation,
        lease_ms: int,
        member: str,
        step: _UpdateContext,
    ) -> None:
        """See `alter_range_leases`."""
        uncounted, is_claim = batch.uncounted_deliveries, operation == RangeOperation.CLAIM
        if operation == RangeOperation.ACCEPT:
            self._in_flight.change_state(batch, ACKNOWLEDGED, step.token, holder=member)
        elif is_claim and (
            batch.deliveries - uncounted >= self.settings.delivery_limit or batch.deliveries >= DELIVERIES_MAX
        ):
            self._dead_letter(batch, CAUSE_DELIVERY_LIMIT, "", member, step, uncounted)
        else:
            self._in_flight.change_state(
                batch,
                ACQUIRED,
                step.token,
                deliveries=batch.deliveries + is_claim,
                deadline_ms=step.now_ms + lease_ms,
                lease_ms=lease_ms,
                is_range=True,
            )

    def release_member(self, member: str, now_ms: float, *, uncounted: bool = True) -> Update | None:
        """Release all records that are leased to a member that has left the group; other members can acquire them at
        once.

        `uncounted`: the member closed its session, so its deliveries do not count as attempts. Leases whose update is
        not stored yet stay unchanged.
        """
        in_flight = self._in_flight
        changed = [
            batch
            for batch in in_flight.ranges
            if batch.state == ACQUIRED and batch.holder == member and batch.pending_token == NOT_PENDING
        ]
        if not changed:
            return None
        step = _UpdateContext(in_flight.begin_update(), now_ms, round(self._wall_ms_at(now_ms)), 0.0)
        for batch in changed:
            self._retry_or_dead_letter(
                batch, 0, member, step, uncounted=batch.uncounted_deliveries + uncounted
            )
        return self._update(step.token, changed, durable=_must_be_durable(changed), cause=BY_MEMBER_END)

    def tick(self, now_ms: float, wall_ms: int, random_fraction: float) -> Update | None:
        """End the leases, backoffs and withholding periods whose deadline has passed, and advance the lease bound if
        necessary. Returns the update, or None if nothing has to be stored."""
        in_flight = self._in_flight
        self._wall_clock_offset_ms = wall_ms - now_ms
        if self.has_key_limits and in_flight.key_index is not None:
            in_flight.key_index.advance(now_ms)
        step = _UpdateContext(in_flight.begin_update(), now_ms, wall_ms, random_fraction)
        changed = self._archive_below_log_start(step.token)
        due = in_flight.take_due_batches(now_ms)
        delayed = [batch for batch in due if batch.state == AVAILABLE]
        for batch in delayed:
            in_flight.end_delay(batch)
        withheld: list[InFlightBatch] = []
        for batch in due:
            if batch.state == WITHHELD:
                in_flight.change_state(batch, AVAILABLE, step.token)
                withheld.append(batch)
            elif batch.state != AVAILABLE:
                self._retry_or_dead_letter(batch, -1, batch.holder, step)
                changed.append(batch)
        in_flight.merge(delayed)
        if not changed and not withheld and not self.is_lease_bound_due:
            in_flight.complete_update(step.token)
            return None
        traced = tuple(state_batches(changed)) if withheld else None  # no lease has ended of those withheld
        changed += withheld
        changed.sort(key=attrgetter("first"))
        return self._update(
            step.token,
            changed,
            durable=_must_be_durable(changed),
            lease_bound=True,
            cause=BY_DEADLINE,
            traced=traced,
        )

    def next_deadline_ms(self) -> float:
        """Time of the steady clock at which `tick` has to be called next, in ms."""
        if self.is_lease_bound_due or self._in_flight.batches_below_log_start(self._log_start):
            return ALREADY_DUE_MS
        deadline_ms = self._in_flight.next_deadline_ms
        if self.has_key_limits and self._in_flight.key_index is not None:
            due_ms = self._in_flight.key_index.next_due_ms
            return deadline_ms if due_ms is None else min(deadline_ms, due_ms)
        return deadline_ms

    def _wall_ms_at(self, now_ms: float) -> float:
        return now_ms + self._wall_clock_offset_ms

    def _end_delivery(
        self, batch: InFlightBatch, run: AcknowledgedRange, member: str, step: _UpdateContext
    ) -> None:
        """Apply one acknowledgement. The delivery of a withheld record that a member acknowledges counts as an
        attempt."""
        uncounted = 0 if batch.state == WITHHELD else batch.uncounted_deliveries
        if run.type == ACCEPT:
            self._in_flight.change_state(
                batch, ACKNOWLEDGED, step.token, holder=member, uncounted_deliveries=uncounted
            )
        elif run.type == GAP:
            self._in_flight.change_state(
                batch, ARCHIVED, step.token, holder=member, uncounted_deliveries=uncounted
            )
        elif run.type == RELEASE and not run.request_batch.was_handed_out:
            self._retry_or_dead_letter(batch, 0, member, step, uncounted=uncounted + 1)
        elif run.type == RELEASE:
            self._retry_or_dead_letter(
                batch,
                run.request_batch.delay_ms,
                member,
                step,
                uncounted=uncounted,
                reason=run.request_batch.reason,
            )
        else:
            self._dead_letter(batch, CAUSE_REJECTED, run.request_batch.reason, member, step, uncounted)

    def _retry_or_dead_letter(
        self,
        batch: InFlightBatch,
        requested_ms: int,
        consumer: str,
        step: _UpdateContext,
        *,
        uncounted: int | None = None,
        reason: str = "",
    ) -> None:
        """Offer the records again after a backoff; if they have reached the delivery limit, dead-letter them instead.

        `requested_ms`: delay that the consumer has requested, -1 for the group's backoff. `uncounted`: new number of
        deliveries that do not count as attempts, None to leave it unchanged. `reason`: why the last delivery failed.
        """
        settings = self.settings
        uncounted = batch.uncounted_deliveries if uncounted is None else uncounted
        attempts = batch.deliveries - uncounted
        if attempts >= settings.delivery_limit or batch.deliveries >= DELIVERIES_MAX:
            self._dead_letter(batch, CAUSE_DELIVERY_LIMIT, reason, consumer, step, uncounted)
            return
        keeps_order = settings.is_ordered and requested_ms < 0
        backoff_ms = (
            0 if keeps_order else settings.backoff.delay_ms(attempts, step.random_fraction, requested_ms)
        )
        self._in_flight.change_state(
            batch,
            AVAILABLE,
            step.token,
            uncounted_deliveries=uncounted,
            deadline_ms=step.now_ms + backoff_ms if backoff_ms else NEVER_MS,
            due_ms=step.wall_ms + backoff_ms if backoff_ms else -1,
        )

    def _dead_letter(
        self,
        batch: InFlightBatch,
        cause: int,
        reason: str,
        consumer: str,
        step: _UpdateContext,
        uncounted: int,
    ) -> None:
        reservation, state = None, ARCHIVED
        if self.settings.dead_letters_enabled:
            reservation, state = new_reservation(cause, reason, consumer, step.wall_ms), ARCHIVING
        self._in_flight.change_state(
            batch, state, step.token, holder=consumer, reservation=reservation, uncounted_deliveries=uncounted
        )

    # ------------------------------------------------------------------ updates and snapshots

    def mark_persisted(self, token: int) -> list[ArchivingRange]:
        """Make the update with this token effective after it was stored. Returns the ranges that are to be copied to
        the dead-letter topic now."""
        batches = self._in_flight.complete_update(token)
        self._lease_bound.mark_persisted(token)
        found = [
            _archiving_range(self.key, batch)
            for batch in batches
            if batch.state == ARCHIVING
            and batch.reservation is not None
            and batch.reservation.producer_id < 0
        ]
        self._in_flight.merge(batches)
        return found

    def snapshot(self, now_ms: float) -> LoadedState:
        """Return the whole current state, including updates that are not stored yet."""
        start, done = self._in_flight.ranges.start, self._in_flight.done_count
        return self._state._replace(
            leader_epoch=self.leader_epoch,
            start_offset=start,
            lease_bound=self._lease_bound.offset,
            done_count=done,
            changes=stored_batches(self._in_flight, now_ms=now_ms, wall_ms=round(self._wall_ms_at(now_ms))),
            dead_ranges=self._dead.ranges(),
            redrives=self._dead.redrives(),
            producer=self._producer,
            is_complete=True,
            withheld_ms=0,
            isolations=self._isolations,
        )

    def full_update(self, now_ms: float) -> Update:
        """Return an update with the whole state, which replaces stored state that may lack changes."""
        return full_update(self._in_flight.begin_update(), self.snapshot(now_ms))

    # ------------------------------------------------------------------ division among share partitions

    def divide(self, own: OwnOffsets, now_ms: float) -> None:
        """From now on the share partition has only the offsets `own`; those that were leased before are among them."""
        self._own = own
        self._lease_bound.divide(own)
        self._reset_key_index(now_ms)

    def set_isolations(self, isolations: tuple[Isolation, ...]) -> Update:
        """Set which keys have their records in other share partitions; return the update, which has to be stored."""
        self._isolations = isolations
        return self._update(self._in_flight.begin_update(), [], durable=True, isolations=isolations)

    @property
    def has_records(self) -> bool:
        """Whether an offset is not done, or dead-lettered, among those that the share partition is known to have. It
        does not depend on how far the log can be read now."""
        start = self._in_flight.ranges.start
        is_done = self._own is not None and self._own.first_at_or_above(start) is None
        return not is_done or self._dead.offset_count > 0

    @property
    def passed_end(self) -> int:
        """Offset below which each offset of other share partitions was passed, according to stored updates."""
        ranges, own = self._in_flight.ranges, self._own
        for each in ranges:
            is_done = each.state in TERMINAL and each.pending_token == NOT_PENDING
            if not is_done and (
                each.pending_token != NOT_PENDING
                or (own is not None and own.count(each.first, each.last) < each.size)
            ):
                return each.first
        return ranges.end

    @property
    def undelivered_from(self) -> int:
        """Offset below which each record was delivered, or is done, according to stored updates. The state does not
        have the withheld ones yet."""
        ranges = self._in_flight.ranges
        undelivered = (
            each.first
            for each in ranges
            if each.state == WITHHELD or (each.state == AVAILABLE and not each.deliveries)
        )
        return min(next(undelivered, ranges.end), self.passed_end)

    def undone_ranges(self) -> list[tuple[int, int]]:
        """Return the ascending ranges of the offsets that were delivered and are not done, or are dead-lettered."""
        undone = [
            (each.first, each.last)
            for each in self._in_flight.ranges
            if (each.state not in TERMINAL or each.pending_token != NOT_PENDING)
            and (each.deliveries or each.state != AVAILABLE)
        ]
        return merge_intervals([*undone, *[(each.first, each.last) for each in self._dead.ranges()]])

    def _update(
        self,
        token: int,
        batches: list[InFlightBatch],
        *,
        durable: bool,
        lease_bound: bool = False,
        **more: Any,
    ) -> Update:
        in_flight = self._in_flight
        start, done = in_flight.progress_after(token)
        bound = self._lease_bound.offset
        if lease_bound and self.is_lease_bound_due:
            bound, durable = self._lease_bound.request(token, in_flight.ranges, self.settings), True
        return Update(token, durable, start, bound, done, tuple(state_batches(batches)), **more)

    @property
    def is_lease_bound_due(self) -> bool:
        """Whether the lease bound has to be advanced now."""
        return self._lease_bound.is_due(self._in_flight.ranges, self.settings)

    # ------------------------------------------------------------------ deletion of the oldest log records

    def advance_log_start(self, log_start: int, *, store: bool = True) -> Update | None:
        """Set the log start offset and drop the records below it, except ARCHIVING ones. Returns the update, or None if
        nothing has to be stored. `store`: false while the state is being loaded."""
        if log_start <= self._log_start:
            return None
        self._log_start = log_start
        in_flight, before = self._in_flight, self._in_flight.ranges.start
        self.aged_out_record_count += in_flight.drop_below_log_start(log_start, self._count_records)
        fewer_dead = self._dead.remove([(0, log_start - 1)])
        if not store:
            in_flight.merge(self._archive_below_log_start(NOT_PENDING))
            return None
        if (
            in_flight.ranges.start == before
            and not fewer_dead
            and not in_flight.batches_below_log_start(log_start)
        ):
            return None
        token = in_flight.begin_update()
        dead = self._dead.ranges() if fewer_dead else None
        return self._update(
            token,
            self._archive_below_log_start(token),
            durable=True,
            dead_ranges=dead,
            cause=BY_LOG_START,
        )

    def _archive_below_log_start(self, token: int) -> list[InFlightBatch]:
        """Archive the records below the log start offset that are neither done nor ARCHIVING."""
        batches = self._in_flight.archive_below_log_start(self._log_start, token)
        self.aged_out_record_count += sum(self._count_records(batch.first, batch.last) for batch in batches)
        return batches

    def _count_records(self, first: int, last: int) -> int:
        """Return how many of the offsets this share partition has."""
        if last < first:
            return 0
        return last - first + 1 if self._own is None else self._own.count(first, last)

    # ------------------------------------------------------------------ dead letters

    def archiving_ranges(self) -> list[ArchivingRange]:
        """Return the stored ARCHIVING ranges, ascending. After a load they are copied to the dead-letter topic in this
        order."""
        return [
            _archiving_range(self.key, batch)
            for batch in self._in_flight.ranges
            if batch.state == ARCHIVING and batch.pending_token == NOT_PENDING
        ]

    def reserve(
        self, producer: Producer, reservations: Sequence[tuple[int, int, DeadLetterReservation]]
    ) -> Update:
        """Set the dead-letter reservations of ranges, each given as first offset, last offset and the reservation of
        the first record. This producer writes the copies once the returned update is stored."""
        in_flight, token = self._in_flight, self._in_flight.begin_update()
        self._producer = producer
        changed: list[InFlightBatch] = []
        for first, last, reservation in sorted(reservations, key=lambda each: each[0]):
            for batch in in_flight.ranges.split(first, last):
                in_flight.change_state(
                    batch, ARCHIVING, token, reservation=shift_reservation(reservation, batch.first - first)
                )
                changed.append(batch)
        return self._update(token, changed, durable=True, producer=producer)

    def mark_archived(self, reservations: Sequence[tuple[int, int, DeadLetterReservation]]) -> Update:
        """Archive ranges whose copies are committed in the dead-letter topic. Records that are still in the log become
        dead ranges, which a redrive can offer again."""
        in_flight, token = self._in_flight, self._in_flight.begin_update()
        changed: list[InFlightBatch] = []
        added: list[DeadRange] = []
        for first, last, reservation in sorted(reservations, key=lambda each: each[0]):
            for batch in in_flight.ranges.split(first, last):
                expected = shift_reservation(reservation, batch.first - first)
                if expected is None or expected.producer_id < 0 or batch.reservation != expected:
                    message = f"offsets {batch.first} to {batch.last} have another dead-letter reservation"
                    raise AssertionError(message)
                in_flight.change_state(batch, ARCHIVED, token)
                if batch.last >= self._log_start:
                    dead_first = max(batch.first, self._log_start)
                    added.append(
                        DeadRange(dead_first, batch.last, batch.deliveries, batch.uncounted_deliveries)
                    )
                    self._dead.add(added[-1])
                changed.append(batch)
        return self._update(token, changed, durable=True, added_dead_ranges=tuple(added), cause=BY_COPY)

    def redrive(
        self, redrive_id: str, offsets: Sequence[tuple[int, int]] | None, offsets_max: int, now_ms: float
    ) -> tuple[Update | None, RedriveResult]:
        """Offer at most `offsets_max` dead-lettered records again, lowest offsets first; only those within the ranges
        `offsets` unless that is None. Redrives with the same id offer each offset once. Raises `InvalidRequest`."""
        in_flight, dead = self._in_flight, self._dead
        chosen, result = self._plan_redrive(redrive_id, offsets, offsets_max)
        if not chosen:
            return None, result
        offered = [(each.first, each.last) for each in chosen]
        dead.record_offered(redrive_id, offered)
        is_below_start = chosen[0].first < in_flight.ranges.start
        if is_below_start:
            self._lower_start(chosen[0].first)
        dead.remove(offered)
        token = in_flight.begin_update()
        changed = []
        for each in chosen:  # earlier deliveries do not count as attempts any more; the delivery count stays
            for batch in in_flight.ranges.split(each.first, each.last):
                in_flight.change_state(batch, AVAILABLE, token, uncounted_deliveries=batch.deliveries)
                changed.append(batch)
        self._reset_key_index(now_ms)  # the keys of records that were done are not known any more
        if is_below_start:
            traced = tuple(state_batches(changed))
            whole = full_update(token, self.snapshot(now_ms))
            return whole._replace(cause=BY_REDRIVE, traced=traced), result
        update = self._update(
            token,
            changed,
            durable=True,
            dead_ranges=dead.ranges(),
            redrives=dead.redrives(),
            cause=BY_REDRIVE,
        )
        return update, result

    def _plan_redrive(
        self, redrive_id: str, offsets: Sequence[tuple[int, int]] | None, offsets_max: int
    ) -> tuple[list[DeadRange], RedriveResult]:
        """Return the lowest `offsets_max` offsets to offer again, without a change of state. Raises `InvalidRequest`
        for invalid ranges."""
        dead, log_start = self._dead, self._log_start
        wanted = merge_intervals(
            [(each.first, each.last) for each in dead.ranges()] if offsets is None else offsets
        )
        deleted = intersection(wanted, [(0, log_start - 1)]) if log_start > 0 else []
        before = intersection(wanted, dead.offered_offsets(redrive_id))
        left, chosen = offsets_max, []
        for each in dead.intersect(difference(difference(wanted, before), deleted)):
            for part in self._parts_without_pending_update(each):
                if left > 0 and part.deliveries < DELIVERIES_MAX:
                    taken = part._replace(last=min(part.last, part.first + left - 1))
                    chosen.append(taken)
                    left -= taken.last - taken.first + 1
        return chosen, RedriveResult(
            offsets_max - left, count_offsets(before), count_offsets(difference(deleted, before))
        )

    def _parts_without_pending_update(self, dead: DeadRange) -> Iterator[DeadRange]:
        """Yield the parts of a dead range that no pending update concerns."""
        batches = self._in_flight.ranges.overlapping(dead.first, dead.last)
        pending = [(batch.first, batch.last) for batch in batches if batch.pending_token]
        for first, last in difference([(dead.first, dead.last)], pending):
            yield dead._replace(first=first, last=last)

    def _lower_start(self, first: int) -> None:
        """Move the start offset back to `first`. Dead offsets in between become ARCHIVED, all others ACKNOWLEDGED."""
        start = self._in_flight.ranges.start
        batches: list[InFlightBatch] = []
        begin = first
        for each in self._dead.intersect([(first, start - 1)]):
            if each.first > begin:
                batches.append(InFlightBatch(begin, each.first - 1, ACKNOWLEDGED))
            batch = InFlightBatch(each.first, each.last, ARCHIVED, each.deliveries, each.uncounted_deliveries)
            if batches and batches[-1].has_same_state(batch):
                batches[-1].last = batch.last
            else:
                batches.append(batch)
            begin = each.last + 1
        if begin < start:
            batches.append(InFlightBatch(begin, start - 1, ACKNOWLEDGED))
        self._in_flight.lower_start(batches)

    # ------------------------------------------------------------------ inspection

    @property
    def lease_bound(self) -> int:
        """Offset of the durable lease bound: no offset at or above it was ever leased."""
        return self._lease_bound.offset

    def dead_ranges(self) -> tuple[DeadRange, ...]:
        """Return the dead-lettered ranges that no redrive has offered again, as far as they are known."""
        return self._dead.ranges()

    @property
    def leased_count(self) -> int:
        """Number of records leased now."""
        return self._in_flight.leased_count

    def lock_count(self, *, is_range: bool) -> int:
        """Return the number of records that are leased now by range leases, or by the other leases."""
        in_ranges = self._in_flight.range_count
        return in_ranges if is_range else self._in_flight.leased_count - in_ranges

    def free_lock_count(self, *, is_range: bool = False) -> int:
        """Return the number of records that can still be leased by range leases, or by other ones; below 0 after a
        limit was lowered."""
        in_flight, settings = self._in_flight, self.settings
        if is_range:
            return settings.range_locks_max - in_flight.range_count
        return settings.record_locks_max - in_flight.leased_count + in_flight.range_count

    @property
    def ranges(self) -> BatchMap:
        """The in-flight batches; callers must not change them."""
        return self._in_flight.ranges

    def counts(self, now_ms: float, readable_end: int = 0) -> ShareCounts:
        """Count the records per state, and per member its leased records and the age of its oldest lease (time since
        delivery or renewal). `readable_end`: offset below which the group may read the log now, by default as far as
        it was known before; from now on it is known.

        The cost grows with the number of in-flight batches. Records of a pending update count in their new state.
        """
        self.high_watermark = max(self.high_watermark, readable_end)
        archiving = withheld = in_backoff = 0
        lock_ms = self.settings.lock_ms
        held: dict[str, tuple[int, float]] = {}
        for batch in self._in_flight.ranges:
            if batch.state == ARCHIVING:
                archiving += batch.size
            elif batch.state == WITHHELD:
                withheld += batch.size
            elif batch.state == ACQUIRED:
                leased, since_ms = held.get(batch.holder, (0, NEVER_MS))
                began_ms = batch.deadline_ms - batch.duration_ms(lock_ms)
                held[batch.holder] = (leased + batch.size, min(since_ms, began_ms))
            elif batch.state == AVAILABLE and batch.deadline_ms != NEVER_MS:
                in_backoff += batch.size
        ranges = self._in_flight.ranges
        return ShareCounts(
            start_offset=ranges.start,
            end_offset=ranges.end,
            lag=self._lag(),
            leased=self._in_flight.leased_count,
            in_backoff=in_backoff,
            withheld=withheld,
            archiving=archiving,
            dead=self._dead.offset_count,
            holders=tuple(
                LeaseHolder(member, leased, max(round(now_ms - since_ms), 0))
                for member, (leased, since_ms) in sorted(held.items())
            ),
        )

    def most_retried(self, now_ms: float) -> RetriedRecord | None:
        """Return the record in flight with the most attempts, the first one of them; None if there is none with two."""
        worst: InFlightBatch | None = None
        most = 1
        for batch in self._in_flight.ranges:
            if batch.state in (AVAILABLE, ACQUIRED):
                attempts = batch.deliveries - batch.uncounted_deliveries
                if attempts > most:
                    worst, most = batch, attempts
        if worst is None:
            return None
        is_resting = worst.state == AVAILABLE and worst.deadline_ms != NEVER_MS
        return RetriedRecord(worst.first, most, max(worst.deadline_ms - now_ms, 0.0) if is_resting else 0.0)

    def held_back(self) -> HeldBack | None:
        """Return which record in flight holds back most others, by the order of the group; None if none does."""
        if not self.settings.is_ordered:
            key_index = self._in_flight.key_index
            return None if key_index is None else key_index.held_back()
        undone = (each for each in self._in_flight.ranges if each.state not in TERMINAL)
        first = next(undone, None)
        if first is None or first.is_free:
            return None
        waiting = self._lag() - self.leased_count
        return HeldBack(first.first, waiting, waiting, is_complete=True) if waiting > 0 else None

    def _lag(self) -> int:
        """Return the number of records below the known end of the readable log that are not done."""
        ranges = self._in_flight.ranges
        if self._own is None:
            return max(self.high_watermark - ranges.start, 0) - self._in_flight.done_count
        done = sum(self._own.count(each.first, each.last) for each in ranges if each.state in TERMINAL)
        # Offsets that the index does not cover yet count as those of `BASE`.
        others = (
            max(self.high_watermark - max(self._own.end, ranges.start), 0) if self.key.number == BASE else 0
        )
        return self._own.count(ranges.start, self.high_watermark - 1) + others - done


def _index_settings(settings: ShareSettings) -> tuple[bool, bool, str]:
    """Return the settings after whose change all keys have to be read again."""
    return settings.is_ordered_by_key, settings.has_key_limits, settings.key_header


def _own_parts(ranges: Iterable[tuple[int, int]], own: OwnOffsets) -> Iterator[tuple[int, int]]:
    """Yield the parts of the ranges that a share partition has."""
    return (part for each in ranges for part in own.within(*each))


def _is_prefix(read: Sequence[tuple[int, int]], planned: Sequence[tuple[int, int]]) -> bool:
    """Whether the ranges that were read contain the planned ones from the first one on, without a gap; the last of them
    may be read in part, and those behind it not at all."""
    return all(
        got[0] == wanted[0] and (got[1] >= wanted[1] or index == len(read) - 1)
        for index, (got, wanted) in enumerate(zip(read, planned, strict=False))
    )


def split_by_type(batches: Sequence[AcknowledgementBatch], start: int) -> list[AcknowledgedRange]:
    """Split acknowledgement batches into ascending, disjoint runs of one type. Offsets below `start`, which are deleted
    from the log, are skipped.

    Raises `InvalidRequest` under the conditions of Kafka's ShareFetchUtils.
    """
    found: list[AcknowledgedRange] = []
    before, one_by_one = -1, 0
    for batch in batches:
        if batch.first <= before or batch.last < batch.first:
            raise InvalidRequest("acknowledged offsets are not in order")
        before = batch.last
        if len(batch.types) != 1 and len(batch.types) != batch.last - batch.first + 1:
            raise InvalidRequest("a batch needs one acknowledgement type, or one for each offset")
        one_by_one += len(batch.types)
        if one_by_one > ACKNOWLEDGEMENT_TYPES_MAX:
            raise InvalidRequest(f"more than {ACKNOWLEDGEMENT_TYPES_MAX} acknowledgements for one partition")
        if max(batch.types) > _TYPES_MAX:
            raise InvalidRequest(f"unknown acknowledgement type {max(batch.types)}")
        if len(batch.types) == 1:
            if before >= start:
                found.append(AcknowledgedRange(max(batch.first, start), before, batch.types[0], batch))
            continue
        first = batch.first
        for type_, equal in groupby(batch.types):
            last = first + sum(1 for _ in equal) - 1
            if last >= start:
                found.append(AcknowledgedRange(max(first, start), last, type_, batch))
            first = last + 1
    return found


def _check_leased(ranges: BatchMap, member: str, run: AcknowledgedRange, *, renew: bool) -> None:
    """Raise `InvalidRecordState` unless the member has leased the whole range, and the delivery count that it sends, if
    any, is the current one; `InvalidRequest` for a renewal with too long a lease.

    At most one, unknown, member has leased a withheld record, so any member may acknowledge it.
    """
    if run.type == RENEW and not renew:
        raise InvalidRecordState("this group does not renew leases")
    if run.type == RENEW and run.request_batch.delay_ms > LEASE_MS_MAX:
        raise InvalidRequest(f"a lease of {run.request_batch.delay_ms} ms; at most {LEASE_MS_MAX}")
    if run.last >= ranges.end:
        raise InvalidRecordState(f"offset {run.last} is not leased")
    if run.first < ranges.start:
        raise InvalidRecordState(f"offset {run.first} is already acknowledged")
    for batch in ranges.overlapping(run.first, run.last):
        is_withheld = batch.state == WITHHELD and run.type != RENEW
        is_held = batch.holder == member if batch.state == ACQUIRED else is_withheld
        if batch.pending_token != NOT_PENDING or not is_held:
            raise InvalidRecordState(f"offset {max(batch.first, run.first)} is not leased by this member")
        if run.request_batch.delivery_count not in (-1, batch.deliveries):
            raise InvalidRecordState(f"offset {max(batch.first, run.first)} has been delivered again")


def new_reservation(cause: int, reason: str, consumer: str, wall_ms: int) -> DeadLetterReservation:
    """Return a dead-letter reservation without target, producer id and sequence, which are assigned later."""
    return DeadLetterReservation(
        _NO_TOPIC, -1, -1, -1, -1, cause, reason[:REASON_CHARACTERS_MAX], consumer, wall_ms
    )


def _archiving_range(key: ShareKey, batch: InFlightBatch) -> ArchivingRange:
    if batch.reservation is None:
        message = f"offsets {batch.first} to {batch.last} are ARCHIVING without a reservation"
        raise AssertionError(message)
    return ArchivingRange(key, batch.first, batch.last, batch.deliveries, batch.reservation)


def _must_be_durable(batches: list[InFlightBatch]) -> bool:
    """Whether the update has to be durable. A release or expiry need not be: if it is lost, the lease ends again."""
    return any(batch.state != AVAILABLE for batch in batches)
