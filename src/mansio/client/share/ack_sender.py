"""What members say of their leases, on its way to the brokers: gathered, and sent.

Where the leader of a partition is a Mansio broker, `AcknowledgeRecords` says it, at any time and of one certain
delivery, so that nothing is ever said of a later one. Apache Kafka wants it in the share session, behind whatever
the session waits for; there `lease_fetcher` takes it along, and does so everywhere when a fetch goes out anyway.

Always true: a request is sent at once if none is under way to that broker, else after `GATHER_S` or with `GATHERED_MAX`
of them; at most `IN_FLIGHT_MAX` are under way to one.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.client.share.ack_queue import EXPIRY_S, AckQueue
from mansio.client.share.in_flight_records import contiguous_runs
from mansio.client.share.leased import (
    ACCEPT,
    ACKNOWLEDGED,
    ACKNOWLEDGING,
    GAP,
    HELD,
    LOST,
    REJECT,
    RELEASE,
    RENEW,
    AckFuture,
    DelayNotOffered,
    LeaseLost,
)
from mansio.client.share.pending_ack import PendingAck, merge_contiguous
from mansio.client.tasks import client_failed
from mansio.errors import ConnectionLost, InvalidRecordState, MansioError, UnsupportedVersion
from mansio.net.retry import error_for, raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import acknowledge_records
from mansio.wire.apis.acknowledge_records import AcknowledgeBatch
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import AckListener, Leased, ReceiveOptions
    from mansio.client.share.pending_ack import PendingAcks
    from mansio.client.tasks import Tasks
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.wire.apis.acknowledge_records import AcknowledgeRecordsResponse

GATHER_S: Final = 0.005
GATHERED_MAX: Final = 500
IN_FLIGHT_MAX: Final = 4
"""Requests under way to one broker."""

REQUEST_TIMEOUT_MS_MAX: Final = 10_000
_WORDS: Final = {ACCEPT: "acknowledged", RELEASE: "given back", REJECT: "rejected", GAP: "skipped"}
_CHANNEL_NUMBERS = itertools.count()


class _Broker:
    """What is under way to one."""

    __slots__ = ("blocked_until", "failures", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self.failures = 0
        self.blocked_until = 0.0


class AckSender(AckQueue):
    """Of one receiver. All methods belong to the loop's thread; `dispatch` is called by the fetcher, in its turn."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        tasks: Tasks,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(cluster, in_flight_records, wake)
        self._options = options
        self._member_id = member_id
        self._tasks = tasks
        self._brokers: dict[int, _Broker] = {}
        self.ids: dict[TopicPartition, bytes] = {}
        """Of every partition anything was ever leased of."""
        self.supports_acknowledge_records: dict[int, bool] = {}
        """Whether a broker offers AcknowledgeRecords, as far as is known."""
        self.can_renew_in_session: Callable[[int], bool] = lambda _: False
        self._channel = f"settle {next(_CHANNEL_NUMBERS)}"
        in_flight_records.ack_target = self
        in_flight_records.renew = self.renew_in_background

    # -- what is said --------

    async def acknowledge(self, message: Leased, kind: int, *, delay_ms: int = -1, reason: str = "") -> None:
        """See `Leased`. Whoever gives up waiting leaves it under way."""
        self._check(message, kind, delay_ms)
        known = self._loop.create_future()
        if kind != RENEW:
            self._in_flight_records.start_acknowledging((message,))
        # What came from the file system may have half a character in it, which nothing can be sent with.
        reason = reason.encode(errors="backslashreplace").decode()
        self._enqueue((message,), kind, AckFuture(known, 1), delay_ms=delay_ms, reason=reason)
        self._flush_when_idle()
        await known

    async def acknowledge_all(self, messages: Sequence[Leased], kind: int) -> None:
        """The same of many; the first error is raised when all is known."""
        if not messages:
            return
        known = self._loop.create_future()
        outcome = AckFuture(known, len(messages))
        held, others = self._in_flight_records.start_acknowledging(() if self._is_closed else messages)
        for run in contiguous_runs(held):
            self._enqueue(run, kind, outcome)
        for message in messages if self._is_closed else others:
            outcome.completed((message,), self._refusal(message))
        self._flush_when_idle()
        await known

    def acknowledge_handled(self, messages: Sequence[Leased], kind: int, outcome: AckListener) -> None:
        """The same at once of those that `in_flight_records` knows somebody is done with, without waiting:
        `outcome` is told."""
        for run in contiguous_runs([message for message in messages if message._state == ACKNOWLEDGING]):
            self._enqueue(run, kind, outcome)
        for message in messages:
            if message._state == LOST:
                outcome.completed((message,), self._refusal(message))
        self._flush()

    def _flush_when_idle(self) -> None:
        """At once if the application has nothing in hand of which it could say more in this turn of the loop."""
        if self._in_flight_records.delivered <= 0:
            self._flush()
        else:
            self._flush_soon()

    def release(self, message: Leased) -> None:
        """Release, and wait for nothing."""
        if message._state == HELD and not self._is_closed:
            self._in_flight_records.start_acknowledging((message,))
            self._enqueue((message,), RELEASE, None)
            self._flush_soon()

    def renew_in_background(self, message: Leased) -> None:
        """Extend, and wait for nothing; `in_flight_records` hears of it."""
        if self._can_renew(message):
            self._enqueue((message,), RENEW, None)
            self._flush_soon()
        else:
            self._in_flight_records.not_renewed(message)

    def acknowledge_range(self, partition: TopicPartition, kind: int, first: int, last: int) -> None:
        """Of offsets without a message."""
        now = self._loop.time()
        self._put(partition, PendingAck(kind, first, last, now, now + EXPIRY_S))
        self._flush_soon()

    def seconds_left(self, message: Leased) -> float:
        """Until its lease ends, as far as is known."""
        return self._in_flight_records.seconds_left(message)

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
        done = _WORDS.get(message._ack_type, "settled") if message._state == ACKNOWLEDGED else "being settled"
        return InvalidRecordState(f"{_name(message)} is {done} already")

    def _is_native(self, message: Leased) -> bool:
        node = self._leader(message)
        return node is None or self.supports_acknowledge_records.get(node, True)

    def _can_renew(self, message: Leased) -> bool:
        node = self._leader(message)
        return (
            node is None
            or self.supports_acknowledge_records.get(node, True)
            or self.can_renew_in_session(node)
        )

    def _leader(self, message: Leased) -> int | None:
        return self.leader_of(TopicPartition(message.topic, message.partition), self._loop.time())

    def dispatch(self, waiting: dict[int, list[TopicPartition]], now: float) -> None:
        """Send what the sessions did not take along, to the brokers that have an API for it."""
        for node, partitions in waiting.items():
            broker = self._brokers.setdefault(node, _Broker())
            if not self.supports_acknowledge_records.get(node, True):
                continue
            if broker.blocked_until > now:
                self._earliest_timer.set(broker.blocked_until)
                continue
            if broker.in_flight >= IN_FLIGHT_MAX:
                continue
            if broker.in_flight:
                queued = [self._pending.get(partition, []) for partition in partitions]
                oldest = min((each[0].requested for each in queued if each), default=now)
                records = sum(pending.last - pending.first + 1 for each in queued for pending in each)
                if records < GATHERED_MAX and oldest + GATHER_S > now:
                    self._earliest_timer.set(oldest + GATHER_S)
                    continue
            taken = {partition: found for partition in partitions if (found := self._next(partition))}
            if taken:
                self._mark_in_flight(taken)
                broker.in_flight += 1
                connection = self._cluster.open_connection(node, self._channel)
                if connection is None:
                    self._tasks.spawn(self._connect_and_send(node, broker, taken))
                else:
                    self._send(connection, node, broker, taken)
        self._look_idle()

    # -- one request --------

    async def _connect_and_send(self, node: int, broker: _Broker, taken: PendingAcks) -> None:
        try:
            connection = await self._cluster.connection(node, self._channel)
        except MansioError as error:
            self._ended(node, broker, taken, b"", error)
        else:
            self._send(connection, node, broker, taken)

    def _send(self, connection: Connection, node: int, broker: _Broker, taken: PendingAcks) -> None:
        reply = self._tasks.reply(partial(self._ended, node, broker, taken))
        try:
            connection.version_for(ApiKey.ACKNOWLEDGE_RECORDS)
            number, client_id = connection.next_correlation_id(), connection.options.client_id
            topics: dict[bytes, list[tuple[int, list[AcknowledgeBatch]]]] = {}
            for partition, pending in taken.items():
                part = (partition.partition, _batches(pending))
                topics.setdefault(self.ids[partition], []).append(part)
            framed = acknowledge_records.encode_request(
                number, client_id, self._options.group, self._member_id, list(topics.items())
            )
            timeout_ms = min(connection.options.request_timeout_ms, REQUEST_TIMEOUT_MS_MAX)
            connection.begin((framed,), number, reply, timeout_ms=timeout_ms)
        except MansioError as error:
            reply.set_exception(error)
        except Exception as error:  # noqa: BLE001  # whoever waits is told, and what is said next is sent
            reply.set_exception(client_failed(error))

    def _ended(
        self, node: int, broker: _Broker, taken: PendingAcks, frame: bytes, error: MansioError | None
    ) -> None:
        """A request was answered, or came to nothing."""
        try:
            if error is None:
                try:
                    answer = acknowledge_records.decode_response(frame)
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
            if self.has_pending:
                self._wake()

    def _take(self, taken: PendingAcks, answer: AcknowledgeRecordsResponse) -> None:
        lock_s = answer.lock_ms / 1000
        requested = {(self.ids[each], each.partition): each for each in taken}
        for topic_id, index, code, message in answer.results:
            if (partition := requested.get((topic_id, index))) is not None:
                self.on_result(taken, partition, error_for(code, message) if code else None, lock_s)
        if taken:
            self.on_failure(taken, ConnectionLost("the broker said nothing of a partition"))

    def _failed(self, node: int, broker: _Broker, taken: PendingAcks, error: MansioError) -> None:
        if isinstance(error, UnsupportedVersion):
            self.supports_acknowledge_records[node] = False  # the session says it then
            error = ConnectionLost(error.message)
        else:
            broker.failures += 1
            delay_s = self._options.backoff.delay_seconds(broker.failures)
            broker.blocked_until = self._loop.time() + delay_s
            self._cluster.mark_stale({partition.topic for partition in taken})
        self.on_failure(taken, error)

    async def close(self) -> None:
        """Say nothing more, and leave nobody waiting."""
        self._end()
        await self._cluster.close_channel(self._channel)


def _batches(pending: list[PendingAck]) -> list[AcknowledgeBatch]:
    return [
        AcknowledgeBatch(
            run[0].first,
            run[-1].last,
            run[0].kind,
            run[0].delay_ms,
            run[0].reason,
            run[0].messages[0].delivery_count if run[0].messages else -1,
        )
        for run in merge_contiguous(pending)
    ]


def _name(message: Leased) -> str:
    return f"offset {message.offset} of {message.topic}-{message.partition}"
