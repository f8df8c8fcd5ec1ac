"""Share fetcher: decides which partitions and how many records a share consumer requests, and keeps the share sessions.

A fetch requests a number of records that the broker must not exceed (KIP-1206), waits at the broker until records are
available, and contains pending acknowledgements. To a broker without AcknowledgeRecords, ShareAcknowledge sends the
acknowledgements that no fetch contains. There is one share session per broker (KIP-932). A session ends with its
connection; the leases that it granted are suspect then (see `in_flight_records`).

Invariants:
* The number of requested and held records is at most `max_records`, not counting those being acknowledged.
* The fetcher requests a partition only from the broker that it knows as the leader.
* Acknowledgements are sent in the iteration of the event loop in which that becomes possible. All partitions are
  examined only when records can be requested.
* At most one request per session is in flight. The state of a session changes when the response arrives, not before.
* A session error, a lost connection or a change of the leader never fails the receiver: the fetcher opens a new session
  or uses another one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.client.leader_cache import LeaderCache
from mansio.client.share.ack_sender import merge_contiguous
from mansio.client.share.broker_turns import BrokerTurns
from mansio.client.share.in_flight_records import WithoutRecords
from mansio.client.share.leased import RELEASE, RENEW
from mansio.client.tasks import log_client_failure
from mansio.errors import (
    ConnectionLost,
    InvalidShareSessionEpoch,
    MansioError,
    ShareSessionLimitReached,
    ShareSessionNotFound,
    UnreadableRecords,
    UnsupportedVersion,
)
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.field_values import FINAL_SHARE_SESSION_EPOCH, SHARE_SESSION_EPOCH_MAX
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container

    from mansio.client.share.ack_sender import AckSender, PendingAcks
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import ReceiveOptions
    from mansio.client.tasks import BackgroundTasks, Reply
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

    TopicIds = dict[TopicPartition, bytes]


class ShareFetcher:
    """Decides what one receiver fetches. All methods run on the event loop.

    `fail` is called with errors that the receiver reports to the application.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: BackgroundTasks,
        fail: Callable[[MansioError], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._sessions = ShareSessions(
            cluster, options, member_id, in_flight_records, ack_sender, tasks, fail, self
        )
        self._leader_cache = LeaderCache(cluster, tasks, self.schedule_dispatch, refreshes_old_metadata=False)
        self._earliest_timer = EarliestTimer(self._loop, self.schedule_dispatch)
        self.assigned: TopicIds = {}
        self._backoffs: dict[TopicPartition, tuple[float, int]] = {}
        """Partition -> (time of the event loop before which it is not requested, number of consecutive failures)."""
        self._rotation = 0
        self._is_dispatch_scheduled = False
        self._has_idle_session = True
        """Whether a session without a request in flight could request records if `_capacity` were above 0."""
        self._asked_count = 0
        """Number of records that the application waits for."""
        self._concurrency = 0
        """Number of records that `Receiver.run` handles at the same time."""
        self._ask_deadlines: list[float] = []
        """Times of the event loop until which the callers wait for records."""
        self._turns = BrokerTurns()
        self._is_paused = False
        self._is_closed = False

    def assign(self, partitions: TopicIds) -> None:
        """Fetch only the given partitions from now on. Existing leases of other partitions remain."""
        self.assigned = dict(partitions)
        self._ack_sender.topic_ids.update(partitions)
        self.schedule_dispatch()

    def ask(self, count: int, until_s: float) -> None:
        """Request `count` records more, for which the application waits until this time of the event loop. Each call is
        followed by one of `stop_asking` with the same arguments."""
        self._asked_count += count
        self._ask_deadlines.append(until_s)
        if self._options.prefetch is not None:
            self.on_capacity()

    def stop_asking(self, count: int, until_s: float) -> None:
        """Stop requesting the records of a call of `ask`."""
        self._asked_count -= count
        self._ask_deadlines.remove(until_s)

    def set_concurrency(self, concurrency: int) -> None:
        """Set how many records `Receiver.run` handles at the same time."""
        self._concurrency = concurrency

    def pause(self) -> None:
        """Stop requesting records. Leased records can still be acknowledged."""
        self._is_paused = True

    def on_capacity(self) -> None:
        """Schedule a dispatch if records can be requested, because fewer records are held than before."""
        if self._has_idle_session and self._capacity > 0:
            self.schedule_dispatch()

    def schedule_dispatch(self) -> None:
        """Schedule a dispatch, which sends all possible requests, for the next iteration of the event loop."""
        if not self._is_dispatch_scheduled and not self._is_closed:
            self._is_dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def send_acknowledgements(self) -> None:
        """Send pending acknowledgements: in a fetch if one can be sent now, otherwise with AcknowledgeRecords."""
        if self._is_closed:
            return
        if (
            (self._has_idle_session and self._capacity > 0)
            or not all(self._ack_sender.supports_acknowledge_records.values())
            or self._sessions.has_closed_connection
        ):
            self._dispatch()
            return
        try:
            now = self._loop.time()
            self._ack_sender.send_pending(self._ack_sender.pending_by_leader(now), now)
        except Exception as error:  # noqa: BLE001  # it ends this dispatch only; the error goes to the receiver
            self.on_unexpected_error(error)

    def on_unexpected_error(self, error: Exception) -> None:
        """Report an unexpected exception to the receiver, and dispatch again after a backoff."""
        self._leader_cache.reset()
        self._fail(log_client_failure(error))
        self._earliest_timer.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    # -- choosing --------

    @property
    def _capacity(self) -> int:
        """Number of records that may be requested now; 0 or less if none."""
        in_flight_records, most = self._in_flight_records, self._options.max_records
        if self._is_paused or in_flight_records.undelivered_bytes >= self._options.prefetch_bytes_max:
            return 0
        # Held records count except those being acknowledged, of which there may be `most` more.
        uncounted = min(in_flight_records.acknowledging_count, most)
        capacity = most + uncounted - in_flight_records.held_count - self._sessions.reserved_count
        if self._options.prefetch is not None:
            wanted = self._asked_count + self._options.prefetch
            if self._concurrency:
                wanted += max(self._concurrency - in_flight_records.delivered_count, 0)
            return min(capacity, wanted - in_flight_records.undelivered_count - self._sessions.reserved_count)
        # Requests of single records would make brokers send the same large batch repeatedly.
        return capacity if in_flight_records.undelivered_count == 0 or capacity * 2 >= most else 0

    def _dispatch(self) -> None:
        self._is_dispatch_scheduled = False
        if self._is_closed:
            return
        try:
            now = self._loop.time()
            waiting = self._ack_sender.pending_by_leader(now)
            leading = self._partitions_by_leader(now)
            self._verify_suspects(now)
            self._send_requests(leading, waiting, now)
            self._ack_sender.send_pending(waiting, now)
        except Exception as error:  # noqa: BLE001  # it ends this dispatch only; the error goes to the receiver
            self.on_unexpected_error(error)

    def _partitions_by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        found: dict[int, list[TopicPartition]] = {}
        for partition in self.assigned:
            if (node := self.leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def leader_of(self, partition: TopicPartition, now: float) -> int | None:
        """Return the node id of the leader; None while it is unknown or the partition has a backoff."""
        blocked = self._backoffs.get(partition)
        if blocked is not None and blocked[0] > now:
            self._earliest_timer.set(blocked[0])
            return None
        node = self._leader_cache.find(*partition, now)
        if node is None:
            self._leader_cache.look_up(*partition, partial(self.on_partition_refused, partition))
        return node

    def _send_requests(
        self, leading: dict[int, list[TopicPartition]], waiting: dict[int, list[TopicPartition]], now: float
    ) -> None:
        """Send one request in each session that has no request in flight and that can request records or acknowledge.

        `leading`: node id -> assigned partitions that the broker leads; `waiting`: node id -> partitions with pending
        acknowledgements.
        """
        self._has_idle_session = False
        free: list[tuple[int, ShareSession]] = []
        for node in dict.fromkeys([*leading, *waiting, *self._sessions.by_node]):
            session = self._sessions.with_broker(node)
            if session.has_request_in_flight:
                continue
            if session.blocked_until_s > now:
                self._earliest_timer.set(session.blocked_until_s)
                continue
            self._sessions.check_connection(node, session)
            free.append((node, session))
        requested = [node for node, _ in free if node in leading]
        in_turn = self._options.prefetch is not None and 0 < self._capacity < len(leading)
        if in_turn:
            turns = {node: number for number, node in enumerate(self._turns.order(leading))}
            free.sort(key=lambda each: turns.get(each[0], len(turns)))
        elif requested:
            self._rotation = (self._rotation + 1) % len(free)
            free = free[self._rotation :] + free[: self._rotation]
        left = len(requested)
        suspect = set(self._in_flight_records.suspect_partitions.values())
        for node, session in free:
            records_max = 0
            if node in leading:
                records_max = max(0, -(-self._capacity // left))
                left -= 1
            partitions = leading.get(node, [])
            is_open = session.epoch > 0
            has_acknowledge_records = self._ack_sender.supports_acknowledge_records.get(node, True)
            acks: PendingAcks = {}
            if is_open and node in waiting and (records_max or not has_acknowledge_records):
                acks = self._ack_sender.take_for_session(
                    waiting[node], everything=not has_acknowledge_records
                )
            if acks and (not records_max or (not has_acknowledge_records and has_ack_type(acks, RENEW))):
                self._sessions.acknowledge(node, session, acks)
            elif records_max or (
                not is_open and (node in suspect or (node in waiting and not has_acknowledge_records))
            ):
                wait_ms = self._wait_ms(node, leading, now, in_turn=in_turn)
                self._sessions.fetch(node, session, partitions, records_max, acks, wait_ms)
            elif node in leading:
                self._has_idle_session = True

    def _wait_ms(self, node: int, leading: Collection[int], now: float, *, in_turn: bool) -> int:
        """Return how long a broker may hold a fetch until records are available."""
        wait_ms = self._options.fetch_wait_ms_max
        if self._options.prefetch is None:
            return wait_ms
        if self._ask_deadlines and not self._concurrency:  # nobody takes a record that comes later
            wait_ms = round(max(0, min(wait_ms, (max(self._ask_deadlines) - now) * 1000)))
        if not in_turn:
            return wait_ms
        if not self._turns.may_wait(node, leading):
            return 0
        return min(wait_ms, max(wait_ms // len(leading), FETCH_WAIT_IN_TURN_MS_MIN))

    def _verify_suspects(self, now: float) -> None:
        """Renew suspect leases, to verify them, where the partition's leader has a new session or is another broker."""
        for partition, ended in list(self._in_flight_records.suspect_partitions.items()):
            node = self.leader_of(partition, now)
            if node is None:
                continue
            session = self._sessions.by_node.get(node)
            is_open = session is not None and session.epoch > 0
            if node != ended or is_open:
                has_acknowledge_records = self._ack_sender.supports_acknowledge_records.get(node, True)
                self._in_flight_records.renew_suspect_leases(partition, can_renew=has_acknowledge_records)

    # -- results of fetches --------

    def on_fetch_ended(self, *, is_answered: bool) -> None:
        """Schedule a dispatch after a fetch, if there is something to send. `is_answered`: whether the fetch got a
        response without a top-level error."""
        self._has_idle_session = True
        if (
            not is_answered
            or self._capacity > 0
            or self._ack_sender.has_pending
            or self._in_flight_records.suspect_partitions
        ):
            self.schedule_dispatch()

    def on_records(self, node: int, response: share_fetch.ShareFetchResponse) -> None:
        """Note the response of a broker to a request for records."""
        if self._options.prefetch is not None:
            acquired = [each for _, parts in response.topics for part in parts for each in part.acquired]
            self._turns.on_answer(node, sum(last - first + 1 for first, last, _ in acquired))

    def on_fetch_answered(self, known: Container[TopicPartition], refused: Container[TopicPartition]) -> None:
        """Clear the backoff of the partitions of a session that got a response, except of the `refused` partitions."""
        for partition in [each for each in self._backoffs if each in known and each not in refused]:
            del self._backoffs[partition]

    def on_partition_refused(self, partition: TopicPartition, error: MansioError) -> None:
        """Start a backoff for a partition that the broker refused, and refresh its leader. Non-retriable errors are
        reported to the receiver."""
        if not error.retriable:
            self._fail(error)
        self._cluster.mark_stale((partition.topic,))
        failures = self._backoffs.get(partition, (0.0, 0))[1] + 1
        extend_until = self._loop.time() + self._options.backoff.delay_seconds(failures)
        self._backoffs[partition] = (extend_until, failures)

    # -- the end --------

    def can_renew_in_session(self, node: int) -> bool:
        """Return whether a broker renews leases in its share session."""
        return self._sessions.can_renew(node)

    async def end_sessions(self) -> None:
        """End all share sessions, so that brokers release the leases at once."""
        await self._sessions.end()

    async def close(self) -> None:
        """Stop sending requests and close the connections. Responses to requests in flight are ignored."""
        self._is_closed = True
        self._earliest_timer.cancel()
        await self._sessions.close()


class ShareSession:
    """Share session with one broker. `epoch`: epoch of the next request; 0 if that opens a new session."""

    __slots__ = (
        "blocked_until_s",
        "connection",
        "epoch",
        "failure_count",
        "has_request_in_flight",
        "partitions",
        "topic_names",
    )

    def __init__(self) -> None:
        self.epoch = 0
        self.connection: BrokerConnection | None = None
        self.partitions: TopicIds = {}
        """Partitions that the broker has in the session -> topic id."""
        self.topic_names: dict[bytes, str] = {}
        """Topic id -> topic name, of the partitions of the session."""
        self.has_request_in_flight = False
        """Whether a request of the session is in flight."""
        self.failure_count = 0
        self.blocked_until_s = 0.0

    def on_response(self) -> None:
        """Advance the epoch after a response without error, and end the backoff."""
        self.epoch = self.epoch + 1 if self.epoch < SHARE_SESSION_EPOCH_MAX else 1
        self.failure_count = 0

    def reset(self) -> None:
        """Reset the state after the session has ended; the next request opens a new session."""
        self.epoch = 0
        self.connection = None
        self.set_partitions({})

    def set_partitions(self, partitions: TopicIds) -> None:
        """Set the partitions that the broker has in the session."""
        if partitions is not self.partitions:
            self.partitions = partitions
            self.topic_names = {key: each.topic for each, key in partitions.items()}


class ShareRequests:
    """Sends the ShareFetch and ShareAcknowledge requests of one member. `ids`: partition -> topic id, for all
    partitions that were ever assigned; `bytes_max`: maximum size of the records in a response; `lease_ms`: duration of
    the leases, None for the group's; `keeps_leases`: whether they outlive a connection."""

    def __init__(
        self,
        group: str,
        member_id: str,
        ids: TopicIds,
        *,
        bytes_max: int,
        lease_ms: int | None,
        keeps_leases: bool = False,
    ) -> None:
        self._group = group
        self._member_id = member_id
        self._topic_ids = ids
        self._bytes_max = bytes_max
        self._lease_ms = -1 if lease_ms is None else lease_ms
        self._keeps_leases = keeps_leases

    def begin_fetch(
        self,
        connection: BrokerConnection,
        session: ShareSession,
        wanted: TopicIds,
        acks: PendingAcks,
        *,
        records_max: int,
        wait_ms: int,
        reply: Reply,
    ) -> TopicIds:
        """Send a ShareFetch for at most `records_max` records of the partitions `wanted`, with the acknowledgements
        `acks`; `reply` receives the response frame.

        Returns the partitions that the session will have after the response, for `read_fetch`. With `records_max` 0 the
        request only opens the session and does not wait for records. Raises `ConnectionLost` if there are
        acknowledgements but the session has ended, and `UnsupportedVersion` if the broker knows no leases of a chosen
        duration.
        """
        if self._lease_ms >= 0 and ApiKey.ACKNOWLEDGE_RECORDS not in connection.versions:
            raise UnsupportedVersion("lease_ms: this broker has leases of the group's duration only")
        if acks and not session.epoch:
            raise ConnectionLost("the share session ended")
        known = session.partitions
        added, gone, next_partitions = wanted, dict[TopicPartition, bytes](), wanted
        if wanted == known:
            added, next_partitions = {}, known
        elif known:
            added = {each: key for each, key in wanted.items() if known.get(each) != key}
            if records_max:
                gone = {each: key for each, key in known.items() if wanted.get(each) != key}
            next_partitions = {each: key for each, key in known.items() if each not in gone} | wanted
        version = connection.version_for(ApiKey.SHARE_FETCH)
        correlation_id = connection.next_correlation_id()
        framed = share_fetch.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._group,
            self._member_id,
            session.epoch,
            self._topics(added, acks),
            max_wait_ms=wait_ms if records_max else 0,
            min_bytes=1 if records_max else 0,
            max_bytes=self._bytes_max if records_max else 0,
            max_records=records_max,
            batch_size=records_max,
            acquire_mode=share_fetch.RECORD_LIMIT,
            forgotten_topics=_forgotten_topics(gone) if session.epoch else (),
            lease_ms=self._lease_ms,
            keeps_leases=self._keeps_leases,
        )
        timeout_ms = connection.options.request_timeout_ms + wait_ms
        connection.begin_exchange((framed,), correlation_id, reply, timeout_ms=timeout_ms)
        return next_partitions

    def read_fetch(
        self, connection: BrokerConnection, session: ShareSession, next_partitions: TopicIds, frame: bytes
    ) -> share_fetch.ShareFetchResponse:
        """Decode the response to `begin_fetch`, and set `next_partitions` as the partitions of the session. Raises the
        top-level error."""
        response = share_fetch.decode_response(connection.version_for(ApiKey.SHARE_FETCH), frame)
        raise_for_code(response.error_code, response.error_message)
        session.set_partitions(next_partitions)
        return response

    async def acknowledge(
        self, connection: BrokerConnection, session: ShareSession, acks: PendingAcks
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        """Send the acknowledgements `acks` with ShareAcknowledge and return the response. Raises its top-level error,
        and `ConnectionLost` if the session has ended."""
        if not session.epoch:
            raise ConnectionLost("the share session ended")
        return await self._acknowledge(connection, session.epoch, acks)

    async def end(self, connection: BrokerConnection) -> None:
        """End the share session; the broker then releases the leases of the member."""
        await self._acknowledge(connection, FINAL_SHARE_SESSION_EPOCH, {})

    async def _acknowledge(
        self, connection: BrokerConnection, epoch: int, acks: PendingAcks
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        version = connection.version_for(ApiKey.SHARE_ACKNOWLEDGE)
        correlation_id = connection.next_correlation_id()
        framed = share_acknowledge.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._group,
            self._member_id,
            epoch,
            self._topics({}, acks),
            is_renew_ack=has_ack_type(acks, RENEW),
        )
        frame = await connection.exchange((framed,), correlation_id)
        response = share_acknowledge.decode_response(version, frame)
        raise_for_code(response.error_code, response.error_message)
        return response

    def _topics(self, added: TopicIds, acks: PendingAcks) -> list[tuple[bytes, list[AckPartition]]]:
        """Return the topics field of a request: partitions to add to the session and acknowledgements to send."""
        found: dict[bytes, list[AckPartition]] = {}
        for partition in dict.fromkeys([*added, *acks]):
            batches = [
                AckBatch(run[0].first_offset, run[-1].last_offset, bytes((run[0].ack_type,)))
                for run in merge_contiguous(acks.get(partition, []))
            ]
            key = added.get(partition) or self._topic_ids[partition]
            found.setdefault(key, []).append(AckPartition(partition.partition, batches))
        return list(found.items())


def has_ack_type(acks: PendingAcks, ack_type: int) -> bool:
    """Whether one of the acknowledgements is of type `ack_type`."""
    return any(pending.ack_type == ack_type for each in acks.values() for pending in each)


def can_renew(connection: BrokerConnection | None) -> bool:
    """Whether the broker of a connection renews leases in a share session (KIP-1222); False without a connection."""
    try:
        return (
            connection is not None
            and connection.version_for(ApiKey.SHARE_ACKNOWLEDGE) >= share_acknowledge.RENEWAL_VERSION_MIN
        )
    except UnsupportedVersion:
        return False


def _forgotten_topics(gone: TopicIds) -> list[tuple[bytes, list[int]]]:
    found: dict[bytes, list[int]] = {}
    for partition, topic_id in gone.items():
        found.setdefault(topic_id, []).append(partition.partition)
    return list(found.items())


logger = logging.getLogger(__name__)

FETCH_WAIT_BEFORE_ACKS_MS_MAX: Final = 100
"""Maximum time, in milliseconds, for which a broker without AcknowledgeRecords holds a fetch while records are held:
acknowledgements have to wait for the end of the fetch."""

FETCH_WAIT_IN_TURN_MS_MIN: Final = 20
"""Minimum time, in milliseconds, for which a broker holds a fetch if the brokers are asked in turn."""

_CHANNEL_NUMBERS = itertools.count()


class _FetchRequest:
    """ShareFetch in flight: a request for `records_max` records of `partitions` with the acknowledgements `acks`.
    `next_partitions`: partitions of the session after the response."""

    __slots__ = ("acks", "next_partitions", "node", "partitions", "records_max", "session", "wait_ms")

    def __init__(
        self,
        node: int,
        session: ShareSession,
        partitions: list[TopicPartition],
        records_max: int,
        acks: PendingAcks,
        wait_ms: int,
    ) -> None:
        self.node = node
        self.session = session
        self.partitions = partitions
        self.records_max = records_max
        self.acks = acks
        self.wait_ms = wait_ms
        self.next_partitions: TopicIds = {}


class ShareSessions:
    """Share sessions of one receiver, one per broker. All methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: BackgroundTasks,
        fail: Callable[[MansioError], None],
        fetcher: ShareFetcher,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._tasks = tasks
        self._fail = fail
        self._fetcher = fetcher
        self._loop = asyncio.get_running_loop()
        self._requests = ShareRequests(
            options.group,
            member_id,
            ack_sender.topic_ids,
            bytes_max=options.fetch_bytes_max,
            lease_ms=options.lease_ms,
            keeps_leases=options.keeps_leases,
        )
        self._is_closed = False
        self._channel = f"share {next(_CHANNEL_NUMBERS)}"
        self.by_node: dict[int, ShareSession] = {}
        self.reserved_count = 0
        """Number of records that fetches in flight request."""

    def with_broker(self, node: int) -> ShareSession:
        """Return the session with a broker. The first request of a session opens it at the broker."""
        session = self.by_node.get(node)
        if session is None:
            session = self.by_node[node] = ShareSession()
        return session

    # -- connections --------

    @property
    def has_closed_connection(self) -> bool:
        """Whether the connection of any session is closed."""
        return any(each.connection is not None and each.connection.closed for each in self.by_node.values())

    def check_connection(self, node: int, session: ShareSession) -> None:
        """End the session if its connection is closed."""
        if session.epoch and (session.connection is None or session.connection.closed):
            self._on_session_ended(node, session)

    def _on_session_ended(self, node: int, session: ShareSession) -> None:
        session.reset()
        self._in_flight_records.on_session_ended(node)

    def can_renew(self, node: int) -> bool:
        session = self.by_node.get(node)
        return session is not None and can_renew(session.connection)

    async def _connect(self, node: int, session: ShareSession) -> BrokerConnection:
        connection = await self._cluster.connection(node, self._channel)
        self._use_connection(node, session, connection)
        return connection

    def _use_connection(self, node: int, session: ShareSession, connection: BrokerConnection) -> None:
        if session.connection is not connection:
            if session.epoch:
                self._on_session_ended(node, session)
            session.connection = connection
            self._ack_sender.supports_acknowledge_records[node] = (
                ApiKey.ACKNOWLEDGE_RECORDS in connection.versions
            )

    # -- requests --------

    def fetch(
        self,
        node: int,
        session: ShareSession,
        partitions: list[TopicPartition],
        records_max: int,
        acks: PendingAcks,
        wait_ms: int,
    ) -> None:
        """Send a ShareFetch for `records_max` records of `partitions` with the acknowledgements `acks`, which the
        broker may hold for `wait_ms`. If a connection is open, this creates no task and no future."""
        session.has_request_in_flight = True
        self.reserved_count += records_max
        requested = _FetchRequest(node, session, partitions, records_max, acks, wait_ms)
        connection = self._cluster.existing_connection(node, self._channel)
        if connection is None:
            self._tasks.spawn(self._connect_and_fetch(requested))
        else:
            self._send_fetch(connection, requested)

    async def _connect_and_fetch(self, requested: _FetchRequest) -> None:
        try:
            connection = await self._cluster.connection(requested.node, self._channel)
        except MansioError as error:
            self._on_fetch_ended(requested, None, b"", error)
        else:
            self._send_fetch(connection, requested)

    def _send_fetch(self, connection: BrokerConnection, requested: _FetchRequest) -> None:
        node, session = requested.node, requested.session
        reply = self._tasks.create_reply(partial(self._on_fetch_ended, requested, connection))
        assigned, wait_ms = self._fetcher.assigned, requested.wait_ms
        try:
            self._use_connection(node, session, connection)
            if self._in_flight_records.held_count and not self._ack_sender.supports_acknowledge_records.get(
                node, True
            ):
                wait_ms = min(FETCH_WAIT_BEFORE_ACKS_MS_MAX, wait_ms)
            requested.next_partitions = self._requests.begin_fetch(
                connection,
                session,
                {each: assigned[each] for each in requested.partitions if each in assigned},
                requested.acks,
                records_max=requested.records_max,
                wait_ms=wait_ms,
                reply=reply,
            )
        except MansioError as error:
            reply.set_exception(copied(error))
        except Exception as error:  # noqa: BLE001  # the error goes to the waiters, and the session continues
            reply.set_exception(log_client_failure(error))

    def _on_fetch_ended(
        self,
        requested: _FetchRequest,
        connection: BrokerConnection | None,
        frame: bytes,
        error: MansioError | None,
    ) -> None:
        """Handle the response frame of a fetch, or the error with which it ended."""
        node, session, acks = requested.node, requested.session, requested.acks
        response = None
        try:
            if error is None and connection is not None:
                try:
                    response = self._requests.read_fetch(
                        connection, session, requested.next_partitions, frame
                    )
                except MansioError as refused:
                    error = without_traceback(refused)
            if response is not None:
                session.on_response()
                self._apply_response(node, session, response, acks)
                if requested.records_max:
                    self._fetcher.on_records(node, response)
                if acks:
                    self._ack_sender.on_failure(acks, ConnectionLost("the response lacks a partition"))
            elif error is not None:
                self._on_request_error(node, session, error)
                self._ack_sender.on_failure(acks, error if error.retriable else ConnectionLost(error.message))
        finally:
            session.has_request_in_flight = False
            self.reserved_count -= requested.records_max
            self._fetcher.on_fetch_ended(is_answered=response is not None)

    def acknowledge(self, node: int, session: ShareSession, acks: PendingAcks) -> None:
        """Send the acknowledgements `acks` with ShareAcknowledge, in a task."""
        session.has_request_in_flight = True
        self._tasks.spawn(self._acknowledge(node, session, acks))

    async def _acknowledge(self, node: int, session: ShareSession, acks: PendingAcks) -> None:
        try:
            connection = await self._connect(node, session)
            response = await self._requests.acknowledge(connection, session, acks)
        except MansioError as error:
            self._on_request_error(node, session, error)
            self._ack_sender.on_failure(acks, error if error.retriable else ConnectionLost(error.message))
        else:
            session.on_response()
            names = {self._ack_sender.topic_ids[each]: each.topic for each in acks}
            for topic_id, results in response.topics:
                for result in results:
                    partition = TopicPartition(names[topic_id], result.index)
                    code, why = result.error_code, result.error_message
                    refusal = client_error_for_code(code, why) if code else None
                    self._ack_sender.on_result(acks, partition, refusal, response.lock_ms / 1000)
            self._ack_sender.on_failure(acks, ConnectionLost("the response lacks a partition"))
        finally:
            session.has_request_in_flight = False
            self._fetcher.schedule_dispatch()

    # -- answers --------

    def _on_request_error(self, node: int, session: ShareSession, error: MansioError) -> None:
        """Handle the error of a request: start a backoff, and end the session if the broker has ended it. Non-retriable
        errors are reported to the receiver."""
        if self._is_closed:
            return
        session.failure_count += 1
        session.blocked_until_s = self._loop.time() + self._options.backoff.delay_seconds(
            session.failure_count
        )
        if isinstance(error, ShareSessionNotFound | InvalidShareSessionEpoch | ConnectionLost):
            logger.info("share group %s: session with broker %d: %s", self._options.group, node, error)
            if session.epoch:
                self._on_session_ended(node, session)
        elif isinstance(error, ShareSessionLimitReached):
            logger.warning("share group %s: broker %d: %s", self._options.group, node, error)
        elif not error.retriable:
            self._fail(error)
        self.check_connection(node, session)
        self._cluster.mark_stale({partition.topic for partition in self._fetcher.assigned})

    def _apply_response(
        self, node: int, session: ShareSession, response: share_fetch.ShareFetchResponse, acks: PendingAcks
    ) -> None:
        names = session.topic_names
        if acks:
            names = names | {self._ack_sender.topic_ids[each]: each.topic for each in acks}
        lease_s = response.lock_ms / 1000
        refused: set[TopicPartition] = set()
        for topic_id, partitions in response.topics:
            for data in partitions:
                partition = TopicPartition(names.get(topic_id, ""), data.index)
                if partition in acks:
                    code, message = data.acknowledge_error_code, data.acknowledge_error_message
                    self._ack_sender.on_result(
                        acks, partition, client_error_for_code(code, message) if code else None
                    )
                if not partition.topic:
                    continue
                if data.error_code:
                    refused.add(partition)
                    self._fetcher.on_partition_refused(
                        partition, client_error_for_code(data.error_code, data.error_message)
                    )
                elif data.acquired:
                    self._add_records(partition, node, data, lease_s)
        self._fetcher.on_fetch_answered(session.partitions, refused)

    def _add_records(
        self, partition: TopicPartition, node: int, data: share_fetch.SharePartitionData, lease_s: float
    ) -> None:
        records = data.records[0] if data.records else memoryview(b"")
        try:
            holes = self._in_flight_records.add_acquired(partition, node, records, data.acquired, lease_s)
        except MansioError as error:  # damaged on its way: the next delivery may be intact
            holes = [WithoutRecords(first, last, RELEASE) for first, last, _ in data.acquired]
            self._fail(error)
        for hole in holes:
            if hole.reason:
                unreadable = UnreadableRecords.at(*partition, hole.first, hole.last, hole.reason)
                logger.warning("share group %s: %s; rejected", self._options.group, unreadable.message)
            self._ack_sender.acknowledge_range(
                partition, hole.ack_type, hole.first, hole.last, reason=hole.reason
            )

    # -- the end --------

    async def end(self) -> None:
        """End all share sessions, so that brokers release the leases at once."""
        nodes = [node for node, session in self.by_node.items() if session.epoch]
        await asyncio.gather(*(self._end_session(node) for node in nodes))

    async def _end_session(self, node: int) -> None:
        # Sent on another connection, because the broker may hold a fetch on the connection of the session.
        try:
            connection = await self._cluster.connection(node)
            await self._requests.end(connection)
        except MansioError as error:
            logger.info(
                "share group %s: ending the session with broker %d: %s", self._options.group, node, error
            )

    async def close(self) -> None:
        """Close the connections of the sessions. Requests in flight fail."""
        self._is_closed = True
        await self._cluster.close_channel(self._channel)
