"""Transaction marker service: writes the markers that end a transaction to the partitions that this broker leads.

Invariants:
* The result of a partition is returned when its marker is committed on all in-sync replicas, or failed; an error of one
  partition does not affect the others.
* The markers of one call are flushed together.
* The group coordinator gets the marker of a partition of the offsets topic after its commit and before the result is
  returned, so that a client that sees its transaction end finds its offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.ports import Promise
    from mansio.wire.batch.end_marker import EndMarker

OFFSETS_TOPIC: Final = "__consumer_offsets"


class TransactionMarkerService:
    """Writes transaction markers. All methods run on the broker's event loop."""

    __slots__ = ("_partitions", "before_offsets_marker", "on_offsets_marker")

    def __init__(self, partitions: PartitionSet) -> None:
        self._partitions = partitions
        self.on_offsets_marker: Callable[[int, EndMarker], None] | None = None
        """Called with the index of a partition of the offsets topic when a marker in it is committed."""
        self.before_offsets_marker: Callable[[int, int], None] | None = None
        """Called with the index of a partition of the offsets topic and the producer id before a marker is appended."""

    async def write(
        self, marker: EndMarker, partitions: Sequence[tuple[str, int]]
    ) -> list[MansioError | None]:
        """Write a marker to each of these partitions (topic, index). Returns None for a partition whose marker is
        committed, otherwise its error: those of `Partition.append_marker`, and `UnknownTopicOrPartition`."""
        with self._partitions.one_flush():
            waiting = [self._append(marker, topic, index) for topic, index in partitions]
        results: list[MansioError | None] = []
        for (topic, index), one in zip(partitions, waiting, strict=True):
            if isinstance(one, MansioError):
                results.append(one)
                continue
            try:
                await one
            except MansioError as error:
                results.append(error)
                continue
            if topic == OFFSETS_TOPIC and self.on_offsets_marker is not None:
                self.on_offsets_marker(index, marker)
            results.append(None)
        return results

    def _append(self, marker: EndMarker, topic: str, index: int) -> Promise[None] | MansioError:
        try:
            partition = self._partitions.find(topic, None, index)
            if topic == OFFSETS_TOPIC and self.before_offsets_marker is not None:
                self.before_offsets_marker(index, marker.producer_id)
            return partition.commit_promise(partition.append_marker(marker).end_offset)
        except MansioError as error:
            return error
