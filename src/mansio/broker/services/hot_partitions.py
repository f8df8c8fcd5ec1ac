"""Hot partitions of this broker, for administrators; the keys of their records, for those who may read the topic.

Keys are data. A caller that may DESCRIBE the cluster learns which partitions are hot, and only with READ for a topic
which keys its hot partitions have.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from mansio.state.authorization.acls import Operation, ResourceType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from mansio.broker.hot_partitions.monitor import HotPartition, HotPartitionMonitor
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.state.hot_partitions.detector import Skew
    from mansio.state.hot_partitions.frequent_keys import KeySample
    from mansio.state.hot_partitions.remedies import BrokerLoad


class KeyAccess(IntEnum):
    """Whether a description of a hot partition has its keys. The numbers are those of DescribeHotPartitions."""

    SHOWN = 0
    NOT_SAMPLED = 1
    """The topic forbids it with `mansio.hot.keys.enable`, or nothing was sampled yet."""
    NOT_AUTHORIZED = 2
    """The caller may not READ the topic."""
    NOT_REQUESTED = 3


class DescribedHotPartition(NamedTuple):
    """A hot partition that this broker leads. `led_s`: for how long, as far as it knows; `sample`: without keys unless
    `key_access` is `SHOWN`."""

    topic: str
    topic_id: UUID
    partition: int
    skew: Skew
    led_s: float
    key_access: KeyAccess
    sample: KeySample | None


class HotPartitionReport(NamedTuple):
    """Load and hot partitions of this broker. `window_ms`: 0 if it does not look for them."""

    window_ms: int
    load: BrokerLoad
    partitions: Sequence[DescribedHotPartition]


class HotPartitionService:
    """Describes hot partitions. All methods run on the broker's event loop."""

    def __init__(
        self, monitor: HotPartitionMonitor, *, partitions: PartitionSet, authorization: Authorization
    ) -> None:
        self._monitor = monitor
        self._partitions = partitions
        self._authorization = authorization

    @property
    def count(self) -> int:
        """Number of the partitions that this broker leads and that are hot."""
        return len(self._monitor.hot)

    @property
    def sampled_batch_count(self) -> int:
        """Number of batches whose keys were read since the start."""
        return self._monitor.sampler.batch_count

    def is_hot(self, topic: str, index: int) -> bool:
        """Whether a partition that this broker leads is hot. No rights are asked for."""
        partition = self._partitions.get(topic, index)
        return partition is not None and self._monitor.is_hot(partition)

    def describe(self, keys_max: int, *, caller: Caller) -> HotPartitionReport:
        """Return the hot partitions of this broker, with at most `keys_max` keys of each. Raises
        `ClusterAuthorizationFailed` without DESCRIBE for the cluster."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        monitor = self._monitor
        found = sorted(
            (self._described(each, keys_max, caller) for each in monitor.hot),
            key=lambda each: (each.topic, each.partition),
        )
        return HotPartitionReport(monitor.window_ms, monitor.load, found)

    def _described(self, hot: HotPartition, keys_max: int, caller: Caller) -> DescribedHotPartition:
        partition = hot.partition
        access, sample = KeyAccess.NOT_REQUESTED, None
        if keys_max > 0:
            access = KeyAccess.NOT_AUTHORIZED
            if self._authorization.allows(caller, Operation.READ, ResourceType.TOPIC, partition.topic):
                sample = self._monitor.sampler.sample(partition, keys_max)
                access = KeyAccess.NOT_SAMPLED if sample is None else KeyAccess.SHOWN
        return DescribedHotPartition(
            partition.topic, partition.topic_id, partition.index, hot.skew, hot.led_s, access, sample
        )

    def rates_for_others(self, topic_id: bytes) -> Sequence[float]:
        """Return, for another broker, the rates of the partitions of a topic that this one leads, in records per
        second; those that take in nothing are left out."""
        name = self._partitions.name_of(topic_id)
        found = [] if name is None else self._partitions.open_partitions_of(name)
        return self._monitor.rates_for_others(found)
