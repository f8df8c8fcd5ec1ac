"""Properties of records that partitions of this broker may have: what each needs, and which of them exist.

A feature registers here, in `partition_features`, and a partition gets all of them by its constructor. The partition
attaches a feature when its settings or its files need it, also while it is served; it stays attached until the
partition is closed, because the log keeps what the feature has written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.broker.log_view.replay import ViewReplay
from mansio.broker.log_view.view import LogView
from mansio.broker.partition.deduplication_view import DeduplicationView
from mansio.broker.partition.deduplicator import Deduplicator
from mansio.broker.partition.delay_manager import DelayManager
from mansio.broker.partition.delayed_records import DelayedRecords, has_delay_snapshot
from mansio.broker.partition.partition import Attached, PartitionFeature
from mansio.broker.partition.priority_view import PriorityReader, PriorityView
from mansio.broker.partition.retention_holds import RetentionHoldHook
from mansio.wire.batch.delay_control_records import DelayControlType
from mansio.wire.batch.schedule_control_records import ScheduleControlType

if TYPE_CHECKING:
    from mansio.broker.partition.delayed_delivery import DelayedDelivery
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.retention_holds import RetentionHolds
    from mansio.ports import Background, Clock, Disk, Scheduler

V = TypeVar("V", bound=LogView[Any])


class FeaturePorts(NamedTuple):
    """What features use of the outside world. `background`: the thread that writes snapshots."""

    disk: Disk
    background: Background
    scheduler: Scheduler
    clock: Clock

    def replay(self, partition: Partition, view: V) -> ViewReplay[V] | None:
        """Keep a view of the log of a partition. Return None if it cannot be read; then the log has failed."""
        log = partition.log
        try:
            return ViewReplay(
                view,
                self.disk,
                self.background,
                self.scheduler,
                log,
                is_leader=lambda: partition.is_leader,
                on_damage=partition.report_damage,
            )
        except OSError as error:
            log.fail(error, f"cannot read the {view.kind} of {log.directory}")
            return None


class RetentionHoldFeature(PartitionFeature):
    """Holds of pipelines, on every topic that clients may write."""

    def __init__(self, ports: FeaturePorts, holds: RetentionHolds) -> None:
        self._ports = ports
        self._holds = holds

    def is_needed(self, partition: Partition) -> bool:
        return not partition.internal

    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        del is_new
        hook = RetentionHoldHook(partition, self._holds, self._ports.clock)
        return Attached(hook, hook, is_on_data_path=False)


class DeduplicationFeature(PartitionFeature):
    """Deduplication of records by id."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.dedup_ms > 0

    def attach(self, partition: Partition, *, is_new: bool) -> Attached | None:
        del is_new
        disk, clock = self._ports.disk, self._ports.clock
        view = DeduplicationView(disk, clock, partition.log, window_ms=lambda: partition.settings.dedup_ms)
        replay = self._ports.replay(partition, view)
        if replay is None:
            return None
        if partition.producers is not None:
            partition.producers.expect_shorter_batches()
        deduplicator = Deduplicator(partition, replay)
        return Attached(deduplicator, replay, appends=deduplicator, releases=deduplicator)


class DelayFeature(PartitionFeature):
    """Delayed records and schedules. `delivery` None: nothing is delivered but on request."""

    control_types = frozenset((*DelayControlType, *ScheduleControlType))

    def __init__(self, ports: FeaturePorts, delivery: DelayedDelivery | None) -> None:
        self._ports = ports
        self._delivery = delivery

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.accepts_delays or has_delay_snapshot(
            self._ports.disk, partition.log.directory
        )

    def attach(self, partition: Partition, *, is_new: bool) -> Attached | None:
        del is_new
        replay = self._ports.replay(partition, DelayedRecords(partition.log))
        if replay is None:
            return None
        manager = DelayManager(partition, replay)
        if self._delivery is not None:
            self._delivery.attach(manager)
        return Attached(manager, replay, appends=manager, releases=manager)

    def detach(self, feature: object) -> None:
        if self._delivery is not None and isinstance(feature, DelayManager):
            self._delivery.detach(feature)


class PriorityFeature(PartitionFeature):
    """Priorities of records."""

    def __init__(self, ports: FeaturePorts) -> None:
        self._ports = ports

    def is_needed(self, partition: Partition) -> bool:
        return partition.settings.has_priorities

    def attach(self, partition: Partition, *, is_new: bool) -> Attached | None:
        view = PriorityView(partition.log, is_new=is_new, on_complete=partition.wake_readers)
        replay = self._ports.replay(partition, view)
        if replay is None:
            return None
        return Attached(view, replay, appends=PriorityReader(view))


def partition_features(
    ports: FeaturePorts, holds: RetentionHolds, delivery: DelayedDelivery | None
) -> tuple[PartitionFeature, ...]:
    """Return all features, in the order in which they take part in an append: a delayed record counts as accepted for
    deduplication, and has a priority when it is delivered."""
    return (
        RetentionHoldFeature(ports, holds),
        DeduplicationFeature(ports),
        DelayFeature(ports, delivery),
        PriorityFeature(ports),
    )
