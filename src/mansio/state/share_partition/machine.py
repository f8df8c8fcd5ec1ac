"""One share partition as a state machine: who has which offsets of a topic partition, for one share group.

How it moves. A member *acquires* offsets whose bytes it is about to be sent; they are its own until it *settles* them,
or until the lease ends. Accepted ones are done. Released and expired ones rest and are offered again; rejected ones,
and those tried too often, go to the dead-letter topic first, and are done once the copy is known to be there.

                     acquire                  accept
      AVAILABLE ────────────────► ACQUIRED ──────────► ACKNOWLEDGED
       ▲  ▲  ▲                     │ │ ▲ │                  ▲
       │  │  └─────────────────────┘ │ └─┘ renew            │ accept
       │  │    release, expiry       │                      │
       │  │                          │ reject,           WITHHELD  may have been leased before a loss
       │  └── time is over ──────────┼── too many tries ────┤
       │                             ▼                      ▼
       │        redrive           ARCHIVING ──────────► ARCHIVED
       └─────────────────────────────── (ARCHIVED) ◄── copy is in the dead-letter topic

(`share_window.TRANSITIONS` is that drawing as a table.)

Pure: methods take the time (`now_ms` any steady clock, `wall_ms` the wall's) and chance, and return an `Update`, which
has to be stored; `persisted` says that it is. A request that is wrong raises its typed error and has changed
nothing. If an update fails, or nobody knows, the object is of no use any more: the state is loaded anew.

An update with `snapshot` set is the whole state: it is stored after all that came before it and before all that came
after it. Others may be under way side by side, because they speak of different offsets.

Always true: * An offset has one holder at most. What is in an update under way is nobody's until it is stored.
* `deliveries` never go down, `uncounted_deliveries` of them are no tries. A delivery after the first waits for a
  durable update.
* What is settled for ever stays so, but for what died and is offered again by an operator.
* Nothing at or above the durable lease horizon is leased. Leased are at most `locks_max` records.
* The start moves over what is done and stored, and over what the log has lost, but never over what is on its way to
  the dead-letter topic.

Source: KIP-932, KIP-1206 (record limit), KIP-1222 (renewal), KIP-1191 (dead letters). Where it differs from Kafka:
docs/DELIVERY.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from mansio.state.share_partition import acquisition, archiving, redrive, report
from mansio.state.share_partition.acknowledgement_check import check, split_by_type
from mansio.state.share_partition.acquire_policy import InOrder, LowestFirst
from mansio.state.share_partition.batch_map import NOT_PENDING, InFlightBatch
from mansio.state.share_partition.dead_ranges import DeadRanges
from mansio.state.share_partition.delivery_outcome import DeliveryOutcome
from mansio.state.share_partition.in_flight import acquired_of, changes_of
from mansio.state.share_partition.lease_bound import LeaseBound
from mansio.state.share_partition.log_start import age, drop, late
from mansio.state.share_partition.restore import restored, stored, whole
from mansio.state.share_partition.types import (
    ACQUIRED,
    ARCHIVING,
    AVAILABLE,
    RENEW,
    AcquiredRange,
    ArchivingRange,
    DeadLetterReservation,
    LoadedState,
    RedriveResult,
    ShareCounts,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.share_partition.acquire_policy import Policy
    from mansio.state.share_partition.batch_map import BatchMap
    from mansio.state.share_partition.types import AcknowledgementBatch, Producer, ShareKey, ShareSettings

AT_ONCE_MS: Final = -math.inf


class SharePartition:
    """The machine. Read its attributes; change them through its methods only."""

    __slots__ = (
        "_dead",
        "_in_flight",
        "_lease_bound",
        "_log_start",
        "_policy",
        "_producer",
        "_state",
        "_wall_ahead_ms",
        "aged_out",
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
    ) -> None:
        """`log_end`: where this broker's log ends now, at or above the high watermark of any leader before."""
        self.key = key
        self.reconfigure(settings)
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.aged_out = 0  # records that the log lost before anybody settled them
        self._state = state
        self._lease_bound = LeaseBound(state.lease_bound)
        self._wall_ahead_ms = wall_ms - now_ms
        self._dead = DeadRanges(state)
        self._producer = state.producer
        self._in_flight = restored(
            state, lock_ms=settings.lock_ms, log_end=log_end, now_ms=now_ms, wall_ms=wall_ms
        )
        self._log_start = -1
        self.advance_log_start(log_start, store=False)

    def reconfigure(self, settings: ShareSettings) -> None:
        """These are in force from now on; leases that run keep their ends."""
        self.settings = settings
        self._policy: Policy = InOrder() if settings.ordered else LowestFirst()

    # ------------------------------------------------------------------ leases

    def acquirable_ranges(
        self, member: str, max_records: int, high_watermark: int, now_ms: float
    ) -> list[tuple[int, int]]:
        """Stretches of offsets that this member might be given now, first and last: what is worth reading."""
        self.high_watermark = max(self.high_watermark, high_watermark)
        room = min(max_records, self.settings.locks_max - self._in_flight.leased)
        picked = self._policy.pick(self._in_flight.ranges, member, now_ms)
        return acquisition.read_ranges(picked, room, min(self._lease_end, self.high_watermark))

    def acquire(
        self,
        member: str,
        read: Sequence[tuple[int, int]],
        max_records: int,
        *,
        strict: bool,
        batch_ends: Sequence[int],
        now_ms: float,
    ) -> tuple[list[AcquiredRange], Update | None]:
        """Lease what of `read` is free, which is below the high watermark and whose bytes are in the answer.

        `strict`: not one more than `max_records`; otherwise the batch in which the last one lies is finished, if that
        takes no more than `max_records` once more. `batch_ends`: the last offsets of the batches in `read`, ascending,
        as far as they matter. Nobody may be told of the leases before the update is `persisted`.
        """
        in_flight, policy = self._in_flight, self._policy
        picked = policy.pick(in_flight.ranges, member, now_ms)
        chosen = acquisition.choose(
            acquisition.readable(picked, read, self._lease_end, may_skip=policy.may_skip),
            max_records,
            self.settings.locks_max - in_flight.leased,
            strict=strict,
            batch_ends=batch_ends,
        )
        if not chosen and not self._is_lease_bound_due:
            return [], None
        token = in_flight.begin()
        deadline_ms = now_ms + self.settings.lock_ms
        in_flight_batches: list[InFlightBatch] = []
        for first, last in chosen:
            for batch in in_flight.ranges.split(first, last):
                in_flight.put(
                    batch,
                    ACQUIRED,
                    token,
                    deliveries=batch.deliveries + 1,
                    holder=member,
                    deadline_ms=deadline_ms,
                )
                in_flight_batches.append(batch)
        told = acquired_of(in_flight_batches)
        again = any(each.deliveries > 1 for each in told)
        return told, self._update(token, in_flight_batches, durable=again, lease_bound=True)

    @property
    def _lease_end(self) -> int:
        return self._lease_bound.lease_end(self._in_flight.ranges, self.settings)

    def acknowledge(
        self,
        member: str,
        batches: Sequence[AcknowledgementBatch],
        now_ms: float,
        wall_ms: int,
        random_fraction: float,
    ) -> Update | None:
        """The member is done with these: all of it holds, or nothing.

        Raises `InvalidRequest` for what makes no sense, `InvalidRecordState` for what the member has not leased.
        """
        in_flight = self._in_flight
        self._wall_ahead_ms = wall_ms - now_ms
        runs = split_by_type(batches, min(in_flight.ranges.start, self._log_start))
        for run in runs:
            check(in_flight.ranges, member, run, renew=self.settings.renew)
        told = [run for run in runs if run.type != RENEW]
        deadline_ms = now_ms + self.settings.lock_ms
        for run in runs:
            if run.type == RENEW:
                for batch in in_flight.ranges.split(run.first, run.last):
                    in_flight.put(batch, ACQUIRED, NOT_PENDING, deadline_ms=deadline_ms)
                in_flight.ranges.merge_around(run.first, run.last)
        if not told:
            return None
        ending = DeliveryOutcome(
            in_flight, self.settings, in_flight.begin(), now_ms, wall_ms, random_fraction
        )
        in_flight_batches: list[InFlightBatch] = []
        for run in told:
            for batch in in_flight.ranges.split(run.first, run.last):
                ending.acknowledge(batch, run, member)
                in_flight_batches.append(batch)
        return self._update(ending.token, in_flight_batches, durable=_says_more_than_free(in_flight_batches))

    def release_member(self, member: str, now_ms: float, *, uncounted: bool = True) -> Update | None:
        """The member is gone: what it has is offered to others at once. `uncounted`: it left in order, so its
        deliveries are no tries. What it has in an update under way stays as it is."""
        in_flight = self._in_flight
        in_flight_batches = [
            batch
            for batch in in_flight.ranges
            if batch.state == ACQUIRED and batch.holder == member and batch.pending_token == NOT_PENDING
        ]
        if not in_flight_batches:
            return None
        ending = DeliveryOutcome(
            in_flight, self.settings, in_flight.begin(), now_ms, round(self._wall(now_ms)), 0.0
        )
        for batch in in_flight_batches:
            batch.uncounted_deliveries += uncounted
            ending.retry(batch, 0, member)
        return self._update(ending.token, in_flight_batches, durable=_says_more_than_free(in_flight_batches))

    def tick(self, now_ms: float, wall_ms: int, random_fraction: float) -> Update | None:
        """What time brings: leases end, what rested is free, what was withheld is, the horizon moves ahead."""
        in_flight = self._in_flight
        self._wall_ahead_ms = wall_ms - now_ms
        token = in_flight.begin()
        changed = self._age(token)
        due = in_flight.due(now_ms)
        rested = [batch for batch in due if batch.state == AVAILABLE]
        for batch in rested:
            in_flight.unpark(batch)
        ending = DeliveryOutcome(in_flight, self.settings, token, now_ms, wall_ms, random_fraction)
        for batch in due:
            if batch.state != AVAILABLE:
                ending.expire(batch)
                changed.append(batch)
        in_flight.merge(rested)
        if not changed and not self._is_lease_bound_due:
            in_flight.acknowledge(token)
            return None
        changed.sort(key=lambda batch: batch.first)
        return self._update(token, changed, durable=_says_more_than_free(changed), lease_bound=True)

    def next_deadline_ms(self) -> float:
        """When `tick` is due."""
        return (
            AT_ONCE_MS
            if self._is_lease_bound_due or late(self._in_flight, self._log_start)
            else self._in_flight.next_deadline_ms
        )

    def _wall(self, now_ms: float) -> float:
        return now_ms + self._wall_ahead_ms

    # ------------------------------------------------------------------ what is stored

    def persisted(self, token: int) -> list[ArchivingRange]:
        """The update with this token is stored as it asked for. Gives what is to go to the dead-letter topic now."""
        in_flight_batches = self._in_flight.acknowledge(token)
        self._lease_bound.persisted(token)
        found = [
            archiving.archiving_range(self.key, batch)
            for batch in in_flight_batches
            if batch.state == ARCHIVING
            and batch.reservation is not None
            and batch.reservation.producer_id < 0
        ]
        self._in_flight.merge(in_flight_batches)
        return found

    def snapshot(self, now_ms: float) -> LoadedState:
        """The whole state as it is now, with what is under way."""
        start, done = self._in_flight.ranges.start, self._in_flight.done
        return self._state._replace(
            leader_epoch=self.leader_epoch,
            start_offset=start,
            lease_bound=self._lease_bound.offset,
            done_count=done,
            changes=stored(self._in_flight, now_ms=now_ms, wall_ms=round(self._wall(now_ms))),
            dead=self._dead.ranges(),
            redrives=self._dead.redrives(),
            producer=self._producer,
            is_complete=True,
            withheld_ms=0,
        )

    def full_update(self, now_ms: float) -> Update:
        """The whole state as an update: what is stored of it may have lost what this object knows."""
        return self._whole(self._in_flight.begin(), now_ms)

    def _whole(self, token: int, now_ms: float) -> Update:
        return whole(token, self.snapshot(now_ms))

    def _update(
        self,
        token: int,
        in_flight_batches: list[InFlightBatch],
        *,
        durable: bool,
        lease_bound: bool = False,
        **more: Any,
    ) -> Update:
        in_flight = self._in_flight
        start, done = in_flight.start_with(token)
        ahead = self._lease_bound.offset
        if lease_bound and self._is_lease_bound_due:
            ahead, durable = self._lease_bound.ask(token, in_flight.ranges, self.settings), True
        return Update(token, durable, start, ahead, done, tuple(changes_of(in_flight_batches)), **more)

    @property
    def _is_lease_bound_due(self) -> bool:
        return self._lease_bound.is_due(self._in_flight.ranges, self.settings)

    # ------------------------------------------------------------------ the log loses its oldest records

    def advance_log_start(self, log_start: int, *, store: bool = True) -> Update | None:
        """The log begins there now. What is below and still waits for its dead letter stays."""
        if log_start <= self._log_start:
            return None
        self._log_start = log_start
        in_flight, before = self._in_flight, self._in_flight.ranges.start
        self.aged_out += drop(in_flight, log_start)
        fewer_dead = self._dead.remove([(0, log_start - 1)])
        if not store:
            in_flight.merge(self._age(NOT_PENDING))
            return None
        if in_flight.ranges.start == before and not fewer_dead and not late(in_flight, log_start):
            return None
        token = in_flight.begin()
        dead = self._dead.ranges() if fewer_dead else None
        return self._update(token, self._age(token), durable=True, dead=dead)

    def _age(self, token: int) -> list[InFlightBatch]:
        in_flight_batches = age(self._in_flight, self._log_start, token)
        self.aged_out += sum(batch.size for batch in in_flight_batches)
        return in_flight_batches

    # ------------------------------------------------------------------ dead letters

    def archiving(self) -> list[ArchivingRange]:
        """All that waits for its dead letter, stored ones only: after a load, what is to be done first to last."""
        return [
            archiving.archiving_range(self.key, batch)
            for batch in self._in_flight.ranges
            if batch.state == ARCHIVING and batch.pending_token == NOT_PENDING
        ]

    def reserve(
        self, producer: Producer, reservations: Sequence[tuple[int, int, DeadLetterReservation]]
    ) -> Update:
        """This producer is to write these ranges, with these tickets; not before that is stored."""
        token = self._in_flight.begin()
        self._producer = producer
        in_flight_batches = archiving.reserve(self._in_flight, reservations, token)
        return self._update(token, in_flight_batches, durable=True, producer=producer)

    def archived(self, reservations: Sequence[tuple[int, int, DeadLetterReservation]]) -> Update:
        """The copies of these are in the dead-letter topic, committed."""
        token = self._in_flight.begin()
        in_flight_batches, added = archiving.archive(
            self._in_flight, self._dead, reservations, self._log_start, token
        )
        return self._update(token, in_flight_batches, durable=True, dead_added=added)

    def redrive(
        self, redrive_id: str, offsets: Sequence[tuple[int, int]] | None, most: int, now_ms: float
    ) -> tuple[Update | None, RedriveResult]:
        """Offer dead records again, at most so many: those among `offsets`, or all (None). Under one id it happens once
        for each offset. Raises `InvalidRequest`."""
        in_flight, dead = self._in_flight, self._dead
        chosen, result = redrive.plan(dead, in_flight.ranges, self._log_start, redrive_id, offsets, most)
        if not chosen:
            return None, result
        offered = [(each.first, each.last) for each in chosen]
        dead.remember(redrive_id, offered)
        lower = chosen[0].first < in_flight.ranges.start
        if lower:
            redrive.take_back(in_flight, dead, chosen[0].first)
        dead.remove(offered)
        token = in_flight.begin()
        in_flight_batches = redrive.offer(in_flight, chosen, token)
        if lower:
            return self._whole(token, now_ms), result
        update = self._update(
            token, in_flight_batches, durable=True, dead=dead.ranges(), redrives=dead.redrives()
        )
        return update, result

    # ------------------------------------------------------------------ for people

    @property
    def lease_bound(self) -> int:
        """Nothing at or above this offset was ever leased."""
        return self._lease_bound.offset

    @property
    def leased(self) -> int:
        """Records that somebody has now."""
        return self._in_flight.leased

    @property
    def ranges(self) -> BatchMap:
        """To be read, not changed."""
        return self._in_flight.ranges

    def counts(self, now_ms: float) -> ShareCounts:
        """What there is of each state, and who has what leased since when (since it was renewed last)."""
        return report.counts(self._in_flight, self._dead, self.high_watermark, self.settings.lock_ms, now_ms)


def _says_more_than_free(in_flight_batches: list[InFlightBatch]) -> bool:
    """Has it to be durable? A release, or the end of a lease, may be lost: the lease is found again, and ends again."""
    return any(batch.state != AVAILABLE for batch in in_flight_batches)
