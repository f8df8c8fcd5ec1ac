"""Sender of a producer: sends batches and completes them with their result (Kafka's Sender).

The sender selects the batches of each request, limits the requests in flight, and retries, splits or fails batches.
`produce_request` encodes requests. The sender assigns sequence numbers (KIP-98) when it first sends a batch; a batch
keeps them through every retry.

Ordering after a failure: a partition has up to `in_flight_batches_max` batches in flight. After a retriable failure the
partition is *recovering*: no new batch is sent until all in-flight requests have ended; then the batches are resent one
at a time in sequence order, until the failed ones are stored. A broker refuses a batch whose predecessor is missing
(OUT_OF_ORDER_SEQUENCE) and accepts it once the predecessor is stored.

The broker may or may not have stored a batch that failed at its delivery timeout. Later batches of the partition keep
their sequence numbers. If the failed batch is stored, the broker accepts them. If it is not, the broker refuses them,
and only then the partition starts a new producer epoch (KIP-360) in which they get new sequence numbers. So no record
is stored twice.

A request to a connected broker needs neither a task nor a future: the sender writes it in the same iteration of the
event loop, and the connection's read callback handles the response. While a connection to a broker is being opened,
the sender sends no other request to that broker, so that requests keep their order.

Invariants:
* A batch is completed once; its bytes then no longer count as buffered.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from mansio.client.leader_cache import LeaderCache
from mansio.client.producer.accumulator import NO_IDENTITY, ProducerIdentity
from mansio.client.producer.produce_request import PRODUCE_CHANNEL, PendingRequest, RequestWriter
from mansio.client.tasks import BackgroundTasks, log_client_failure
from mansio.errors import (
    ConnectionLost,
    InvalidRecord,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    RequestError,
    RequestTimedOut,
    TransactionAborted,
    UnknownProducerId,
)
from mansio.net.cluster import check_new_producer_id
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import client_error_for_code
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult
from mansio.wire.batch.compression import Codec
from mansio.wire.field_values import PRODUCER_EPOCH_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.client.producer.accumulator import Batch, PartitionQueue
    from mansio.client.producer.produce_request import Outcomes
    from mansio.client.producer.producer_options import ProducerOptions
    from mansio.client.producer.transaction_requests import TransactionRequests
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

logger = logging.getLogger(__name__)

REQUESTS_IN_FLIGHT_MAX = 5
"""Maximum number of Produce requests in flight to one broker."""
RESPONSE_WAIT_MS_MAX = 10.0
"""How long an open batch keeps filling while another one of its partition is in flight. Longer waits would cost callers
that publish one record at a time half a round trip each, where the round trip is long."""
EXPIRY_CHECK_INTERVAL_S = 0.5
"""Interval between checks for batches that are older than the delivery timeout."""
DUPLICATE_SEQUENCE_NUMBER = 46
"""Kafka error code of a batch that the broker has already stored."""
RESULT_WITHOUT_RESPONSE = PartitionResult(-1)
"""Result of every batch with acks=0, for which the broker sends no response: error code 0 and no offset."""


class Sender:
    """Sends the batches of one producer and completes them. All methods run on the event loop's thread."""

    def __init__(
        self,
        cluster: Cluster,
        options: ProducerOptions,
        on_space_freed: Callable[[], None],
        transaction: TransactionRequests | None = None,
    ) -> None:
        """`transaction`: of a transactional producer, which calls `start_identity` before each transaction."""
        self._cluster = cluster
        self._transaction = transaction
        self._options = options
        self._on_space_freed = on_space_freed
        self._loop = asyncio.get_running_loop()
        self.buffered_bytes = 0
        """Approximate size of the records that are not acknowledged yet, in bytes."""
        self.incomplete_batches: set[Batch] = set()
        """Batches, open or closed, that are not completed yet."""
        self._queues: dict[PartitionQueue, None] = {}
        """Queues with batches, in round-robin order."""
        self._in_flight: dict[int, int] = {}
        """Number of requests in flight, by node id."""
        self._connecting: dict[int, PendingRequest] = {}
        """Request that waits for a connection, by node id."""
        self._pending: set[PendingRequest] = set()
        """Requests that wait for a response."""
        self._tasks = BackgroundTasks(self._loop, self._on_internal_error)
        self._leader_cache = LeaderCache(cluster, self._tasks, self._schedule_dispatch)
        self._is_dispatch_scheduled = False
        self._earliest_timer = EarliestTimer(self._loop, self._schedule_dispatch)
        self._expiry: asyncio.TimerHandle | None = None
        self._identity = NO_IDENTITY
        self._is_prepared = False
        self._is_initializing = False
        self._writer = RequestWriter(
            cluster,
            acks=-1 if options.acks == "all" else options.acks,
            codec=Codec[options.codec.upper()],
            transaction=None if transaction is None else transaction.manager,
        )
        self._is_adding = False
        """Whether partitions are being added to the transaction."""

    # -- called by the producer --------

    def on_batch_opened(self, batch: Batch, *, is_awaited: bool = False) -> None:
        """Register a batch that got its first record and schedule it for sending, after the linger time.

        `is_awaited`: whether the caller waits for the acknowledgement of the record. Without a linger time, an awaited
        batch is sent at once if the last batch of the queue had one waiter. Otherwise the batch is sent in the next
        iteration of the event loop, so that records published in the current iteration join it.
        """
        self.incomplete_batches.add(batch)
        queue = batch.queue
        self._queues.setdefault(queue)
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_INTERVAL_S, self._fail_expired_batches)
        if self._options.linger_ms:
            self._earliest_timer.set(batch.created_s + self._options.linger_ms / 1000)
        elif queue.in_flight_count:  # it is sent when the response arrives, or this time has passed
            self._earliest_timer.set(batch.created_s + RESPONSE_WAIT_MS_MAX / 1000)
        elif is_awaited and queue.last_waiter_count == 1 and not self._is_dispatch_scheduled:
            self._send_requests(batch.created_s)
        else:
            self._schedule_dispatch()

    def prepare(self) -> None:
        """Request what the first batch needs besides the metadata of its topic, which the caller is about to request:
        the producer id and, where the leader can only be one broker, the connection to it. So these take no round trips
        of their own. Raises `ClientFailed` after an unexpected error."""
        if self._transaction is not None or self._is_prepared:
            return
        self._is_prepared = True
        try:
            self._request_ahead()
        except Exception as error:
            self._is_prepared = self._is_initializing = False
            raise log_client_failure(error) from error

    def _request_ahead(self) -> None:
        if self._options.is_idempotent and self._identity is NO_IDENTITY and not self._is_initializing:
            self._is_initializing = True
            self._tasks.spawn(self._init_producer_id())
        if len(self._cluster.nodes) == 1:
            self._tasks.spawn(self._connect_ahead(next(iter(self._cluster.nodes))))

    async def _connect_ahead(self, node: int) -> None:
        with suppress(MansioError):  # the first batch reports it
            await self._cluster.connection(node, PRODUCE_CHANNEL)

    def close_batch(self, batch: Batch) -> None:
        """Close an open batch, because it is full or flush was called, and schedule it for sending."""
        batch.queue.close_batch(batch)
        self._schedule_dispatch()

    def start_identity(self, identity: ProducerIdentity) -> None:
        """Use this producer id and epoch from now on, in a transaction. No batch may be incomplete."""
        self._identity = identity

    def fail_unsent(self, error: MansioError) -> None:
        """Fail all batches except those in flight, because their transaction is aborted."""
        for queue in list(self._queues):
            self._fail_queue(queue, error)

    def fail_all(self, error: MansioError) -> None:
        """Fail all batches, also those in flight, whose results are ignored. The broker must refuse these if it
        receives them later."""
        self._fail_all(error)

    async def close(self) -> None:
        """Fail every batch that is not completed with `ConnectionLost`, and stop."""
        self._earliest_timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        await self._tasks.close()
        self._fail_all(ConnectionLost("the producer was closed before the record was acknowledged"))
        if self._expiry is not None:
            self._expiry.cancel()

    # -- choosing what to send --------

    def _schedule_dispatch(self) -> None:
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatch_scheduled = False
        self._send_requests(self._loop.time())

    def _send_requests(self, now: float) -> None:
        """Send every request that can be sent at the time `now` of the event loop."""
        try:
            if self._transaction is not None and not self._transaction.manager.is_writable:
                self.fail_unsent(TransactionAborted())
            elif self._identity is not NO_IDENTITY or not self._options.is_idempotent:
                for pending in self._select_requests(now):
                    self._start_request(pending)
            elif self._queues and not self._is_initializing:
                self._is_initializing = True
                self._tasks.spawn(self._init_producer_id())
        except Exception as error:  # noqa: BLE001  # reported through every incomplete batch
            self._on_internal_error(error)

    def _select_requests(self, now: float) -> Iterable[PendingRequest]:
        """Take from each queue the batch that can be sent now, if there is one, and return one request per broker."""
        if len(self._queues) == 1:
            (only,) = self._queues
            node = self._sendable_leader(only, now)
            return (
                ()
                if node is None
                else (PendingRequest(node, [self._take_batch(only)], now, self._on_request_end),)
            )
        chosen: dict[int, PendingRequest] = {}
        sizes: dict[int, int] = {}
        for queue in list(self._queues):
            node = self._sendable_leader(queue, now)
            if node is None:
                continue
            first = queue.ready_batches[0] if queue.ready_batches else queue.next_open_batch
            size = cast("Batch", first).size
            if node in chosen and sizes[node] + size > self._options.request_bytes_max:
                self._schedule_dispatch()
                continue
            batch = self._take_batch(queue)
            if node in chosen:
                chosen[node].batches.append(batch)
                sizes[node] += size
            else:
                chosen[node] = PendingRequest(node, [batch], now, self._on_request_end)
                sizes[node] = size
            del self._queues[queue]  # to the end of the round-robin order
            self._queues[queue] = None
        return chosen.values()

    def _sendable_leader(self, queue: PartitionQueue, now: float) -> int | None:
        """Return the node id of the leader if the next batch of the queue can be sent now; None if it has to wait."""
        if not self._may_send(queue, now):
            return None
        node = self._leader_cache.find(queue.topic, queue.partition, now)
        if node is None:
            self._leader_cache.look_up(queue.topic, queue.partition, partial(self._on_leader_error, queue))
            return None
        if node in self._connecting or self._in_flight.get(node, 0) >= REQUESTS_IN_FLIGHT_MAX:
            return None
        if self._transaction is not None and not self._is_in_transaction(queue):
            return None
        return node

    def _is_in_transaction(self, queue: PartitionQueue) -> bool:
        """Whether a batch of this partition may be sent. If the partition has to be added to the transaction first, a
        task does that."""
        assert self._transaction is not None
        if self._transaction.manager.add_partition(queue.topic, queue.partition):
            return True
        if not self._is_adding:
            self._is_adding = True
            self._tasks.spawn(self._add_partitions(self._transaction))
        return False

    async def _add_partitions(self, transaction: TransactionRequests) -> None:
        """Add all partitions with batches to the transaction. An error fails the transaction, unless that has ended
        meanwhile: an abort leads to another identity."""
        identity = transaction.manager.identity
        try:
            await transaction.add_partitions()
        except MansioError as error:
            if transaction.manager.identity is identity:
                transaction.manager.fail(error)
        finally:
            self._is_adding = False
            self._schedule_dispatch()

    def _take_batch(self, queue: PartitionQueue) -> Batch:
        """Remove the next batch from the queue, assign its sequence numbers and return it."""
        if self._transaction is not None and queue.identity is not self._identity:
            queue.start_identity(self._identity)
        batch = queue.take_batch()
        if queue.identity is None:
            queue.identity = self._identity
        queue.in_flight_count += 1
        if queue.ready_batches or queue.prioritized_batches:
            self._schedule_dispatch()
        return batch

    def _start_request(self, pending: PendingRequest) -> None:
        node = pending.node
        self._in_flight[node] = self._in_flight.get(node, 0) + 1
        connection = self._writer.existing_connection(pending)
        if connection is None:
            self._connecting[node] = pending
            self._tasks.spawn(self._connect_and_send(pending))
        else:
            self._send(connection, pending)

    def _may_send(self, queue: PartitionQueue, now: float) -> bool:
        if queue.blocked_until_s > now:
            self._earliest_timer.set(queue.blocked_until_s)
            return False
        if queue.ready_batches:
            return queue.in_flight_count < (1 if queue.is_recovering else self._options.in_flight_batches_max)
        batch = queue.next_open_batch if queue.prioritized_batches else queue.open_batch
        if batch is None:
            return False
        wait_ms = self._options.linger_ms
        if queue.in_flight_count:  # an open batch keeps filling while another is in flight
            if queue.is_recovering or queue.in_flight_count >= self._options.in_flight_batches_max:
                return False
            wait_ms = max(wait_ms, RESPONSE_WAIT_MS_MAX)
        due = batch.created_s + wait_ms / 1000
        if due > now:
            self._earliest_timer.set(due)
            return False
        return True

    def _start_epoch(self, queue: PartitionQueue) -> None:
        """Start a new producer epoch for a queue. If the producer id has no higher epoch left, the queue gets a new
        producer id. Other queues keep the old id, under which the broker knows the batches that they resend."""
        queue.start_epoch()
        identity = queue.identity
        if identity is not None and identity.first_epoch + queue.producer_epoch > PRODUCER_EPOCH_MAX:
            queue.identity, queue.producer_epoch = None, 0
            if self._identity is identity:
                self._identity = NO_IDENTITY  # InitProducerId is sent before the next batch

    def _on_leader_error(self, queue: PartitionQueue, error: MansioError) -> None:
        queue.last_error = without_traceback(error)
        self._back_off(queue)
        if not error.retriable:
            self._fail_queue(queue, error)

    # -- one request --------

    async def _init_producer_id(self) -> None:
        """Request a producer id (InitProducerId). A non-retriable error fails all queued batches."""
        fields = {
            "transactional_id": None,
            "transaction_timeout_ms": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        try:
            response = await self._cluster.request(
                ApiKey.INIT_PRODUCER_ID, fields, check=check_new_producer_id
            )
            self._identity = ProducerIdentity(response.producer_id, response.producer_epoch)
        except MansioError as error:
            if error.retriable:
                await asyncio.sleep(self._options.backoff.longest_ms / 1000)
            else:
                for queue in list(self._queues):
                    self._fail_queue(queue, error)
        finally:
            self._is_initializing = False
            self._schedule_dispatch()

    async def _connect_and_send(self, pending: PendingRequest) -> None:
        try:
            connection = await self._cluster.connection(pending.node, PRODUCE_CHANNEL)
        except MansioError as error:
            self._connecting.pop(pending.node, None)
            if not pending.done():
                self._on_request_end(pending, (), error, was_sent=False)
        except asyncio.CancelledError:
            self._connecting.pop(pending.node, None)
            raise
        else:
            self._connecting.pop(pending.node, None)
            if not pending.done():  # otherwise its batches have failed, and must not be sent
                pending.selected_s = self._loop.time()
                self._send(connection, pending)
            self._schedule_dispatch()

    def _send(self, connection: BrokerConnection, pending: PendingRequest) -> None:
        try:
            self._writer.send(connection, pending)
        except MansioError as error:
            self._on_request_end(pending, (), error, was_sent=False)
            return
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            invalid = InvalidRecord(f"a record cannot be encoded: {error}")
            self._on_request_end(pending, (), invalid, was_sent=False)
            return
        if self._options.acks == 0:
            self._on_request_end(
                pending, [(batch, RESULT_WITHOUT_RESPONSE) for batch in pending.batches], None
            )
        else:
            self._pending.add(pending)

    def _on_request_end(
        self,
        pending: PendingRequest,
        outcomes: Outcomes,
        error: MansioError | None,
        *,
        was_sent: bool = True,
    ) -> None:
        """Handle the end of a request: the broker's result for each batch, or the error that ended the request without
        results. `was_sent`: whether the broker may have received the request."""
        self._pending.discard(pending)
        try:
            if error is not None:
                for batch in pending.batches:
                    batch.may_be_stored = batch.may_be_stored or was_sent
                    self._handle_error(batch, error)
            for batch, result in outcomes:
                if result is None:
                    batch.may_be_stored = True
                    self._handle_error(batch, RequestTimedOut("the response has no result for the partition"))
                else:
                    self._handle_result(batch, result)
            self._in_flight[pending.node] -= 1
            for batch in pending.batches:
                batch.queue.in_flight_count -= 1
                self._update_queue(batch.queue)
        except Exception as unexpected:  # noqa: BLE001  # reported through every incomplete batch
            self._on_internal_error(unexpected)
        if self._queues:
            self._schedule_dispatch()

    # -- outcome of one batch --------

    def _handle_result(self, batch: Batch, result: PartitionResult) -> None:
        """Complete a stored batch; handle the error of a refused one."""
        if result.error_code in (0, DUPLICATE_SEQUENCE_NUMBER):
            batch.base_offset = result.base_offset if result.error_code == 0 else -1
            batch.log_append_time_ms = result.log_append_time_ms
            batch.queue.on_batch_stored(batch)
            self._complete(batch, None)
            return
        batch.record_errors = {index: message or "" for index, message in result.record_errors}
        error = client_error_for_code(result.error_code, result.error_message)
        if not isinstance(error, RequestError):
            # After a disk error, too few in-sync replicas or a timeout the batch may be in the log.
            batch.may_be_stored = True
        self._handle_error(batch, error)

    def _handle_error(self, batch: Batch, error: MansioError) -> None:
        """Handle the error of one attempt to store a batch: retry, split or fail the batch. A batch with a refused
        sequence number is sent again, possibly in a new producer epoch, or fails."""
        queue = batch.queue
        if isinstance(error, OutOfOrderSequence | UnknownProducerId):
            if self._is_sequence_repairable(batch):
                queue.requeue(batch)
                return
            queue.needs_new_epoch = True  # without a new epoch the broker would refuse all later batches
        if isinstance(error, MessageTooLarge) and len(batch.values) > 1:
            self.incomplete_batches.discard(batch)
            left, right = batch.split()
            self.incomplete_batches.update((left, right))
            queue.requeue(right)
            queue.requeue(left)
            return
        expired = self._loop.time() >= batch.created_s + self._options.delivery_timeout_ms / 1000
        is_doomed = self._transaction is not None and not self._transaction.manager.is_writable
        if not error.retriable or expired or is_doomed:
            self._fail_batch(batch, error)
            return
        self._cluster.mark_stale((queue.topic,))
        queue.requeue(batch)
        queue.last_error = without_traceback(error)
        self._back_off(queue)

    def _is_sequence_repairable(self, batch: Batch) -> bool:
        """Whether the broker refused the sequence number of the batch only because an earlier batch must be sent again
        or has failed. If not, the broker has lost acknowledged records; then the batch must fail, so that the
        application learns of it."""
        queue = batch.queue
        if queue.in_flight_count > 1 or queue.has_earlier_retry(batch):
            return True
        queue.needs_new_epoch = queue.gap_sequence is not None
        return queue.needs_new_epoch

    def _fail_batch(self, batch: Batch, error: MansioError) -> None:
        batch.queue.on_batch_failed(batch)
        if not batch.is_awaited and self._transaction is None:  # the commit raises it
            logger.warning(
                "%d records for partition %d of topic %s were not stored: %s",
                len(batch.values),
                batch.queue.partition,
                batch.queue.topic,
                error,
            )
        self._complete(batch, error)

    def _complete(self, batch: Batch, error: MansioError | None) -> None:
        batch.error = without_traceback(error)
        if error is not None and self._transaction is not None:
            self._transaction.manager.fail(error)
            self._schedule_dispatch()  # fails the other batches
        self.incomplete_batches.discard(batch)
        self.buffered_bytes -= batch.size
        batch.queue.last_waiter_count = len(batch.waiters)
        batch.complete()
        self._on_space_freed()

    def _fail_queue(self, queue: PartitionQueue, error: MansioError) -> None:
        """Fail all batches of a queue except those in flight."""
        queue.close_open_batches()
        while queue.ready_batches:
            self._fail_batch(queue.ready_batches.popleft(), error)
        self._update_queue(queue)

    def _back_off(self, queue: PartitionQueue) -> None:
        queue.failure_count += 1
        queue.blocked_until_s = self._loop.time() + self._options.backoff.delay_seconds(queue.failure_count)

    def _update_queue(self, queue: PartitionQueue) -> None:
        """Update the state of a queue after some of its batches ended or failed; forget the queue if it is empty."""
        if queue.in_flight_count == 0:
            if queue.needs_new_epoch and self._transaction is None:  # the abort ends the epoch
                self._start_epoch(queue)
            queue.is_recovering = (
                bool(queue.ready_batches) and queue.ready_batches[0].base_sequence is not None
            )
        if queue.in_flight_count == 0 and not queue.ready_batches and queue.next_open_batch is None:
            self._queues.pop(queue, None)

    # -- failure and expiry --------

    def _on_internal_error(self, error: Exception) -> None:
        """Fail every batch that is not completed after an unexpected exception, because the sender's state may be
        inconsistent and no caller may wait forever. Later records start with an empty state."""
        self._tasks.cancel()
        self._leader_cache.reset()
        self._connecting.clear()
        self._is_initializing = False
        self._fail_all(log_client_failure(error))

    def _fail_all(self, error: MansioError) -> None:
        """Fail every batch that is not completed. The broker may still store batches in flight, so later records get a
        new producer epoch."""
        for pending in (*self._pending, *self._connecting.values()):
            pending.ignore_response()
        self._pending.clear()
        self._in_flight.clear()
        queues = {batch.queue for batch in self.incomplete_batches}.union(self._queues)
        self._queues.clear()
        for queue in queues:
            queue.drop_batches()
        for batch in list(self.incomplete_batches):
            self._complete(batch, error)

    def _fail_expired_batches(self) -> None:
        """Fail queued batches that are older than the delivery timeout, and schedule the next check."""
        self._expiry = None
        oldest = self._loop.time() - self._options.delivery_timeout_ms / 1000
        for queue in list(self._queues):
            while queue.ready_batches and queue.ready_batches[0].created_s <= oldest:
                batch = queue.ready_batches.popleft()
                message = f"not acknowledged within {self._options.delivery_timeout_ms:.0f} ms"
                if queue.last_error is not None:
                    message += f"; the last attempt: {queue.last_error.message}"
                self._fail_batch(batch, RequestTimedOut(message))
            batch_open = queue.next_open_batch
            if batch_open is not None and batch_open.created_s <= oldest:
                queue.close_open_batches()
            self._update_queue(queue)
        if self.incomplete_batches:
            self._expiry = self._loop.call_later(EXPIRY_CHECK_INTERVAL_S, self._fail_expired_batches)
