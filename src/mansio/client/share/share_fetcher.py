"""Share fetches of a share consumer: which partitions and how many records to request, and the share sessions that
do it.

Fetches request an exact number of records (KIP-1206), wait at the broker for them, and carry pending acknowledgements.
With a broker that does not offer AcknowledgeRecords, ShareAcknowledge carries the others. There is one share session
per broker (KIP-932). A session lives as long as its connection; the leases it granted end with it, so all of them are
suspect then (see `in_flight_records`).

Invariants:
* Requested and held records are at most `max_records`, apart from those being acknowledged.
* A partition is requested from its leader only, as far as known.
* Acknowledgements are sent in the iteration of the loop in which that becomes possible. The full dispatch runs only
  where something can be requested.
* One request per session is in flight. The state of a session changes when the response is there, not before. A
  session error, a lost connection or a moved leader leads to a new or another session, and to nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.client.leader_cache import LeaderCache
from mansio.client.share.ack_sender import merge_contiguous
from mansio.client.share.leased import RELEASE, RENEW
from mansio.client.tasks import client_failed
from mansio.errors import (
    ConnectionLost,
    InvalidShareSessionEpoch,
    MansioError,
    ShareSessionLimitReached,
    ShareSessionNotFound,
    UnsupportedVersion,
)
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import error_for, raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mansio.client.share.ack_sender import AckSender, PendingAcks
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import ReceiveOptions
    from mansio.client.tasks import Reply, Tasks
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection

    TopicIds = dict[TopicPartition, bytes]


class ShareFetcher:
    """Decides what one receiver fetches. All methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: Tasks,
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
        self._leader_cache = LeaderCache(cluster, tasks, self.wake, refreshes=False)
        self._earliest_timer = EarliestTimer(self._loop, self.wake)
        self.assigned: TopicIds = {}
        self._blocked: dict[TopicPartition, tuple[float, int]] = {}
        """Per partition the time until which it is not requested, and the number of failures in a row."""
        self._turn = 0
        self._woken = False
        self._is_idle = True
        """Whether a session may be able to request records once there is capacity."""
        self._is_paused = False
        self._is_closed = False
        ack_sender.leader_of = self._leader_of
        ack_sender.on_pending = self._enqueue

    def assign(self, partitions: TopicIds) -> None:
        """Fetch these partitions only. Leases of other partitions stay."""
        self.assigned = dict(partitions)
        self._ack_sender.ids.update(partitions)
        self.wake()

    def pause(self) -> None:
        """Fetch nothing more; leased records can still be acknowledged."""
        self._is_paused = True

    def on_capacity(self) -> None:
        """Request more records in the next iteration of the loop, if a session can."""
        if self._is_idle and self._capacity > 0:
            self.wake()

    def wake(self) -> None:
        """Dispatch in the next iteration of the loop."""
        if not self._woken and not self._is_closed:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def _enqueue(self) -> None:
        """Send pending acknowledgements: with a fetch if one can be sent now, else separately."""
        if self._is_closed:
            return
        if (
            (self._is_idle and self._capacity > 0)
            or not all(self._ack_sender.supports_acknowledge_records.values())
            or self._sessions.has_closed_connection
        ):
            self._dispatch()
            return
        try:
            now = self._loop.time()
            self._ack_sender.dispatch(self._ack_sender.pending_by_leader(now), now)
        except Exception as error:  # noqa: BLE001  # it ends this dispatch only; the error goes to the receiver
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """Unexpected error: report it to the receiver and continue."""
        self._leader_cache.forget()
        self._fail(client_failed(error))
        self._earliest_timer.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    # -- choosing --------

    @property
    def _capacity(self) -> int:
        """Number of records that may be requested now."""
        in_flight_records, most = self._in_flight_records, self._options.max_records
        if self._is_paused or in_flight_records.undelivered_bytes >= self._options.prefetch_bytes_max:
            return 0
        capacity = (
            min(
                most - (in_flight_records.held - in_flight_records.acknowledging),
                2 * most - in_flight_records.held,
            )
            - self._sessions.reserved
        )
        # Requests of single records would make brokers send the same large batch repeatedly.
        return capacity if in_flight_records.undelivered == 0 or capacity * 2 >= most else 0

    def _dispatch(self) -> None:
        self._woken = False
        if self._is_closed:
            return
        try:
            now = self._loop.time()
            waiting = self._ack_sender.pending_by_leader(now)
            leading = self._by_leader(now)
            self._verify_suspects(now)
            self._start(leading, waiting, now)
            self._ack_sender.dispatch(waiting, now)
        except Exception as error:  # noqa: BLE001  # it ends this dispatch only; the error goes to the receiver
            self.broke(error)

    def _by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        found: dict[int, list[TopicPartition]] = {}
        for partition in self.assigned:
            if (node := self._leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def _leader_of(self, partition: TopicPartition, now: float) -> int | None:
        """The leader to request from; None while unknown, or after it refused."""
        blocked = self._blocked.get(partition)
        if blocked is not None and blocked[0] > now:
            self._earliest_timer.set(blocked[0])
            return None
        node = self._leader_cache.find(*partition, now)
        if node is None:
            self._leader_cache.look_up(*partition, partial(self.refused, partition))
        return node

    def _start(
        self, leading: dict[int, list[TopicPartition]], waiting: dict[int, list[TopicPartition]], now: float
    ) -> None:
        """Send one request to each idle session that has something to request or acknowledge."""
        self._is_idle = False
        free: list[tuple[int, ShareSession]] = []
        for node in dict.fromkeys([*leading, *waiting, *self._sessions.by_node]):
            session = self._sessions.with_broker(node)
            if session.busy:
                continue
            if session.blocked_until > now:
                self._earliest_timer.set(session.blocked_until)
                continue
            self._sessions.check_connection(node, session)
            free.append((node, session))
        requested = [node for node, _ in free if node in leading]
        if requested:
            self._turn = (self._turn + 1) % len(free)
            free = free[self._turn :] + free[: self._turn]
        left = len(requested)
        suspect = set(self._in_flight_records.suspects.values())
        for node, session in free:
            share = 0
            if node in leading:
                share = max(0, -(-self._capacity // left))
                left -= 1
            partitions = leading.get(node, [])
            is_open = session.epoch > 0
            native = self._ack_sender.supports_acknowledge_records.get(node, True)
            taken: PendingAcks = {}
            if is_open and node in waiting and (share or not native):
                taken = self._ack_sender.take_for_session(waiting[node], everything=not native)
            if has(taken, RENEW) or (taken and not share):
                self._sessions.acknowledge(node, session, taken)
            elif share or (not is_open and (node in suspect or (node in waiting and not native))):
                self._sessions.fetch(node, session, partitions, share, taken)
            elif node in leading:
                self._is_idle = True

    def _verify_suspects(self, now: float) -> None:
        """Verify suspect leases as soon as their leader has a session that does not end them."""
        for partition, ended in list(self._in_flight_records.suspects.items()):
            node = self._leader_of(partition, now)
            if node is None:
                continue
            session = self._sessions.by_node.get(node)
            is_open = session is not None and session.epoch > 0
            if node != ended or is_open:
                native = self._ack_sender.supports_acknowledge_records.get(node, True)
                self._in_flight_records.verify(partition, can_renew=native)

    # -- what became of it --------

    def fetched(self, *, is_answered: bool) -> None:
        """A fetch ended: its session is idle and its records are not reserved any more."""
        self._is_idle = True
        if (
            not is_answered
            or self._capacity > 0
            or self._ack_sender.has_pending
            or self._in_flight_records.suspects
        ):
            self.wake()

    def served(self, known: Container[TopicPartition], refused: Container[TopicPartition]) -> None:
        """A session with partitions `known` was answered; those not `refused` are requested again without backoff."""
        for partition in [each for each in self._blocked if each in known and each not in refused]:
            del self._blocked[partition]

    def refused(self, partition: TopicPartition, error: MansioError) -> None:
        """The broker refused a partition; request it later, or from another broker."""
        if not error.retriable:
            self._fail(error)
        self._cluster.mark_stale((partition.topic,))
        failures = self._blocked.get(partition, (0.0, 0))[1] + 1
        extend_until = self._loop.time() + self._options.backoff.delay_seconds(failures)
        self._blocked[partition] = (extend_until, failures)

    # -- the end --------

    async def end_sessions(self) -> None:
        """End all sessions, so that brokers release the leases at once."""
        await self._sessions.end()

    async def close(self) -> None:
        """Stop; requests in flight are dropped."""
        self._is_closed = True
        self._earliest_timer.cancel()
        await self._sessions.close()


FINAL_EPOCH: Final = -1

EPOCH_MAX: Final = 2**31 - 1


class ShareSession:
    """Share session with one broker. `epoch`: of the next request, 0 for a new session."""

    __slots__ = ("blocked_until", "busy", "connection", "epoch", "failures", "known", "names")

    def __init__(self) -> None:
        self.epoch = 0
        self.connection: Connection | None = None
        self.known: TopicIds = {}
        """Partitions of the session at the broker, and the ids of their topics."""
        self.names: dict[bytes, str] = {}
        """Topic names by id."""
        self.busy = False
        self.failures = 0
        self.blocked_until = 0.0

    def succeeded(self) -> None:
        """A request was answered."""
        self.epoch = self.epoch + 1 if self.epoch < EPOCH_MAX else 1
        self.failures = 0

    def ended(self) -> None:
        """The session ended; the next request opens a new one."""
        self.epoch = 0
        self.connection = None
        self.set_partitions({})

    def set_partitions(self, partitions: TopicIds) -> None:
        """Set the partitions of the session."""
        if partitions is not self.known:
            self.known = partitions
            self.names = {key: each.topic for each, key in partitions.items()}


class ShareRequests:
    """Encodes the requests of one member. `ids`: topic ids of all partitions of which records were ever leased."""

    def __init__(self, group: str, member_id: str, ids: TopicIds, *, bytes_max: int) -> None:
        self._group = group
        self._member_id = member_id
        self._ids = ids
        self._bytes_max = bytes_max

    def begin_fetch(
        self,
        connection: Connection,
        session: ShareSession,
        wanted: TopicIds,
        taken: PendingAcks,
        *,
        records_max: int,
        wait_ms: int,
        reply: Reply,
    ) -> TopicIds:
        """Send a fetch of `records_max` records with the acknowledgements `taken`; `reply` receives the response frame.

        Returns the partitions of the session once it is answered, for `read_fetch`. With `records_max` 0 the session is
        opened without waiting for records.
        """
        if taken and not session.epoch:
            raise ConnectionLost("the share session ended")
        known = session.known
        added, gone, then = wanted, dict[TopicPartition, bytes](), wanted
        if wanted == known:
            added, then = {}, known
        elif known:
            added = {each: key for each, key in wanted.items() if known.get(each) != key}
            if records_max:
                gone = {each: key for each, key in known.items() if wanted.get(each) != key}
            then = {each: key for each, key in known.items() if each not in gone} | wanted
        version = connection.version_for(ApiKey.SHARE_FETCH)
        correlation_id = connection.next_correlation_id()
        framed = share_fetch.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._group,
            self._member_id,
            session.epoch,
            self._topics(added, taken),
            max_wait_ms=wait_ms if records_max else 0,
            min_bytes=1 if records_max else 0,
            max_bytes=self._bytes_max if records_max else 0,
            max_records=records_max,
            batch_size=records_max,
            acquire_mode=share_fetch.RECORD_LIMIT,
            forgotten_topics=_forgotten(gone) if session.epoch else (),
        )
        timeout_ms = connection.options.request_timeout_ms + wait_ms
        connection.begin((framed,), correlation_id, reply, timeout_ms=timeout_ms)
        return then

    def read_fetch(
        self, connection: Connection, session: ShareSession, then: TopicIds, frame: bytes
    ) -> share_fetch.ShareFetchResponse:
        """Decode the response and update the session. Raises a top-level error."""
        response = share_fetch.decode_response(connection.version_for(ApiKey.SHARE_FETCH), frame)
        raise_for(response.error_code, response.error_message)
        session.set_partitions(then)
        return response

    async def acknowledge(
        self, connection: Connection, session: ShareSession, taken: PendingAcks
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        """Send acknowledgements without fetching."""
        if not session.epoch:
            raise ConnectionLost("the share session ended")
        return await self._acknowledge(connection, session.epoch, taken)

    async def end(self, connection: Connection) -> None:
        """End the session; the broker releases the member's leases."""
        await self._acknowledge(connection, FINAL_EPOCH, {})

    async def _acknowledge(
        self, connection: Connection, epoch: int, taken: PendingAcks
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
            self._topics({}, taken),
            is_renew_ack=has(taken, RENEW),
        )
        frame = await connection.exchange((framed,), correlation_id)
        response = share_acknowledge.decode_response(version, frame)
        raise_for(response.error_code, response.error_message)
        return response

    def _topics(self, added: TopicIds, taken: PendingAcks) -> list[tuple[bytes, list[AckPartition]]]:
        """Added partitions and acknowledgements."""
        found: dict[bytes, list[AckPartition]] = {}
        for partition in dict.fromkeys([*added, *taken]):
            batches = [
                AckBatch(run[0].first, run[-1].last, bytes((run[0].kind,)))
                for run in merge_contiguous(taken.get(partition, []))
            ]
            key = added.get(partition) or self._ids[partition]
            found.setdefault(key, []).append(AckPartition(partition.partition, batches))
        return list(found.items())


def has(taken: PendingAcks, kind: int) -> bool:
    """Whether there is an acknowledgement of this type."""
    return any(pending.kind == kind for each in taken.values() for pending in each)


def can_renew(connection: Connection | None) -> bool:
    """Whether the broker renews leases in a share session (KIP-1222)."""
    try:
        return (
            connection is not None
            and connection.version_for(ApiKey.SHARE_ACKNOWLEDGE) >= share_acknowledge.RENEWAL_VERSION_MIN
        )
    except UnsupportedVersion:
        return False


def _forgotten(gone: TopicIds) -> list[tuple[bytes, list[int]]]:
    found: dict[bytes, list[int]] = {}
    for partition, topic_id in gone.items():
        found.setdefault(topic_id, []).append(partition.partition)
    return list(found.items())


logger = logging.getLogger(__name__)

HOLDING_WAIT_MS: Final = 100

"""Maximum wait of a fetch at a broker where acknowledgements queue behind it."""

_CHANNEL_NUMBERS = itertools.count()


class _FetchRequest:
    """A fetch of `share` records of these partitions. `then`: partitions of the session once it is answered."""

    __slots__ = ("node", "partitions", "session", "share", "taken", "then")

    def __init__(
        self,
        node: int,
        session: ShareSession,
        partitions: list[TopicPartition],
        share: int,
        taken: PendingAcks,
    ) -> None:
        self.node = node
        self.session = session
        self.partitions = partitions
        self.share = share
        self.taken = taken
        self.then: TopicIds = {}


class ShareSessions:
    """Share sessions of one receiver with its brokers. All methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: Tasks,
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
            options.group, member_id, ack_sender.ids, bytes_max=options.fetch_bytes_max
        )
        self._is_closed = False
        self._channel = f"share {next(_CHANNEL_NUMBERS)}"
        self.by_node: dict[int, ShareSession] = {}
        self.reserved = 0
        """Records requested by fetches in flight."""
        ack_sender.can_renew_in_session = self._can_renew

    def with_broker(self, node: int) -> ShareSession:
        """The session with this broker; a new one is opened by its first request."""
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
            self._ended(node, session)

    def _ended(self, node: int, session: ShareSession) -> None:
        session.ended()
        self._in_flight_records.session_ended(node)

    def _can_renew(self, node: int) -> bool:
        session = self.by_node.get(node)
        return session is not None and can_renew(session.connection)

    async def _connect(self, node: int, session: ShareSession) -> Connection:
        connection = await self._cluster.connection(node, self._channel)
        self._adopt(node, session, connection)
        return connection

    def _adopt(self, node: int, session: ShareSession, connection: Connection) -> None:
        if session.connection is not connection:
            if session.epoch:
                self._ended(node, session)
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
        share: int,
        taken: PendingAcks,
    ) -> None:
        """Fetch `share` records of these partitions and send the acknowledgements `taken`. No task or future is
        created if the broker is connected."""
        session.busy = True
        self.reserved += share
        requested = _FetchRequest(node, session, partitions, share, taken)
        connection = self._cluster.open_connection(node, self._channel)
        if connection is None:
            self._tasks.spawn(self._connect_and_fetch(requested))
        else:
            self._send_fetch(connection, requested)

    async def _connect_and_fetch(self, requested: _FetchRequest) -> None:
        try:
            connection = await self._cluster.connection(requested.node, self._channel)
        except MansioError as error:
            self._fetched(requested, None, b"", error)
        else:
            self._send_fetch(connection, requested)

    def _send_fetch(self, connection: Connection, requested: _FetchRequest) -> None:
        node, session = requested.node, requested.session
        reply = self._tasks.reply(partial(self._fetched, requested, connection))
        assigned, wait_ms = self._fetcher.assigned, self._options.fetch_wait_ms_max
        try:
            self._adopt(node, session, connection)
            if self._in_flight_records.held and not self._ack_sender.supports_acknowledge_records.get(
                node, True
            ):
                wait_ms = min(HOLDING_WAIT_MS, wait_ms)
            requested.then = self._requests.begin_fetch(
                connection,
                session,
                {each: assigned[each] for each in requested.partitions if each in assigned},
                requested.taken,
                records_max=requested.share,
                wait_ms=wait_ms,
                reply=reply,
            )
        except MansioError as error:
            reply.set_exception(error)
        except Exception as error:  # noqa: BLE001  # the error goes to the waiters, and the session continues
            reply.set_exception(client_failed(error))

    def _fetched(
        self, requested: _FetchRequest, connection: Connection | None, frame: bytes, error: MansioError | None
    ) -> None:
        """A fetch was answered, or failed."""
        node, session, taken = requested.node, requested.session, requested.taken
        response = None
        try:
            if error is None and connection is not None:
                try:
                    response = self._requests.read_fetch(connection, session, requested.then, frame)
                except MansioError as refused:
                    error = refused
            if response is not None:
                session.succeeded()
                self._take(node, session, response, taken)
                if taken:
                    self._ack_sender.on_failure(taken, ConnectionLost("the response lacks a partition"))
            elif error is not None:
                self._failed(node, session, error)
                self._ack_sender.on_failure(
                    taken, error if error.retriable else ConnectionLost(error.message)
                )
        finally:
            session.busy = False
            self.reserved -= requested.share
            self._fetcher.fetched(is_answered=response is not None)

    def acknowledge(self, node: int, session: ShareSession, taken: PendingAcks) -> None:
        """Send the acknowledgements `taken` without fetching."""
        session.busy = True
        self._tasks.spawn(self._acknowledge(node, session, taken))

    async def _acknowledge(self, node: int, session: ShareSession, taken: PendingAcks) -> None:
        try:
            connection = await self._connect(node, session)
            response = await self._requests.acknowledge(connection, session, taken)
        except MansioError as error:
            self._failed(node, session, error)
            self._ack_sender.on_failure(taken, error if error.retriable else ConnectionLost(error.message))
        else:
            session.succeeded()
            names = {self._ack_sender.ids[each]: each.topic for each in taken}
            for topic_id, results in response.topics:
                for result in results:
                    partition = TopicPartition(names[topic_id], result.index)
                    code, why = result.error_code, result.error_message
                    refusal = error_for(code, why) if code else None
                    self._ack_sender.on_result(taken, partition, refusal, response.lock_ms / 1000)
            self._ack_sender.on_failure(taken, ConnectionLost("the response lacks a partition"))
        finally:
            session.busy = False
            self._fetcher.wake()

    # -- answers --------

    def _failed(self, node: int, session: ShareSession, error: MansioError) -> None:
        """The request failed: back off and try again."""
        if self._is_closed:
            return
        session.failures += 1
        session.blocked_until = self._loop.time() + self._options.backoff.delay_seconds(session.failures)
        if isinstance(error, ShareSessionNotFound | InvalidShareSessionEpoch | ConnectionLost):
            logger.info("share group %s: session with broker %d: %s", self._options.group, node, error)
            if session.epoch:
                self._ended(node, session)
        elif isinstance(error, ShareSessionLimitReached):
            logger.warning("share group %s: broker %d: %s", self._options.group, node, error)
        elif not error.retriable:
            self._fail(error)
        self.check_connection(node, session)
        self._cluster.mark_stale({partition.topic for partition in self._fetcher.assigned})

    def _take(
        self, node: int, session: ShareSession, response: share_fetch.ShareFetchResponse, taken: PendingAcks
    ) -> None:
        names = session.names
        if taken:
            names = names | {self._ack_sender.ids[each]: each.topic for each in taken}
        lock_s = response.lock_ms / 1000
        refused: set[TopicPartition] = set()
        for topic_id, partitions in response.topics:
            for data in partitions:
                partition = TopicPartition(names.get(topic_id, ""), data.index)
                if partition in taken:
                    code, message = data.acknowledge_error_code, data.acknowledge_error_message
                    self._ack_sender.on_result(taken, partition, error_for(code, message) if code else None)
                if not partition.topic:
                    continue
                if data.error_code:
                    refused.add(partition)
                    self._fetcher.refused(partition, error_for(data.error_code, data.error_message))
                elif data.acquired:
                    self._add_records(partition, node, data, lock_s)
        self._fetcher.served(session.known, refused)

    def _add_records(
        self, partition: TopicPartition, node: int, data: share_fetch.SharePartitionData, lock_s: float
    ) -> None:
        records = data.records[0] if data.records else memoryview(b"")
        try:
            holes = self._in_flight_records.take(partition, node, records, data.acquired, lock_s)
        except MansioError as error:  # other members may be able to decode it; otherwise it is dead-lettered
            holes = [(first, last, RELEASE) for first, last, _ in data.acquired]
            self._fail(error)
        for first, last, kind in holes:
            self._ack_sender.acknowledge_range(partition, kind, first, last)

    # -- the end --------

    async def end(self) -> None:
        """End all sessions, so that brokers release the leases at once."""
        nodes = [node for node, session in self.by_node.items() if session.epoch]
        await asyncio.gather(*(self._end_session(node) for node in nodes))

    async def _end_session(self, node: int) -> None:
        # On another connection: a fetch may wait on that of the session.
        try:
            connection = await self._cluster.connection(node)
            await self._requests.end(connection)
        except MansioError as error:
            logger.info(
                "share group %s: ending the session with broker %d: %s", self._options.group, node, error
            )

    async def close(self) -> None:
        """Stop; requests in flight are dropped."""
        self._is_closed = True
        await self._cluster.close_channel(self._channel)
