"""The share sessions of one receiver, one with each broker that has something for it (KIP-932).

Owns each session's epoch, its partitions, and its one request under way. A session lives as long as its connection;
what it leased ends with it, so everything of it is suspect then (see `lease_book`). What to ask for and what to say is
for its `SessionObserver` to decide, which is `lease_fetcher`.

Always true: one request of a session is under way; a session error, a lost connection or a leader that moved makes a
new session, or another, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from mansio.client.share.leased import RELEASE
from mansio.client.share.share_requests import ShareRequests, ShareSession, can_renew
from mansio.client.tasks import client_failed
from mansio.errors import (
    ConnectionLost,
    InvalidShareSessionEpoch,
    MansioError,
    ShareSessionLimitReached,
    ShareSessionNotFound,
)
from mansio.net.retry import error_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mansio.client.share.ack_sender import AckSender
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import ReceiveOptions
    from mansio.client.share.pending_ack import PendingAcks
    from mansio.client.share.share_requests import TopicIds
    from mansio.client.tasks import Tasks
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.wire.apis import share_fetch

logger = logging.getLogger(__name__)

HOLDING_WAIT_MS: Final = 100
"""How long a fetch may wait where acknowledgements wait behind it."""

_CHANNEL_NUMBERS = itertools.count()


class SessionObserver(Protocol):
    """Who decides what is asked for, and is told what became of that."""

    assigned: TopicIds
    """What is fetched now, and the ids of its topics."""

    def wake(self) -> None:
        """A session is free."""

    def fetched(self, *, is_answered: bool) -> None:
        """A session is free, and the room that its fetch had been given."""

    def served(self, known: Container[TopicPartition], refused: Container[TopicPartition]) -> None:
        """A session that `known` are in was answered, and only these were `refused`."""

    def refused(self, partition: TopicPartition, error: MansioError) -> None:
        """Not from this broker, or not now."""


class _FetchRequest:
    """One fetch: for `share` records of these partitions. `then`: what the session has when it is answered."""

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
    """Of one receiver. All methods belong to the loop's thread."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: Tasks,
        fail: Callable[[MansioError], None],
        observer: SessionObserver,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._tasks = tasks
        self._fail = fail
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._requests = ShareRequests(
            options.group, member_id, ack_sender.ids, bytes_max=options.fetch_bytes_max
        )
        self._is_closed = False
        self._channel = f"share {next(_CHANNEL_NUMBERS)}"
        self.by_node: dict[int, ShareSession] = {}
        self.reserved = 0
        """Records that fetches under way ask for."""
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
        """Whether some session has lost its connection."""
        return any(each.connection is not None and each.connection.closed for each in self.by_node.values())

    def check_connection(self, node: int, session: ShareSession) -> None:
        """A session ends with its connection."""
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
        """Ask for `share` records of these partitions, and say what is `taken` along. Needs neither task nor future
        where the broker is connected."""
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
        assigned, wait_ms = self._observer.assigned, self._options.fetch_wait_ms_max
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
        except Exception as error:  # noqa: BLE001  # whoever waits is told, and the session goes on
            reply.set_exception(client_failed(error))

    def _fetched(
        self, requested: _FetchRequest, connection: Connection | None, frame: bytes, error: MansioError | None
    ) -> None:
        """A fetch was answered, or came to nothing."""
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
                    self._ack_sender.on_failure(
                        taken, ConnectionLost("the broker said nothing of a partition")
                    )
            elif error is not None:
                self._failed(node, session, error)
                self._ack_sender.on_failure(
                    taken, error if error.retriable else ConnectionLost(error.message)
                )
        finally:
            session.busy = False
            self.reserved -= requested.share
            self._observer.fetched(is_answered=response is not None)

    def acknowledge(self, node: int, session: ShareSession, taken: PendingAcks) -> None:
        """Say what is `taken` without asking for anything."""
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
            self._ack_sender.on_failure(taken, ConnectionLost("the broker said nothing of a partition"))
        finally:
            session.busy = False
            self._observer.wake()

    # -- answers --------

    def _failed(self, node: int, session: ShareSession, error: MansioError) -> None:
        """The request came to nothing: begin again, soon."""
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
        self._cluster.mark_stale({partition.topic for partition in self._observer.assigned})

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
                    self._observer.refused(partition, error_for(data.error_code, data.error_message))
                elif data.acquired:
                    self._put_down(partition, node, data, lock_s)
        self._observer.served(session.known, refused)

    def _put_down(
        self, partition: TopicPartition, node: int, data: share_fetch.SharePartitionData, lock_s: float
    ) -> None:
        records = data.records[0] if data.records else memoryview(b"")
        try:
            holes = self._in_flight_records.take(partition, node, records, data.acquired, lock_s)
        except MansioError as error:  # others may be able to read it; if not, it goes to the dead letters
            holes = [(first, last, RELEASE) for first, last, _ in data.acquired]
            self._fail(error)
        for first, last, kind in holes:
            self._ack_sender.acknowledge_range(partition, kind, first, last)

    # -- the end --------

    async def end(self) -> None:
        """Tell every broker: what is still leased is released at once."""
        nodes = [node for node, session in self.by_node.items() if session.epoch]
        await asyncio.gather(*(self._end_session(node) for node in nodes))

    async def _end_session(self, node: int) -> None:
        # Beside the session's own connection, on which a fetch may wait.
        try:
            connection = await self._cluster.connection(node)
            await self._requests.end(connection)
        except MansioError as error:
            logger.info(
                "share group %s: ending the session with broker %d: %s", self._options.group, node, error
            )

    async def close(self) -> None:
        """What is under way is thrown away."""
        self._is_closed = True
        await self._cluster.close_channel(self._channel)
