"""Share partitions compared with a model that has one entry per offset, with crashes that lose unsynced updates.

Five groups work on one topic partition side by side: without order, in order, in order by key, with limits by key, and
with these in order by key; some of them on its records of high priority only. `History` knows what members were told,
through all restarts: nobody gets what another still has, no two members have records of one key, counts only grow, what
was acknowledged never comes back, no more records of a key are leased than its limit, and in no interval more
deliveries of it start than the rate allows. Members also take range leases, which they keep, claim again or drop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.errors import CoordinatorLoadInProgress, InvalidRecordState
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.offset_numbers import NumberedOffsets, NumberedRange
from mansio.state.share_partition.snapshot import with_known_state
from mansio.state.share_partition.types import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    WITHHELD,
    AcknowledgementBatch,
    AcquiredRange,
    Backoff,
    DeadRange,
    LoadedState,
    Producer,
    RangeOperation,
    ShareKey,
    ShareSettings,
    Update,
)
from mansio.wire.batch.priority_header import Priority
from support.present import present
from support.share_store import Store, at_offset, expand
from support.tiers import examples

LOCK, WALL, BATCH = 100, 1_000_000, 4
MEMBERS = ("a", "b")
DONE = (ACKNOWLEDGED, ARCHIVED)
SETTINGS = ShareSettings(
    LOCK, 3, 10, 12, 20, False, True, True, Backoff(10, 2.0, 60, 0.0), range_locks_max=14
)
SIDES = st.sampled_from((0, 1, 2, 3, 4))
LIMITS = st.sampled_from(((2, 0.0, 1), (1, 50.0, 2), (0, 25.0, 1), (3, 12.5, 3), (0, 0.0, 1)))
"""Leases of a key, deliveries of it per second, and the burst; 0: no limit."""

LIES = st.sampled_from(("", "", "", "", "more", "another's", "again"))


def key_of(offset: int) -> int | None:
    """Hash of the key of the record at this offset; some have no key, and some offsets have no record."""
    return None if offset % 7 == 6 else offset // 2 % 3


def is_high(offset: int) -> bool:
    """Whether the record at this offset has high priority."""
    return offset // 3 % 3 != 1


def with_limits(settings: ShareSettings, limits: tuple[int, float, int]) -> ShareSettings:
    leases_max, rate, burst = limits
    return settings._replace(key_leases_max=leases_max, key_rate=rate, key_burst=burst)


def lasts(lease: int) -> int:
    return LOCK if lease < 0 else lease


@dataclass
class Record:
    """What the model knows of one offset."""

    state: int = AVAILABLE
    n: int = 0
    f: int = 0
    holder: str = ""
    until: float = math.inf
    due: int = -1
    busy: int = 0
    sequence: int = -1
    lease: int = -1
    is_range: bool = False


@dataclass
class History:
    """What members received: who has what until when, which delivery that was, what is final."""

    has: dict[int, tuple[str, float]] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    persisted: set[int] = field(default_factory=set)

    def handed(self, offset: int, member: str, count: int, until: float, now: float) -> None:
        assert offset not in self.persisted, "a settled record was delivered again"
        holder, ends = self.has.get(offset, (member, now))
        assert ends <= now, f"{offset} was given to {member} while {holder} has it"
        assert count > self.count.get(offset, 0), "a count went back"
        self.has[offset], self.count[offset] = (member, until), count


class Side:
    """One group: the machine, its model, its store."""

    def __init__(
        self,
        name: str,
        index: PriorityIndex | None,
        *,
        ordered: bool = False,
        by_key: bool = False,
        limits: tuple[int, float, int] = (0, 0.0, 1),
    ) -> None:
        self.key = ShareKey(name, bytes(16), 0)
        self.own = None if index is None else NumberedOffsets(index, Priority.HIGH)
        self.settings = with_limits(SETTINGS, limits)._replace(is_ordered=ordered, is_ordered_by_key=by_key)
        self.empty_since = 0.0
        """When all buckets of the rate were empty."""
        self.starts: dict[int, list[float]] = defaultdict(list)
        """When deliveries of each key began, since the rate was set."""
        self.starts_before: dict[int, int] = {}
        """How many of them began before all buckets were empty."""
        self.scanned: set[int] = set()
        self.store, self.history = Store(), History()
        self.flying: list[tuple[Update, list[AcquiredRange], str]] = []
        self.unresolved, self.withheld_until = False, 0.0
        self.sequence = 0
        self.log_start = 0

    def load(self, now: float, log_end: int, *, is_complete: bool, known: LoadedState | None = None) -> None:
        """`known`: by a leader who lived through what was lost; it writes all of it."""
        if not is_complete:
            self.unresolved, self.withheld_until = True, now + LOCK
        left = max(self.withheld_until - now, 0)
        state = self.store.fold(is_complete=not self.unresolved, withheld_ms=round(left))
        if known is not None:
            state = with_known_state(state._replace(leader_epoch=known.leader_epoch), known)
            self.unresolved = False
        self.start, self.lease_bound = state.start_offset, state.lease_bound
        self.bound_asked: tuple[int, int] | None = None
        self.dead = {o: each for each in state.dead_ranges for o in range(each.first, each.last + 1)}
        self.offered = {
            name: {o for first, last in ranges for o in range(first, last + 1)}
            for name, ranges in state.redrives
        }
        self.model = {}
        for o, change in ((o, at_offset(each, o)) for o, each in expand(state.changes).items()):
            if change.state == AVAILABLE and not self.has(o):
                continue  # it was passed, which a lost update did not store
            record = Record(change.state, change.deliveries, change.uncounted_deliveries)
            self.model[o] = record
            if change.state == ACQUIRED:
                record.holder, record.lease, record.is_range = change.holder, change.lease_ms, change.is_range
                record.until = now + lasts(change.lease_ms)
            elif change.state == AVAILABLE and change.due_ms > WALL + now:
                record.due, record.until = change.due_ms, change.due_ms - WALL
            elif change.reservation is not None and change.reservation.sequence >= 0:
                record.sequence = change.reservation.sequence
        for o in range(self.start, min(self.lease_bound, log_end)) if self.unresolved else ():
            if self.has(o) and self.at(o).state == AVAILABLE and self.at(o).n == 0:
                self.model[o] = Record(WITHHELD, 1, 1, until=now + left)
        self.flying = []
        # A release that was lost after it had freed locks is undone.
        self.locks_max = {
            is_range: max(self.settings.locks_max(is_range=is_range), self.leased(is_range=is_range))
            for is_range in (False, True)
        }
        self.scanned.clear()
        self.empty_since = now
        self.starts_before = {key: len(starts) for key, starts in self.starts.items()}
        self.state_machine = SharePartition(
            self.key,
            self.settings,
            state,
            leader_epoch=1,
            log_start=self.log_start,
            log_end=log_end,
            high_watermark=log_end,
            now_ms=now,
            wall_ms=round(WALL + now),
            own=self.own,
        )
        self.trim(self.log_start, 0)
        self.advance()
        self.forget_keys()

    def forget_keys(self) -> None:
        """The keys are read again from the start; those of all that is in flight are needed first."""
        self.scanned.clear()
        open_ones = [
            o
            for o, record in self.model.items()
            if not (record.state == AVAILABLE and not record.busy and record.until == math.inf)
            and (record.state not in DONE or record.busy)
        ]
        self.keys_needed_until = max(open_ones, default=-1) + 1

    def at(self, offset: int) -> Record:
        return self.model.setdefault(offset, Record())

    def has(self, offset: int) -> bool:
        """Whether the share partition has this offset."""
        return self.own is None or is_high(offset)

    def advance(self) -> None:
        while self.at(self.start).state in DONE and not self.at(self.start).busy:
            del self.model[self.start]
            self.start += 1
        self.model = {o: record for o, record in self.model.items() if o >= self.start}

    def trim(self, log_start: int, token: int) -> None:
        waiting = [o for o, record in self.model.items() if record.state == ARCHIVING and o < log_start]
        self.start = max(self.start, min([log_start, *waiting]))
        self.dead = {o: each for o, each in self.dead.items() if o >= log_start}
        self.model = {o: record for o, record in self.model.items() if o >= self.start}
        self.age(log_start, token)

    def age(self, log_start: int, token: int) -> None:
        for o in range(self.start, log_start):
            if self.at(o).state in (AVAILABLE, ACQUIRED, WITHHELD) and not self.at(o).busy:
                self.end(o, ARCHIVED, token)

    def end(self, o: int, state: int, token: int, **more: Any) -> None:
        old = self.at(o)
        self.model[o] = replace(Record(state, old.n, old.f, old.holder if token else "", busy=token), **more)

    def retry(self, o: int, token: int, now: float, asked: int = -1) -> None:
        record = self.at(o)
        attempts = record.n - record.f
        if attempts >= self.settings.delivery_limit:
            self.end(o, ARCHIVING, token)
            return
        rest = (
            0
            if self.settings.is_ordered and asked < 0
            else self.settings.backoff.delay_ms(attempts, 0.5, asked)
        )
        until, due = (now + rest, round(WALL + now) + rest) if rest else (math.inf, -1)
        self.end(o, AVAILABLE, token, until=until, due=due)

    def scan(self, end: int) -> None:
        """Add the keys of the log below `end`."""
        begin = self.state_machine.next_key_offset
        if begin is None or begin >= end:
            return
        keys = {o: key for o in range(begin, end) if (key := key_of(o)) is not None}
        self.state_machine.add_keys(end, keys)
        self.scanned.update(o for o in range(begin, end) if self.has(o))

    def is_free(self, o: int) -> bool:
        record = self.at(o)
        return record.state == AVAILABLE and not record.busy and record.until == math.inf and self.has(o)

    def has_key_index(self) -> bool:
        return self.settings.is_ordered_by_key or self.settings.has_key_limits

    def free_by_key(
        self, stop: int, now: float, readable: set[int] | None = None, *, one_per_key: bool = False
    ) -> list[int]:
        """`readable`: None for all."""
        key_index = present(self.state_machine._in_flight.key_index)
        if key_index.scanned_end < self.keys_needed_until:
            return []
        is_ordered = self.settings.is_ordered_by_key
        closed: set[int | None] = set()
        places: dict[int, float] = {}
        found = []
        for o in range(self.start, stop):
            if o not in self.scanned or not self.has(o):
                continue
            key = key_of(o)
            if not self.is_free(o):
                if is_ordered and (self.at(o).state not in DONE or self.at(o).busy):
                    closed |= {key} - {None}
            elif readable is not None and o not in readable:
                closed |= {key} - {None} if is_ordered else set()
            elif key is None:
                found.append(o)
            elif key not in closed and places.setdefault(key, self.places(key, now)) > 0:
                places[key] -= 1
                found.append(o)
                closed |= {key} if is_ordered and one_per_key else set()
        return found

    def is_counted(self, o: int) -> bool:
        """Whether the record may be leased."""
        record = self.at(o)
        is_withheld = record.state == AVAILABLE and record.until != math.inf and record.n == record.f
        return self.has(o) and (record.state in (ACQUIRED, WITHHELD) or bool(record.busy) or is_withheld)

    def free_places(self, key: int) -> float:
        """How many more records of a key may be leased."""
        if not self.settings.key_leases_max:
            return math.inf
        counted = sum(key_of(o) == key and o in self.scanned and self.is_counted(o) for o in [*self.model])
        return self.settings.key_leases_max - counted

    def places(self, key: int, now: float) -> float:
        """How many records of a key may be leased now: in no interval that ends now more may start than its length
        allows and the burst, and since all buckets were empty not more than its length allows."""
        places, rate, starts = self.free_places(key), self.settings.key_rate / 1000, self.starts[key]
        if rate:
            since = len(starts) - self.starts_before.get(key, 0)
            places = min(places, math.floor(rate * (now - self.empty_since) - since + 1e-9))
            for at, start in enumerate(starts):
                left = rate * (now - start) + self.settings.key_burst - (len(starts) - at)
                places = min(places, math.floor(left + 1e-9))
            places = min(places, self.settings.key_burst)
        return places

    def due(self, key: int) -> float:
        """When the rate allows the next delivery of a key."""
        starts, interval = self.starts[key], 1000 / self.settings.key_rate
        since = len(starts) - self.starts_before.get(key, 0)
        waits = [self.empty_since + (since + 1) * interval]
        for at, start in enumerate(starts):
            waits.append(start + (len(starts) - at + 1 - self.settings.key_burst) * interval)
        return max(waits)

    def check_wakes(self, now: float) -> None:
        """The timer fires when the rate allows a record that waits for nothing else."""
        if not self.settings.key_rate or not self.state_machine.is_offering:
            return
        free = {
            key_of(o): o for o in sorted(self.scanned, reverse=True) if o >= self.start and self.is_free(o)
        }
        for key, o in free.items():
            if key is None or self.free_places(key) <= 0 or self.places(key, now) > 0:
                continue
            before = [other for other in self.scanned if self.start <= other < o and key_of(other) == key]
            if not self.settings.is_ordered_by_key or not any(self.is_open(other) for other in before):
                assert self.state_machine.next_deadline_ms() <= self.due(key) + 1e-6, (
                    "a waiting key is not woken"
                )

    def is_open(self, o: int) -> bool:
        return self.at(o).state not in DONE or bool(self.at(o).busy)

    def check_limits(self, taken: list[int], now: float) -> None:
        """Members have no more records of a key than they may, those of pending leases included."""
        most = self.settings.key_leases_max
        held = {o for o, (_, until) in self.history.has.items() if until > now and o >= self.log_start}
        held |= {o for o, record in self.model.items() if record.state == ACQUIRED}
        for key in {key_of(o) for o in taken} - {None} if most else ():
            assert sum(key_of(o) == key for o in held) <= most, (
                "more records of a key are leased than the limit"
            )

    def free(self, member: str, stop: int, now: float, *, one_per_key: bool = False) -> list[int]:
        """What the member might be given, in order; for a group in order up to what it may not pass."""
        if self.has_key_index():
            return self.free_by_key(stop, now, one_per_key=one_per_key)
        found = []
        for o in range(self.start, stop):
            record = self.at(o)
            if not self.has(o):
                continue
            if record.state == AVAILABLE and not record.busy and record.until == math.inf:
                found.append(o)
            elif self.settings.is_ordered:
                mine = record.holder == member
                closed = record.state in (*DONE, ARCHIVING) and (mine or not record.busy)
                if not closed and not (record.state == ACQUIRED and mine):
                    break
        return found

    def held(self) -> list[int]:
        return sorted(
            o for o, each in self.model.items() if each.state in (ACQUIRED, WITHHELD) and not each.busy
        )

    def end_of_run(self, first: int, size: int) -> int:
        """Where the offsets end that the holder of `first` has, at most so many."""
        held, last = self.held(), first
        while (
            last + 1 in held and self.at(last + 1).holder == self.at(first).holder and last - first + 1 < size
        ):
            last += 1
        return last

    def leased(self, *, is_range: bool) -> int:
        return sum(record.state == ACQUIRED and record.is_range == is_range for record in self.model.values())

    def may_move_bound(self, update: Update) -> None:
        if update.lease_bound > self.lease_bound:
            assert update.durable
            assert self.bound_asked is None
            self.bound_asked = (update.token, update.lease_bound)

    def fly(
        self, update: Update | None, acquired: list[AcquiredRange] | None = None, member: str = ""
    ) -> None:
        if update is None:
            return
        self.may_move_bound(update)
        start, token = self.start, 0 if update.is_snapshot else update.token
        while token and self.at(start).state in DONE and self.at(start).busy in (0, token):
            start += 1
        assert update.start_offset == start, (
            "the start is stored as it is when this update is, without others"
        )
        assert update.done_count == sum(r.state in DONE for o, r in self.model.items() if o >= start)
        for o, change in expand(update.changes).items():
            assert update.is_snapshot or self.at(o).busy in (update.token, 0)
            assert update.durable or change.state in (ACQUIRED, AVAILABLE) or not self.has(o)
            assert update.durable or change.state != ACQUIRED or change.deliveries == 1, (
                "a redelivery is durable"
            )
            assert update.durable or not change.is_range, "a range lease is durable"
        self.flying.append((update, acquired or [], member))

    def land(self, update: Update, acquired: list[AcquiredRange], member: str, now: float) -> None:
        self.store.append(update)
        archiving = self.state_machine.mark_persisted(update.token)
        if self.bound_asked and self.bound_asked[0] == update.token:
            self.lease_bound, self.bound_asked = self.bound_asked[1], None
        fresh = []
        for o, record in self.model.items():
            if record.busy == update.token:
                record.busy = 0
                if record.state == ACQUIRED and not acquired:
                    self.history.has[o] = (record.holder, record.until)
                if record.state == ARCHIVING and record.sequence < 0:
                    fresh.append(o)
                if record.state == ACKNOWLEDGED:
                    self.history.persisted.add(o)
                if record.state != ACQUIRED:
                    record.holder = ""
        assert [o for each in archiving for o in range(each.first, each.last + 1)] == sorted(fresh)
        self.advance()
        if update.is_snapshot:
            self.unresolved = False  # it says what is withheld, too
        if self.unresolved and now >= self.withheld_until and not self.state_machine.counts(now).withheld:
            self.unresolved = any(record.busy and record.n == 1 == record.f for record in self.model.values())
        offsets = [o for each in acquired for o in range(each.first, each.last + 1)]
        if self.settings.is_ordered_by_key:
            last_of = {key_of(o): o for o in sorted(offsets) if key_of(o) is not None}
            for o, (_, until) in self.history.has.items():
                is_over = until <= now or o < self.log_start  # what retention deletes is no longer leased
                assert is_over or o in offsets or o > last_of.get(key_of(o), -1), "its key is leased already"
        for each in acquired:
            for o in range(each.first, each.last + 1):
                if self.model.get(o, Record()).state == ACQUIRED:
                    self.history.handed(o, member, each.deliveries, self.at(o).until, now)


class ShareModel(RuleBasedStateMachine):
    """The rules are what members, time and the shell do."""

    @initialize(
        end=st.integers(4, 30), only_high=st.tuples(*[st.booleans()] * 5), limits=st.tuples(LIMITS, LIMITS)
    )
    def begin(
        self,
        end: int,
        only_high: tuple[bool, ...],
        limits: tuple[tuple[int, float, int], tuple[int, float, int]],
    ) -> None:
        self.now, self.log_end = 0.0, 0
        self.index = PriorityIndex(0)
        self.append(end)
        loose, strict, keyed, limited, both = (self.index if each else None for each in only_high)
        self.sides = [
            Side("loose", loose),
            Side("strict", strict, ordered=True),
            Side("keyed", keyed, by_key=True),
            Side("limited", limited, limits=limits[0]),
            Side("limited and keyed", both, by_key=True, limits=limits[1]),
        ]
        for side in self.sides:
            side.load(self.now, self.log_end, is_complete=True)

    @rule(more=st.integers(1, 12))
    def produce(self, more: int) -> None:
        self.append(min(self.log_end + more, 90))

    def append(self, end: int) -> None:
        """Append records to the log."""
        high = [NumberedRange(o, o, Priority.HIGH) for o in range(self.log_end, end) if is_high(o)]
        self.log_end = end
        self.index.append(end, high)

    @rule(
        index=SIDES,
        member=st.sampled_from(MEMBERS),
        most=st.integers(1, 8),
        strict=st.booleans(),
        skip=st.sampled_from((0, 0, 0, 1)),
        wide=st.integers(0, 9),
        at_once=st.booleans(),
        scanned=st.integers(0, 12),
        lease=st.sampled_from((-1, -1, -1, 30, 250)),
    )
    def acquire(
        self,
        index: int,
        member: str,
        most: int,
        strict: bool,
        skip: int,
        wide: int,
        at_once: bool,
        scanned: int = 90,
        lease: int = -1,
    ) -> None:
        side = self.sides[index]
        side.scan(min((side.state_machine.next_key_offset or 0) + scanned, self.log_end))
        stop = min(self.log_end, side.lease_bound)
        if len(side.state_machine.ranges) >= side.settings.in_flight_batches_max:
            stop = min(stop, side.state_machine.ranges.end)
        free = side.free(member, stop, self.now)
        locks = max(side.settings.record_locks_max - side.leased(is_range=False), 0)
        ranges_to_read = side.state_machine.acquirable_ranges(member, most, self.log_end, self.now)
        offered = [o for first, last in ranges_to_read for o in range(first, last + 1)]
        assert offered == free[: min(most, locks)] or len(ranges_to_read) == (8 if side.own is None else 32)
        read = [
            (first, min(max(last, last // BATCH * BATCH + BATCH - 1), self.log_end - 1))
            for first, last in ranges_to_read
        ]
        if read:
            read[-1] = (read[-1][0], min(read[-1][1] + wide, self.log_end - 1))
        read = [
            (first, min([last, *(other - 1 for other, _ in ranges_to_read if other > first)]))
            for first, last in read
        ][skip:]
        side.check_wakes(self.now)
        readable = {o for first, last in read for o in range(first, last + 1)}
        expected: list[int] = []
        for o in side.free_by_key(stop, self.now, readable) if side.has_key_index() else free:
            if o not in readable:
                if side.settings.is_ordered:
                    break
                continue
            if len(expected) >= locks:
                break
            if len(expected) >= most:
                end = expected[most - 1] // BATCH * BATCH + BATCH - 1
                if strict or o > end:
                    break
            expected.append(o)
        ends = range(BATCH - 1, 200, BATCH)
        acquired, update = side.state_machine.acquire(
            member, read, most, strict=strict, batch_ends=ends, now_ms=self.now, lease_ms=lease
        )
        assert [o for each in acquired for o in range(each.first, each.last + 1)] == expected
        token = present(update).token if expected else 0
        for o in expected:
            old = side.at(o)
            side.model[o] = Record(
                ACQUIRED, old.n + 1, old.f, member, self.now + lasts(lease), busy=token, lease=lease
            )
            if (key := key_of(o)) is not None and side.settings.key_rate:
                side.starts[key].append(self.now)
            assert o < side.lease_bound
        side.check_limits(expected, self.now)
        for o in range(side.start, expected[-1] + 1) if expected else ():
            old = side.at(o)
            if not side.has(o) and old.state == AVAILABLE and not old.busy and old.until == math.inf:
                side.model[o] = Record(ACKNOWLEDGED, 1, busy=token)
        for each in acquired:
            assert {side.at(o).n for o in range(each.first, each.last + 1)} == {each.deliveries}
        side.fly(update, acquired, member)
        if at_once:
            self.land_all(index)

    @rule(
        index=SIDES,
        member=st.sampled_from(MEMBERS),
        most=st.integers(1, 16),
        ranges_max=st.integers(1, 6),
        scanned=st.integers(0, 30),
        lease=st.sampled_from((30, 100, 250)),
        at_once=st.booleans(),
    )
    def lease_ranges(
        self, index: int, member: str, most: int, ranges_max: int, scanned: int, lease: int, at_once: bool
    ) -> None:
        side = self.sides[index]
        machine = side.state_machine
        side.scan(min((machine.next_key_offset or 0) + scanned, self.log_end))
        stop = min(self.log_end, side.lease_bound)
        if len(machine.ranges) >= side.settings.in_flight_batches_max:
            stop = min(stop, machine.ranges.end)
        locks = max(side.settings.range_locks_max - side.leased(is_range=True), 0)
        free = side.free(member, stop, self.now, one_per_key=True)[: min(most, locks)]
        planned = machine.acquirable_ranges(member, most, self.log_end, self.now, is_range=True)
        assert [o for first, last in planned for o in range(first, last + 1)] == free
        batch_of = {o: at for at, each in enumerate(machine.ranges) for o in range(each.first, each.last + 1)}
        expected, pieces, before = [], 0, None
        for at, (first, last) in enumerate(planned):
            for o in range(first, last + 1):
                piece = at, batch_of.get(o)
                pieces += piece != before
                before = piece
                if pieces <= ranges_max:
                    expected.append(o)
        is_short = machine._lease_bound.is_short
        expected = [] if is_short else expected
        acquired, update = machine.acquire(
            member,
            planned,
            most,
            strict=True,
            batch_ends=(),
            now_ms=self.now,
            lease_ms=lease,
            ranges_max=ranges_max,
        )
        assert [o for each in acquired for o in range(each.first, each.last + 1)] == expected
        assert len(acquired) <= ranges_max
        assert not is_short or present(update).lease_bound > side.lease_bound
        token = present(update).token if expected else 0
        for o in expected:
            old = side.at(o)
            side.model[o] = Record(
                ACQUIRED,
                old.n + 1,
                old.f,
                member,
                self.now + lease,
                busy=token,
                lease=lease,
                is_range=True,
            )
            if (key := key_of(o)) is not None and side.settings.key_rate:
                side.starts[key].append(self.now)
            assert o < side.lease_bound
        side.check_limits(expected, self.now)
        for o in range(side.start, expected[-1] + 1) if expected else ():
            old = side.at(o)
            if not side.has(o) and old.state == AVAILABLE and not old.busy and old.until == math.inf:
                side.model[o] = Record(ACKNOWLEDGED, 1, busy=token)
        for each in acquired:
            assert {side.at(o).n for o in range(each.first, each.last + 1)} == {each.deliveries}
        side.fly(update, acquired, member)
        if at_once:
            self.land_all(index)
            if is_short:
                self.lease_ranges(index, member, most, ranges_max, scanned, lease, at_once=True)

    @rule(
        index=SIDES,
        members=st.permutations(MEMBERS),
        in_ranges=st.integers(4, 14),
        most=st.integers(4, 12),
        lease=st.sampled_from((100, 250)),
    )
    def lease_ranges_beside_records(
        self, index: int, members: list[str], in_ranges: int, most: int, lease: int
    ) -> None:
        """One member takes ranges, another one records; then the first speaks of what it has."""
        driver, worker = members
        self.lease_ranges(index, driver, in_ranges, 6, 90, lease, at_once=True)
        self.acquire(index, worker, most, strict=True, skip=0, wide=0, at_once=True)

    @precondition(lambda self: any(record.is_range for side in self.sides for record in side.model.values()))
    @rule(
        index=SIDES,
        which=st.integers(0, 40),
        size=st.integers(0, 12),
        lie=st.sampled_from((0, 0, 0, -1, 1)),
        lease=st.sampled_from((30, 100, 250)),
        operation=st.sampled_from((*RangeOperation, RangeOperation.CLAIM)),
        others=st.booleans(),
        at_once=st.booleans(),
    )
    def alter_range_leases(
        self,
        index: int,
        which: int,
        size: int,
        lie: int,
        lease: int,
        operation: RangeOperation,
        others: bool,
        at_once: bool,
    ) -> None:
        """A member keeps, claims again or accepts some of its range leases. `lie`: it knows another delivery count."""
        side = next(
            each for each in self.from_side(index) if any(record.is_range for record in each.model.values())
        )
        ranged = [o for o, record in sorted(side.model.items()) if record.is_range]
        member = side.at(ranged[which % len(ranged)]).holder
        mine = [o for o in ranged if side.at(o).holder == member]
        chosen = mine[which % len(mine) :][:size]
        wanted: list[AcquiredRange] = []
        for o in chosen:
            if wanted and wanted[-1].last + 1 == o and wanted[-1].deliveries == side.at(o).n + lie:
                wanted[-1] = wanted[-1]._replace(last=o)
            else:
                wanted.append(AcquiredRange(o, o, side.at(o).n + lie))
        is_busy = any(side.at(o).busy for o in chosen)
        try:
            kept, ended, update = side.state_machine.alter_range_leases(
                member,
                wanted,
                operation,
                lease,
                self.now,
                round(WALL + self.now),
                releases_others=others,
            )
        except CoordinatorLoadInProgress:
            assert is_busy
            return
        assert not is_busy
        counts = operation == RangeOperation.CLAIM
        claimed = chosen if not lie or (operation != RangeOperation.KEEP and lie < 0) else []
        dropped = [o for o in mine if others and o not in claimed and not side.at(o).busy]
        assert (update is None) == (not claimed and not dropped)
        token = update.token if update else 0
        for o in claimed:
            old = side.at(o)
            side.history.has[o] = (member, self.now if counts else self.now + lease)
            if operation == RangeOperation.ACCEPT:
                side.history.has[o] = (member, self.now)
                side.end(o, ACKNOWLEDGED, token)
            elif counts and old.n - old.f >= side.settings.delivery_limit:
                side.end(o, ARCHIVING, token)
            else:
                side.model[o] = replace(
                    old, n=old.n + counts, until=self.now + lease, lease=lease, busy=token
                )
        for o in dropped:
            side.at(o).f += 1
            side.history.has[o] = (member, self.now)
            side.retry(o, token, self.now, 0)
        still = [o for o in claimed if side.at(o).state in (ACQUIRED, ACKNOWLEDGED)]
        assert [o for each in kept for o in range(each.first, each.last + 1)] == still
        for each in kept:
            assert {side.at(o).n for o in range(each.first, each.last + 1)} == {each.deliveries}
        over = [o for o in chosen if side.at(o).state in (ARCHIVING, ARCHIVED) or o in side.dead]
        assert [o for each in ended for o in range(each.first, each.last + 1)] == over
        assert update is None or update.durable
        side.fly(update, kept if counts else [], member)
        if at_once:
            self.land_all(self.sides.index(side))

    @rule(index=st.sampled_from((3, 4)), limits=LIMITS, really=st.sampled_from((False, True)))
    def limits_change(self, index: int, limits: tuple[int, float, int], really: bool) -> None:
        """Counts and leases are kept; buckets are empty after a change of the rate."""
        if not really:
            return
        side = self.sides[index]
        before, side.settings = side.settings, with_limits(side.settings, limits)
        side.state_machine.reconfigure(side.settings, self.now)
        if side.settings.has_key_limits != before.has_key_limits:
            side.forget_keys()
        if (side.settings.key_rate, side.settings.key_burst) != (before.key_rate, before.key_burst):
            side.empty_since = self.now
            side.starts.clear()
            side.starts_before.clear()

    @precondition(lambda self: any(side.held() for side in self.sides))
    @rule(
        index=SIDES, which=st.integers(0, 40), size=st.integers(1, 9), lie=LIES,
        count=st.sampled_from((-1, -1, -1, -1, 1, 2)), delay=st.sampled_from((-1, -1, 0, 30)), single=st.booleans(),
        handed_out=st.sampled_from((True, True, False)), at_once=st.booleans(), data=st.data(),
    )  # fmt: skip
    def acknowledge(
        self,
        index: int,
        which: int,
        size: int,
        lie: str,
        count: int,
        delay: int,
        single: bool,
        handed_out: bool,
        at_once: bool,
        data: st.DataObject,
    ) -> None:
        """A member mostly speaks of what it has; a liar of more, of what another has, or of what it is being given."""
        side = next(each for each in self.from_side(index) if each.held())
        held = side.held()
        if lie == "again":
            busy = [o for o, record in sorted(side.model.items()) if record.state == ACQUIRED and record.busy]
            held = busy or held
        first = held[which % len(held)]
        member = side.at(first).holder or MEMBERS[which % 2]
        last = side.end_of_run(first, size) + (lie == "more")
        member = MEMBERS[member == MEMBERS[0]] if lie == "another's" else member
        size = last - first + 1
        kinds = st.sampled_from((ACCEPT, ACCEPT, RELEASE, REJECT, RENEW, GAP))
        types = bytes(
            [data.draw(kinds)] if single else data.draw(st.lists(kinds, min_size=size, max_size=size))
        )
        self.say(side, member, AcknowledgementBatch(first, last, types, delay, "why", count, handed_out))
        if at_once:
            self.land_all(self.sides.index(side))

    def from_side(self, index: int) -> list[Side]:
        return self.sides[index:] + self.sides[:index]

    def say(self, side: Side, member: str, batch: AcknowledgementBatch) -> None:
        first, last, types, delay, _, count, handed_out = batch
        types_by_offset = {
            o: types[o - first if len(types) > 1 else 0] for o in range(first, last + 1) if o >= side.start
        }
        allowed = all(
            not side.at(o).busy
            and (
                (side.at(o).state == ACQUIRED and side.at(o).holder == member)
                or (side.at(o).state == WITHHELD and type_ != RENEW)
            )
            and count in (-1, side.at(o).n)
            for o, type_ in types_by_offset.items()
        )
        try:
            update = side.state_machine.acknowledge(member, [batch], self.now, round(WALL + self.now), 0.5)
        except InvalidRecordState:
            assert not allowed
            return
        assert allowed
        token = update.token if update else 0
        for o, type_ in types_by_offset.items():
            if side.at(o).state == WITHHELD:
                side.at(o).f = 0
            side.at(o).holder = member
            if type_ == RENEW and delay < 0:
                side.at(o).until = self.now + lasts(side.at(o).lease)
                side.history.has[o] = (member, side.at(o).until)
                continue
            if type_ == RENEW and delay > 0:
                old = side.at(o)
                side.model[o] = Record(
                    ACQUIRED,
                    old.n,
                    old.f,
                    member,
                    self.now + delay,
                    busy=token,
                    lease=delay,
                    is_range=old.is_range,
                )
                continue
            side.history.has[o] = (member, self.now)
            if type_ == RELEASE and not handed_out:
                assert present(update).durable, "otherwise the end of the lease may count the delivery"
                side.at(o).f += 1
                side.retry(o, token, self.now, 0)
            elif type_ in (RELEASE, RENEW):
                side.retry(o, token, self.now, delay)
            else:
                side.end(o, {ACCEPT: ACKNOWLEDGED, GAP: ARCHIVED, REJECT: ARCHIVING}[type_], token)
        assert (update is None) == (not types_by_offset)
        renews = RENEW in types_by_offset.values() and delay != 0  # 0 releases
        assert update is None or update.durable or not renews
        side.fly(update)

    @rule(index=SIDES, member=st.sampled_from(MEMBERS), most=st.integers(1, 4))
    def be_overtaken(self, index: int, member: str, most: int) -> None:
        """A lease that need not be synced is stored before what waits for a sync."""
        side = self.sides[index]
        before = len(side.flying)
        self.acquire(index, member, most, strict=True, skip=0, wide=0, at_once=False)
        if len(side.flying) > before > 0 and not any(each[0].is_snapshot for each in side.flying):
            self.land_one(side, durable=False)

    @rule(index=SIDES, member=st.sampled_from(MEMBERS), uncounted=st.booleans())
    def member_leaves(self, index: int, member: str, uncounted: bool) -> None:
        side = self.sides[index]
        update = side.state_machine.release_member(member, self.now, uncounted=uncounted)
        for o, record in list(side.model.items()):
            if record.state == ACQUIRED and record.holder == member and not record.busy:
                record.f += uncounted
                side.history.has[o] = (member, self.now)
                side.retry(o, present(update).token, self.now, 0)
        side.fly(update)

    @rule(index=SIDES, most=st.integers(1, 3), times=st.integers(2, 4), uncounted=st.booleans())
    def go_from_hand_to_hand(self, index: int, most: int, times: int, uncounted: bool) -> None:
        """Members come, take some, and leave without a word."""
        for turn in range(times):
            member = MEMBERS[turn % 2]
            self.acquire(index, member, most, strict=True, skip=0, wide=0, at_once=True)
            self.member_leaves(index, member, uncounted=uncounted)
            self.land_all(index)

    @rule(ms=st.sampled_from((1, 10, 30, 99, 100)))
    def pass_time(self, ms: int) -> None:
        self.now += ms

    @rule(index=SIDES)
    def tick(self, index: int) -> None:
        side = self.sides[index]
        due = side.state_machine.next_deadline_ms()
        update = side.state_machine.tick(self.now, round(WALL + self.now), 0.5)
        token = update.token if update else 0
        side.age(side.log_start, token)
        for o, record in list(side.model.items()):
            if record.busy or record.until > self.now:
                continue
            assert due <= self.now
            if record.state == ACQUIRED:
                side.retry(o, token, self.now)
            elif record.state == WITHHELD:
                side.end(o, AVAILABLE, token)
            else:
                record.until, record.due = math.inf, -1
        side.fly(update)
        assert side.state_machine.next_deadline_ms() > self.now

    @precondition(lambda self: any(side.flying for side in self.sides))
    @rule(data=st.data(), durable=st.booleans())
    def land(self, data: st.DataObject, durable: bool) -> None:
        """The next of its kind is stored: durable ones and others go over two connections, a snapshot goes alone."""
        self.land_one(
            data.draw(st.sampled_from([side for side in self.sides if side.flying])), durable=durable
        )

    def land_one(self, side: Side, *, durable: bool) -> None:
        kinds = [each for each in side.flying if each[0].durable == durable] or side.flying
        chosen = side.flying[0] if any(each[0].is_snapshot for each in side.flying) else kinds[0]
        side.flying.remove(chosen)
        side.land(*chosen, self.now)

    @rule(index=SIDES)
    def land_all(self, index: int) -> None:
        side = self.sides[index]
        while side.flying:
            side.land(*side.flying.pop(0), self.now)

    @precondition(
        lambda self: any(record.state == ARCHIVING for side in self.sides for record in side.model.values())
    )
    @rule(index=SIDES)
    def reserve(self, index: int) -> None:
        side = self.sides[index]
        waiting = [each for each in side.state_machine.archiving_ranges() if each.reservation.producer_id < 0]
        expected = [
            o for o, r in sorted(side.model.items()) if r.state == ARCHIVING and not r.busy and r.sequence < 0
        ]
        assert [o for each in waiting for o in range(each.first, each.last + 1)] == expected
        if not waiting:
            return
        reservations = []
        for each in waiting:
            reservation = each.reservation._replace(
                topic_id=b"t" * 16, partition=0, producer_id=7, epoch=0, sequence=side.sequence
            )
            reservations.append((each.first, each.last, reservation))
            side.sequence += each.last - each.first + 1
        update = side.state_machine.reserve(Producer(7, 0, ((b"t" * 16, 0, side.sequence),)), reservations)
        for first, last, reservation in reservations:
            for o in range(first, last + 1):
                side.end(o, ARCHIVING, update.token, sequence=reservation.sequence + o - first)
        side.fly(update)

    @precondition(
        lambda self: any(record.sequence >= 0 for side in self.sides for record in side.model.values())
    )
    @rule(index=SIDES, truncated=st.integers(0, 3))
    def copied(self, index: int, truncated: int) -> None:
        """The copies of some are in the dead-letter topic; a batch may end in the middle of a range."""
        side = self.sides[index]
        filled = [each for each in side.state_machine.archiving_ranges() if each.reservation.producer_id >= 0]
        if not filled:
            return
        dead_letters = [
            (each.first, max(each.first, each.last - truncated), each.reservation) for each in filled[:2]
        ]
        update = side.state_machine.mark_archived(dead_letters)
        for first, last, reservation in dead_letters:
            for o in range(first, last + 1):
                assert side.at(o).sequence == reservation.sequence + o - first
                if o >= side.log_start:
                    side.dead[o] = DeadRange(o, o, side.at(o).n, side.at(o).f)
                side.end(o, ARCHIVED, update.token)
        side.fly(update)

    @precondition(lambda self: any(side.held() for side in self.sides))
    @rule(
        index=SIDES,
        which=st.integers(0, 40),
        size=st.integers(1, 4),
        every=st.sampled_from((1, 1, 2)),
        truncated=st.integers(0, 1),
        known=st.booleans(),
    )
    def die(self, index: int, which: int, size: int, every: int, truncated: int, known: bool) -> None:
        """All of them, or every other, to the dead-letter topic; that they are there may not be stored yet."""
        side = next(each for each in self.from_side(index) if each.held())
        index = self.sides.index(side)
        held = side.held()
        first = held[which % len(held)]
        last = side.end_of_run(first, size)
        types = bytes([ACCEPT if at % every else REJECT for at in range(last - first + 1)])
        self.say(side, side.at(first).holder or "a", AcknowledgementBatch(first, last, types, reason="bad"))
        self.land_all(index)
        self.reserve(index)
        self.land_all(index)
        self.copied(index, truncated)
        if known:
            self.land_all(index)

    @precondition(lambda self: any(side.dead for side in self.sides))
    @rule(
        index=SIDES,
        name=st.sampled_from(("x", "y")),
        first=st.integers(0, 40),
        size=st.integers(1, 20),
        most=st.integers(1, 9),
        every=st.booleans(),
        twice=st.booleans(),
    )
    def redrive(
        self, index: int, name: str, first: int, size: int, most: int, every: bool, twice: bool
    ) -> None:
        side = next(each for each in self.from_side(index) if each.dead)
        first = max(sorted(side.dead)[first % len(side.dead)] - size // 4, 0)
        self.offer_again(side, name, first, size, most, every=every)
        if twice:
            self.land_all(self.sides.index(side))
            self.offer_again(side, name, first, size, most, every=every)

    def offer_again(self, side: Side, name: str, first: int, size: int, most: int, *, every: bool) -> None:
        offered = side.offered.setdefault(name, set())
        acquirable_ranges = sorted(side.dead) if every else list(range(first, first + size))
        here = [o for o in acquirable_ranges if o in side.dead and o not in offered and not side.at(o).busy][
            :most
        ]
        ranges = None if every else [(first, first + size - 1)]
        update, result = side.state_machine.redrive(name, ranges, most, self.now)
        again = [o for o in acquirable_ranges if o in offered]
        assert result == (
            len(here),
            len(again),
            sum(o < side.log_start and o not in offered for o in acquirable_ranges),
        )
        assert (update is None) == (not here)
        if not here:
            return
        for o in range(here[0], side.start):
            side.model[o] = Record(ARCHIVED, *side.dead[o][2:]) if o in side.dead else Record(ACKNOWLEDGED)
        side.start = min(side.start, here[0])
        for o in here:
            side.end(o, AVAILABLE, present(update).token, f=side.at(o).n)
            del side.dead[o]
        offered.update(here)
        side.forget_keys()
        side.fly(update)

    @rule(index=SIDES, more=st.integers(1, 6), really=st.sampled_from((False, False, False, True)))
    def log_is_trimmed(self, index: int, more: int, really: bool) -> None:
        if not really:
            return
        self.trim(self.sides[index], max(self.sides[index].log_start, self.sides[index].start) + more)

    @precondition(lambda self: any(len(side.held()) > 1 for side in self.sides))
    @rule(index=SIDES, really=st.sampled_from((False, False, True)))
    def log_is_trimmed_over_a_dead_letter(self, index: int, really: bool) -> None:
        """It is not in its topic yet, and a member has a lease above it."""
        side = next(each for each in self.from_side(index) if len(each.held()) > 1)
        if not really:
            return
        first, *_, last = side.held()
        self.say(side, side.at(first).holder or "a", AcknowledgementBatch(first, first, bytes([REJECT])))
        self.land_all(self.sides.index(side))
        self.trim(side, last + 1)

    def trim(self, side: Side, log_start: int) -> None:
        log_start = min(max(log_start, side.log_start), self.log_end)
        update = side.state_machine.advance_log_start(log_start)
        side.log_start = log_start
        side.trim(log_start, update.token if update else 0)
        side.fly(update)
        side.advance()

    @rule(index=SIDES)
    def state_moved(self, index: int) -> None:
        """All that is under way is stored; then the whole state is, in place of what was."""
        side = self.sides[index]
        self.land_all(index)
        side.fly(side.state_machine.full_update(self.now))
        self.land_all(index)
        stored = {
            change.first: (change.deliveries, change.uncounted_deliveries)
            for change in side.store.fold().changes
        }
        assert {o: count for o, count in stored.items() if count[0]} == {
            o: (record.n, record.f) for o, record in side.model.items() if record.n
        }

    @rule(
        index=SIDES, lost=st.integers(0, 4), power=st.booleans(), really=st.sampled_from((False, False, True))
    )
    def crash(self, index: int, lost: int, power: bool, really: bool) -> None:
        """The process dies, or the machine loses what was not synced; what was under way may be stored or not."""
        if not really:
            return
        side = self.sides[index]
        for update, *_ in side.flying[: lost // 2]:
            if not update.is_snapshot or update is side.flying[0][0]:
                side.store.append(update)
        if power:
            del side.store.log[max(side.store.synced, len(side.store.log) - lost) :]
        side.load(self.now, self.log_end, is_complete=not power)

    @rule(index=SIDES, lost=st.integers(0, 4), really=st.sampled_from((False, True)))
    def state_lost(self, index: int, lost: int, really: bool) -> None:
        """The coordinator of the state loses what was not synced; the leader, and its members, live on."""
        if not really:
            return
        side = self.sides[index]
        for update, *_ in side.flying[: lost // 2]:
            if not update.is_snapshot or update is side.flying[0][0]:
                side.store.append(update)
        del side.store.log[max(side.store.synced, len(side.store.log) - lost) :]
        leased = {
            o: each.holder for o, each in side.model.items() if each.state == ACQUIRED and not each.busy
        }
        side.load(self.now, self.log_end, is_complete=False, known=side.state_machine.snapshot(self.now))
        still = {o: each.holder for o, each in side.model.items() if each.state == ACQUIRED}
        assert leased.items() <= still.items(), "a lease is undone"
        assert not side.state_machine.counts(self.now).withheld
        side.fly(side.state_machine.full_update(self.now))
        self.land_all(index)

    @invariant()
    def agrees(self) -> None:
        for side in getattr(self, "sides", ()):
            ranges = side.state_machine.ranges
            assert ranges.start == side.start
            covered = ranges.start
            previous = None
            for span in ranges:
                assert span.first == covered <= span.last
                covered = span.last + 1
                assert (
                    previous is None
                    or span.pending_token
                    or previous.pending_token
                    or not previous.has_same_state(span)
                ), "not merged"
                previous = span
                for o in range(span.first, span.last + 1):
                    record = side.at(o)
                    found = (
                        span.state,
                        span.deliveries,
                        span.uncounted_deliveries,
                        span.due_ms,
                        span.pending_token,
                    )
                    assert found == (record.state, record.n, record.f, record.due, record.busy), o
                    assert span.is_range == record.is_range
                    assert record.busy or span.holder == record.holder
                    assert record.state != ACQUIRED or span.holder == record.holder
                    assert record.busy or span.deadline_ms == record.until
                    if span.reservation is not None and span.reservation.producer_id >= 0:
                        assert span.reservation.sequence + o - span.first == record.sequence
                    assert 0 <= record.f <= record.n
            assert covered == ranges.end
            assert all(record == Record() for o, record in side.model.items() if o >= ranges.end)
            counts = side.state_machine.counts(self.now)
            leased = {is_range: side.leased(is_range=is_range) for is_range in (False, True)}
            assert counts.leased == sum(leased.values())
            for is_range, count in leased.items():
                assert side.state_machine.lock_count(is_range=is_range) == count <= side.locks_max[is_range]
            assert counts.dead == len(side.dead)
            done = sum(record.state in DONE for record in side.model.values())
            done_own = sum(r.state in DONE for o, r in side.model.items() if side.has(o))
            known = sum(side.has(o) for o in range(side.start, side.state_machine.high_watermark))
            assert counts.lag == known - done_own
            assert side.state_machine.snapshot(self.now).done_count == done


ShareModel.TestCase.settings = settings(max_examples=examples(20, 300, 5_000), stateful_step_count=50)
TestShareModel = ShareModel.TestCase


def test_offsets_of_other_share_partitions_that_a_lost_update_passed_count_no_delivery() -> None:
    model = ShareModel()
    model.begin(end=7, only_high=(False, False, False, False, True), limits=((2, 0.0, 1), (2, 0.0, 1)))
    model.be_overtaken(index=4, member="a", most=4)
    model.state_lost(index=4, lost=0, really=True)
    model.agrees()
    passed = [o for o in range(model.log_end) if not is_high(o)]
    stored = expand(model.sides[4].store.fold().changes)
    assert passed == [3, 4, 5]
    assert not stored.keys() & set(passed)
