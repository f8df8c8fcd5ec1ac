"""From sealed batches to acknowledgements.

Owns the requests of one producer: which batches go to which broker in one request, how many are under way, what is
sent again and when to give up (how a request looks is `request`'s business). Idempotence (KIP-98) lives here: sequence
numbers are given when a batch is first sent and kept through every retry.

How order survives failure: a partition has up to `in_flight_batches_max` batches under way. When one fails in a way
that may pass, the partition is *recovering*: nothing new leaves until all that is under way has come back, then the
batches go again one by one, in the order of their numbers, until the failed ones are through. A broker refuses a
batch whose predecessor is missing (OUT_OF_ORDER_SEQUENCE); with the predecessor before it, it is taken again.

A batch given up may or may not be stored. The batches behind it keep their numbers: if it was stored they are
accepted, if not they are refused, and only then the partition begins a new producer epoch (KIP-360) and numbers them
anew, so none is ever stored twice.

A request to a broker that is connected needs neither task nor future: it leaves in the turn of the loop in which it is
due, and its answer is dealt with where it is read. While a connection is being made, nothing else leaves for its
broker, so that nothing overtakes what waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from functools import partial
from typing import TYPE_CHECKING, cast

from mansio.client.leader_cache import LeaderCache
from mansio.client.producer.produce_outcome import ProduceOutcomes
from mansio.client.producer.produce_request import (
    NO_IDENTITY,
    PendingRequest,
    ProducerIdentity,
    RequestWriter,
)
from mansio.client.tasks import Tasks, client_failed
from mansio.errors import (
    ConnectionLost,
    InvalidRecord,
    MansioError,
    RequestTimedOut,
)
from mansio.net.cluster import check_top_level
from mansio.net.earliest_timer import EarliestTimer
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.client.producer.accumulator import Batch, PartitionQueue
    from mansio.client.producer.produce_request import Outcomes
    from mansio.client.producer.producer_options import ProducerOptions
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection

logger = logging.getLogger(__name__)

REQUESTS_IN_FLIGHT_MAX = 5
EXPIRY_CHECK_SECONDS = 0.5
PRODUCER_EPOCH_MAX = (1 << 15) - 1
CHANNEL = "produce"
NOT_ASKED = PartitionResult(-1)
"""What stands for the answer with acks=0."""


class Sender(ProduceOutcomes):
    """Sends what the queues of one producer have ready. All methods belong to the loop's thread."""

    def __init__(
        self, cluster: Cluster, options: ProducerOptions, on_space_freed: Callable[[], None]
    ) -> None:
        super().__init__(cluster, options, on_space_freed)
        self._in_flight: dict[int, int] = {}
        self._connecting: set[int] = set()
        self._pending: set[PendingRequest] = set()
        self._tasks = Tasks(self._loop, self._on_internal_error)
        self._leader_cache = LeaderCache(cluster, self._tasks, self._wake)
        self._woken = False
        self._earliest_timer = EarliestTimer(self._loop, self._wake)
        self._expiry: asyncio.TimerHandle | None = None
        self._identity = NO_IDENTITY
        self._is_initializing = False
        self._writer = RequestWriter(
            cluster, acks=-1 if options.acks == "all" else options.acks, codec=Codec[options.codec.upper()]
        )

    # -- what the producer says --------

    def opened(self, batch: Batch, *, is_awaited: bool = False) -> None:
        """A batch got its first record: it may leave after the linger time.

        `is_awaited`: who put it there waits for it. If records came one by one lately, it leaves now; otherwise in the
        loop's next turn, so that others that are published in this one join it.
        """
        self.incomplete.add(batch)
        queue = batch.queue
        self._queues.setdefault(queue)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_SECONDS, self._expire)
        if self._options.linger_ms:
            self._earliest_timer.set(batch.created + self._options.linger_ms / 1000)
        elif not queue.in_flight:  # otherwise its turn comes with the answer
            if is_awaited and queue.last_waiter_count == 1 and not self._woken:
                self._dispatch()
            else:
                self._wake()

    def seal(self, queue: PartitionQueue) -> None:
        """The open batch of a queue is full, or somebody waits: it may leave now."""
        queue.seal()
        self._wake()

    async def close(self) -> None:
        """Give up whatever is not settled, and stop."""
        self._earliest_timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        await self._tasks.end()
        self._abandon(ConnectionLost("the producer was closed before the record was acknowledged"))
        if self._expiry is not None:
            self._expiry.cancel()

    # -- choosing what to send --------

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start every request that can start now."""
        self._woken = False
        try:
            if self._identity is not NO_IDENTITY or not self._options.is_idempotent:
                for pending in self._choose():
                    self._start(pending)
            elif self._queues and not self._is_initializing:
                self._is_initializing = True
                self._tasks.spawn(self._init_producer_id())
        except Exception as error:  # noqa: BLE001  # it ends nothing but what waits, and that is told
            self._on_internal_error(error)

    def _choose(self) -> Iterable[PendingRequest]:
        """Take the batches that may leave now from their queues: one of each queue, one request for each broker."""
        now = self._loop.time()
        if len(self._queues) == 1:
            (only,) = self._queues
            node = self._node_for(only, now)
            return () if node is None else (PendingRequest(node, [self._next_batch(only)], self._ended),)
        chosen: dict[int, PendingRequest] = {}
        sizes: dict[int, int] = {}
        for queue in list(self._queues):
            node = self._node_for(queue, now)
            if node is None:
                continue
            size = (queue.ready[0] if queue.ready else cast("Batch", queue.open)).size
            if node in chosen and sizes[node] + size > self._options.request_bytes_max:
                self._wake()
                continue
            batch = self._next_batch(queue)
            if node in chosen:
                chosen[node].batches.append(batch)
                sizes[node] += size
            else:
                chosen[node] = PendingRequest(node, [batch], self._ended)
                sizes[node] = size
            del self._queues[queue]  # to the end of the line
            self._queues[queue] = None
        return chosen.values()

    def _node_for(self, queue: PartitionQueue, now: float) -> int | None:
        """The broker that can be sent this queue's next batch now."""
        if not self._may_send(queue, now):
            return None
        node = self._leader_cache.find(queue.topic, queue.partition, now)
        if node is None:
            self._leader_cache.look_up(queue.topic, queue.partition, partial(self._not_located, queue))
            return None
        if node in self._connecting or self._in_flight.get(node, 0) >= REQUESTS_IN_FLIGHT_MAX:
            return None
        return node

    def _next_batch(self, queue: PartitionQueue) -> Batch:
        """Take it, with its sequence numbers."""
        if not queue.ready:
            queue.seal()
        batch = queue.ready.popleft()
        if queue.identity is None:
            queue.identity = self._identity
        queue.number(batch)
        queue.in_flight += 1
        if queue.ready:
            self._wake()
        return batch

    def _start(self, pending: PendingRequest) -> None:
        node = pending.node
        self._in_flight[node] = self._in_flight.get(node, 0) + 1
        connection = self._cluster.open_connection(node, CHANNEL)
        if connection is None:
            self._connecting.add(node)
            self._tasks.spawn(self._connect_and_send(pending))
        else:
            self._send(connection, pending)

    def _may_send(self, queue: PartitionQueue, now: float) -> bool:
        if queue.blocked_until > now:
            self._earliest_timer.set(queue.blocked_until)
            return False
        if queue.ready:
            return queue.in_flight < (1 if queue.is_recovering else self._options.in_flight_batches_max)
        if queue.open is None or queue.in_flight:
            return False  # an open batch goes on filling while another is under way
        due = queue.open.created + self._options.linger_ms / 1000
        if due > now:
            self._earliest_timer.set(due)
            return False
        return True

    def _begin_epoch(self, queue: PartitionQueue) -> None:
        """In the end a producer id has no epochs left; the queue gets another one then. Others keep theirs, because
        what they have to send again is known to the broker under it."""
        super()._begin_epoch(queue)
        who = queue.identity
        if who is not None and who.first_epoch + queue.producer_epoch > PRODUCER_EPOCH_MAX:
            queue.identity, queue.producer_epoch = None, 0
            if self._identity is who:
                self._identity = NO_IDENTITY  # asked for before the next batch leaves

    def _not_located(self, queue: PartitionQueue, error: MansioError) -> None:
        queue.refusal = error
        self._back_off(queue)
        if not error.retriable:
            self._fail_queue(queue, error)

    # -- one request --------

    async def _init_producer_id(self) -> None:
        """Get a producer id (InitProducerId)."""
        fields = {
            "transactional_id": None,
            "transaction_timeout_ms": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        try:
            answer = await self._cluster.request(ApiKey.INIT_PRODUCER_ID, fields, check=check_top_level)
            self._identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
        except MansioError as error:
            if error.retriable:
                await asyncio.sleep(self._options.backoff.longest_ms / 1000)
            else:
                for queue in list(self._queues):
                    self._fail_queue(queue, error)
        finally:
            self._is_initializing = False
            self._wake()

    async def _connect_and_send(self, pending: PendingRequest) -> None:
        try:
            connection = await self._cluster.connection(pending.node, CHANNEL)
        except MansioError as error:
            self._connecting.discard(pending.node)
            self._ended(pending, (), error, was_sent=False)
        except asyncio.CancelledError:
            self._connecting.discard(pending.node)
            raise
        else:
            self._connecting.discard(pending.node)
            self._send(connection, pending)
            self._wake()

    def _send(self, connection: Connection, pending: PendingRequest) -> None:
        try:
            self._writer.send(connection, pending)
        except MansioError as error:
            self._ended(pending, (), error, was_sent=False)
            return
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            wrong = InvalidRecord(f"a record cannot be written: {error}")
            self._ended(pending, (), wrong, was_sent=False)
            return
        if self._options.acks == 0:
            self._ended(pending, [(batch, NOT_ASKED) for batch in pending.batches], None)
        else:
            self._pending.add(pending)

    def _ended(
        self,
        pending: PendingRequest,
        outcomes: Outcomes,
        error: MansioError | None,
        *,
        was_sent: bool = True,
    ) -> None:
        """A request was answered, or came to nothing."""
        self._pending.discard(pending)
        try:
            if error is not None:
                for batch in pending.batches:
                    batch.may_be_stored = batch.may_be_stored or was_sent
                    self._failed(batch, error)
            for batch, result in outcomes:
                if result is None:
                    batch.may_be_stored = True
                    self._failed(batch, RequestTimedOut("the broker left a partition out of its answer"))
                else:
                    self._take(batch, result)
            self._in_flight[pending.node] -= 1
            for batch in pending.batches:
                batch.queue.in_flight -= 1
                self._update_queue(batch.queue)
        except Exception as unforeseen:  # noqa: BLE001  # it ends nothing but what waits, and that is told
            self._on_internal_error(unforeseen)
        if self._queues:
            self._wake()

    def _on_internal_error(self, error: Exception) -> None:
        """Something happened here that nobody foresaw. How far it got is unknown, so all that waits fails, rather than
        be waited for in vain; what is published after it begins anew."""
        self._tasks.cancel()
        self._leader_cache.forget()
        self._connecting.clear()
        self._is_initializing = False
        self._abandon(client_failed(error))

    def _abandon(self, error: MansioError) -> None:
        """Fail all that is not settled. What is under way may still be stored, so the next records are numbered in a
        new epoch."""
        for pending in self._pending:
            pending.give_up()
        self._pending.clear()
        self._in_flight.clear()
        queues = {batch.queue for batch in self.incomplete}.union(self._queues)
        self._queues.clear()
        for queue in queues:
            queue.abandon()
        for batch in list(self.incomplete):
            self._complete(batch, error)

    def _expire(self) -> None:
        """Give up batches that waited in line for longer than the delivery timeout."""
        self._expiry = None
        oldest = self._loop.time() - self._options.delivery_timeout_ms / 1000
        for queue in list(self._queues):
            while queue.ready and queue.ready[0].created <= oldest:
                batch = queue.ready.popleft()
                waited = f"not acknowledged within {self._options.delivery_timeout_ms:.0f} ms"
                if queue.refusal is not None:
                    waited += f"; the last attempt: {queue.refusal.message}"
                self._give_up(batch, RequestTimedOut(waited))
            if queue.open is not None and queue.open.created <= oldest:
                queue.seal()
            self._update_queue(queue)
        if self.incomplete:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_SECONDS, self._expire)
