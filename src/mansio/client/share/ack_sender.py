"""Acknowledgement sender of a share consumer: queue of pending acknowledgements and the requests that send them.

If the leader of a partition is a Mansio broker, the sender uses the API `AcknowledgeRecords`. Such a request can be
sent at any time, and contains the delivery count, so that the broker never applies an acknowledgement to a later
delivery. Apache Kafka accepts acknowledgements only in the share session, where they wait behind a fetch that the
broker holds; for its brokers `share_fetcher` sends them. With both brokers, a fetch that is sent anyway contains the
pending acknowledgements of its session.

A request has one part per partition, which the broker accepts or refuses as a whole. The sender splits a refused part
in halves and sends these again, until it has found the records whose lease is lost.

Invariants:
* Every acknowledgement completes once: with the broker's result, or with `LeaseLost` when there is no result until the
  estimated end of the lease, but for `ACK_EXPIRY_S_MIN` at least.
* The number of pending acknowledgements is bounded by the number of records in flight.
* A request is sent at once if no request to that broker is in flight, otherwise after `GATHER_S_MAX` or when
  `GATHERED_RECORDS_MAX` records wait. At most `REQUESTS_IN_FLIGHT_MAX` requests to one broker are in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.client.share.in_flight_records import contiguous_runs
from mansio.client.share.leased import (
    ACCEPT,
    ACKNOWLEDGED,
    ACKNOWLEDGING,
    GAP,
    HELD,
    LOST,
    MILLISECONDS_PER_SECOND,
    NO_RENEWAL,
    REJECT,
    RELEASE,
    RENEW,
    RENEWAL_QUEUED,
    RENEWAL_SENT,
    AckFuture,
)
from mansio.client.tasks import log_client_failure
from mansio.errors import (
    ConnectionLost,
    DelayNotOffered,
    InvalidRecordState,
    InvalidRequest,
    LeaseLost,
    MansioError,
    UnsupportedVersion,
)
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import acknowledge_records
from mansio.wire.apis.acknowledge_records import AcknowledgeBatch
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import AckListener, Leased, ReceiveOptions
    from mansio.client.tasks import BackgroundTasks
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection
    from mansio.telemetry.client_telemetry import ClientTelemetry, Operation
    from mansio.wire.apis.acknowledge_records import AcknowledgeRecordsResponse

    PendingAcks = dict[TopicPartition, list["PendingAck"]]


logger = logging.getLogger(__name__)

ACK_EXPIRY_S_MIN: Final = 5.0
"""Minimum time, in seconds, for which an acknowledgement waits for a result before it fails with `LeaseLost`."""
GATHER_S_MAX: Final = 0.005
"""Maximum time, in seconds, for which acknowledgements are collected for one request while another is in flight."""
GATHERED_RECORDS_MAX: Final = 500
"""Number of records with pending acknowledgements at which a request is sent while another is in flight."""
REQUESTS_IN_FLIGHT_MAX: Final = 4
"""Maximum number of AcknowledgeRecords requests in flight to one broker."""

REQUEST_TIMEOUT_MS_MAX: Final = 10_000
_ACK_TYPE_TEXTS: Final = {ACCEPT: "acknowledged", RELEASE: "released", REJECT: "rejected", GAP: "skipped"}
_OPERATION_NAMES: Final = {ACCEPT: "ack", RELEASE: "retry", REJECT: "reject"}
"""Names of spans by the type of acknowledgement."""
_CHANNEL_NUMBERS = itertools.count()


class PendingAck:
    """Acknowledgement of messages with consecutive offsets and equal delivery counts, or of a range of offsets that has
    no messages.

    `queued_time_s` (when the acknowledgement was queued) and `expiry_time_s` (when it fails without a result) are times
    of the event loop. `lost_count`: `InFlightRecords.lost_count` at a time when none of `messages` was lost.
    """

    __slots__ = (
        "ack_type",
        "delay_ms",
        "expiry_time_s",
        "first_offset",
        "last_offset",
        "listener",
        "lost_count",
        "messages",
        "queued_time_s",
        "reason",
    )

    def __init__(
        self,
        ack_type: int,
        first_offset: int,
        last_offset: int,
        queued_time_s: float,
        expiry_time_s: float,
        *,
        messages: Sequence[Leased] = (),
        listener: AckListener | None = None,
        delay_ms: int = -1,
        reason: str = "",
        lost_count: int = 0,
    ) -> None:
        self.ack_type = ack_type
        self.first_offset = first_offset
        self.last_offset = last_offset
        self.queued_time_s = queued_time_s
        self.expiry_time_s = expiry_time_s
        self.messages = messages
        self.listener = listener
        self.delay_ms = delay_ms
        self.reason = reason
        self.lost_count = lost_count

    @property
    def fits_share_fetch(self) -> bool:
        """Whether a ShareFetch that requests records can contain the acknowledgement: it is no renewal and has neither
        a delay nor a reason."""
        return self.ack_type != RENEW and self.delay_ms < 0 and not self.reason

    @property
    def message_to_renew(self) -> Leased | None:
        """The message whose lease is to be renewed; None if this is no renewal. A renewal has one message."""
        return self.messages[0] if self.ack_type == RENEW and self.messages else None

    def copy_for(self, messages: Sequence[Leased]) -> PendingAck:
        """Return the same acknowledgement for some of its messages, which must have consecutive offsets."""
        return PendingAck(
            self.ack_type,
            messages[0].offset,
            messages[-1].offset,
            self.queued_time_s,
            self.expiry_time_s,
            messages=messages,
            listener=self.listener,
            delay_ms=self.delay_ms,
            reason=self.reason,
            lost_count=self.lost_count,
        )

    def on_completed(self, error: MansioError | None) -> None:
        """Report the result to the listener, if there is one."""
        if self.listener is not None:
            self.listener.on_completed(self.messages, error)


class _TracedAck:
    """Listener that ends the operation of a traced acknowledgement, after the last of its results or with the first
    error, and passes the results on."""

    __slots__ = ("_listener", "_operation", "_remaining")

    def __init__(self, operation: Operation, listener: AckListener, message_count: int) -> None:
        self._operation = operation
        self._listener = listener
        self._remaining = message_count

    def on_completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        if self._remaining > 0:
            self._remaining = 0 if error is not None else self._remaining - len(messages)
            if not self._remaining:
                self._operation.end(error)
        self._listener.on_completed(messages, error)


class _BrokerState:
    """Number of AcknowledgeRecords requests in flight to one broker, and its backoff after failures."""

    __slots__ = ("blocked_until_s", "failure_count", "in_flight_count")

    def __init__(self) -> None:
        self.in_flight_count = 0
        self.failure_count = 0
        self.blocked_until_s = 0.0


class AckSender:
    """Sends the acknowledgements of one receiver. All methods run on the event loop.

    `schedule_dispatch` schedules a dispatch of the share fetcher, which calls `send_pending`.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        tasks: BackgroundTasks,
        schedule_dispatch: Callable[[], None],
        *,
        leader_of: Callable[[TopicPartition, float], int | None],
        on_pending: Callable[[], None],
        can_renew_in_session: Callable[[int], bool],
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        """`leader_of` returns the node id of a partition's leader; None if it is unknown or the partition has a backoff
        at the given time of the event loop. `on_pending` is called when acknowledgements can be sent.
        `can_renew_in_session` returns whether the broker with a node id renews leases in its share session.
        `telemetry`: None if the client is not traced."""
        self._telemetry = telemetry
        self._cluster = cluster
        self._in_flight_records = in_flight_records
        self._schedule_dispatch = schedule_dispatch
        self._loop = asyncio.get_running_loop()
        self._earliest_timer = EarliestTimer(self._loop, schedule_dispatch)
        self._pending: PendingAcks = {}
        self._refused_halves: dict[TopicPartition, deque[list[PendingAck]]] = {}
        """Halves of the refused parts of a partition; each half is sent in a request of its own."""
        self._in_flight: dict[int, PendingAcks] = {}
        """Acknowledgements in flight of each request, by `id` of the `PendingAcks`."""
        self._backoffs: dict[TopicPartition, tuple[float, int]] = {}
        """Partition -> (time of the event loop before which nothing is sent, number of consecutive failures)."""
        self._renewals_in_flight = 0
        """Number of renewals in flight."""
        self._is_flush_scheduled = False
        self._is_closed = False
        self._leader_of = leader_of
        self._on_pending = on_pending
        self._can_renew_in_session = can_renew_in_session
        self.idle = asyncio.Event()
        """Event that is set while no acknowledgement is pending or in flight."""
        self.idle.set()
        self._options = options
        self._member_id = member_id
        self._tasks = tasks
        self._brokers: dict[int, _BrokerState] = {}
        self.topic_ids: dict[TopicPartition, bytes] = {}
        """Partition -> topic id, for all partitions that were ever assigned."""
        self.supports_acknowledge_records: dict[int, bool] = {}
        """Node id -> whether the broker supports AcknowledgeRecords; absent if unknown."""
        self._channel = f"acknowledge {next(_CHANNEL_NUMBERS)}"
        in_flight_records.acknowledge_with(self)

    # -- acknowledging --------

    async def acknowledge(
        self, message: Leased, ack_type: int, *, delay_ms: int = -1, reason: str = ""
    ) -> None:
        """Acknowledge one message and wait for the result. If the wait is cancelled, the acknowledgement is sent
        nevertheless. Raises `LeaseLost`, `InvalidRecordState` for a message that is already acknowledged,
        `DelayNotOffered`, `UnsupportedVersion`."""
        self._check_can_acknowledge(message, ack_type, delay_ms)
        known = self._loop.create_future()
        if ack_type != RENEW:
            self._in_flight_records.start_acknowledging((message,))
        if reason:  # one with file names may contain lone surrogates, which cannot be encoded
            reason = reason.encode(errors="backslashreplace").decode()
        listener: AckListener = AckFuture(known, 1)
        if self._telemetry is not None and ack_type != RENEW:
            listener = self._traced(self._telemetry, listener, (message,), ack_type)
        self._enqueue((message,), ack_type, listener, delay_ms=delay_ms, reason=reason)
        self._flush_when_idle()
        await known

    def accept_with_next_fetch(self, message: Leased) -> asyncio.Future[None]:
        """Accept one message with the next request that the share fetcher sends. Returns a future of the result, with
        the errors of `acknowledge`, which it raises if the message cannot be acknowledged."""
        self._check_can_acknowledge(message, ACCEPT, -1)
        known: asyncio.Future[None] = self._loop.create_future()
        known.add_done_callback(_retrieve_error)
        self._in_flight_records.start_acknowledging((message,))
        listener: AckListener = AckFuture(known, 1)
        if self._telemetry is not None:
            listener = self._traced(self._telemetry, listener, (message,), ACCEPT)
        self._enqueue((message,), ACCEPT, listener)
        return known

    async def acknowledge_all(self, messages: Sequence[Leased], ack_type: int) -> None:
        """Acknowledge many messages and wait for all results; then raises the first error, if there is one."""
        if not messages:
            return
        known = self._loop.create_future()
        listener: AckListener = AckFuture(known, len(messages))
        if self._telemetry is not None:
            listener = self._traced(self._telemetry, listener, messages, ack_type, is_batch=True)
        held, others = self._in_flight_records.start_acknowledging(() if self._is_closed else messages)
        for run in contiguous_runs(held):
            self._enqueue(run, ack_type, listener)
        for message in messages if self._is_closed else others:
            listener.on_completed((message,), self._unacknowledgeable_error(message))
        self._flush_when_idle()
        await known

    def send_acknowledgements(self, messages: Sequence[Leased], ack_type: int, listener: AckListener) -> None:
        """Send acknowledgements of messages that are already in state `ACKNOWLEDGING`, without waiting. `listener`
        receives the results, and an error for messages that were lost since."""
        if self._telemetry is not None:
            listener = self._traced(self._telemetry, listener, messages, ack_type, is_batch=True)
        for run in contiguous_runs([message for message in messages if message._state == ACKNOWLEDGING]):
            self._enqueue(run, ack_type, listener)
        for message in messages:
            if message._state == LOST:
                listener.on_completed((message,), self._unacknowledgeable_error(message))
        self._flush()

    def _traced(
        self,
        telemetry: ClientTelemetry,
        listener: AckListener,
        messages: Sequence[Leased],
        ack_type: int,
        *,
        is_batch: bool = False,
    ) -> AckListener:
        """Return a listener that also ends a span, which begins now, when the results of all messages are known."""
        operation = telemetry.start_acknowledging(
            _OPERATION_NAMES[ack_type], messages, group=self._options.group, is_batch=is_batch
        )
        return _TracedAck(operation, listener, len(messages))

    def _flush_when_idle(self) -> None:
        """Send pending acknowledgements at once if the application holds no other message; otherwise at the end of this
        iteration of the event loop, together with those that the application adds until then."""
        if self._in_flight_records.delivered_count <= 0:
            self._flush()
        else:
            self._flush_soon()

    def release(self, message: Leased) -> None:
        """Release a message, without the group's backoff where the broker supports that, and do not wait for the
        result. Does nothing if the message is not held."""
        if message._state == HELD and not self._is_closed:
            self._in_flight_records.start_acknowledging((message,))
            delay_ms = 0 if self._has_acknowledge_records(message) else -1
            self._enqueue((message,), RELEASE, None, delay_ms=delay_ms)
            self._flush_soon()

    def renew_in_background(self, message: Leased) -> None:
        """Renew a lease without waiting; the result is recorded in `InFlightRecords`."""
        if self._can_renew(message):
            self._enqueue((message,), RENEW, None)
            self._flush_soon()
        else:
            self._in_flight_records.on_not_renewed(message)

    def acknowledge_range(
        self,
        partition: TopicPartition,
        ack_type: int,
        first_offset: int,
        last_offset: int,
        *,
        reason: str = "",
    ) -> None:
        """Acknowledge a range of acquired offsets that have no messages, without waiting."""
        now = self._loop.time()
        self._append_pending(
            partition,
            PendingAck(ack_type, first_offset, last_offset, now, now + ACK_EXPIRY_S_MIN, reason=reason),
        )
        self._flush_soon()

    def seconds_left(self, message: Leased) -> float:
        """Return the estimated number of seconds until the lease of the message ends."""
        return self._in_flight_records.seconds_left(message)

    def _check_can_acknowledge(self, message: Leased, ack_type: int, delay_ms: int) -> None:
        if message._state != HELD or self._is_closed:
            raise self._unacknowledgeable_error(message)
        if delay_ms < 0 and ack_type != RENEW:
            return
        name = _name(message)
        if delay_ms >= 0 and not self._has_acknowledge_records(message):
            if ack_type == RENEW:
                raise UnsupportedVersion(f"{name}: this broker renews leases for the group's duration only")
            raise DelayNotOffered(f"{name}: this broker does not support retry delays; omit `after`")
        if ack_type == RENEW and not self._can_renew(message):
            raise UnsupportedVersion(
                f"{name}: this broker does not renew leases (it needs ShareAcknowledge 2)"
            )

    def _unacknowledgeable_error(self, message: Leased) -> MansioError:
        """Return the error for a message that cannot be acknowledged."""
        if message._state == LOST or self._is_closed:
            return LeaseLost(f"{_name(message)} is not leased by this member any more")
        done = (
            _ACK_TYPE_TEXTS.get(message._ack_type, "acknowledged")
            if message._state == ACKNOWLEDGED
            else "being acknowledged"
        )
        return InvalidRecordState(f"{_name(message)} is {done} already")

    def _has_acknowledge_records(self, message: Leased) -> bool:
        node = self._leader(message)
        return node is None or self.supports_acknowledge_records.get(node, True)

    def _can_renew(self, message: Leased) -> bool:
        node = self._leader(message)
        return (
            node is None
            or self.supports_acknowledge_records.get(node, True)
            or self._can_renew_in_session(node)
        )

    def _leader(self, message: Leased) -> int | None:
        return self._leader_of(TopicPartition(message.topic, message.partition), self._loop.time())

    def send_pending(self, waiting: dict[int, list[TopicPartition]], now: float) -> None:
        """Send AcknowledgeRecords with the pending acknowledgements of the partitions `waiting` (node id of the leader
        -> partitions) that share sessions have not sent. Brokers without that API get nothing."""
        for node, partitions in waiting.items():
            broker = self._brokers.setdefault(node, _BrokerState())
            if not self.supports_acknowledge_records.get(node, True):
                continue
            if broker.blocked_until_s > now:
                self._earliest_timer.set(broker.blocked_until_s)
                continue
            if broker.in_flight_count >= REQUESTS_IN_FLIGHT_MAX:
                continue
            if broker.in_flight_count:
                queued = [self._pending.get(partition, []) for partition in partitions]
                oldest = min((each[0].queued_time_s for each in queued if each), default=now)
                records = sum(
                    pending.last_offset - pending.first_offset + 1 for each in queued for pending in each
                )
                if records < GATHERED_RECORDS_MAX and oldest + GATHER_S_MAX > now:
                    self._earliest_timer.set(oldest + GATHER_S_MAX)
                    continue
            acks = {partition: found for partition in partitions if (found := self._take_next(partition))}
            if acks:
                self._mark_in_flight(acks)
                broker.in_flight_count += 1
                connection = self._cluster.existing_connection(node, self._channel)
                if connection is None:
                    self._tasks.spawn(self._connect_and_send(node, broker, acks))
                else:
                    self._send(connection, node, broker, acks)
        self._update_idle()

    # -- one request --------

    async def _connect_and_send(self, node: int, broker: _BrokerState, acks: PendingAcks) -> None:
        try:
            connection = await self._cluster.connection(node, self._channel)
        except MansioError as error:
            self._on_request_end(node, broker, acks, b"", error)
        else:
            self._send(connection, node, broker, acks)

    def _send(self, connection: BrokerConnection, node: int, broker: _BrokerState, acks: PendingAcks) -> None:
        reply = self._tasks.create_reply(partial(self._on_request_end, node, broker, acks))
        try:
            connection.version_for(ApiKey.ACKNOWLEDGE_RECORDS)
            number, client_id = connection.next_correlation_id(), connection.options.client_id
            topics: dict[bytes, list[tuple[int, list[AcknowledgeBatch]]]] = {}
            for partition, pending in acks.items():
                part = (partition.partition, _acknowledge_batches(pending))
                topics.setdefault(self.topic_ids[partition], []).append(part)
            framed = acknowledge_records.encode_request(
                number, client_id, self._options.group, self._member_id, list(topics.items())
            )
            timeout_ms = min(connection.options.request_timeout_ms, REQUEST_TIMEOUT_MS_MAX)
            connection.begin_exchange((framed,), number, reply, timeout_ms=timeout_ms)
        except MansioError as error:
            reply.set_exception(copied(error))
        except Exception as error:  # noqa: BLE001  # the error goes to the waiters, and later acknowledgements are still sent
            reply.set_exception(log_client_failure(error))

    def _on_request_end(
        self, node: int, broker: _BrokerState, acks: PendingAcks, frame: bytes, error: MansioError | None
    ) -> None:
        """Handle the response frame of a request, or the error with which it ended."""
        try:
            if error is None:
                try:
                    answer = acknowledge_records.decode_response(frame)
                    raise_for_code(answer.error_code, answer.error_message)
                except MansioError as refused:
                    error = without_traceback(refused)
                else:
                    broker.failure_count = 0
                    self._apply_response(acks, answer)
            if error is not None:
                self._on_request_error(node, broker, acks, error)
        finally:
            broker.in_flight_count -= 1
            if self.has_pending:
                self._schedule_dispatch()

    def _apply_response(self, acks: PendingAcks, answer: AcknowledgeRecordsResponse) -> None:
        lease_s = answer.lock_ms / 1000
        requested = {(self.topic_ids[each], each.partition): each for each in acks}
        for topic_id, index, code, message in answer.results:
            if (partition := requested.get((topic_id, index))) is not None:
                self.on_result(
                    acks, partition, client_error_for_code(code, message) if code else None, lease_s
                )
        if acks:
            self.on_failure(acks, ConnectionLost("the response lacks a partition"))

    def _on_request_error(
        self, node: int, broker: _BrokerState, acks: PendingAcks, error: MansioError
    ) -> None:
        if isinstance(error, UnsupportedVersion):
            self.supports_acknowledge_records[node] = False  # `share_fetcher` sends them in the share session
            error = ConnectionLost(error.message)
        else:
            broker.failure_count += 1
            delay_s = self._options.backoff.delay_seconds(broker.failure_count)
            broker.blocked_until_s = self._loop.time() + delay_s
            self._cluster.mark_stale({partition.topic for partition in acks})
        self.on_failure(acks, error)

    # -- queue of pending acknowledgements --------

    def _enqueue(
        self,
        run: Sequence[Leased],
        ack_type: int,
        listener: AckListener | None,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Queue an acknowledgement of messages with consecutive offsets and equal delivery counts."""
        now = self._loop.time()
        first = run[0]
        pending = PendingAck(
            ack_type,
            first[2],
            run[-1][2],
            now,
            max(first._lease.deadline_s, run[-1]._lease.deadline_s, now + ACK_EXPIRY_S_MIN),
            messages=run,
            listener=listener,
            delay_ms=delay_ms,
            reason=reason,
            lost_count=self._in_flight_records.lost_count,
        )
        self._append_pending(TopicPartition(first[0], first[1]), pending)

    def _append_pending(self, partition: TopicPartition, pending: PendingAck) -> None:
        if self._is_closed:
            self._fail_with_lease_lost(pending, None)
            return
        self._pending.setdefault(partition, []).append(pending)
        self.idle.clear()
        self._earliest_timer.set(pending.expiry_time_s)

    def _flush_soon(self) -> None:
        """Send pending acknowledgements at the end of this iteration of the event loop."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        """Send pending acknowledgements now."""
        if (self._pending or self._refused_halves) and not self._is_closed:
            self._on_pending()

    @property
    def has_pending(self) -> bool:
        """Whether acknowledgements wait to be sent."""
        return bool(self._pending or self._refused_halves)

    # -- choosing what to send --------

    def pending_by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        """Return the partitions with pending acknowledgements that can be sent at time `now`, by node id of the leader.
        Expired acknowledgements are completed before."""
        found: dict[int, list[TopicPartition]] = {}
        for partition in dict.fromkeys([*self._refused_halves, *self._pending]):
            self._expire(partition, now)
            if partition not in self._pending and partition not in self._refused_halves:
                continue
            if (until := self._backoffs.get(partition, (0.0, 0))[0]) > now:
                self._earliest_timer.set(until)
            elif (node := self._leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def take_for_session(self, partitions: Sequence[TopicPartition], *, everything: bool) -> PendingAcks:
        """Remove and return pending acknowledgements, which the caller sends in a share session and whose result it
        reports with `on_result` or `on_failure`. `everything`: whether to include those that do not fit a ShareFetch
        with records, because the broker has no other request for them."""
        acks: PendingAcks = {}
        for partition in partitions:
            if everything:
                found = self._take_next(partition)
            elif partition in self._refused_halves:
                continue
            else:
                found = []
                for pending in self._take_sendable(partition, self._pending.pop(partition, [])):
                    if pending.fits_share_fetch:
                        found.append(pending)
                    else:
                        self._pending.setdefault(partition, []).append(pending)
            if found:
                acks[partition] = found
        self._mark_in_flight(acks)
        return acks

    def _mark_in_flight(self, acks: PendingAcks) -> None:
        if acks:
            self._in_flight[id(acks)] = acks
            for pending in itertools.chain.from_iterable(acks.values()):
                if (message := pending.message_to_renew) is not None:
                    self._in_flight_records.set_renewal_state(message, RENEWAL_SENT)
                    self._renewals_in_flight += 1

    def _take_next(self, partition: TopicPartition) -> list[PendingAck]:
        """Remove and return the acknowledgements of a partition for the next request: one half of a refused part, or
        all pending ones."""
        refused_halves = self._refused_halves.get(partition)
        while refused_halves:
            found = self._take_sendable(partition, refused_halves.popleft())
            if not refused_halves:
                del self._refused_halves[partition]
            if found:
                return found
        return self._take_sendable(partition, self._pending.pop(partition, []))

    def _take_sendable(self, partition: TopicPartition, waiting: list[PendingAck]) -> list[PendingAck]:
        """Return the acknowledgements that can be sent now. Those of lost records are completed with an error. Those of
        records with a renewal in flight are queued again until it ends: otherwise the broker could handle them before
        the renewal, and would then refuse the renewal and all acknowledgements in its request."""
        found: list[PendingAck] = []
        later: list[PendingAck] = []
        for pending in waiting:
            for each in self._without_lost(pending):
                message = each.message_to_renew
                if message is not None and message._state != HELD:
                    self._in_flight_records.set_renewal_state(message, NO_RENEWAL)
                    each.on_completed(None)
                elif self._renewals_in_flight and any(
                    one._renewal_state == RENEWAL_SENT for one in each.messages
                ):
                    later.append(each)
                else:
                    found.append(each)
        if later:
            self._pending.setdefault(partition, []).extend(later)
        return found

    def _without_lost(self, pending: PendingAck) -> list[PendingAck]:
        """Return the acknowledgement without the messages that were lost since it was queued, as one acknowledgement
        per run of consecutive offsets. The acknowledgements of lost messages are completed with an error."""
        if pending.lost_count == self._in_flight_records.lost_count or not pending.messages:
            return [pending]
        parts: list[list[Leased]] = [[]]
        for message in pending.messages:
            if message._state == LOST:
                self._fail_with_lease_lost(pending.copy_for([message]), None)
                parts.append([])
            else:
                parts[-1].append(message)
        pending.lost_count = self._in_flight_records.lost_count
        if len(parts) == 1:
            return [pending]
        return [pending.copy_for(part) for part in parts if part]

    def _expire(self, partition: TopicPartition, now: float) -> None:
        """Complete the expired acknowledgements of a partition with an error, and set the timer to the next expiry."""
        for queue in (self._pending.get(partition, []), *self._refused_halves.get(partition, ())):
            for pending in [pending for pending in queue if pending.expiry_time_s <= now]:
                queue.remove(pending)
                self._fail_with_lease_lost(pending, None)
            if queue:
                self._earliest_timer.set(min(pending.expiry_time_s for pending in queue))
        if not self._pending.get(partition, [None]):
            del self._pending[partition]

    # -- results --------

    def on_result(
        self, acks: PendingAcks, partition: TopicPartition, error: MansioError | None, lease_s: float = 0.0
    ) -> None:
        """Handle the result of the part of a request that concerns one partition. `acks`: the acknowledgements of the
        request without result, from which those of the partition are removed; `lease_s`: duration of renewed leases in
        seconds, 0 if unknown. Retriable errors are retried."""
        pending = acks.pop(partition, [])
        for each in pending:
            if (message := each.message_to_renew) is not None:
                self._in_flight_records.set_renewal_state(message, RENEWAL_QUEUED)
                self._renewals_in_flight -= 1
        if error is None:
            self._backoffs.pop(partition, None)
            for each in pending:
                self._complete(partition, each, lease_s)
        elif isinstance(error, InvalidRecordState | InvalidRequest) and (parts := split_in_halves(pending)):
            self._refused_halves.setdefault(partition, deque()).extend(parts)
        elif error.retriable:
            self._cluster.mark_stale((partition.topic,))
            now = self._loop.time()
            if not isinstance(error, ConnectionLost):  # an unreachable broker has a backoff of its own
                failures = self._backoffs.get(partition, (0.0, 0))[1] + 1
                self._backoffs[partition] = (now + self._cluster.backoff.delay_seconds(failures), failures)
            again = []
            for each in pending:
                if each.expiry_time_s <= now or self._is_closed:
                    self._fail_with_lease_lost(each, error)
                else:
                    again.append(each)
            if again:
                self._pending.setdefault(partition, [])[:0] = again
                self._earliest_timer.set(again[0].expiry_time_s)
        else:
            for each in pending:
                self._on_refused(each, error)
        if not acks:
            self._in_flight.pop(id(acks), None)
        self._update_idle()

    def on_failure(self, acks: PendingAcks, error: MansioError) -> None:
        """Set `error` as the result of the acknowledgements of a request that have no result yet."""
        for partition in list(acks):
            self.on_result(acks, partition, error)

    def _complete(self, partition: TopicPartition, pending: PendingAck, lease_s: float) -> None:
        if (message := pending.message_to_renew) is not None:
            if pending.delay_ms > 0:
                lease_s = pending.delay_ms / MILLISECONDS_PER_SECOND
            self._in_flight_records.on_renewed(message, lease_s, is_chosen=pending.delay_ms > 0)
        elif pending.messages:
            self._in_flight_records.on_acknowledged(partition, pending.messages, pending.ack_type)
        pending.on_completed(None)

    def _on_refused(self, pending: PendingAck, error: MansioError) -> None:
        if isinstance(error, InvalidRecordState):
            self._fail_with_lease_lost(pending, error)
            return
        for message in pending.messages:
            if pending.ack_type == RENEW:
                self._in_flight_records.on_not_renewed(message)
            elif pending.listener is not None:
                self._in_flight_records.restore(message)
            else:  # it is not acknowledged again: let its lease end
                self._in_flight_records.mark_lost(message)
        if pending.listener is not None:
            pending.on_completed(error)
        else:
            logger.warning("lease not acknowledged: %s", error)

    def _fail_with_lease_lost(self, pending: PendingAck, error: MansioError | None) -> None:
        """Complete an acknowledgement with `LeaseLost`, because the lease is lost or the acknowledgement got no result
        until it expired, and mark its messages as lost. Undelivered records of a renewal are marked as lost."""
        if not pending.messages:
            return
        for message in pending.messages:
            if pending.ack_type == RENEW:
                self._in_flight_records.on_not_renewed(message)
            else:
                self._in_flight_records.mark_lost(message)
        if pending.listener is None:
            return
        first = pending.messages[0]
        name = f"{first.topic}-{first.partition}"
        which = f"offset {pending.first_offset} of {name} is"
        if pending.first_offset != pending.last_offset:
            which = f"offsets {pending.first_offset} to {pending.last_offset} of {name} are"
        why = f": {error.message}" if error is not None else ""
        lost = LeaseLost(f"{which} not leased by this member any more{why}")
        lost.__cause__ = without_traceback(error)
        pending.on_completed(lost)

    def _update_idle(self) -> None:
        if not self._pending and not self._refused_halves and not self._in_flight:
            self.idle.set()

    async def close(self) -> None:
        """Stop sending; complete all acknowledgements that are pending or in flight with an error."""
        self._fail_all()
        await self._cluster.close_channel(self._channel)

    def _fail_all(self) -> None:
        """Complete all acknowledgements that are pending or in flight with an error."""
        self._is_closed = True
        self._earliest_timer.cancel()
        queues = [*self._pending.values(), *itertools.chain.from_iterable(self._refused_halves.values())]
        queues += [pending for acks in self._in_flight.values() for pending in acks.values()]
        self._pending.clear()
        self._refused_halves.clear()
        self._in_flight.clear()
        for pending in itertools.chain.from_iterable(queues):
            self._fail_with_lease_lost(pending, ConnectionLost("the receiver is closed"))
        self.idle.set()


def _acknowledge_batches(pending: list[PendingAck]) -> list[AcknowledgeBatch]:
    return [
        AcknowledgeBatch(
            run[0].first_offset,
            run[-1].last_offset,
            run[0].ack_type,
            run[0].delay_ms,
            run[0].reason,
            run[0].messages[0].delivery_count if run[0].messages else -1,
        )
        for run in merge_contiguous(pending)
    ]


def _retrieve_error(known: asyncio.Future[None]) -> None:
    """Prevent asyncio's warning about a future that is not awaited, because another error was raised before."""
    if not known.cancelled():
        known.exception()


def _name(message: Leased) -> str:
    return f"offset {message.offset} of {message.topic}-{message.partition}"


def split_in_halves(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Split acknowledgements into two halves. Returns an empty list for a single record."""
    if len(pending) > 1:
        middle = len(pending) // 2
        return [pending[:middle], pending[middle:]]
    messages = pending[0].messages if pending else ()
    if len(messages) > 1:
        middle = len(messages) // 2
        return [[pending[0].copy_for(messages[:middle])], [pending[0].copy_for(messages[middle:])]]
    return []


def merge_contiguous(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Group acknowledgements into runs with consecutive offsets and equal type, delay, reason and delivery count, in
    offset order. If two acknowledgements concern the same offset, the second one is dropped."""
    if len(pending) == 1:
        return [pending]
    runs: list[list[PendingAck]] = []
    end = -1
    alike: tuple[Any, ...] = ()
    for each in sorted(pending, key=_first):
        if each.first_offset <= end:
            continue
        count = each.messages[0].delivery_count if each.messages else -1
        same = (each.ack_type, each.delay_ms, each.reason, count)
        if runs and each.first_offset == end + 1 and same == alike:
            runs[-1].append(each)
        else:
            runs.append([each])
        end, alike = each.last_offset, same
    return runs


def _first(pending: PendingAck) -> int:
    return pending.first_offset
