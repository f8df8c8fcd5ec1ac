"""What members say of their leases, on its way to the brokers: gathered, and sent.

Where the leader of a partition is a Mansio broker, `SettleLeases` says it, at any time and of one certain delivery, so
that nothing is ever said of a later one. Apache Kafka wants it in the share session, behind whatever the session waits
for; there `lease_fetcher` takes it along, and does so everywhere when a fetch goes out anyway.

Always true: a request is sent at once if none is under way to that broker, else after `GATHER_S` or with `GATHERED_MAX`
of them; at most `IN_FLIGHT_MAX` are under way to one.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.errors import ConnectionLost, InvalidRecordState, MansioError, UnsupportedVersion
from mansio.link.retry import error_for, raise_for
from mansio.wire import settle_leases
from mansio.wire.settle_leases import SettleBatch
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .lease_book import neighbours
from .leased_types import (
    ACCEPT,
    GAP,
    HELD,
    LOST,
    REJECT,
    RELEASE,
    RENEW,
    SETTLED,
    SETTLING,
    DelayNotOffered,
    LeaseLost,
    Outcome,
)
from .said import Settle, runs_of
from .settle_queue import GIVE_UP_S, SettleQueue
from .tasks import client_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.link.cluster import Cluster
    from mansio.link.connection import Connection
    from mansio.wire.settle_leases import SettleLeasesResponse

    from .lease_book import LeaseBook
    from .leased_types import Leased, Listener, ReceiveOptions
    from .said import Said
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
        self._check(message, kind, delay_ms)
        known = self._loop.create_future()
        if kind != RENEW:
            self._book.begins_to_settle((message,))
        # What came from the file system may have half a character in it, which nothing can be sent with.
        reason = reason.encode(errors="backslashreplace").decode()
        self._say((message,), kind, Outcome(known, 1), delay_ms=delay_ms, reason=reason)
        self._send_said()
        await known

    async def settle_all(self, messages: Sequence[Leased], kind: int) -> None:
        """The same of many; the first error is raised when all is known."""
        if not messages:
            return
        known = self._loop.create_future()
        outcome = Outcome(known, len(messages))
        held, others = self._book.begins_to_settle(() if self._is_closed else messages)
        for run in neighbours(held):
            self._say(run, kind, outcome)
        for message in messages if self._is_closed else others:
            outcome.tell((message,), self._refusal(message))
        self._send_said()
        await known

    def say_of_begun(self, messages: Sequence[Leased], kind: int, outcome: Listener) -> None:
        """The same at once of those that `book` knows somebody is done with, without waiting: `outcome` is told."""
        for run in neighbours([message for message in messages if message._state == SETTLING]):
            self._say(run, kind, outcome)
        for message in messages:
            if message._state == LOST:
                outcome.tell((message,), self._refusal(message))
        self._say_now()

    def _send_said(self) -> None:
        """At once if the application has nothing in hand of which it could say more in this turn of the loop."""
        if self._book.in_hand <= 0:
            self._say_now()
        else:
            self._say_soon()

    def give_back(self, message: Leased) -> None:
        """Release, and wait for nothing."""
        if message._state == HELD and not self._is_closed:
            self._book.begins_to_settle((message,))
            self._say((message,), RELEASE, None)
            self._say_soon()

    def renew_later(self, message: Leased) -> None:
        """Extend, and wait for nothing; `book` hears of it."""
        if self._can_renew(message):
            self._say((message,), RENEW, None)
            self._say_soon()
        else:
            self._book.not_renewed(message)

    def say_of_range(self, partition: TopicPartition, kind: int, first: int, last: int) -> None:
        """Of offsets without a message."""
        now = self._loop.time()
        self._put(partition, Settle(kind, first, last, now, now + GIVE_UP_S))
        self._say_soon()

    def seconds_left(self, message: Leased) -> float:
        """Until its lease ends, as far as is known."""
        return self._book.seconds_left(message)

    def _check(self, message: Leased, kind: int, delay_ms: int) -> None:
        if message._state != HELD or self._is_closed:
            raise self._refusal(message)
        if delay_ms < 0 and kind != RENEW:
            return
        name = _name(message)
        if delay_ms >= 0 and not self._is_native(message):
            raise DelayNotOffered(
                f"{name}: this broker offers no delay of its own for a retry; leave `after` out"
            )
        if kind == RENEW and not self._can_renew(message):
            raise UnsupportedVersion(f"{name}: this broker extends no leases (it needs ShareAcknowledge 2)")

    def _refusal(self, message: Leased) -> MansioError:
        """Why nothing can be said of it."""
        if message._state == LOST or self._is_closed:
            return LeaseLost(f"{_name(message)} is not leased by this member any more")
        done = _WORDS.get(message._settled_as, "settled") if message._state == SETTLED else "being settled"
        return InvalidRecordState(f"{_name(message)} is {done} already")

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
                records = sum(said.last - said.first + 1 for each in queued for said in each)
                if records < GATHERED_MAX and oldest + GATHER_S > now:
                    self._alarm.set(oldest + GATHER_S)
                    continue
            taken = {partition: found for partition in partitions if (found := self._next(partition))}
            if taken:
                self._fly(taken)
                broker.in_flight += 1
                connection = self._cluster.open_connection(node, self._lane)
                if connection is None:
                    self._tasks.spawn(self._connect_and_send(node, broker, taken))
                else:
                    self._send(connection, node, broker, taken)
        self._look_idle()

    # -- one request --------

    async def _connect_and_send(self, node: int, broker: _Broker, taken: Said) -> None:
        try:
            connection = await self._cluster.connection(node, self._lane)
        except MansioError as error:
            self._ended(node, broker, taken, b"", error)
        else:
            self._send(connection, node, broker, taken)

    def _send(self, connection: Connection, node: int, broker: _Broker, taken: Said) -> None:
        reply = self._tasks.reply(partial(self._ended, node, broker, taken))
        try:
            connection.version_for(ApiKey.SETTLE_LEASES)
            number, client_id = connection.next_correlation_id(), connection.options.client_id
            topics: dict[bytes, list[tuple[int, list[SettleBatch]]]] = {}
            for partition, said in taken.items():
                part = (partition.partition, _batches(said))
                topics.setdefault(self.ids[partition], []).append(part)
            framed = settle_leases.encode_request(
                number, client_id, self._options.group, self._member_id, list(topics.items())
            )
            timeout_ms = min(connection.options.request_timeout_ms, REQUEST_TIMEOUT_MS_MAX)
            connection.begin((framed,), number, reply, timeout_ms=timeout_ms)
        except MansioError as error:
            reply.set_exception(error)
        except Exception as error:  # noqa: BLE001  # whoever waits is told, and what is said next is sent
            reply.set_exception(client_failed(error))

    def _ended(
        self, node: int, broker: _Broker, taken: Said, frame: bytes, error: MansioError | None
    ) -> None:
        """A request was answered, or came to nothing."""
        try:
            if error is None:
                try:
                    answer = settle_leases.decode_response(frame)
                    raise_for(answer.error_code, answer.error_message)
                except MansioError as refused:
                    error = refused
                else:
                    broker.failures = 0
                    self._take(taken, answer)
            if error is not None:
                self._failed(node, broker, taken, error)
        finally:
            broker.in_flight -= 1
            if self.is_waiting:
                self._wake()

    def _take(self, taken: Said, answer: SettleLeasesResponse) -> None:
        lock_s = answer.lock_ms / 1000
        asked = {(self.ids[each], each.partition): each for each in taken}
        for topic_id, index, code, message in answer.results:
            if (partition := asked.get((topic_id, index))) is not None:
                self.told(taken, partition, error_for(code, message) if code else None, lock_s)
        if taken:
            self.told_all(taken, ConnectionLost("the broker said nothing of a partition"))

    def _failed(self, node: int, broker: _Broker, taken: Said, error: MansioError) -> None:
        if isinstance(error, UnsupportedVersion):
            self.natives[node] = False  # the session says it then
            error = ConnectionLost(error.message)
        else:
            broker.failures += 1
            delay_s = self._options.backoff.delay_seconds(broker.failures)
            broker.blocked_until = self._loop.time() + delay_s
            self._cluster.mark_stale({partition.topic for partition in taken})
        self.told_all(taken, error)

    async def close(self) -> None:
        """Say nothing more, and leave nobody waiting."""
        self._end()
        await self._cluster.close_lane(self._lane)


def _batches(said: list[Settle]) -> list[SettleBatch]:
    return [
        SettleBatch(
            run[0].first,
            run[-1].last,
            run[0].kind,
            run[0].delay_ms,
            run[0].reason,
            run[0].messages[0].delivery_count if run[0].messages else -1,
        )
        for run in runs_of(said)
    ]


def _name(message: Leased) -> str:
    return f"offset {message.offset} of {message.topic}-{message.partition}"
