"""Sender of the markers that end a transaction in its partitions.

A marker is sent to the leader of each partition, again and again with backoff, until the leader has stored it, the
topic is deleted, or the sender's coordinator is replaced. Markers for another broker that wait while a request is in
flight are sent in the next request.

Invariants: a marker is sent to the broker that leads the partition when it is sent. A partition accepts a repeated
marker with the same epochs, unless the producer's next transaction has begun there with an epoch of its own. One
request per broker is in flight.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from mansio.broker.coordinator.transaction.partition_errors import partition_errors
from mansio.broker.routing.combining_queue import CombiningQueue
from mansio.errors import (
    ConnectionLost,
    InvalidProducerEpoch,
    LeaderNotAvailable,
    MansioError,
)
from mansio.logs import fields
from mansio.ports import Backoff, complete
from mansio.state.transactions.transaction import BUMPING_VERSION
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.routing.routes import PartitionLeaders
    from mansio.ports import Peers, Promise, Scheduler
    from mansio.wire.batch.end_marker import EndMarker
    from mansio.wire.topic_partition import PartitionKey

logger = logging.getLogger(__name__)

MARKERS_CLIENT_ID: Final = "mansio-transactions"
WRITE_TXN_MARKERS_VERSION: Final = 2
PLAIN_VERSION: Final = 1
"""Transaction version in which the epoch stays the same."""
TRANSACTION_COORDINATOR_FENCED: Final = 52
"""Kafka's error code."""

MARKERS_TIMEOUT_MS: Final = 30_000
MARKERS_PER_REQUEST_MAX: Final = 1_000
RETRY_BACKOFF: Final = Backoff(20, 1_000, jitter=0)
"""Pauses between two attempts for the partitions of a transaction."""

NO_LEADER: Final = -1

Outcomes = list["MansioError | None"]


class MarkerWriter(Protocol):
    """Writes markers to partitions that this broker leads; implemented by `TransactionMarkerService`."""

    async def write(self, marker: EndMarker, partitions: Sequence[PartitionKey]) -> Outcomes:
        """Write a marker to each partition; return when it is committed, with None or an error for each."""


class MarkerSender:
    """Sends markers to the leaders of partitions. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        scheduler: Scheduler,
        leaders: PartitionLeaders,
        local: MarkerWriter,
        peers: Peers | None = None,
    ) -> None:
        """`peers` is None on a single node."""
        self._node_id = node_id
        self._scheduler = scheduler
        self._leaders = leaders
        self._local = local
        self._peers = peers
        self._queues: dict[int, _BrokerQueue] = {}
        self.waiting_count = 0
        """Number of partitions that have still to get a marker."""

    def has_partition(self, topic: str, index: int) -> bool:
        """Whether the partition exists, according to the metadata."""
        return self._leaders.leader_id(topic, index) is not None

    async def send(
        self, marker: EndMarker, partitions: Sequence[PartitionKey], is_current: Callable[[], bool]
    ) -> bool:
        """Return True when every partition has the marker or is deleted; False if `is_current()` has become false
        before, or a later coordinator has fenced this one."""
        self.waiting_count += len(partitions)
        missing = list(partitions)
        try:
            return await self._send_all(marker, missing, is_current)
        finally:
            self.waiting_count -= len(missing)

    async def _send_all(
        self, marker: EndMarker, missing: list[PartitionKey], is_current: Callable[[], bool]
    ) -> bool:
        """Send the marker until `missing` is empty; partitions that have it are removed."""
        failures = 0
        while missing:
            if not is_current():
                return False
            by_leader: dict[int, list[PartitionKey]] = defaultdict(list)
            waiting: list[PartitionKey] = []
            for topic, index in missing:
                leader = self._leaders.leader_id(topic, index)
                if leader is None:
                    continue  # deleted
                if leader == NO_LEADER:
                    waiting.append((topic, index))
                else:
                    by_leader[leader].append((topic, index))
            for outcome in await self._send_once(marker, by_leader):
                if outcome.error is None:
                    continue
                if outcome.error.kafka_code == TRANSACTION_COORDINATOR_FENCED:
                    self._report(marker, outcome)
                    return False
                if isinstance(outcome.error, InvalidProducerEpoch):
                    # A later epoch has written to the partition, which it does not do before this transaction has ended
                    # there.
                    self._report(marker, outcome)
                    continue
                waiting.append(outcome.partition)
            self.waiting_count -= len(missing) - len(waiting)
            missing[:] = waiting
            if missing:
                failures += 1
                await self._scheduler.sleep(RETRY_BACKOFF.delay_ms(failures))
        return True

    def _report(self, marker: EndMarker, outcome: _Outcome) -> None:
        topic, index = outcome.partition
        known = fields(topic=topic, partition=index, producer_id=marker.producer_id, reason=outcome.error)
        logger.warning("transaction_marker_refused", extra=known)

    async def _send_once(self, marker: EndMarker, by_leader: dict[int, list[PartitionKey]]) -> list[_Outcome]:
        """Send the marker to each leader once, to all of them at the same time."""
        promises = [
            (partitions, self._start(leader, marker, partitions)) for leader, partitions in by_leader.items()
        ]
        outcomes: list[_Outcome] = []
        for partitions, promise in promises:
            errors = await promise
            outcomes += (
                _Outcome(partition, error) for partition, error in zip(partitions, errors, strict=True)
            )
        return outcomes

    def _start(self, leader: int, marker: EndMarker, partitions: list[PartitionKey]) -> Promise[Outcomes]:
        if leader != self._node_id and self._peers is not None:
            queue = self._queues.get(leader)
            if queue is None:
                queue = self._queues[leader] = _BrokerQueue(leader, self._peers, self._scheduler)
            return queue.put(_Waiting(marker, partitions))
        promise: Promise[Outcomes] = self._scheduler.promise()
        if leader == self._node_id:
            self._scheduler.spawn(self._write_locally(marker, partitions, promise), name="write markers")
        else:
            promise.set_result([LeaderNotAvailable()] * len(partitions))
        return promise

    async def _write_locally(
        self, marker: EndMarker, partitions: list[PartitionKey], promise: Promise[Outcomes]
    ) -> None:
        errors: Outcomes = [ConnectionLost("interrupted")] * len(partitions)
        try:
            errors = await self._local.write(marker, partitions)
        except MansioError as error:
            errors = [without_traceback(error)] * len(partitions)
        finally:
            complete(promise, errors)


class _Outcome(NamedTuple):
    partition: PartitionKey
    error: MansioError | None


class _Waiting(NamedTuple):
    marker: EndMarker
    partitions: list[PartitionKey]


class _BrokerQueue(CombiningQueue[_Waiting, Outcomes]):
    """Markers that wait for a request to one broker. A request has one marker per producer, because the response names
    only the producer."""

    name = "send markers"
    items_max = MARKERS_PER_REQUEST_MAX

    def __init__(self, node_id: int, peers: Peers, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._node_id = node_id
        self._peers = peers

    def order_key(self, item: _Waiting) -> int:
        return item.marker.producer_id

    def failure(self, item: _Waiting, reason: Exception | None) -> Outcomes:
        error = (
            without_traceback(reason)
            if isinstance(reason, MansioError)
            else ConnectionLost(str(reason or "interrupted"))
        )
        return [error] * len(item.partitions)

    async def request(self, items: Sequence[_Waiting]) -> list[Outcomes]:
        request = messages.encode_request(
            ApiKey.WRITE_TXN_MARKERS,
            WRITE_TXN_MARKERS_VERSION,
            0,
            MARKERS_CLIENT_ID,
            {"markers": [_marker_fields(each.marker, each.partitions) for each in items]},
        )
        frame = await self._peers.send(self._node_id, request, timeout_ms=MARKERS_TIMEOUT_MS)
        _, response = messages.decode_response_frame(
            ApiKey.WRITE_TXN_MARKERS, WRITE_TXN_MARKERS_VERSION, frame
        )
        codes = {
            (marker.producer_id, topic.name, each.partition_index): each.error_code
            for marker in response.markers
            for topic in marker.topics
            for each in topic.partitions
        }
        return [
            partition_errors(codes, each.marker.producer_id, each.partitions, self.failure(each, None))
            for each in items
        ]


def _marker_fields(marker: EndMarker, partitions: Sequence[PartitionKey]) -> dict[str, Any]:
    indexes: dict[str, list[int]] = defaultdict(list)
    for topic, index in partitions:
        indexes[topic].append(index)
    return {
        "producer_id": marker.producer_id,
        "producer_epoch": marker.producer_epoch,
        "transaction_result": marker.is_commit,
        "topics": [{"name": topic, "partition_indexes": each} for topic, each in indexes.items()],
        "coordinator_epoch": marker.coordinator_epoch,
        "transaction_version": BUMPING_VERSION if marker.bumps_epoch else PLAIN_VERSION,
    }
