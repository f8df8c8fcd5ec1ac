"""Delayed records, with schedules, as a feature of partitions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.broker.features.delays.delay_control_records import DelayControlType
from mansio.broker.features.delays.delay_manager import DELAY_READER, DelayManager, StoredRecordsCache
from mansio.broker.features.delays.delayed_delivery import DelayedDelivery
from mansio.broker.features.delays.delayed_records import DelayedRecords
from mansio.broker.log_view.snapshots import snapshots_among
from mansio.broker.partition.partition import Attached, PartitionFeature
from mansio.wire.batch.schedule_control_records import ScheduleControlType

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.append_validation import RecordReader
    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.storage.log import Log


class DelayFeature(PartitionFeature):
    """Delayed records and schedules."""

    control_types = frozenset((*DelayControlType, *ScheduleControlType))

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports
        self.delivery = DelayedDelivery(ports.clock, ports.scheduler)
        """The delivery of what is due, of all partitions of this broker."""

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.accepts_delays

    def is_stored(self, log: Log) -> bool:
        return bool(snapshots_among(log.recovery.other_files, DelayedRecords.suffix))

    def reader(self, settings: TopicSettings) -> RecordReader | None:
        return DELAY_READER if settings.accepts_delays else None

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        del is_new
        stored = StoredRecordsCache()
        on_due_changed = partial(self.delivery.on_due_changed, partition)
        view = DelayedRecords(partition.log, on_due_changed, stored.clear)
        replay = self._ports.replay(partition, view)
        manager = DelayManager(partition, replay, stored, on_due_changed, self._ports.may_write)
        self.delivery.attach(manager)
        return Attached(manager, replay, appends=manager, releases=manager)

    def detach(self, feature: object) -> None:
        if isinstance(feature, DelayManager):
            self.delivery.detach(feature)

    def close(self) -> None:
        self.delivery.close()
