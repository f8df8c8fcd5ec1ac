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
from typing import TYPE_CHECKING, Any

from mansio.errors import (
    ConnectionLost,
    InvalidRecord,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    RequestTimedOut,
    UnknownProducerId,
)
from mansio.link.alarm import Alarm
from mansio.link.cluster import check_top_level
from mansio.link.retry import error_for
from mansio.wire.compression import Codec
from mansio.wire.produce import PartitionResult
from mansio.wire.versions import ApiKey

from .request import NOBODY, Identity, PendingRequest, RequestWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.link.cluster import Cluster
    from mansio.link.connection import Connection

    from .accumulator import Batch, PartitionQueue
    from .producer import ProducerOptions
    from .request import Outcomes

logger = logging.getLogger(__name__)

DUPLICATE_SEQUENCE_NUMBER = 46
REQUESTS_IN_FLIGHT_MAX = 5
EXPIRY_CHECK_SECONDS = 0.5
LANE = "produce"
NOT_ASKED = PartitionResult(-1)
"""What stands for the answer with acks=0."""


class Sender:
    """Sends what the queues of one producer have ready. All methods belong to the loop's thread."""

    def __init__(self, cluster: Cluster, options: ProducerOptions, on_room: Callable[[], None]) -> None:
        self._cluster = cluster
        self._options = options
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self.buffered_bytes = 0
        self.unsettled: set[Batch] = set()
        self._queues: dict[PartitionQueue, None] = {}
        """Queues that hold anything, in the order in which they get their turn."""
        self._in_flight: dict[int, int] = {}
        self._connecting: set[int] = set()
        self._pending: set[PendingRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._locating: set[str] = set()
        self._refreshing: set[str] = set()
        self._woken = False
        self._alarm = Alarm(self._loop, self._wake)
        self._expiry: asyncio.TimerHandle | None = None
        self._identity = NOBODY
        self._identifying = False
        self._writer = RequestWriter(
            cluster, acks=-1 if options.acks == "all" else options.acks, codec=Codec[options.codec.upper()]
        )

    # -- what the producer says --------

    def opened(self, batch: Batch, *, is_awaited: bool = False) -> None:
        """A batch got its first record: it may leave after the linger time.

        `is_awaited`: who put it there waits for it. If records came one by one lately, it leaves now; otherwise in the
        loop's next turn, so that others that are published in this one join it.
        """
        self.unsettled.add(batch)
        queue = batch.queue
        self._queues.setdefault(queue)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_SECONDS, self._expire)
        if self._options.linger_ms:
            self._alarm.set(batch.created + self._options.linger_ms / 1000)
        elif not queue.in_flight:  # otherwise its turn comes with the answer
            if is_awaited and queue.sent_records == 1 and not self._woken:
                self._dispatch()
            else:
                self._wake()

    def seal(self, queue: PartitionQueue) -> None:
        """The open batch of a queue is full, or somebody waits: it may leave now."""
        queue.seal()
        self._wake()

    async def close(self) -> None:
        """Give up whatever is not settled, and stop."""
        self._alarm.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in self._pending:
            pending.give_up()
        self._pending.clear()
        for batch in list(self.unsettled):
            self._settle(batch, ConnectionLost("the producer was closed before the record was acknowledged"))
        self._queues.clear()
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
        if self._identity is NOBODY and self._options.is_idempotent:
            if self._queues and not self._identifying:
                self._identifying = True
                self._spawn(self._identify())
            return
        now = self._loop.time()
        chosen: dict[int, list[Batch]] = {}
        sizes: dict[int, int] = {}
        for queue in list(self._queues):
            if not self._may_send(queue, now):
                continue
            node = self._leader(queue)
            if (
                node is None
                or node in self._connecting
                or self._in_flight.get(node, 0) >= REQUESTS_IN_FLIGHT_MAX
            ):
                continue
            if not queue.ready:
                queue.seal()
            size = queue.ready[0].size
            if node in chosen and sizes[node] + size > self._options.request_bytes_max:
                self._wake()
                continue
            batch = queue.ready.popleft()
            queue.number(batch)
            queue.sent_records = len(batch.records)
            queue.in_flight += 1
            chosen.setdefault(node, []).append(batch)
            sizes[node] = sizes.get(node, 0) + size
            del self._queues[queue]  # to the end of the line
            self._queues[queue] = None
            if queue.ready:
                self._wake()
        for node, batches in chosen.items():
            self._in_flight[node] = self._in_flight.get(node, 0) + 1
            pending = PendingRequest(node, batches, self._ended)
            connection = self._cluster.open_connection(node, LANE)
            if connection is None:
                self._connecting.add(node)
                self._spawn(self._connect_and_send(pending))
            else:
                self._send(connection, pending)

    def _may_send(self, queue: PartitionQueue, now: float) -> bool:
        if queue.blocked_until > now:
            self._alarm.set(queue.blocked_until)
            return False
        if queue.ready:
            return queue.in_flight < (1 if queue.is_recovering else self._options.in_flight_batches_max)
        if queue.open is None or queue.in_flight:
            return False  # an open batch goes on filling while another is under way
        due = queue.open.created + self._options.linger_ms / 1000
        if due > now:
            self._alarm.set(due)
            return False
        return True

    def _leader(self, queue: PartitionQueue) -> int | None:
        """The node to send to, from the cache; looked up in the background where the cache does not know."""
        if queue.topic in self._locating:
            return None
        view = self._cluster.cached_topic(queue.topic)
        if (
            view is not None
            and queue.partition < len(view.partitions)
            and not self._cluster.is_stale(queue.topic)
        ):
            leader = view.partitions[queue.partition].leader
            if leader in self._cluster.nodes:
                if self._cluster.is_old(queue.topic) and queue.topic not in self._refreshing:
                    self._refreshing.add(queue.topic)
                    self._spawn(self._refresh(queue.topic))
                return leader
        self._locating.add(queue.topic)
        self._spawn(self._locate(queue))
        return None

    async def _refresh(self, topic: str) -> None:
        """Look, while records go on being sent, whether the topic has grown."""
        try:
            await self._cluster.refresh((topic,))
        except MansioError as error:
            logger.info("metadata of topic %s: %s", topic, error)
        finally:
            self._refreshing.discard(topic)

    async def _locate(self, queue: PartitionQueue) -> None:
        try:
            await self._cluster.refresh((queue.topic,))
            (await self._cluster.topic(queue.topic, wait_ms=0)).leader(queue.partition)
        except MansioError as error:
            self._back_off(queue)
            if not error.retriable:
                self._fail_queue(queue, error)
        finally:
            self._locating.discard(queue.topic)
            self._wake()

    # -- one request --------

    async def _identify(self) -> None:
        """Get a producer id (InitProducerId)."""
        fields = {
            "transactional_id": None,
            "transaction_timeout_ms": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        try:
            answer = await self._cluster.request(ApiKey.INIT_PRODUCER_ID, fields, check=check_top_level)
            self._identity = Identity(answer.producer_id, answer.producer_epoch)
        except MansioError as error:
            if error.retriable:
                await asyncio.sleep(self._options.backoff.longest_ms / 1000)
            else:
                for queue in list(self._queues):
                    self._fail_queue(queue, error)
        finally:
            self._identifying = False
            self._wake()

    async def _connect_and_send(self, pending: PendingRequest) -> None:
        try:
            connection = await self._cluster.connection(pending.node, LANE)
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
            self._writer.send(connection, pending, self._identity)
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
        if error is not None:
            for batch in pending.batches:
                batch.may_be_stored = batch.may_be_stored or was_sent
                self._failed(batch, error)
        for batch, result in outcomes:
            if result is None:
                self._failed(batch, RequestTimedOut("the broker left a partition out of its answer"))
            else:
                self._take(batch, result)
        self._in_flight[pending.node] -= 1
        for batch in pending.batches:
            batch.queue.in_flight -= 1
            self._tidy(batch.queue)
        if self._queues:
            self._wake()

    # -- outcomes --------

    def _take(self, batch: Batch, result: PartitionResult) -> None:
        """The broker's word on one batch."""
        if result.error_code in (0, DUPLICATE_SEQUENCE_NUMBER):
            batch.base_offset = result.base_offset if result.error_code == 0 else -1
            batch.log_append_time_ms = result.log_append_time_ms
            batch.queue.failures = 0
            batch.queue.has_gap = False
            self._settle(batch, None)
            return
        batch.record_errors = {index: message or "" for index, message in result.record_errors}
        self._failed(batch, error_for(result.error_code, result.error_message))

    def _failed(self, batch: Batch, error: MansioError) -> None:
        """Send again, number anew, split, or give up."""
        queue = batch.queue
        if isinstance(error, OutOfOrderSequence | UnknownProducerId) and self._is_repairable(batch):
            queue.put_back(batch)
            return
        if isinstance(error, MessageTooLarge) and len(batch.records) > 1:
            self.unsettled.discard(batch)
            left, right = batch.split()
            self.unsettled.update((left, right))
            queue.put_back(right)
            queue.put_back(left)
            return
        expired = self._loop.time() >= batch.created + self._options.delivery_timeout_ms / 1000
        if not error.retriable or expired:
            self._give_up(batch, error)
            return
        self._cluster.mark_stale((queue.topic,))
        queue.put_back(batch)
        self._back_off(queue)

    def _is_repairable(self, batch: Batch) -> bool:
        """Whether a refused sequence number means only that a batch before this one has to go again, or was given
        up. Otherwise the broker has lost acknowledged records, which nobody may paper over."""
        queue = batch.queue
        if queue.in_flight > 1 or queue.waits_before(batch):
            return True
        queue.needs_epoch = queue.has_gap
        return queue.has_gap

    def _give_up(self, batch: Batch, error: MansioError) -> None:
        batch.queue.give_up(batch)
        if not batch.waiters:
            logger.warning(
                "%d records for partition %d of topic %s were not stored: %s",
                len(batch.records),
                batch.queue.partition,
                batch.queue.topic,
                error,
            )
        self._settle(batch, error)

    def _settle(self, batch: Batch, error: MansioError | None) -> None:
        batch.error = error
        self.unsettled.discard(batch)
        self.buffered_bytes -= batch.size
        batch.settle()
        self._on_room()

    def _fail_queue(self, queue: PartitionQueue, error: MansioError) -> None:
        """Everything that waits in a queue fails."""
        queue.seal()
        while queue.ready:
            self._give_up(queue.ready.popleft(), error)
        self._tidy(queue)

    def _back_off(self, queue: PartitionQueue) -> None:
        queue.failures += 1
        queue.blocked_until = self._loop.time() + self._options.backoff.delay_seconds(queue.failures)

    def _tidy(self, queue: PartitionQueue) -> None:
        """After batches left a queue."""
        if queue.in_flight == 0:
            if queue.needs_epoch:
                queue.begin_epoch()
            queue.is_recovering = bool(queue.ready) and queue.ready[0].base_sequence is not None
        if queue.in_flight == 0 and not queue.ready and queue.open is None:
            self._queues.pop(queue, None)

    def _expire(self) -> None:
        """Give up batches that waited in line for longer than the delivery timeout."""
        self._expiry = None
        oldest = self._loop.time() - self._options.delivery_timeout_ms / 1000
        for queue in list(self._queues):
            while queue.ready and queue.ready[0].created <= oldest:
                batch = queue.ready.popleft()
                waited = f"not acknowledged within {self._options.delivery_timeout_ms:.0f} ms"
                self._give_up(batch, RequestTimedOut(waited))
            if queue.open is not None and queue.open.created <= oldest:
                queue.seal()
            self._tidy(queue)
        if self.unsettled:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_SECONDS, self._expire)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
