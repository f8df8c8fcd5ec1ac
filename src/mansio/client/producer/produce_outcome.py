"""What becomes of a batch: stored, sent again, numbered anew, split, or given up.

Owns the outcome of every batch of one producer (when something is sent is `sender`'s business). Always true: a batch is
settled once, and its bytes are then free for others.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mansio.errors import MansioError, MessageTooLarge, OutOfOrderSequence, RequestError, UnknownProducerId
from mansio.net.retry import error_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.producer.accumulator import Batch, PartitionQueue
    from mansio.client.producer.producer_options import ProducerOptions
    from mansio.net.cluster import Cluster
    from mansio.wire.apis.produce import PartitionResult

logger = logging.getLogger(__name__)

DUPLICATE_SEQUENCE_NUMBER = 46


class ProduceOutcomes:
    """The part of a sender that deals with outcomes; made for `Sender` to build upon."""

    def __init__(
        self, cluster: Cluster, options: ProducerOptions, on_space_freed: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._on_space_freed = on_space_freed
        self._loop = asyncio.get_running_loop()
        self.buffered_bytes = 0
        self.incomplete: set[Batch] = set()
        self._queues: dict[PartitionQueue, None] = {}
        """Queues that hold anything, in the order in which they get their turn."""

    def _take(self, batch: Batch, result: PartitionResult) -> None:
        """The broker's word on one batch."""
        if result.error_code in (0, DUPLICATE_SEQUENCE_NUMBER):
            batch.base_offset = result.base_offset if result.error_code == 0 else -1
            batch.log_append_time_ms = result.log_append_time_ms
            batch.queue.stored(batch)
            self._complete(batch, None)
            return
        batch.record_errors = {index: message or "" for index, message in result.record_errors}
        error = error_for(result.error_code, result.error_message)
        if not isinstance(error, RequestError):
            # Not refused: a disk that failed, too few replicas, a time-out. The batch may be in the log.
            batch.may_be_stored = True
        self._failed(batch, error)

    def _failed(self, batch: Batch, error: MansioError) -> None:
        """Send again, number anew, split, or give up."""
        queue = batch.queue
        if isinstance(error, OutOfOrderSequence | UnknownProducerId):
            if self._is_repairable(batch):
                queue.requeue(batch)
                return
            queue.needs_epoch = True  # this batch is refused, and that is told; those after it would be, too
        if isinstance(error, MessageTooLarge) and len(batch.values) > 1:
            self.incomplete.discard(batch)
            left, right = batch.split()
            self.incomplete.update((left, right))
            queue.requeue(right)
            queue.requeue(left)
            return
        expired = self._loop.time() >= batch.created + self._options.delivery_timeout_ms / 1000
        if not error.retriable or expired:
            self._give_up(batch, error)
            return
        self._cluster.mark_stale((queue.topic,))
        queue.requeue(batch)
        queue.refusal = error
        self._back_off(queue)

    def _is_repairable(self, batch: Batch) -> bool:
        """Whether a refused sequence number means only that a batch before this one has to go again, or was given
        up. Otherwise the broker has lost acknowledged records, which nobody may paper over."""
        queue = batch.queue
        if queue.in_flight > 1 or queue.waits_before(batch):
            return True
        queue.needs_epoch = queue.gap is not None
        return queue.needs_epoch

    def _give_up(self, batch: Batch, error: MansioError) -> None:
        batch.queue.give_up(batch)
        if not batch.waiters:
            logger.warning(
                "%d records for partition %d of topic %s were not stored: %s",
                len(batch.values),
                batch.queue.partition,
                batch.queue.topic,
                error,
            )
        self._complete(batch, error)

    def _complete(self, batch: Batch, error: MansioError | None) -> None:
        batch.error = error
        self.incomplete.discard(batch)
        self.buffered_bytes -= batch.size
        batch.queue.last_waiter_count = len(batch.waiters)
        batch.complete()
        self._on_space_freed()

    def _fail_queue(self, queue: PartitionQueue, error: MansioError) -> None:
        """Everything that waits in a queue fails."""
        queue.seal()
        while queue.ready:
            self._give_up(queue.ready.popleft(), error)
        self._update_queue(queue)

    def _back_off(self, queue: PartitionQueue) -> None:
        queue.failures += 1
        queue.blocked_until = self._loop.time() + self._options.backoff.delay_seconds(queue.failures)

    def _begin_epoch(self, queue: PartitionQueue) -> None:
        queue.begin_epoch()

    def _update_queue(self, queue: PartitionQueue) -> None:
        """After batches left a queue."""
        if queue.in_flight == 0:
            if queue.needs_epoch:
                self._begin_epoch(queue)
            queue.is_recovering = bool(queue.ready) and queue.ready[0].base_sequence is not None
        if queue.in_flight == 0 and not queue.ready and queue.open is None:
            self._queues.pop(queue, None)
