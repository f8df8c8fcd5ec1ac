"""What is said of leases, until it is known to be so: the queues of a `Settler`.

A partition's part of a request holds as a whole or not at all: one that is refused is halved until it is known which
lease is gone.

Always true: everything that is said ends once: with the broker's word, or with `LeaseLost` when the lease is over as
far as is known here (after `GIVE_UP_S` at least); what waits is bounded by what is held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.errors import ConnectionLost, InvalidRecordState, InvalidRequest
from mansio.link.alarm import Alarm
from mansio.wire.topic_partition import TopicPartition

from .leased_types import (
    HELD,
    LOST,
    NOT_RENEWING,
    RENEW,
    RENEWAL_SENT,
    RENEWAL_WAITS,
    LeaseLost,
)
from .said import Settle, halves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.errors import MansioError
    from mansio.link.cluster import Cluster

    from .lease_book import LeaseBook
    from .leased_types import Leased, Listener
    from .said import Said

logger = logging.getLogger(__name__)

GIVE_UP_S: Final = 5.0


class SettleQueue:
    """The part of a settler that keeps what is said; made for `Settler` to build upon."""

    def __init__(self, cluster: Cluster, book: LeaseBook, wake: Callable[[], None]) -> None:
        self._cluster = cluster
        self._book = book
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, wake)
        self._pending: Said = {}
        self._probes: dict[TopicPartition, deque[list[Settle]]] = {}
        """Parts of what was refused, each to be asked about alone."""
        self._flying: dict[int, Said] = {}
        self._resting: dict[TopicPartition, tuple[float, int]] = {}
        """Partitions of which nothing is said until then, and how often in a row their broker would not hear it."""
        self._renewing = 0
        """Renewals that are under way."""
        self._is_due = False
        self._is_closed = False
        self.leader_of: Callable[[TopicPartition, float], int | None] = lambda _partition, _now: None
        """The broker to ask at that time, if it is known."""
        self.on_said: Callable[[], None] = wake
        """Called when something is to be sent."""
        self.idle = asyncio.Event()
        """Set while there is nothing to say, and nothing under way."""
        self.idle.set()

    def _say(
        self,
        run: Sequence[Leased],
        kind: int,
        outcome: Listener | None,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Of neighbours in the same delivery."""
        now = self._loop.time()
        first = run[0]
        said = Settle(
            kind,
            first[2],
            run[-1][2],
            now,
            max(first._lease.deadline, run[-1]._lease.deadline, now + GIVE_UP_S),
            messages=run,
            outcome=outcome,
            delay_ms=delay_ms,
            reason=reason,
            losses=self._book.losses,
        )
        self._put(TopicPartition(first[0], first[1]), said)

    def _put(self, partition: TopicPartition, said: Settle) -> None:
        if self._is_closed:
            self._give_up(said, None)
            return
        self._pending.setdefault(partition, []).append(said)
        self.idle.clear()
        self._alarm.set(said.give_up)

    def _say_soon(self) -> None:
        """Send it at the end of the loop's turn, with what else is said until then."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._say_due)

    def _say_due(self) -> None:
        self._is_due = False
        self._say_now()

    def _say_now(self) -> None:
        """Send what can be sent."""
        if (self._pending or self._probes) and not self._is_closed:
            self.on_said()

    @property
    def is_waiting(self) -> bool:
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
            if (until := self._resting.get(partition, (0.0, 0))[0]) > now:
                self._alarm.set(until)
            elif (node := self.leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def take_along(self, partitions: Sequence[TopicPartition], *, everything: bool) -> Said:
        """What the session is to say of these: all, or what nobody else has to. The caller says what came of it."""
        taken: Said = {}
        for partition in partitions:
            if everything:
                found = self._next(partition)
            elif partition in self._probes:
                continue
            else:
                waiting = self._current(partition, self._pending.pop(partition, []))
                found = [said for said in waiting if said.goes_anywhere]
                if rest := [said for said in waiting if not said.goes_anywhere]:
                    self._pending.setdefault(partition, []).extend(rest)
            if found:
                taken[partition] = found
        self._fly(taken)
        return taken

    def _fly(self, taken: Said) -> None:
        if taken:
            self._flying[id(taken)] = taken
            for said in itertools.chain.from_iterable(taken.values()):
                if (message := said.renewed) is not None:
                    message._renewal = RENEWAL_SENT
                    self._renewing += 1

    def _next(self, partition: TopicPartition) -> list[Settle]:
        """What the next request says of a partition."""
        probes = self._probes.get(partition)
        while probes:
            found = self._current(partition, probes.popleft())
            if not probes:
                del self._probes[partition]
            if found:
                return found
        return self._current(partition, self._pending.pop(partition, []))

    def _current(self, partition: TopicPartition, waiting: list[Settle]) -> list[Settle]:
        """Without what is of no interest any more. What is said of a lease that is being renewed waits for that, or the
        renewal of all the others would be refused with it."""
        found: list[Settle] = []
        later: list[Settle] = []
        for said in waiting:
            for each in self._not_lost(said):
                message = each.renewed
                if message is not None and message._state != HELD:
                    message._renewal = NOT_RENEWING
                    each.tell(None)
                elif self._renewing and any(one._renewal == RENEWAL_SENT for one in each.messages):
                    later.append(each)
                else:
                    found.append(each)
        if later:
            self._pending.setdefault(partition, []).extend(later)
        return found

    def _not_lost(self, said: Settle) -> list[Settle]:
        """What is left of it without the messages that were lost meanwhile."""
        if said.losses == self._book.losses or not said.messages:
            return [said]
        parts: list[list[Leased]] = [[]]
        for message in said.messages:
            if message._state == LOST:
                self._give_up(said.of([message]), None)
                parts.append([])
            else:
                parts[-1].append(message)
        said.losses = self._book.losses
        if len(parts) == 1:
            return [said]
        return [said.of(part) for part in parts if part]

    def _expire(self, partition: TopicPartition, now: float) -> None:
        """Give up what waited for too long, and look again when the next of them has."""
        for queue in (self._pending.get(partition, []), *self._probes.get(partition, ())):
            for said in [said for said in queue if said.give_up <= now]:
                queue.remove(said)
                self._give_up(said, None)
            if queue:
                self._alarm.set(min(said.give_up for said in queue))
        if not self._pending.get(partition, [None]):
            del self._pending[partition]

    # -- what came of it --------

    def told(
        self, taken: Said, partition: TopicPartition, error: MansioError | None, lock_s: float = 0.0
    ) -> None:
        """The broker's word on one partition's part of a request."""
        said = taken.pop(partition, [])
        for each in said:
            if (message := each.renewed) is not None:
                message._renewal = RENEWAL_WAITS
                self._renewing -= 1
        if error is None:
            self._resting.pop(partition, None)
            for each in said:
                self._done(partition, each, lock_s)
        elif isinstance(error, InvalidRecordState | InvalidRequest) and (parts := halves(said)):
            self._probes.setdefault(partition, deque()).extend(parts)
        elif error.retriable:
            self._cluster.mark_stale((partition.topic,))
            now = self._loop.time()
            if not isinstance(error, ConnectionLost):  # who was not reached rests as a broker
                failures = self._resting.get(partition, (0.0, 0))[1] + 1
                self._resting[partition] = (now + self._cluster.backoff.delay_seconds(failures), failures)
            again = []
            for each in said:
                if each.give_up <= now or self._is_closed:
                    self._give_up(each, error)
                else:
                    again.append(each)
            if again:
                self._pending.setdefault(partition, [])[:0] = again
                self._alarm.set(again[0].give_up)
        else:
            for each in said:
                self._refused(each, error)
        if not taken:
            self._flying.pop(id(taken), None)
        self._look_idle()

    def told_all(self, taken: Said, error: MansioError) -> None:
        """There was no word, but this error."""
        for partition in list(taken):
            self.told(taken, partition, error)

    def _done(self, partition: TopicPartition, said: Settle, lock_s: float) -> None:
        if (message := said.renewed) is not None:
            self._book.renewed(message, lock_s)
        elif said.messages:
            self._book.settled(partition, said.messages, said.kind)
        said.tell(None)

    def _refused(self, said: Settle, error: MansioError) -> None:
        if isinstance(error, InvalidRecordState):
            self._give_up(said, error)
            return
        for message in said.messages:
            if said.kind == RENEW:
                self._book.not_renewed(message)
            elif said.outcome is not None:
                self._book.stays(message)
            else:  # nobody would settle it any more: its lease is to end
                self._book.lose(message)
        if said.outcome is not None:
            said.tell(error)
        else:
            logger.warning("a lease was not settled: %s", error)

    def _give_up(self, said: Settle, error: MansioError | None) -> None:
        """The lease is gone, or nobody said anything about it for as long as it may have lasted."""
        if not said.messages:
            return
        for message in said.messages:
            if said.kind == RENEW:
                self._book.not_renewed(message)
            else:
                self._book.lose(message)
        if said.outcome is None:
            return
        first = said.messages[0]
        place = f"{first.topic}-{first.partition}"
        which = f"offset {said.first} of {place} is"
        if said.first != said.last:
            which = f"offsets {said.first} to {said.last} of {place} are"
        why = f": {error.message}" if error is not None else ""
        lost = LeaseLost(f"{which} not leased by this member any more{why}")
        lost.__cause__ = error
        said.tell(lost)

    def _look_idle(self) -> None:
        if not self._pending and not self._probes and not self._flying:
            self.idle.set()

    def _end(self) -> None:
        """Whatever was not said is not said any more."""
        self._is_closed = True
        self._alarm.cancel()
        queues = [*self._pending.values(), *itertools.chain.from_iterable(self._probes.values())]
        queues += [said for taken in self._flying.values() for said in taken.values()]
        self._pending.clear()
        self._probes.clear()
        self._flying.clear()
        for said in itertools.chain.from_iterable(queues):
            self._give_up(said, ConnectionLost("the receiver is closed"))
        self.idle.set()
