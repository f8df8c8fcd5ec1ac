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
has to be stored; `settled` says that it is. A request that is wrong raises its typed error and has changed nothing. If
an update fails, or nobody knows, the object is of no use any more: the state is loaded anew.

An update with `snapshot` set is the whole state: it is stored after all that came before it and before all that came
after it. Others may be under way side by side, because they speak of different offsets.

Always true: * An offset has one holder at most. What is in an update under way is nobody's until it is stored.
* `deliveries` never go down, `forgiven` of them are no tries. A delivery after the first waits for a durable update.
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

from mansio.state import share_archiving, share_choice, share_redrive, share_report
from mansio.state.share_dead import Dead
from mansio.state.share_ending import Ending
from mansio.state.share_horizon import Horizon
from mansio.state.share_loading import restored, stored, whole
from mansio.state.share_policy import InOrder, LowestFirst
from mansio.state.share_ranges import SETTLED, Span
from mansio.state.share_settling import check, runs_of
from mansio.state.share_trimming import age, drop, late
from mansio.state.share_types import (
    ACQUIRED,
    ARCHIVING,
    AVAILABLE,
    RENEW,
    Acquired,
    Archiving,
    LoadedState,
    RedriveResult,
    ShareCounts,
    Ticket,
    Update,
)
from mansio.state.share_window import acquired_of, changes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.share_policy import Policy
    from mansio.state.share_ranges import Ranges
    from mansio.state.share_types import Producer, Settle, ShareKey, ShareSettings

AT_ONCE_MS: Final = -math.inf


class SharePartition:
    """The machine. Read its attributes; change them through its methods only."""

    __slots__ = (
        "_dead",
        "_horizon",
        "_log_start",
        "_policy",
        "_producer",
        "_state",
        "_wall_ahead_ms",
        "_window",
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
        self._horizon = Horizon(state.horizon)
        self._wall_ahead_ms = wall_ms - now_ms
        self._dead = Dead(state)
        self._producer = state.producer
        self._window = restored(
            state, lock_ms=settings.lock_ms, log_end=log_end, now_ms=now_ms, wall_ms=wall_ms
        )
        self._log_start = -1
        self.trimmed(log_start, store=False)

    def reconfigure(self, settings: ShareSettings) -> None:
        """These are in force from now on; leases that run keep their ends."""
        self.settings = settings
        self._policy: Policy = InOrder() if settings.ordered else LowestFirst()

    # ------------------------------------------------------------------ leases

    def wanted(
        self, member: str, max_records: int, high_watermark: int, now_ms: float
    ) -> list[tuple[int, int]]:
        """Stretches of offsets that this member might be given now, first and last: what is worth reading."""
        self.high_watermark = max(self.high_watermark, high_watermark)
        room = min(max_records, self.settings.locks_max - self._window.leased)
        picked = self._policy.pick(self._window.ranges, member, now_ms)
        return share_choice.stretches(picked, room, min(self._lease_end, self.high_watermark))

    def acquire(
        self,
        member: str,
        read: Sequence[tuple[int, int]],
        max_records: int,
        *,
        strict: bool,
        batch_ends: Sequence[int],
        now_ms: float,
    ) -> tuple[list[Acquired], Update | None]:
        """Lease what of `read` is free, which is below the high watermark and whose bytes are in the answer.

        `strict`: not one more than `max_records`; otherwise the batch in which the last one lies is finished, if that
        takes no more than `max_records` once more. `batch_ends`: the last offsets of the batches in `read`, ascending,
        as far as they matter. Nobody may be told of the leases before the update is `settled`.
        """
        window, policy = self._window, self._policy
        picked = policy.pick(window.ranges, member, now_ms)
        chosen = share_choice.choose(
            share_choice.readable(picked, read, self._lease_end, may_skip=policy.may_skip),
            max_records,
            self.settings.locks_max - window.leased,
            strict=strict,
            batch_ends=batch_ends,
        )
        if not chosen and not self._horizon_due:
            return [], None
        token = window.begin()
        deadline_ms = now_ms + self.settings.lock_ms
        spans: list[Span] = []
        for first, last in chosen:
            for span in window.ranges.split(first, last):
                window.put(
                    span,
                    ACQUIRED,
                    token,
                    deliveries=span.deliveries + 1,
                    holder=member,
                    deadline_ms=deadline_ms,
                )
                spans.append(span)
        told = acquired_of(spans)
        again = any(each.deliveries > 1 for each in told)
        return told, self._update(token, spans, durable=again, horizon=True)

    @property
    def _lease_end(self) -> int:
        return self._horizon.lease_end(self._window.ranges, self.settings)

    def settle(
        self, member: str, batches: Sequence[Settle], now_ms: float, wall_ms: int, chance: float
    ) -> Update | None:
        """The member is done with these: all of it holds, or nothing.

        Raises `InvalidRequest` for what makes no sense, `InvalidRecordState` for what the member has not leased.
        """
        window = self._window
        self._wall_ahead_ms = wall_ms - now_ms
        runs = runs_of(batches, min(window.ranges.start, self._log_start))
        for run in runs:
            check(window.ranges, member, run, renew=self.settings.renew)
        told = [run for run in runs if run.type != RENEW]
        deadline_ms = now_ms + self.settings.lock_ms
        for run in runs:
            if run.type == RENEW:
                for span in window.ranges.split(run.first, run.last):
                    window.put(span, ACQUIRED, SETTLED, deadline_ms=deadline_ms)
                window.ranges.merge_around(run.first, run.last)
        if not told:
            return None
        ending = Ending(window, self.settings, window.begin(), now_ms, wall_ms, chance)
        spans: list[Span] = []
        for run in told:
            for span in window.ranges.split(run.first, run.last):
                ending.settle(span, run, member)
                spans.append(span)
        return self._update(ending.token, spans, durable=_says_more_than_free(spans))

    def release_member(self, member: str, now_ms: float, *, forgive: bool = True) -> Update | None:
        """The member is gone: what it has is offered to others at once. `forgive`: it left in order, so its deliveries
        are no tries. What it has in an update under way stays as it is."""
        window = self._window
        spans = [
            span
            for span in window.ranges
            if span.state == ACQUIRED and span.holder == member and span.unsettled == SETTLED
        ]
        if not spans:
            return None
        ending = Ending(window, self.settings, window.begin(), now_ms, round(self._wall(now_ms)), 0.0)
        for span in spans:
            span.forgiven += forgive
            ending.retry(span, 0, member)
        return self._update(ending.token, spans, durable=_says_more_than_free(spans))

    def tick(self, now_ms: float, wall_ms: int, chance: float) -> Update | None:
        """What time brings: leases end, what rested is free, what was withheld is, the horizon moves ahead."""
        window = self._window
        self._wall_ahead_ms = wall_ms - now_ms
        token = window.begin()
        changed = self._age(token)
        due = window.due(now_ms)
        rested = [span for span in due if span.state == AVAILABLE]
        for span in rested:
            window.unpark(span)
        ending = Ending(window, self.settings, token, now_ms, wall_ms, chance)
        for span in due:
            if span.state != AVAILABLE:
                ending.expire(span)
                changed.append(span)
        window.merge(rested)
        if not changed and not self._horizon_due:
            window.settle(token)
            return None
        changed.sort(key=lambda span: span.first)
        return self._update(token, changed, durable=_says_more_than_free(changed), horizon=True)

    def next_deadline_ms(self) -> float:
        """When `tick` is due."""
        return (
            AT_ONCE_MS
            if self._horizon_due or late(self._window, self._log_start)
            else self._window.next_deadline_ms
        )

    def _wall(self, now_ms: float) -> float:
        return now_ms + self._wall_ahead_ms

    # ------------------------------------------------------------------ what is stored

    def settled(self, token: int) -> list[Archiving]:
        """The update with this token is stored as it asked for. Gives what is to go to the dead-letter topic now."""
        spans = self._window.settle(token)
        self._horizon.settled(token)
        found = [
            share_archiving.letter(self.key, span)
            for span in spans
            if span.state == ARCHIVING and span.ticket is not None and span.ticket.producer_id < 0
        ]
        self._window.merge(spans)
        return found

    def snapshot(self, now_ms: float) -> LoadedState:
        """The whole state as it is now, with what is under way."""
        start, done = self._window.ranges.start, self._window.done
        return self._state._replace(
            leader_epoch=self.leader_epoch,
            start_offset=start,
            horizon=self._horizon.offset,
            done_count=done,
            changes=stored(self._window, now_ms=now_ms, wall_ms=round(self._wall(now_ms))),
            dead=self._dead.ranges(),
            redrives=self._dead.redrives(),
            producer=self._producer,
            certain=True,
            withheld_ms=0,
        )

    def reassert(self, now_ms: float) -> Update:
        """The whole state as an update: what is stored of it may have lost what this object knows."""
        return self._whole(self._window.begin(), now_ms)

    def _whole(self, token: int, now_ms: float) -> Update:
        return whole(token, self.snapshot(now_ms))

    def _update(
        self, token: int, spans: list[Span], *, durable: bool, horizon: bool = False, **more: Any
    ) -> Update:
        window = self._window
        start, done = window.start_with(token)
        ahead = self._horizon.offset
        if horizon and self._horizon_due:
            ahead, durable = self._horizon.ask(token, window.ranges, self.settings), True
        return Update(token, durable, start, ahead, done, tuple(changes_of(spans)), **more)

    @property
    def _horizon_due(self) -> bool:
        return self._horizon.is_due(self._window.ranges, self.settings)

    # ------------------------------------------------------------------ the log loses its oldest records

    def trimmed(self, log_start: int, *, store: bool = True) -> Update | None:
        """The log begins there now. What is below and still waits for its dead letter stays."""
        if log_start <= self._log_start:
            return None
        self._log_start = log_start
        window, before = self._window, self._window.ranges.start
        self.aged_out += drop(window, log_start)
        fewer_dead = self._dead.remove([(0, log_start - 1)])
        if not store:
            window.merge(self._age(SETTLED))
            return None
        if window.ranges.start == before and not fewer_dead and not late(window, log_start):
            return None
        token = window.begin()
        dead = self._dead.ranges() if fewer_dead else None
        return self._update(token, self._age(token), durable=True, dead=dead)

    def _age(self, token: int) -> list[Span]:
        spans = age(self._window, self._log_start, token)
        self.aged_out += sum(span.size for span in spans)
        return spans

    # ------------------------------------------------------------------ dead letters

    def archiving(self) -> list[Archiving]:
        """All that waits for its dead letter, stored ones only: after a load, what is to be done first to last."""
        return [
            share_archiving.letter(self.key, span)
            for span in self._window.ranges
            if span.state == ARCHIVING and span.unsettled == SETTLED
        ]

    def reserve(self, producer: Producer, tickets: Sequence[tuple[int, int, Ticket]]) -> Update:
        """This producer is to write these ranges, with these tickets; not before that is stored."""
        token = self._window.begin()
        self._producer = producer
        spans = share_archiving.reserve(self._window, tickets, token)
        return self._update(token, spans, durable=True, producer=producer)

    def archived(self, tickets: Sequence[tuple[int, int, Ticket]]) -> Update:
        """The copies of these are in the dead-letter topic, committed."""
        token = self._window.begin()
        spans, added = share_archiving.archive(self._window, self._dead, tickets, self._log_start, token)
        return self._update(token, spans, durable=True, dead_added=added)

    def redrive(
        self, redrive_id: str, offsets: Sequence[tuple[int, int]] | None, most: int, now_ms: float
    ) -> tuple[Update | None, RedriveResult]:
        """Offer dead records again, at most so many: those among `offsets`, or all (None). Under one id it happens once
        for each offset. Raises `InvalidRequest`."""
        window, dead = self._window, self._dead
        chosen, result = share_redrive.plan(dead, window.ranges, self._log_start, redrive_id, offsets, most)
        if not chosen:
            return None, result
        offered = [(each.first, each.last) for each in chosen]
        dead.remember(redrive_id, offered)
        lower = chosen[0].first < window.ranges.start
        if lower:
            share_redrive.take_back(window, dead, chosen[0].first)
        dead.remove(offered)
        token = window.begin()
        spans = share_redrive.offer(window, chosen, token)
        if lower:
            return self._whole(token, now_ms), result
        update = self._update(token, spans, durable=True, dead=dead.ranges(), redrives=dead.redrives())
        return update, result

    # ------------------------------------------------------------------ for people

    @property
    def horizon(self) -> int:
        """Nothing at or above this offset was ever leased."""
        return self._horizon.offset

    @property
    def leased(self) -> int:
        """Records that somebody has now."""
        return self._window.leased

    @property
    def ranges(self) -> Ranges:
        """To be read, not changed."""
        return self._window.ranges

    def counts(self, now_ms: float) -> ShareCounts:
        """What there is of each state, and who has what leased since when (since it was renewed last)."""
        return share_report.counts(
            self._window, self._dead, self.high_watermark, self.settings.lock_ms, now_ms
        )


def _says_more_than_free(spans: list[Span]) -> bool:
    """Has it to be durable? A release, or the end of a lease, may be lost: the lease is found again, and ends again."""
    return any(span.state != AVAILABLE for span in spans)
