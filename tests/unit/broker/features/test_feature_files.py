"""Files of features that a partition had before, or does not have yet: they never describe another log than this one,
and they are read when the partition is opened, not when its settings change."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.features.deduplication.deduplicator import ID_READER
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.broker.features.known_features import create_features
from mansio.broker.features.priorities.priority_view import PRIORITY_READER
from mansio.config import topic_config
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import DIRECTORY, LARGE_RULES, SMALL_SEGMENTS, PartitionBench

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition
    from mansio.testing.disk import SimulatedDisk

ENABLED: Any = {
    "deduplication": ({"mansio.dedup.ms": "2000000"}, {"readers": (ID_READER,), "inspects_records": True}),
    "priorities": (
        {"mansio.priority.enable": "true"},
        {"readers": (PRIORITY_READER,), "inspects_records": True},
    ),
}


def bench_of(disk: SimulatedDisk | None = None, *, is_follower: bool = False) -> PartitionBench:
    """A bench without partitions."""
    return PartitionBench(
        disk,
        settings=(),
        seconds=1_000,
        rules=LARGE_RULES,
        log_settings=SMALL_SEGMENTS,
        is_follower=is_follower,
    )


def open_partition(bench: PartitionBench, feature: str | None = None, disk: Any = None) -> Partition:
    """Open the partition as a broker does, with a feature enabled."""
    settings, rules = ENABLED[feature] if feature else ({}, {})
    bench.rules = LARGE_RULES._replace(**rules)
    bench.partitions.clear()
    ports = FeaturePorts(disk or bench.disk, bench.background, bench.scheduler, bench.clock)
    partition = bench.open_partition(settings, features=create_features(ports))
    bench.scheduler.run()
    return partition


def enable(bench: PartitionBench, partition: Partition, feature: str) -> None:
    settings, rules = ENABLED[feature]
    resolved = topic_config.resolve_topic_settings(settings, {}, 1)
    partition.apply_settings(resolved, partition.rules._replace(**rules))
    bench.scheduler.run()


def batch_of(value: bytes, **headers: bytes) -> bytes:
    named = [("mansio-" + name.replace("_", "-"), each) for name, each in headers.items()]
    return build_batch([(1_000_000, None, value, named)])


def close(partition: Partition) -> None:
    partition.close(save=True)
    partition.log.close(save=True)


@pytest.mark.parametrize("feature", ENABLED)
def test_a_truncation_removes_snapshots_of_a_feature_that_is_not_enabled(feature: str) -> None:
    bench = bench_of()
    partition = open_partition(bench, feature)
    for index in range(3):
        partition.append(batch_of(b"%d" % index, dedup_id=b"%d" % index, priority=b"high"))
    bench.flush()
    close(partition)
    suffix = ".dedup" if feature == "deduplication" else ".priority"
    assert f"{partition.end_offset:020d}{suffix}" in bench.disk.list_directory(DIRECTORY)

    bench = bench_of(bench.disk, is_follower=True)
    partition = open_partition(bench)
    partition.become_follower(2, 5)
    partition.reset_to(0)
    assert not [name for name in bench.disk.list_directory(DIRECTORY) if name.endswith(suffix)]


def test_an_id_of_a_discarded_batch_is_accepted_when_deduplication_is_enabled_again() -> None:
    bench = bench_of()
    partition = open_partition(bench, "deduplication")
    partition.append(batch_of(b"not committed", dedup_id=b"pay-1"))
    bench.flush()
    close(partition)

    bench = bench_of(bench.disk, is_follower=True)
    partition = open_partition(bench)
    partition.become_follower(2, 5)
    partition.reset_to(0)
    partition.become_leader(6, in_sync=[1], replicas=[1])
    for _ in range(4):
        partition.append(batch_of(b"another"))
    bench.flush()
    enable(bench, partition, "deduplication")
    sent = partition.append(batch_of(b"committed", dedup_id=b"pay-1"))
    assert not sent.duplicate
    assert bench.visible()[sent.base_offset] == b"committed"


class CountedDisk:
    """A disk that counts listings, and may reject them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.listings = 0
        self.error: OSError | None = None

    def list_directory(self, path: str) -> list[str]:
        self.listings += 1
        if self.error is not None:
            raise self.error
        return self._disk.list_directory(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def test_changed_settings_list_no_directory() -> None:
    bench = bench_of()
    disk = CountedDisk(bench.disk)
    partition = open_partition(bench, disk=disk)
    opened = disk.listings
    for _ in range(10):
        partition.apply_settings(partition.settings, partition.rules)
    assert disk.listings == opened


def test_a_partition_without_snapshots_is_opened_without_a_listing_on_the_event_loop() -> None:
    """Recovery, on its thread, has listed the directory: on a slow disk, thousands of listings would stop the loop."""
    bench = bench_of()
    disk = CountedDisk(bench.disk)
    open_partition(bench, disk=disk).append(batch_of(b"first"))
    bench.flush()
    assert disk.listings == 0
    bench = bench_of(bench.disk)
    disk = CountedDisk(bench.disk)
    open_partition(bench, disk=disk)
    assert disk.listings == 0


def test_a_partition_whose_directory_cannot_be_listed_has_failed() -> None:
    bench = bench_of()
    partition = open_partition(bench, "deduplication")
    partition.append(batch_of(b"first", dedup_id=b"1"))
    bench.flush()
    close(partition)
    bench = bench_of(bench.disk)
    disk = CountedDisk(bench.disk)
    disk.error = OSError(errno.EMFILE, "Too many open files")
    partition = open_partition(bench, disk=disk)
    assert partition.failure is not None
    assert "Too many open files" in str(partition.failure)
