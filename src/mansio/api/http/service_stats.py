"""Implementation of `BrokerStats` for a real broker: reads the counters of its services."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from mansio.api.http import metrics_broker, metrics_cluster, metrics_transactions, retention_warnings
from mansio.api.http.broker_stats import (
    Bounds,
    GroupLag,
    PartitionSample,
    PendingSample,
    ScheduleSample,
)
from mansio.broker.features.holds.retention_hold_feature import RetentionHoldFeature
from mansio.broker.features.holds.retention_holds import RELEASE_REASONS
from mansio.broker.services.acls import NO_ADMINISTRATOR, NO_ADMINISTRATOR_DETAIL
from mansio.broker.services.health import Problem
from mansio.errors import CorruptLog, MansioError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mansio.api.http.broker_stats import (
        Distribution,
        LeaderSample,
        Measurement,
        Phase,
        RunningBroker,
    )
    from mansio.broker.features.delays.delay_service import PartitionPending
    from mansio.broker.features.delays.schedule_service import PartitionSchedules
    from mansio.broker.partition.partition import Partition
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.settings import Settings


DAY_S: Final = 24 * 60 * 60


class ServiceStats:
    """`BrokerStats` of a broker. It exists before the broker runs, so that health checks can report `starting` while
    the broker recovers its logs. All methods run on the event loop of the broker."""

    def __init__(self, settings: Settings) -> None:
        self._broker: RunningBroker | None = None
        self._disk_full_listeners: list[Callable[[], object]] = []
        self._disk_warnings: Callable[[], Iterable[Problem]] = tuple
        self.is_in_cluster = settings.clustered
        self.bounds = Bounds(settings.metrics_partitions_max, settings.metrics_series_max)

    def attach(self, broker: RunningBroker) -> None:
        """Read the values of `broker` from now on, because it has started."""
        self._broker = broker
        broker.services.health.use_sources(
            self.problems, lambda: chain(self._disk_warnings(), self.warnings())
        )
        for listener in self._disk_full_listeners:
            broker.services.partitions.storage_health.on_disk_full_change(listener)

    def use_disk_warnings(self, warnings: Callable[[], Iterable[Problem]]) -> None:
        """Let DescribeHealth report the warnings of the disk monitor, too, which `warnings` returns; `/health/ready`
        adds them itself."""
        self._disk_warnings = warnings

    def running(self) -> RunningBroker | None:
        """Return the broker; None until it has started."""
        return self._broker

    def may_describe(self, caller: Caller) -> bool:
        return self._broker is None or self._broker.services.health.may_describe(caller)

    def on_disk_full_change(self, listener: Callable[[], object]) -> None:
        if self._broker is None:
            self._disk_full_listeners.append(listener)
        else:
            self._broker.services.partitions.storage_health.on_disk_full_change(listener)

    @property
    def phase(self) -> Phase:
        if self._broker is None:
            return "starting"
        return "running" if self._broker.is_ready() else "stopping"

    def problems(self) -> Iterator[Problem]:
        if self._broker is None:
            return
        service = self._broker.services
        state = service.topics.state
        if state.failure is not None:
            yield Problem("metadata_failed", str(state.failure))
        yield from metrics_cluster.problems(self._broker)
        failures = service.partitions.failures()
        for name, error in failures.items():
            topic, _, number = name.rpartition("-")
            reason = _reason(service, topic, int(number), error)
            yield Problem(reason, f"{name}: {error}", topic, int(number))
        for known in tuple(state.topics.values()):
            for index, replica in enumerate(known.partitions):
                name = f"{known.name}-{index}"
                if replica.leader == service.settings.node_id and name not in failures:
                    try:
                        service.partitions.find(known.name, None, index)
                    except MansioError:
                        yield Problem("partition_not_open", name, known.name, index)

    def warnings(self) -> Iterator[Problem]:
        if self._broker is None:
            return
        service = self._broker.services
        tokens = service.tokens
        if tokens is not None and tokens.keys_failure:
            yield Problem("token_keys_not_read", tokens.keys_failure)
        if (certificates := self._broker.certificates) is not None:
            now_s = service.clock.wall_ms() / 1000
            server_context = certificates.server_context
            if server_context.expires_soon(now_s):
                days = (server_context.expires_s - now_s) / DAY_S
                detail = f"expires in {days:.1f} days" if days >= 0 else "has expired"
                yield Problem("certificate_expires_soon", f"{certificates.files.certificate} {detail}")
        if service.acls.lacks_administrator():
            yield Problem(NO_ADMINISTRATOR, NO_ADMINISTRATOR_DETAIL)
        if unreadable := service.sqs_access_keys.undecryptable_count():
            detail = f"this broker cannot check {unreadable} access keys of SQS: their key is not in secrets_key_file"
            yield Problem("secrets_key_missing", detail)
        storage_health = service.partitions.storage_health
        if disk_full_partitions := storage_health.disk_full_partitions():
            topic, index = disk_full_partitions[0]
            yield Problem(
                "disk_full",
                f"the last write to {topic}-{index} failed with disk full"
                + (
                    f", and those to {len(disk_full_partitions) - 1} others, too"
                    if len(disk_full_partitions) > 1
                    else ""
                ),
                topic,
                index,
            )
        for (topic, index), damage in tuple(storage_health.damaged.items()):
            if topic:
                detail = (
                    f"{topic}-{index}: found {damage.found_count} times by readers, last: {damage.reason}"
                )
            else:
                detail = f"other partitions: found {damage.found_count} times by readers"
            yield Problem("corrupt_batch", detail, topic, index)
        for (topic, index), found in tuple(storage_health.unreadable.items()):
            name = f"{topic}-{index}" if topic else "other partitions"
            detail = (
                f"{name}: readers stepped {found.found_count} times over a batch that a client has stored so, the log"
                f" is intact; last at offset {found.offset}: {found.reason}"
            )
            yield Problem("unreadable_batch", detail, topic, index)
        yield from metrics_cluster.warnings(self._broker)
        yield from metrics_broker.dead_letter_warnings(self._broker)
        yield from metrics_broker.delay_warnings(self._broker)
        yield from metrics_broker.deduplication_warnings(self._broker)
        yield from metrics_broker.schedule_warnings(self._broker)
        yield from metrics_transactions.warnings(self._broker)
        yield from retention_warnings.share_group_warnings(self._broker)
        yield from _hold_warnings(service)
        for partition in tuple(service.partitions):
            if (truncated := partition.log.recovery.truncated_tail) is not None:
                detail = (
                    f"{partition.name}: {truncated.size_bytes:,} bytes were truncated at offset {truncated.offset} "
                    f"at start, not known to be flushed: {truncated.reason}"
                )
                if truncated.path:
                    detail += (
                        f"; {truncated.batch_count:,} whole batches of them are kept in {truncated.path}"
                    )
                yield Problem("log_truncated", detail, partition.topic, partition.index)

    def _replication(self, partition: Partition) -> LeaderSample | None:
        assert self._broker is not None
        topic = self._broker.services.topics.state.topics_by_id.get(partition.topic_id)
        is_known = topic is not None and partition.index < len(topic.partitions)
        return metrics_cluster.leader_sample(
            partition, topic.partitions[partition.index] if is_known and topic is not None else None
        )

    def partition_samples(self) -> Iterator[PartitionSample]:
        if self._broker is None:
            return
        clustered = self.is_in_cluster
        delays, schedules = self._broker.services.delays, self._broker.services.schedules
        for partition in tuple(self._broker.services.partitions):
            yield PartitionSample(
                topic=partition.topic,
                partition=partition.index,
                leader_epoch=partition.leader_epoch,
                start_offset=partition.start_offset,
                end_offset=partition.end_offset,
                high_watermark=partition.high_watermark,
                size_bytes=partition.log.size_bytes,
                has_failed=partition.log.failure is not None,
                replication=self._replication(partition) if clustered else None,
                pending=_pending_sample(delays.sample(partition)),
                schedules=_schedule_sample(schedules.sample(partition)),
                stable_lag=max(partition.high_watermark - partition.last_stable_offset, 0),
            )

    def group_lags(self) -> Iterator[GroupLag]:
        if self._broker is None:
            return
        service = self._broker.services
        for entry in tuple(service.group_coordinator.store.entries.values()):
            for topic, offsets in tuple(entry.offsets.items()):
                records = 0
                for index, committed in tuple(offsets.items()):
                    partition = service.partitions.get(topic, index)
                    if partition is not None:
                        records += max(partition.high_watermark - committed.offset, 0)
                yield GroupLag(entry.group.group_id, topic, records, len(offsets))

    def measurements(self) -> Iterator[Measurement]:
        broker = self._broker
        if broker is None:
            return iter(())
        return chain.from_iterable(part(broker) for part in metrics_broker.METRIC_FUNCTIONS)

    def distributions(self) -> Iterator[Distribution]:
        return iter(()) if self._broker is None else metrics_broker.distributions(self._broker)


def _pending_sample(found: PartitionPending | None) -> PendingSample | None:
    if found is None or found.next_due_ms is None:
        return None
    return PendingSample(found.count, found.size_bytes, (found.next_due_ms - found.now_ms) / 1000)


def _schedule_sample(found: PartitionSchedules | None) -> ScheduleSample | None:
    if found is None:
        return None
    next_firing_s = None if found.next_due_ms is None else (found.next_due_ms - found.now_ms) / 1000
    return ScheduleSample(found.count, len(found.failing), next_firing_s)


def _hold_warnings(service: BrokerServices) -> Iterator[Problem]:
    """Return warnings about retention holds."""
    holds = service.partitions.feature(RetentionHoldFeature).holds
    if len(holds) and holds.is_disk_low:
        yield Problem(
            "holds_not_enforced",
            f"{len(holds):,} retention holds have no effect: less than retention_hold_disk_free_bytes_min is free",
        )
    elif len(holds) and holds.is_disk_nearly_low:
        yield Problem(
            "holds_near_release",
            f"{len(holds):,} retention holds lose their effect when less than retention_hold_disk_free_bytes_min is"
            " free, and less than twice as much is",
        )
    if holds.has_blocked_retention:
        yield Problem(
            "holds_not_loaded",
            "nothing is deleted: offsets of groups, which may hold records, are not loaded",
        )
    for one in holds.released_holds():
        yield Problem(
            "hold_released",
            f"pipeline {one.pipeline!r} is at offset {one.offset} of {one.topic}-{one.partition}, and records below "
            f"{one.start} were deleted: {RELEASE_REASONS[one.reason]}",
            one.topic,
            one.partition,
        )


def _reason(service: BrokerServices, topic: str, index: int, error: StorageError) -> str:
    if service.partitions.get(topic, index) is not None:
        return "log_failed"
    return "log_corrupt" if isinstance(error, CorruptLog) else "partition_not_open"
