"""Deduplication of records by id as a feature of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.features.deduplication.deduplication_view import DeduplicationView
from mansio.broker.features.deduplication.deduplicator import ID_READER, Deduplicator
from mansio.broker.log_view.snapshots import remove_snapshots_above, snapshots_among
from mansio.broker.partition.partition import Attached, PartitionFeature

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.append_validation import RecordReader
    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.storage.log import Log


class DeduplicationFeature(PartitionFeature):
    """Deduplication of records by id."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.dedup_ms > 0

    def reader(self, settings: TopicSettings) -> RecordReader | None:
        return ID_READER if settings.dedup_ms > 0 else None

    def truncate(self, log: Log) -> None:
        if snapshots_among(log.recovery.other_files, DeduplicationView.suffix):
            remove_snapshots_above(log.end_offset, self._ports.disk, log.directory, DeduplicationView.suffix)

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        del is_new
        disk, clock = self._ports.disk, self._ports.clock
        view = DeduplicationView(disk, clock, partition.log, window_ms=lambda: partition.settings.dedup_ms)
        replay = self._ports.replay(partition, view)
        if partition.producers is not None:
            partition.producers.expect_shorter_batches()
        deduplicator = Deduplicator(partition, replay)
        return Attached(deduplicator, replay, appends=deduplicator, releases=deduplicator)
