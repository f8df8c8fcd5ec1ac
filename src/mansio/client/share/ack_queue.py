"""What is said of leases, until it is known to be so: the queues of a `AckSender`.

A partition's part of a request holds as a whole or not at all: one that is refused is halved until it is known which
lease is gone.

Always true: everything that is said ends once: with the broker's word, or with `LeaseLost` when the lease is over as
far as is known here (after `EXPIRY_S` at least); what waits is bounded by what is held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.client.share.leased import HELD, LOST, NOT_RENEWING, RENEW, RENEWAL_SENT, RENEWAL_WAITS, LeaseLost
from mansio.client.share.pending_ack import PendingAck, halves
from mansio.errors import ConnectionLost, InvalidRecordState, InvalidRequest
from mansio.net.earliest_timer import EarliestTimer
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import AckListener, Leased
    from mansio.client.share.pending_ack import PendingAcks
    from mansio.errors import MansioError
    from mansio.net.cluster import Cluster

logger = logging.getLogger(__name__)

EXPIRY_S: Final = 5.0


class AckQueue:
    """The part of a settler that keeps what is said; made for `AckSender` to build upon."""

    def __init__(
        self, cluster: Cluster, in_flight_records: InFlightRecords, wake: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._in_flight_records = in_flight_records
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._earliest_timer = EarliestTimer(self._loop, wake)
        self._pending: PendingAcks = {}
        self._probes: dict[TopicPartition, deque[list[PendingAck]]] = {}
        """Parts of what was refused, each to be asked about alone."""
        self._in_flight: dict[int, PendingAcks] = {}
        self._backoffs: dict[TopicPartition, tuple[float, int]] = {}
        """Partitions of which nothing is said until then, and how often in a row their broker would not hear it."""
        self._renewing = 0
        """Renewals that are under way."""
        self._is_due = False
        self._is_closed = False
        self.leader_of: Callable[[TopicPartition, float], int | None] = lambda _partition, _now: None
        """The broker to ask at that time, if it is known."""
        self.on_pending: Callable[[], None] = wake
        """Called when something is to be sent."""
        self.idle = asyncio.Event()
        """Set while there is nothing to say, and nothing under way."""
        self.idle.set()

    def _enqueue(
        self,
        run: Sequence[Leased],
        kind: int,
        outcome: AckListener | None,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Of neighbours in the same delivery."""
        now = self._loop.time()
        first = run[0]
        pending = PendingAck(
            kind,
            first[2],
            run[-1][2],
            now,
            max(first._lease.deadline, run[-1]._lease.deadline, now + EXPIRY_S),
            messages=run,
            outcome=outcome,
            delay_ms=delay_ms,
            reason=reason,
            lost_count=self._in_flight_records.lost_count,
        )
        self._put(TopicPartition(first[0], first[1]), pending)

    def _put(self, partition: TopicPartition, pending: PendingAck) -> None:
        if self._is_closed:
            self._expire_ack(pending, None)
            return
        self._pending.setdefault(partition, []).append(pending)
        self.idle.clear()
        self._earliest_timer.set(pending.expires)

    def _flush_soon(self) -> None:
        """Send it at the end of the loop's turn, with what else is said until then."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        self._flush()

    def _flush(self) -> None:
        """Send what can be sent."""
        if (self._pending or self._probes) and not self._is_closed:
            self.on_pending()

    @property
    def has_pending(self) -> bool:
        """Whether there is something that nobody was told yet."""
        return bool(self._pending or self._probes)

    # -- choosing what to send --------

    def waiting(self, now: float) -> dict[int, list[TopicPartition]]:
        """The partitions of which something is to be said, by leader."""
        found: dict[int, list[TopicPartition]] = {}
        for partition in dict.fromkeys([*self._probes, *self._pending]):
            self._expire(partition, now)
            if partition not in self._pending and partition not in self._probes:
                continue
            if (extend_until := self._backoffs.get(partition, (0.0, 0))[0]) > now:
                self._earliest_timer.set(extend_until)
            elif (node := self.leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def take_for_session(self, partitions: Sequence[TopicPartition], *, everything: bool) -> PendingAcks:
        """What the session is to say of these: all, or what nobody else has to. The caller says what came of it."""
        taken: PendingAcks = {}
        for partition in partitions:
            if everything:
                found = self._next(partition)
            elif partition in self._probes:
                continue
            else:
                waiting = self._current(partition, self._pending.pop(partition, []))
                found = [pending for pending in waiting if pending.fits_share_acknowledge]
                if rest := [pending for pending in waiting if not pending.fits_share_acknowledge]:
                    self._pending.setdefault(partition, []).extend(rest)
            if found:
                taken[partition] = found
        self._mark_in_flight(taken)
        return taken

    def _mark_in_flight(self, taken: PendingAcks) -> None:
        if taken:
            self._in_flight[id(taken)] = taken
            for pending in itertools.chain.from_iterable(taken.values()):
                if (message := pending.renewed) is not None:
                    message._renewal = RENEWAL_SENT
                    self._renewing += 1

    def _next(self, partition: TopicPartition) -> list[PendingAck]:
        """What the next request says of a partition."""
        probes = self._probes.get(partition)
        while probes:
            found = self._current(partition, probes.popleft())
            if not probes:
                del self._probes[partition]
            if found:
                return found
        return self._current(partition, self._pending.pop(partition, []))

    def _current(self, partition: TopicPartition, waiting: list[PendingAck]) -> list[PendingAck]:
        """Without what is of no interest any more. What is said of a lease that is being renewed waits for that, or the
        renewal of all the others would be refused with it."""
        found: list[PendingAck] = []
        later: list[PendingAck] = []
        for pending in waiting:
            for each in self._not_lost(pending):
                message = each.renewed
                if message is not None and message._state != HELD:
                    message._renewal = NOT_RENEWING
                    each.completed(None)
                elif self._renewing and any(one._renewal == RENEWAL_SENT for one in each.messages):
                    later.append(each)
                else:
                    found.append(each)
        if later:
            self._pending.setdefault(partition, []).extend(later)
        return found

    def _not_lost(self, pending: PendingAck) -> list[PendingAck]:
        """What is left of it without the messages that were lost meanwhile."""
        if pending.lost_count == self._in_flight_records.lost_count or not pending.messages:
            return [pending]
        parts: list[list[Leased]] = [[]]
        for message in pending.messages:
            if message._state == LOST:
                self._expire_ack(pending.of([message]), None)
                parts.append([])
            else:
                parts[-1].append(message)
        pending.lost_count = self._in_flight_records.lost_count
        if len(parts) == 1:
            return [pending]
        return [pending.of(part) for part in parts if part]

    def _expire(self, partition: TopicPartition, now: float) -> None:
        """Give up what waited for too long, and look again when the next of them has."""
        for queue in (self._pending.get(partition, []), *self._probes.get(partition, ())):
            for pending in [pending for pending in queue if pending.expires <= now]:
                queue.remove(pending)
                self._expire_ack(pending, None)
            if queue:
                self._earliest_timer.set(min(pending.expires for pending in queue))
        if not self._pending.get(partition, [None]):
            del self._pending[partition]

    # -- what came of it --------

    def on_result(
        self, taken: PendingAcks, partition: TopicPartition, error: MansioError | None, lock_s: float = 0.0
    ) -> None:
        """The broker's word on one partition's part of a request."""
        pending = taken.pop(partition, [])
        for each in pending:
            if (message := each.renewed) is not None:
                message._renewal = RENEWAL_WAITS
                self._renewing -= 1
        if error is None:
            self._backoffs.pop(partition, None)
            for each in pending:
                self._done(partition, each, lock_s)
        elif isinstance(error, InvalidRecordState | InvalidRequest) and (parts := halves(pending)):
            self._probes.setdefault(partition, deque()).extend(parts)
        elif error.retriable:
            self._cluster.mark_stale((partition.topic,))
            now = self._loop.time()
            if not isinstance(error, ConnectionLost):  # who was not reached rests as a broker
                failures = self._backoffs.get(partition, (0.0, 0))[1] + 1
                self._backoffs[partition] = (now + self._cluster.backoff.delay_seconds(failures), failures)
            again = []
            for each in pending:
                if each.expires <= now or self._is_closed:
                    self._expire_ack(each, error)
                else:
                    again.append(each)
            if again:
                self._pending.setdefault(partition, [])[:0] = again
                self._earliest_timer.set(again[0].expires)
        else:
            for each in pending:
                self._refused(each, error)
        if not taken:
            self._in_flight.pop(id(taken), None)
        self._look_idle()

    def on_failure(self, taken: PendingAcks, error: MansioError) -> None:
        """There was no word, but this error."""
        for partition in list(taken):
            self.on_result(taken, partition, error)

    def _done(self, partition: TopicPartition, pending: PendingAck, lock_s: float) -> None:
        if (message := pending.renewed) is not None:
            self._in_flight_records.renewed(message, lock_s)
        elif pending.messages:
            self._in_flight_records.acknowledged(partition, pending.messages, pending.kind)
        pending.completed(None)

    def _refused(self, pending: PendingAck, error: MansioError) -> None:
        if isinstance(error, InvalidRecordState):
            self._expire_ack(pending, error)
            return
        for message in pending.messages:
            if pending.kind == RENEW:
                self._in_flight_records.not_renewed(message)
            elif pending.outcome is not None:
                self._in_flight_records.restore(message)
            else:  # nobody would settle it any more: its lease is to end
                self._in_flight_records.mark_lost(message)
        if pending.outcome is not None:
            pending.completed(error)
        else:
            logger.warning("a lease was not settled: %s", error)

    def _expire_ack(self, pending: PendingAck, error: MansioError | None) -> None:
        """The lease is gone, or nobody said anything about it for as long as it may have lasted."""
        if not pending.messages:
            return
        for message in pending.messages:
            if pending.kind == RENEW:
                self._in_flight_records.not_renewed(message)
            else:
                self._in_flight_records.mark_lost(message)
        if pending.outcome is None:
            return
        first = pending.messages[0]
        place = f"{first.topic}-{first.partition}"
        which = f"offset {pending.first} of {place} is"
        if pending.first != pending.last:
            which = f"offsets {pending.first} to {pending.last} of {place} are"
        why = f": {error.message}" if error is not None else ""
        lost = LeaseLost(f"{which} not leased by this member any more{why}")
        lost.__cause__ = error
        pending.completed(lost)

    def _look_idle(self) -> None:
        if not self._pending and not self._probes and not self._in_flight:
            self.idle.set()

    def _end(self) -> None:
        """Whatever was not said is not said any more."""
        self._is_closed = True
        self._earliest_timer.cancel()
        queues = [*self._pending.values(), *itertools.chain.from_iterable(self._probes.values())]
        queues += [pending for taken in self._in_flight.values() for pending in taken.values()]
        self._pending.clear()
        self._probes.clear()
        self._in_flight.clear()
        for pending in itertools.chain.from_iterable(queues):
            self._expire_ack(pending, ConnectionLost("the receiver is closed"))
        self.idle.set()
