"""Priorities of records as a feature of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.features.priorities.priority_view import PRIORITY_READER, PriorityReader, PriorityView
from mansio.broker.log_view.snapshots import remove_snapshots_above, snapshots_among
from mansio.broker.partition.partition import Attached, PartitionFeature

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.append_validation import RecordReader
    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.storage.log import Log


class PriorityFeature(PartitionFeature):
    """Priorities of records."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.has_priorities

    def reader(self, settings: TopicSettings) -> RecordReader | None:
        return PRIORITY_READER if settings.has_priorities else None

    def truncate(self, log: Log) -> None:
        if snapshots_among(log.recovery.other_files, PriorityView.suffix):
            remove_snapshots_above(log.end_offset, self._ports.disk, log.directory, PriorityView.suffix)

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        view = PriorityView(partition.log, is_new=is_new, on_complete=partition.waits.wake_all)
        replay = self._ports.replay(partition, view)
        return Attached(view, replay, appends=PriorityReader(view))
