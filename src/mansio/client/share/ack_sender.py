"""Acknowledgements of a share consumer: queue of pending acknowledgements and the requests that send them.

If the leader of a partition is a Mansio broker, they are sent with `AcknowledgeRecords`, at any time and with the
delivery count, so that an acknowledgement never applies to a later delivery. Apache Kafka accepts them only in the
share session, behind the fetch that waits in it; there `share_fetcher` sends them. A fetch that is sent anyway carries
them with both kinds of brokers.

The part of a request that concerns one partition succeeds or fails as a whole. A part that is refused is split in
halves and sent again until the lost leases are isolated.

Invariants:
* Every acknowledgement completes once: with the broker's result, or with `LeaseLost` when the lease is over as far as
  the client knows (after `EXPIRY_S` at least). The queue is bounded by the records in flight.
* A request is sent at once if none to that broker is in flight, otherwise after `GATHER_S` or when `GATHERED_MAX`
  records wait. At most `IN_FLIGHT_MAX` requests to one broker are in flight.
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
    NOT_RENEWING,
    REJECT,
    RELEASE,
    RENEW,
    RENEWAL_SENT,
    RENEWAL_WAITS,
    AckFuture,
    DelayNotOffered,
    LeaseLost,
)
from mansio.client.tasks import client_failed
from mansio.errors import ConnectionLost, InvalidRecordState, InvalidRequest, MansioError, UnsupportedVersion
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import error_for, raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import acknowledge_records
from mansio.wire.apis.acknowledge_records import AcknowledgeBatch
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import AckListener, Leased, ReceiveOptions
    from mansio.client.tasks import Tasks
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.wire.apis.acknowledge_records import AcknowledgeRecordsResponse

    PendingAcks = dict[TopicPartition, list["PendingAck"]]


logger = logging.getLogger(__name__)

EXPIRY_S: Final = 5.0
GATHER_S: Final = 0.005
GATHERED_MAX: Final = 500
IN_FLIGHT_MAX: Final = 4
"""Requests in flight to one broker."""

REQUEST_TIMEOUT_MS_MAX: Final = 10_000
_WORDS: Final = {ACCEPT: "acknowledged", RELEASE: "released", REJECT: "rejected", GAP: "skipped"}
_CHANNEL_NUMBERS = itertools.count()


class PendingAck:
    """Acknowledgement of contiguous messages with one delivery count, or of a range without messages.

    `requested` and `expires` are times of the event loop; `lost_count`: number of lost records at a time when none of
    `messages` was lost.
    """

    __slots__ = (
        "delay_ms",
        "expires",
        "first",
        "kind",
        "last",
        "lost_count",
        "messages",
        "outcome",
        "reason",
        "requested",
    )

    def __init__(
        self,
        kind: int,
        first: int,
        last: int,
        requested: float,
        expires: float,
        *,
        messages: Sequence[Leased] = (),
        outcome: AckListener | None = None,
        delay_ms: int = -1,
        reason: str = "",
        lost_count: int = 0,
    ) -> None:
        self.kind = kind
        self.first = first
        self.last = last
        self.requested = requested
        self.expires = expires
        self.messages = messages
        self.outcome = outcome
        self.delay_ms = delay_ms
        self.reason = reason
        self.lost_count = lost_count

    @property
    def fits_share_session(self) -> bool:
        """Whether Kafka's ShareFetch and ShareAcknowledge can express it."""
        return self.kind != RENEW and self.delay_ms < 0 and not self.reason

    @property
    def message_to_renew(self) -> Leased | None:
        """The message of a renewal; renewals have one message each."""
        return self.messages[0] if self.kind == RENEW and self.messages else None

    def copy_for(self, messages: Sequence[Leased]) -> PendingAck:
        """The same acknowledgement for some of its messages, which must be contiguous."""
        return PendingAck(
            self.kind,
            messages[0].offset,
            messages[-1].offset,
            self.requested,
            self.expires,
            messages=messages,
            outcome=self.outcome,
            delay_ms=self.delay_ms,
            reason=self.reason,
            lost_count=self.lost_count,
        )

    def completed(self, error: MansioError | None) -> None:
        """Report the outcome to its listener."""
        if self.outcome is not None:
            self.outcome.completed(self.messages, error)


class _Broker:
    """Requests to one broker."""

    __slots__ = ("blocked_until", "failures", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self.failures = 0
        self.blocked_until = 0.0


class AckSender:
    """Acknowledgements of one receiver. All methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        tasks: Tasks,
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._in_flight_records = in_flight_records
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._earliest_timer = EarliestTimer(self._loop, wake)
        self._pending: PendingAcks = {}
        self._probes: dict[TopicPartition, deque[list[PendingAck]]] = {}
        """Halves of refused parts, each sent alone."""
        self._in_flight: dict[int, PendingAcks] = {}
        self._backoffs: dict[TopicPartition, tuple[float, int]] = {}
        """Per partition the time until which nothing is sent, and the number of failures in a row."""
        self._renewing = 0
        """Renewals in flight."""
        self._is_due = False
        self._is_closed = False
        self.leader_of: Callable[[TopicPartition, float], int | None] = lambda _partition, _now: None
        """The leader of a partition at that time, if known."""
        self.on_pending: Callable[[], None] = wake
        """Called when there is something to send."""
        self.idle = asyncio.Event()
        """Set while nothing is pending or in flight."""
        self.idle.set()
        self._options = options
        self._member_id = member_id
        self._tasks = tasks
        self._brokers: dict[int, _Broker] = {}
        self.ids: dict[TopicPartition, bytes] = {}
        """Topic ids of all partitions of which records were ever leased."""
        self.supports_acknowledge_records: dict[int, bool] = {}
        """Per broker, whether it offers AcknowledgeRecords, as far as known."""
        self.can_renew_in_session: Callable[[int], bool] = lambda _: False
        self._channel = f"acknowledge {next(_CHANNEL_NUMBERS)}"
        in_flight_records.ack_target = self
        in_flight_records.renew = self.renew_in_background

    # -- acknowledging --------

    async def acknowledge(self, message: Leased, kind: int, *, delay_ms: int = -1, reason: str = "") -> None:
        """Acknowledge one message and wait for the result. Cancelling the wait does not cancel the request."""
        self._check(message, kind, delay_ms)
        known = self._loop.create_future()
        if kind != RENEW:
            self._in_flight_records.start_acknowledging((message,))
        # A reason with file names may contain lone surrogates, which cannot be encoded.
        reason = reason.encode(errors="backslashreplace").decode()
        self._enqueue((message,), kind, AckFuture(known, 1), delay_ms=delay_ms, reason=reason)
        self._flush_when_idle()
        await known

    async def acknowledge_all(self, messages: Sequence[Leased], kind: int) -> None:
        """Acknowledge many messages; raises the first error once all results are known."""
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
        """Send acknowledgements of messages that `in_flight_records` has marked, without waiting; `outcome`
        receives the results."""
        for run in contiguous_runs([message for message in messages if message._state == ACKNOWLEDGING]):
            self._enqueue(run, kind, outcome)
        for message in messages:
            if message._state == LOST:
                outcome.completed((message,), self._refusal(message))
        self._flush()

    def _flush_when_idle(self) -> None:
        """Send at once if the application has no other message that it could acknowledge."""
        if self._in_flight_records.delivered <= 0:
            self._flush()
        else:
            self._flush_soon()

    def release(self, message: Leased) -> None:
        """Release a message without waiting for the result."""
        if message._state == HELD and not self._is_closed:
            self._in_flight_records.start_acknowledging((message,))
            self._enqueue((message,), RELEASE, None)
            self._flush_soon()

    def renew_in_background(self, message: Leased) -> None:
        """Renew a lease without waiting; the result goes to `in_flight_records`."""
        if self._can_renew(message):
            self._enqueue((message,), RENEW, None)
            self._flush_soon()
        else:
            self._in_flight_records.not_renewed(message)

    def acknowledge_range(self, partition: TopicPartition, kind: int, first: int, last: int) -> None:
        """Acknowledge offsets that have no message."""
        now = self._loop.time()
        self._put(partition, PendingAck(kind, first, last, now, now + EXPIRY_S))
        self._flush_soon()

    def seconds_left(self, message: Leased) -> float:
        """Seconds until the lease ends, as far as known."""
        return self._in_flight_records.seconds_left(message)

    def _check(self, message: Leased, kind: int, delay_ms: int) -> None:
        if message._state != HELD or self._is_closed:
            raise self._refusal(message)
        if delay_ms < 0 and kind != RENEW:
            return
        name = _name(message)
        if delay_ms >= 0 and not self._has_acknowledge_records(message):
            raise DelayNotOffered(f"{name}: this broker does not support retry delays; omit `after`")
        if kind == RENEW and not self._can_renew(message):
            raise UnsupportedVersion(
                f"{name}: this broker does not renew leases (it needs ShareAcknowledge 2)"
            )

    def _refusal(self, message: Leased) -> MansioError:
        """Why the message cannot be acknowledged."""
        if message._state == LOST or self._is_closed:
            return LeaseLost(f"{_name(message)} is not leased by this member any more")
        done = (
            _WORDS.get(message._ack_type, "acknowledged")
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
            or self.can_renew_in_session(node)
        )

    def _leader(self, message: Leased) -> int | None:
        return self.leader_of(TopicPartition(message.topic, message.partition), self._loop.time())

    def dispatch(self, waiting: dict[int, list[TopicPartition]], now: float) -> None:
        """Send what the sessions did not carry to the brokers that offer AcknowledgeRecords."""
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
        self._update_idle()

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
        except Exception as error:  # noqa: BLE001  # the error goes to the waiters, and later acknowledgements are still sent
            reply.set_exception(client_failed(error))

    def _ended(
        self, node: int, broker: _Broker, taken: PendingAcks, frame: bytes, error: MansioError | None
    ) -> None:
        """A request was answered, or failed."""
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
            self.on_failure(taken, ConnectionLost("the response lacks a partition"))

    def _failed(self, node: int, broker: _Broker, taken: PendingAcks, error: MansioError) -> None:
        if isinstance(error, UnsupportedVersion):
            self.supports_acknowledge_records[node] = False  # then they go with the session
            error = ConnectionLost(error.message)
        else:
            broker.failures += 1
            delay_s = self._options.backoff.delay_seconds(broker.failures)
            broker.blocked_until = self._loop.time() + delay_s
            self._cluster.mark_stale({partition.topic for partition in taken})
        self.on_failure(taken, error)

    # -- queue of pending acknowledgements --------

    def _enqueue(
        self,
        run: Sequence[Leased],
        kind: int,
        outcome: AckListener | None,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Queue an acknowledgement of contiguous messages with one delivery count."""
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
        """Send at the end of this iteration of the loop, with everything queued until then."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        self._flush()

    def _flush(self) -> None:
        """Send what can be sent now."""
        if (self._pending or self._probes) and not self._is_closed:
            self.on_pending()

    @property
    def has_pending(self) -> bool:
        """Whether acknowledgements wait to be sent."""
        return bool(self._pending or self._probes)

    # -- choosing what to send --------

    def pending_by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        """Partitions with pending acknowledgements, by leader."""
        found: dict[int, list[TopicPartition]] = {}
        for partition in dict.fromkeys([*self._probes, *self._pending]):
            self._expire(partition, now)
            if partition not in self._pending and partition not in self._probes:
                continue
            if (until := self._backoffs.get(partition, (0.0, 0))[0]) > now:
                self._earliest_timer.set(until)
            elif (node := self.leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def take_for_session(self, partitions: Sequence[TopicPartition], *, everything: bool) -> PendingAcks:
        """Acknowledgements for a request of the share session. The caller reports the result."""
        taken: PendingAcks = {}
        for partition in partitions:
            if everything:
                found = self._next(partition)
            elif partition in self._probes:
                continue
            else:
                waiting = self._current(partition, self._pending.pop(partition, []))
                found = [pending for pending in waiting if pending.fits_share_session]
                if others := [pending for pending in waiting if not pending.fits_share_session]:
                    self._pending.setdefault(partition, []).extend(others)
            if found:
                taken[partition] = found
        self._mark_in_flight(taken)
        return taken

    def _mark_in_flight(self, taken: PendingAcks) -> None:
        if taken:
            self._in_flight[id(taken)] = taken
            for pending in itertools.chain.from_iterable(taken.values()):
                if (message := pending.message_to_renew) is not None:
                    self._in_flight_records.set_renewal(message, RENEWAL_SENT)
                    self._renewing += 1

    def _next(self, partition: TopicPartition) -> list[PendingAck]:
        """Acknowledgements of a partition for the next request."""
        probes = self._probes.get(partition)
        while probes:
            found = self._current(partition, probes.popleft())
            if not probes:
                del self._probes[partition]
            if found:
                return found
        return self._current(partition, self._pending.pop(partition, []))

    def _current(self, partition: TopicPartition, waiting: list[PendingAck]) -> list[PendingAck]:
        """Acknowledgements that still apply. That of a record whose lease is being renewed waits for the renewal: if it
        was sent first, the renewal and all others in its request would be refused."""
        found: list[PendingAck] = []
        later: list[PendingAck] = []
        for pending in waiting:
            for each in self._not_lost(pending):
                message = each.message_to_renew
                if message is not None and message._state != HELD:
                    self._in_flight_records.set_renewal(message, NOT_RENEWING)
                    each.completed(None)
                elif self._renewing and any(one._renewal == RENEWAL_SENT for one in each.messages):
                    later.append(each)
                else:
                    found.append(each)
        if later:
            self._pending.setdefault(partition, []).extend(later)
        return found

    def _not_lost(self, pending: PendingAck) -> list[PendingAck]:
        """The acknowledgement without messages that were lost meanwhile."""
        if pending.lost_count == self._in_flight_records.lost_count or not pending.messages:
            return [pending]
        parts: list[list[Leased]] = [[]]
        for message in pending.messages:
            if message._state == LOST:
                self._expire_ack(pending.copy_for([message]), None)
                parts.append([])
            else:
                parts[-1].append(message)
        pending.lost_count = self._in_flight_records.lost_count
        if len(parts) == 1:
            return [pending]
        return [pending.copy_for(part) for part in parts if part]

    def _expire(self, partition: TopicPartition, now: float) -> None:
        """Expire acknowledgements that waited too long, and set the timer for the next one."""
        for queue in (self._pending.get(partition, []), *self._probes.get(partition, ())):
            for pending in [pending for pending in queue if pending.expires <= now]:
                queue.remove(pending)
                self._expire_ack(pending, None)
            if queue:
                self._earliest_timer.set(min(pending.expires for pending in queue))
        if not self._pending.get(partition, [None]):
            del self._pending[partition]

    # -- results --------

    def on_result(
        self, taken: PendingAcks, partition: TopicPartition, error: MansioError | None, lock_s: float = 0.0
    ) -> None:
        """The result of one partition's part of a request."""
        pending = taken.pop(partition, [])
        for each in pending:
            if (message := each.message_to_renew) is not None:
                self._in_flight_records.set_renewal(message, RENEWAL_WAITS)
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
            if not isinstance(error, ConnectionLost):  # an unreachable broker has a backoff of its own
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
        self._update_idle()

    def on_failure(self, taken: PendingAcks, error: MansioError) -> None:
        """The whole request failed."""
        for partition in list(taken):
            self.on_result(taken, partition, error)

    def _done(self, partition: TopicPartition, pending: PendingAck, lock_s: float) -> None:
        if (message := pending.message_to_renew) is not None:
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
            else:  # it is not acknowledged again: let its lease end
                self._in_flight_records.mark_lost(message)
        if pending.outcome is not None:
            pending.completed(error)
        else:
            logger.warning("lease not acknowledged: %s", error)

    def _expire_ack(self, pending: PendingAck, error: MansioError | None) -> None:
        """The lease is lost, or there was no result for as long as it may have lasted."""
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
        name = f"{first.topic}-{first.partition}"
        which = f"offset {pending.first} of {name} is"
        if pending.first != pending.last:
            which = f"offsets {pending.first} to {pending.last} of {name} are"
        why = f": {error.message}" if error is not None else ""
        lost = LeaseLost(f"{which} not leased by this member any more{why}")
        lost.__cause__ = error
        pending.completed(lost)

    def _update_idle(self) -> None:
        if not self._pending and not self._probes and not self._in_flight:
            self.idle.set()

    async def close(self) -> None:
        """Send nothing more; complete all pending acknowledgements with an error."""
        self._end()
        await self._cluster.close_channel(self._channel)

    def _end(self) -> None:
        """Expire everything that is pending or in flight."""
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


def halves(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Two halves, or nothing for a single record."""
    if len(pending) > 1:
        middle = len(pending) // 2
        return [pending[:middle], pending[middle:]]
    messages = pending[0].messages if pending else ()
    if len(messages) > 1:
        middle = len(messages) // 2
        return [[pending[0].copy_for(messages[:middle])], [pending[0].copy_for(messages[middle:])]]
    return []


def merge_contiguous(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Runs of contiguous, equal acknowledgements, ascending; the second one of an offset is dropped."""
    if len(pending) == 1:
        return [pending]
    runs: list[list[PendingAck]] = []
    end = -1
    alike: tuple[Any, ...] = ()
    for each in sorted(pending, key=_first):
        if each.first <= end:
            continue
        count = each.messages[0].delivery_count if each.messages else -1
        same = (each.kind, each.delay_ms, each.reason, count)
        if runs and each.first == end + 1 and same == alike:
            runs[-1].append(each)
        else:
            runs.append([each])
        end, alike = each.last, same
    return runs


def _first(pending: PendingAck) -> int:
    return pending.first
