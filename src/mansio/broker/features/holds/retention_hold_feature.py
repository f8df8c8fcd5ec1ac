"""Retention holds of pipelines as a feature of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.features.holds.retention_holds import RetentionHoldHook, RetentionHolds
from mansio.broker.partition.partition import Attached, PartitionFeature

if TYPE_CHECKING:
    from mansio.broker.features.feature_ports import FeaturePorts
    from mansio.broker.partition.partition import Partition


class RetentionHoldFeature(PartitionFeature):
    """Holds of pipelines, on every topic that clients may write."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._clock = ports.clock
        self.holds = RetentionHolds()
        """The holds on the partitions of this broker."""

    def is_needed(self, partition: Partition) -> bool:
        return not partition.internal

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        del is_new
        hook = RetentionHoldHook(partition, self.holds, self._clock)
        return Attached(hook, hook, is_on_data_path=False)
