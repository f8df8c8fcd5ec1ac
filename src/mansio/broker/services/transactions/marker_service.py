"""Transaction marker service: writes the markers that end a transaction to the partitions that this broker leads.

Invariants:
* The result of a partition is returned when its marker is committed on all in-sync replicas, or failed; an error of one
  partition does not affect the others.
* The markers of one call are appended at once and flushed together.
* A client that is not a broker ends a transaction only by an abort, only while it is open, and without fencing a later
  producer or coordinator (KIP-664). It needs ALTER or CLUSTER_ACTION for the cluster.
* The group coordinator gets the marker of a partition of the offsets topic after its commit and before the result is
  returned, so that a client that sees its transaction end finds its offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import (
    AuthorizationFailed,
    InvalidProducerEpoch,
    InvalidTxnState,
    MansioError,
    TransactionCoordinatorFenced,
)
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.ports import Promise
    from mansio.wire.batch.end_marker import EndMarker


class TransactionMarkerService:
    """Writes transaction markers. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_before_offsets_marker", "_on_offsets_marker", "_partitions")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        before_offsets_marker: Callable[[int, int], None],
        on_offsets_marker: Callable[[int, EndMarker], None],
        authorization: Authorization,
    ) -> None:
        """Both functions are called with the index of a partition of the offsets topic: `before_offsets_marker` with
        the producer id before a marker is appended to it, `on_offsets_marker` when a marker in it is committed."""
        self._authorization = authorization
        self._partitions = partitions
        self._before_offsets_marker = before_offsets_marker
        self._on_offsets_marker = on_offsets_marker

    async def write(
        self, marker: EndMarker, partitions: Sequence[tuple[str, int]]
    ) -> list[MansioError | None]:
        """Write a marker to each of these partitions (topic, index). Returns None for a partition whose marker is
        committed, otherwise its error: those of `Partition.append_marker`, and `UnknownTopicOrPartition`."""
        (results,) = await self.write_all([(marker, partitions)])
        return results

    async def write_all(
        self, markers: Sequence[tuple[EndMarker, Sequence[tuple[str, int]]]]
    ) -> list[list[MansioError | None]]:
        """Write markers, each to its partitions: see `write`.

        All are appended at once: a marker that waited for the commit of another one could be repeated by its sender
        meanwhile, and would then be appended when the producer's next transaction has begun."""
        with self._partitions.one_flush():
            waiting = [
                [self._append(marker, topic, index) for topic, index in partitions]
                for marker, partitions in markers
            ]
        return [
            await self._wait(marker, partitions, each)
            for (marker, partitions), each in zip(markers, waiting, strict=True)
        ]

    async def _wait(
        self,
        marker: EndMarker,
        partitions: Sequence[tuple[str, int]],
        waiting: Sequence[Promise[None] | MansioError],
    ) -> list[MansioError | None]:
        results: list[MansioError | None] = []
        for (topic, index), one in zip(partitions, waiting, strict=True):
            if isinstance(one, MansioError):
                results.append(one)
                continue
            try:
                await one
            except MansioError as error:
                results.append(without_traceback(error))
                continue
            if topic == OFFSETS_TOPIC:
                self._on_offsets_marker(index, marker)
            results.append(None)
        return results

    async def abort_open(
        self, marker: EndMarker, partitions: Sequence[tuple[str, int]], *, caller: Caller
    ) -> list[MansioError | None]:
        """Abort the transaction of a producer in each of these partitions, for an administrator. The producer and the
        epochs of `marker` are those that the partition has (coordinator epoch 0 if it has none).

        Errors are `ClusterAuthorizationFailed` without ALTER or CLUSTER_ACTION for the cluster, those of `write`,
        `InvalidTxnState` if the producer has no open transaction there, and `InvalidProducerEpoch` or
        `TransactionCoordinatorFenced` for another epoch."""
        authorization = self._authorization
        try:
            if not authorization.allows(caller, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME):
                authorization.check_cluster(caller, Operation.CLUSTER_ACTION)
        except AuthorizationFailed as error:
            return [without_traceback(error)] * len(partitions)
        refused = [self._check_open(marker, topic, index) for topic, index in partitions]
        allowed = [one for one, error in zip(partitions, refused, strict=True) if error is None]
        written = iter(await self.write(marker, allowed))
        return [next(written) if error is None else error for error in refused]

    def _check_open(self, marker: EndMarker, topic: str, index: int) -> MansioError | None:
        partition = self._partitions.get(topic, index)
        if partition is None or not partition.is_leader or (producers := partition.producers) is None:
            return None  # the append has the error
        producer = producers.table.get(marker.producer_id)
        if producer is None or marker.producer_id not in producers.transactions.open:
            return InvalidTxnState(
                f"producer {marker.producer_id} has no open transaction in {partition.name}"
            )
        if marker.producer_epoch != producer.epoch:
            return InvalidProducerEpoch(
                f"producer {marker.producer_id} has epoch {producer.epoch}, the request {marker.producer_epoch}"
            )
        if marker.coordinator_epoch != max(producer.coordinator_epoch, 0):
            return TransactionCoordinatorFenced(
                f"the coordinator epoch of producer {marker.producer_id} is {producer.coordinator_epoch}, in the"
                f" request it is {marker.coordinator_epoch}"
            )
        return None

    def _append(self, marker: EndMarker, topic: str, index: int) -> Promise[None] | MansioError:
        try:
            partition = self._partitions.find(topic, None, index)
            if topic == OFFSETS_TOPIC:
                self._before_offsets_marker(index, marker.producer_id)
            return partition.commit_promise(partition.append_marker(marker).end_offset)
        except MansioError as error:
            return without_traceback(error)
