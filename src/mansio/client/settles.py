"""What members say of their leases, on its way to the brokers: gathered, sent, and sent again.

Where the leader of a partition is a Mansio broker, `SettleLeases` says it, at any time and of one certain delivery, so
that nothing is ever said of a later one. Apache Kafka wants it in the share session, behind whatever the session waits
for; there `lease_fetcher` takes it along, and does so everywhere when a fetch goes out anyway.

A request is sent at once if none is under way to that broker, else after `GATHER_S` or with `GATHERED_MAX` of them. A
partition's part of a request holds as a whole or not at all: one that is refused is halved until it is known which
lease is gone.

Always true: everything that is said ends: with the broker's word, or at the end of the lease (`GIVE_UP_S` at least)
with `LeaseLost`; what waits is bounded by what is held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import (
    ConnectionLost,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    UnsupportedVersion,
)
from mansio.link.alarm import Alarm
from mansio.link.retry import error_for, raise_for
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .leased_types import (
    ACCEPT,
    GAP,
    HELD,
    LOST,
    REJECT,
    RELEASE,
    RENEW,
    SETTLED,
    DelayNotOffered,
    LeaseLost,
    Outcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.link.cluster import Cluster

    from .leaders import Leaders
    from .lease_book import LeaseBook
    from .leased_types import Leased, ReceiveOptions
    from .tasks import Tasks

    Said = dict[TopicPartition, list["Settle"]]

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.005
GATHERED_MAX: Final = 500
IN_FLIGHT_MAX: Final = 4
"""Requests under way to one broker."""

GIVE_UP_S: Final = 5.0
REQUEST_TIMEOUT_MS_MAX: Final = 10_000
_WORDS: Final = {ACCEPT: "acknowledged", RELEASE: "given back", REJECT: "rejected", GAP: "skipped"}
_LANES = itertools.count()


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


class _Broker:
    """What is under way to one."""

    __slots__ = ("blocked_until", "failures", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self.failures = 0
        self.blocked_until = 0.0


class Settler:
    """Of one receiver. All methods belong to the loop's thread; `dispatch` is called by the fetcher, in its turn."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        book: LeaseBook,
        tasks: Tasks,
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._member_id = member_id
        self._book = book
        self._tasks = tasks
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, wake)
        self._pending: Said = {}
        self._probes: dict[TopicPartition, deque[list[Settle]]] = {}
        """Parts of what was refused, each to be asked about alone."""
        self._flying: dict[int, Said] = {}
        self._brokers: dict[int, _Broker] = {}
        self._is_closed = False
        self.leaders: Leaders
        self.ids: dict[TopicPartition, bytes] = {}
        """Of every partition anything was ever leased of."""
        self.natives: dict[int, bool] = {}
        """Whether a broker offers SettleLeases, as far as is known."""
        self.can_renew_in_session: Callable[[int], bool] = lambda _: False
        self.idle = asyncio.Event()
        self.idle.set()
        self._lane = f"settle {next(_LANES)}"
        book.keeper = self
        book.renew = self.renew_later

    # -- what is said --------

    async def settle(self, message: Leased, kind: int, *, delay_ms: int = -1, reason: str = "") -> None:
        """See `Leased`. Whoever gives up waiting leaves it under way."""
        outcome = self._loop.create_future()
        self._check(message, kind, delay_ms)
        self._say(message, kind, Outcome(outcome, 1), delay_ms=delay_ms, reason=reason)
        await outcome

    async def settle_all(self, messages: Sequence[Leased], kind: int) -> None:
        """The same of many; the first error is raised when all is known."""
        if messages:
            for message in messages:
                self._check(message, kind, -1)
            outcome = self._loop.create_future()
            together = Outcome(outcome, len(messages))
            for message in messages:
                self._say(message, kind, together)
            await outcome

    def give_back(self, message: Leased) -> None:
        """Release, and wait for nothing."""
        if message._state == HELD:
            self._say(message, RELEASE, None)

    def renew_later(self, message: Leased) -> None:
        """Extend, and wait for nothing; `book` hears of it."""
        self._say(message, RENEW, None)

    def say_of_range(self, partition: TopicPartition, kind: int, first: int, last: int) -> None:
        """Of offsets without a message."""
        now = self._loop.time()
        self._put(partition, Settle(kind, first, last, now, now + GIVE_UP_S))

    def seconds_left(self, message: Leased) -> float:
        """Until its lease ends, as far as is known."""
        return self._book.seconds_left(message)

    def _check(self, message: Leased, kind: int, delay_ms: int) -> None:
        name = f"offset {message.offset} of {message.topic}-{message.partition}"
        if message._state == LOST or self._is_closed:
            raise LeaseLost(f"{name} is not leased by this member any more")
        if message._state != HELD:
            done = (
                _WORDS.get(message._settled_as, "settled") if message._state == SETTLED else "being settled"
            )
            raise InvalidRecordState(f"{name} is {done} already")
        if delay_ms < 0 and kind != RENEW:
            return
        node = self.leaders.find(message.topic, message.partition, self._loop.time())
        if node is None or self.natives.get(node, True):
            return
        if delay_ms >= 0:
            raise DelayNotOffered(
                f"{name}: this broker offers no delay of its own for a retry; leave `after` out"
            )
        if not self.can_renew_in_session(node):
            raise UnsupportedVersion(f"{name}: this broker extends no leases (it needs ShareAcknowledge 2)")

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
            node = self.leaders.find(*partition, now)
            if node is None:
                self.leaders.look_up(*partition, _not_found)
            else:
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
                waiting = self._current(self._pending.pop(partition, []))
                found = [said for said in waiting if said.goes_anywhere]
                if rest := [said for said in waiting if not said.goes_anywhere]:
                    self._pending[partition] = rest
            if found:
                taken[partition] = found
        if taken:
            self._flying[id(taken)] = taken
        return taken

    def dispatch(self, waiting: dict[int, list[TopicPartition]], now: float) -> None:
        """Send what the sessions did not take along, to the brokers that have an API for it."""
        for node, partitions in waiting.items():
            broker = self._brokers.setdefault(node, _Broker())
            if not self.natives.get(node, True):
                continue
            if broker.blocked_until > now:
                self._alarm.set(broker.blocked_until)
                continue
            if broker.in_flight >= IN_FLIGHT_MAX:
                continue
            if broker.in_flight:
                queued = [self._pending.get(partition, []) for partition in partitions]
                oldest = min((each[0].asked for each in queued if each), default=now)
                if sum(map(len, queued)) < GATHERED_MAX and oldest + GATHER_S > now:
                    self._alarm.set(oldest + GATHER_S)
                    continue
            taken = {partition: found for partition in partitions if (found := self._next(partition))}
            if taken:
                self._flying[id(taken)] = taken
                broker.in_flight += 1
                self._tasks.spawn(self._send(node, broker, taken))
        self._look_idle()

    def _next(self, partition: TopicPartition) -> list[Settle]:
        """What the next request says of a partition."""
        probes = self._probes.get(partition)
        while probes:
            found = self._current(probes.popleft())
            if not probes:
                del self._probes[partition]
            if found:
                return found
        return self._current(self._pending.pop(partition, []))

    def _current(self, waiting: list[Settle]) -> list[Settle]:
        """Without what is of no interest any more."""
        found: list[Settle] = []
        for said in waiting:
            message = said.message
            if message is not None and message._state == LOST:
                self._give_up(said, None)
            elif message is not None and said.kind == RENEW and message._state != HELD:
                message._is_renewing = False
                if said.outcome is not None:
                    said.outcome.tell(None)
            else:
                found.append(said)
        return found

    def _expire(self, partition: TopicPartition, now: float) -> None:
        for queue in (self._pending.get(partition, []), *self._probes.get(partition, ())):
            for said in [said for said in queue if said.give_up <= now]:
                queue.remove(said)
                self._give_up(said, None)
        if not self._pending.get(partition, [None]):
            del self._pending[partition]

    # -- one request --------

    async def _send(self, node: int, broker: _Broker, taken: Said) -> None:
        try:
            answer, names = await self._exchange(node, taken)
        except MansioError as error:
            if isinstance(error, UnsupportedVersion):
                self.natives[node] = False  # the session says it then
                error = ConnectionLost(error.message)
            else:
                broker.failures += 1
                delay_s = self._options.backoff.delay_seconds(broker.failures)
                broker.blocked_until = self._loop.time() + delay_s
                self._cluster.mark_stale({partition.topic for partition in taken})
            self.told_all(taken, error)
        else:
            broker.failures = 0
            told = {
                TopicPartition(names[bytes(topic.topic_id)], entry.partition_index): entry
                for topic in answer.topics
                for entry in topic.partitions
            }
            lock_s = answer.acquisition_lock_timeout_ms / 1000
            for partition in list(taken):
                entry = told.get(partition)
                if entry is not None:
                    code, message = entry.error_code, entry.error_message
                    self.told(taken, partition, error_for(code, message) if code else None, lock_s)
            self.told_all(taken, ConnectionLost("the broker said nothing of a partition"))
        finally:
            broker.in_flight -= 1
            self._wake()

    async def _exchange(self, node: int, taken: Said) -> tuple[Any, dict[bytes, str]]:
        connection = await self._cluster.connection(node, self._lane)
        topics: dict[bytes, list[dict[str, Any]]] = {}
        names: dict[bytes, str] = {}
        for partition, waiting in taken.items():
            topic_id = self.ids[partition]
            names[topic_id] = partition.topic
            topics.setdefault(topic_id, []).append(
                {"partition_index": partition.partition, "batches": _native_batches(waiting)}
            )
        fields = {
            "group_id": self._options.group,
            "member_id": self._member_id,
            "topics": [
                {"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in topics.items()
            ],
        }
        timeout_ms = min(connection.options.request_timeout_ms, REQUEST_TIMEOUT_MS_MAX)
        answer = await connection.request(ApiKey.SETTLE_LEASES, fields, timeout_ms=timeout_ms)
        raise_for(answer.error_code, answer.error_message)
        return answer, names

    # -- what came of it --------

    def told(
        self, taken: Said, partition: TopicPartition, error: MansioError | None, lock_s: float = 0.0
    ) -> None:
        """The broker's word on one partition's part of a request."""
        said = taken.pop(partition, [])
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

    # -- the end --------

    def _look_idle(self) -> None:
        if not self._pending and not self._probes and not self._flying:
            self.idle.set()

    async def close(self) -> None:
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
        await self._cluster.close_lane(self._lane)


def _not_found(error: MansioError) -> None:
    logger.info("looking for a leader: %s", error)


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


def _native_batches(said: list[Settle]) -> list[dict[str, Any]]:
    return [
        {
            "first_offset": run[0].first,
            "last_offset": run[-1].last,
            "types": bytes((run[0].kind,)),
            "delay_ms": run[0].delay_ms,
            "reason": run[0].reason,
            "delivery_count": -1 if run[0].message is None else run[0].message.delivery_count,
        }
        for run in runs_of(said)
    ]
