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
from typing import TYPE_CHECKING, Any, Final

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
    Outcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.errors import MansioError
    from mansio.link.cluster import Cluster

    from .lease_book import LeaseBook
    from .leased_types import Leased

    Said = dict[TopicPartition, list["Settle"]]

logger = logging.getLogger(__name__)

GIVE_UP_S: Final = 5.0


class Settle:
    """One thing said: of one message, or of a range without any."""

    __slots__ = ("asked", "delay_ms", "first", "give_up", "kind", "last", "message", "outcome", "reason")

    def __init__(
        self,
        kind: int,
        first: int,
        last: int,
        asked: float,
        give_up: float,
        *,
        message: Leased | None = None,
        outcome: Outcome | None = None,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        self.kind = kind
        self.first = first
        self.last = last
        self.asked = asked
        self.give_up = give_up
        self.message = message
        self.outcome = outcome
        self.delay_ms = delay_ms
        self.reason = reason

    @property
    def goes_anywhere(self) -> bool:
        """Whether Kafka's own protocol can say it, along with a fetch."""
        return self.kind != RENEW and self.delay_ms < 0 and not self.reason


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
        self._is_closed = False
        self.leader_of: Callable[[TopicPartition, float], int | None] = lambda _partition, _now: None
        """The broker to ask at that time, if it is known."""
        self.idle = asyncio.Event()
        """Set while there is nothing to say, and nothing under way."""
        self.idle.set()

    def _say(
        self, message: Leased, kind: int, outcome: Outcome | None, *, delay_ms: int = -1, reason: str = ""
    ) -> None:
        now = self._loop.time()
        give_up = max(message._deadline, now + GIVE_UP_S)
        said = Settle(
            kind,
            message.offset,
            message.offset,
            now,
            give_up,
            message=message,
            outcome=outcome,
            delay_ms=delay_ms,
            reason=reason,
        )
        if kind != RENEW:
            self._book.begins_to_settle(message)
        self._put(TopicPartition(message.topic, message.partition), said)

    def _put(self, partition: TopicPartition, said: Settle) -> None:
        if self._is_closed:
            self._give_up(said, None)
            return
        self._pending.setdefault(partition, []).append(said)
        self.idle.clear()
        self._alarm.set(said.give_up)
        self._wake()

    # -- choosing what to send --------

    def waiting(self, now: float) -> dict[int, list[TopicPartition]]:
        """The partitions of which something is to be said, by leader."""
        found: dict[int, list[TopicPartition]] = {}
        for partition in dict.fromkeys([*self._probes, *self._pending]):
            self._expire(partition, now)
            if partition not in self._pending and partition not in self._probes:
                continue
            if (node := self.leader_of(partition, now)) is not None:
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
                if said.kind == RENEW and said.message is not None:
                    said.message._renewal = RENEWAL_SENT

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
            message = said.message
            if message is not None and message._state == LOST:
                self._give_up(said, None)
            elif message is not None and said.kind == RENEW and message._state != HELD:
                message._renewal = NOT_RENEWING
                if said.outcome is not None:
                    said.outcome.tell(None)
            elif message is not None and message._renewal == RENEWAL_SENT:
                later.append(said)
            else:
                found.append(said)
        if later:
            self._pending.setdefault(partition, []).extend(later)
        return found

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
            if each.kind == RENEW and each.message is not None:
                each.message._renewal = RENEWAL_WAITS
        if error is None:
            for each in said:
                self._done(each, lock_s)
        elif isinstance(error, InvalidRecordState | InvalidRequest) and len(said) > 1:
            middle = len(said) // 2
            self._probes.setdefault(partition, deque()).extend((said[:middle], said[middle:]))
        elif error.retriable:
            self._cluster.mark_stale((partition.topic,))
            now = self._loop.time()
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

    def _done(self, said: Settle, lock_s: float) -> None:
        message = said.message
        if message is not None and said.kind == RENEW:
            message._lock_s = lock_s or message._lock_s
            self._book.renewed(message)
        elif message is not None:
            self._book.settled(message, said.kind)
        if said.outcome is not None:
            said.outcome.tell(None)

    def _refused(self, said: Settle, error: MansioError) -> None:
        if isinstance(error, InvalidRecordState):
            self._give_up(said, error)
            return
        if said.message is not None and said.kind == RENEW:
            self._book.not_renewed(said.message)
        elif said.message is not None:
            self._book.stays(said.message)
        if said.outcome is not None:
            said.outcome.tell(error)
        else:
            logger.warning("a lease was not settled: %s", error)

    def _give_up(self, said: Settle, error: MansioError | None) -> None:
        """The lease is gone, or nobody said anything about it for as long as it may have lasted."""
        message = said.message
        if message is None:
            return
        if said.kind == RENEW:
            self._book.not_renewed(message)
        else:
            self._book.lose(message)
        why = f": {error.message}" if error is not None else ""
        lost = LeaseLost(
            f"offset {message.offset} of {message.topic}-{message.partition} is not leased by this member any more{why}"
        )
        lost.__cause__ = error
        if said.outcome is not None:
            said.outcome.tell(lost)

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


def runs_of(said: list[Settle]) -> list[list[Settle]]:
    """Neighbours of which the same is said, in order; what is said twice of an offset counts once."""
    runs: list[list[Settle]] = []
    end = -1
    alike: tuple[Any, ...] = ()
    for each in sorted(said, key=_first):
        if each.first <= end:
            continue
        count = -1 if each.message is None else each.message.delivery_count
        same = (each.kind, each.delay_ms, each.reason, count)
        if runs and each.first == end + 1 and same == alike:
            runs[-1].append(each)
        else:
            runs.append([each])
        end, alike = each.last, same
    return runs


def _first(said: Settle) -> int:
    return said.first
