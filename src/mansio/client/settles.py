"""What members say of their leases, on its way to the brokers: gathered, and sent.

Where the leader of a partition is a Mansio broker, `SettleLeases` says it, at any time and of one certain delivery, so
that nothing is ever said of a later one. Apache Kafka wants it in the share session, behind whatever the session waits
for; there `lease_fetcher` takes it along, and does so everywhere when a fetch goes out anyway.

Always true: a request is sent at once if none is under way to that broker, else after `GATHER_S` or with `GATHERED_MAX`
of them; at most `IN_FLIGHT_MAX` are under way to one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConnectionLost, InvalidRecordState, MansioError, UnsupportedVersion
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
from .settle_queue import GIVE_UP_S, Settle, SettleQueue, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.link.cluster import Cluster

    from .lease_book import LeaseBook
    from .leased_types import Leased, ReceiveOptions
    from .settle_queue import Said
    from .tasks import Tasks

GATHER_S: Final = 0.005
GATHERED_MAX: Final = 500
IN_FLIGHT_MAX: Final = 4
"""Requests under way to one broker."""

REQUEST_TIMEOUT_MS_MAX: Final = 10_000
_WORDS: Final = {ACCEPT: "acknowledged", RELEASE: "given back", REJECT: "rejected", GAP: "skipped"}
_LANES = itertools.count()


class _Broker:
    """What is under way to one."""

    __slots__ = ("blocked_until", "failures", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self.failures = 0
        self.blocked_until = 0.0


class Settler(SettleQueue):
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
        super().__init__(cluster, book, wake)
        self._options = options
        self._member_id = member_id
        self._tasks = tasks
        self._brokers: dict[int, _Broker] = {}
        self.ids: dict[TopicPartition, bytes] = {}
        """Of every partition anything was ever leased of."""
        self.natives: dict[int, bool] = {}
        """Whether a broker offers SettleLeases, as far as is known."""
        self.can_renew_in_session: Callable[[int], bool] = lambda _: False
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
        if not messages:
            return
        outcome = self._loop.create_future()
        together = Outcome(outcome, len(messages))
        for message in messages:
            try:
                self._check(message, kind, -1)
            except MansioError as error:
                together.tell(error)
            else:
                self._say(message, kind, together)
        await outcome

    def give_back(self, message: Leased) -> None:
        """Release, and wait for nothing."""
        if message._state == HELD:
            self._say(message, RELEASE, None)

    def renew_later(self, message: Leased) -> None:
        """Extend, and wait for nothing; `book` hears of it."""
        if self._can_renew(message):
            self._say(message, RENEW, None)
        else:
            self._book.not_renewed(message)

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
        if delay_ms >= 0 and not self._is_native(message):
            raise DelayNotOffered(
                f"{name}: this broker offers no delay of its own for a retry; leave `after` out"
            )
        if kind == RENEW and not self._can_renew(message):
            raise UnsupportedVersion(f"{name}: this broker extends no leases (it needs ShareAcknowledge 2)")

    def _is_native(self, message: Leased) -> bool:
        node = self._leader(message)
        return node is None or self.natives.get(node, True)

    def _can_renew(self, message: Leased) -> bool:
        node = self._leader(message)
        return node is None or self.natives.get(node, True) or self.can_renew_in_session(node)

    def _leader(self, message: Leased) -> int | None:
        return self.leader_of(TopicPartition(message.topic, message.partition), self._loop.time())

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
                self._fly(taken)
                broker.in_flight += 1
                self._tasks.spawn(self._send(node, broker, taken))
        self._look_idle()

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

    async def close(self) -> None:
        """Say nothing more, and leave nobody waiting."""
        self._end()
        await self._cluster.close_lane(self._lane)


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
