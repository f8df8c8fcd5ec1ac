"""From sealed batches to acknowledgements.

Owns the requests of one producer: which batches go to which broker in one request, how many are under way, what is
sent again and when to give up. Idempotence (KIP-98) lives here: sequence numbers are given when a batch is first
sent and kept through every retry.

How order survives failure: a partition has up to `in_flight_batches_max` batches under way. When one fails in a way
that may pass, the partition is *recovering*: nothing new leaves until all that is under way has come back, then the
batches go again one by one, in the order of their numbers, until the failed ones are through. A broker refuses a
batch whose predecessor is missing (OUT_OF_ORDER_SEQUENCE); with the predecessor before it, it is taken again.

A batch given up may or may not be stored. The batches behind it keep their numbers: if it was stored they are
accepted, if not they are refused, and only then the partition begins a new producer epoch (KIP-360) and numbers them
anew, so none is ever stored twice.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from mansio.errors import (
    ConnectionLost,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    RequestTimedOut,
    UnknownProducerId,
)
from mansio.link.cluster import check_top_level
from mansio.link.metadata import NO_TOPIC_ID
from mansio.link.retry import error_for
from mansio.wire import produce
from mansio.wire.compression import Codec
from mansio.wire.records import build_batch
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.link.cluster import Cluster
    from mansio.link.connection import Connection

    from .accumulator import Batch, PartitionQueue
    from .producer import ProducerOptions

logger = logging.getLogger(__name__)

DUPLICATE_SEQUENCE_NUMBER = 46
HIGHEST_VERSION_WITH_NAMES = 12
REQUESTS_IN_FLIGHT_MAX = 5
EXPIRY_CHECK_SECONDS = 0.5


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._locating: set[str] = set()
        self._refreshing: set[str] = set()
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._producer_id = -1
        self._initial_epoch = 0
        self._identifying = False
        self._codec = Codec[options.codec.upper()]
        self._acks = -1 if options.acks == "all" else options.acks

    # -- what the producer says --------

    def opened(self, batch: Batch) -> None:
        """A batch got its first record: it may leave after the linger time."""
        self.unsettled.add(batch)
        self._queues.setdefault(batch.queue)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_SECONDS, self._expire)
        if self._options.linger_ms:
            self._wake_at(batch.created + self._options.linger_ms / 1000)
        else:
            self._wake()

    def seal(self, queue: PartitionQueue) -> None:
        """The open batch of a queue is full, or somebody waits: it may leave now."""
        queue.seal()
        self._wake()

    async def close(self) -> None:
        """Give up whatever is not settled, and stop."""
        for handle in (self._timer, self._expiry):
            if handle is not None:
                handle.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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

    def _wake_at(self, moment: float) -> None:
        if self._timer is None or self._timer.cancelled() or self._timer.when() > moment:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(moment, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _dispatch(self) -> None:
        """Start every request that can start now."""
        self._woken = False
        if self._options.is_idempotent and self._producer_id < 0:
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
            if node is None or self._in_flight.get(node, 0) >= REQUESTS_IN_FLIGHT_MAX:
                continue
            if not queue.ready:
                queue.seal()
            size = queue.ready[0].size
            if node in chosen and sizes[node] + size > self._options.request_bytes_max:
                self._wake()
                continue
            batch = queue.ready.popleft()
            queue.number(batch)
            queue.in_flight += 1
            chosen.setdefault(node, []).append(batch)
            sizes[node] = sizes.get(node, 0) + size
            del self._queues[queue]  # to the end of the line
            self._queues[queue] = None
            if queue.ready:
                self._wake()
        for node, batches in chosen.items():
            self._in_flight[node] = self._in_flight.get(node, 0) + 1
            self._spawn(self._send(node, batches))

    def _may_send(self, queue: PartitionQueue, now: float) -> bool:
        if queue.blocked_until > now:
            self._wake_at(queue.blocked_until)
            return False
        if queue.ready:
            return queue.in_flight < (1 if queue.is_recovering else self._options.in_flight_batches_max)
        if queue.open is None or queue.in_flight:
            return False  # an open batch goes on filling while another is under way
        due = queue.open.created + self._options.linger_ms / 1000
        if due > now:
            self._wake_at(due)
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
            self._producer_id, self._initial_epoch = answer.producer_id, answer.producer_epoch
        except MansioError as error:
            if error.retriable:
                await asyncio.sleep(self._options.backoff.longest_ms / 1000)
            else:
                for queue in list(self._queues):
                    self._fail_queue(queue, error)
        finally:
            self._identifying = False
            self._wake()

    async def _send(self, node: int, batches: list[Batch]) -> None:
        try:
            connection = await self._cluster.connection(node, "produce")
            await self._exchange(connection, batches)
        except MansioError as error:
            for batch in batches:
                batch.may_be_stored = True
                self._failed(batch, error)
        finally:
            self._in_flight[node] -= 1
            for batch in batches:
                batch.queue.in_flight -= 1
                self._tidy(batch.queue)
            self._wake()

    async def _exchange(self, connection: Connection, batches: list[Batch]) -> None:
        """Send one request and settle its batches, or raise before anything of it is settled."""
        topics: dict[str, list[tuple[int, bytes]]] = {}
        expected: dict[tuple[str, int], Batch] = {}
        for batch in batches:
            queue = batch.queue
            topics.setdefault(queue.topic, []).append((queue.partition, self._encode(batch)))
            expected[queue.topic, queue.partition] = batch
        ids = {topic: self._topic_id(topic) for topic in topics}
        highest = HIGHEST_VERSION_WITH_NAMES if NO_TOPIC_ID in ids.values() else None
        version = connection.version_for(ApiKey.PRODUCE, highest=highest)
        correlation_id = connection.next_correlation_id()
        timeout_ms = connection.options.request_timeout_ms
        buffers = produce.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._acks,
            int(timeout_ms),
            [(topic, ids[topic], partitions) for topic, partitions in topics.items()],
        )
        if self._acks == 0:
            connection.send_unanswered(buffers)
            for batch in batches:
                self._settle(batch, None)
            return
        frame = await connection.exchange(buffers, correlation_id, timeout_ms=timeout_ms)
        names = {topic_id: topic for topic, topic_id in ids.items()}
        for name, topic_id, results in produce.decode_response(version, frame).topics:
            for result in results:
                answered = expected.pop((name or names[bytes(topic_id or b"")], result.index), None)
                if answered is not None:
                    self._take(answered, result)
        for batch in expected.values():
            self._failed(batch, RequestTimedOut("the broker left a partition out of its answer"))

    def _encode(self, batch: Batch) -> bytes:
        if not self._options.is_idempotent:
            return build_batch(batch.records, codec=self._codec)
        return build_batch(
            batch.records,
            codec=self._codec,
            producer_id=self._producer_id,
            producer_epoch=self._initial_epoch + batch.producer_epoch,
            base_sequence=-1 if batch.base_sequence is None else batch.base_sequence,
        )

    def _topic_id(self, topic: str) -> bytes:
        view = self._cluster.cached_topic(topic)
        return NO_TOPIC_ID if view is None else view.topic_id

    # -- outcomes --------

    def _take(self, batch: Batch, result: Any) -> None:
        """The broker's word on one batch."""
        if result.error_code in (0, DUPLICATE_SEQUENCE_NUMBER):
            batch.base_offset = result.base_offset if result.error_code == 0 else -1
            batch.log_append_time_ms = result.log_append_time_ms
            batch.queue.failures = 0
            batch.queue.has_gap = False
            self._settle(batch, None)
            return
        batch.record_errors = {int(index): message for index, message in result.record_errors}
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
