"""Log cleaner on virtual time: it stops when requested, and a failing partition does not delay others."""

from __future__ import annotations

import errno
import gc
from typing import TYPE_CHECKING, Any

from mansio.broker.maintenance.log_cleaner import LogCleaner
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import TOPIC_ID, PartitionBench
from unit.broker.groups_fixtures import VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition

INTERVAL_MS = 15_000


class CleanerBench(PartitionBench):
    """Some compacted partitions with much to do, and their log cleaner."""

    def __init__(self, partitions: int = 1, active_files_max: int | None = None, /, **settings: str) -> None:
        loop = VirtualScheduler()  # clock and worker as well
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", **settings}
        super().__init__(
            directory="data/t",
            settings=[compacted] * partitions,
            leader_epoch=3,
            log_settings=LogSettings(segment_bytes=300),
            clock=loop,
            scheduler=loop,
            background=loop,
            active_files_max=active_files_max,
        )
        self.log_cleaner = LogCleaner(
            self.partitions,
            disk=self.disk,
            clock=self.clock,
            scheduler=self.scheduler,
            background=self.background,
            interval_ms=INTERVAL_MS,
            map_bytes_max=1 << 20,
            bytes_per_second=1 << 30,
        )

    def open_partition(self, *settings: Any, **options: Any) -> Partition:
        partition = super().open_partition(*settings, **options)
        for number in range(12):
            partition.append(build_batch([(self.clock.wall_ms(), b"a", b"%d" % number * 30, ())]))
            partition.log.sync()
            self.scheduler.pass_time(1000)
        return partition

    def look(self, rounds: int = 1) -> None:
        self.scheduler.pass_time(rounds * INTERVAL_MS + 5000)

    def fail(self, code: int, operation: str, matches: Callable[[str], bool]) -> None:
        self.disk.fail_when = lambda what, path: code if what == operation and matches(path) else None

    def swap_finds_no_room(self, directory: str = "t-") -> None:
        self.fail(errno.ENOSPC, "rename", lambda path: directory in path and path.endswith(".compacted.tmp"))


def started(bench: CleanerBench) -> CleanerBench:
    bench.log_cleaner.start()
    bench.look(rounds=3)
    return bench


def test_the_world_is_compacted_when_nothing_fails() -> None:
    bench = started(CleanerBench(2))
    assert bench.log_cleaner.counts.swaps >= 2
    assert not bench.log_cleaner.uncleanable


def test_it_stops_although_a_swap_finds_no_room() -> None:
    bench = CleanerBench()
    bench.swap_finds_no_room()
    started(bench)
    assert bench.partitions[0].log.compaction.is_busy
    bench.scheduler.run(bench.log_cleaner.stop(), limit_ms=1000)


def test_a_topic_can_be_left_although_a_swap_finds_no_room_and_is_not_taken_up_again() -> None:
    bench = CleanerBench()
    bench.swap_finds_no_room()
    started(bench)
    assert bench.partitions[0].log.compaction.is_busy
    bench.scheduler.run(bench.log_cleaner.abort(TOPIC_ID), limit_ms=1000)
    runs = bench.log_cleaner.counts.runs
    bench.disk.fail_when = None
    bench.look(rounds=3)
    assert bench.log_cleaner.counts.runs == runs


def test_a_swap_without_room_is_tried_now_and_then_only() -> None:
    bench = CleanerBench()
    tries = []
    bench.fail(
        errno.ENOSPC, "rename", lambda path: path.endswith(".compacted.tmp") and not tries.append(path)
    )  # it counts
    started(bench)
    tries.clear()
    bench.scheduler.pass_time(10_000)
    assert 1 <= len(tries) <= 40


def test_a_partition_that_finds_no_room_holds_up_no_other() -> None:
    bench = CleanerBench(2)  # the last one goes first
    bench.fail(errno.ENOSPC, "open", lambda path: "t-1" in path and path.endswith(".compacted.tmp"))
    started(bench)
    assert bench.partitions[1].log.compaction.state.cleaned_end_offset == 0
    assert bench.partitions[0].log.compaction.state.cleaned_end_offset > 0
    bench.disk.fail_when = None
    bench.look(rounds=2)
    assert bench.partitions[1].log.compaction.state.cleaned_end_offset > 0


def test_no_descriptor_to_close_a_segment_with_is_no_reason_to_give_a_partition_up() -> None:
    bench = CleanerBench(1, **{"max.compaction.lag.ms": "60000", "min.cleanable.dirty.ratio": "1.0"})
    log = bench.partitions[0].log
    started(bench)
    bench.partitions[0].append(build_batch([(bench.scheduler.wall_ms() - 1, b"b", b"1", ())]))
    log.sync()
    bench.look(rounds=8)
    bench.partitions[0].append(build_batch([(bench.scheduler.wall_ms(), b"b", b"2", ())]))
    log.sync()
    bench.fail(errno.EMFILE, "open", lambda path: path.endswith(".log"))
    bench.look(rounds=8)
    assert bench.log_cleaner.uncleanable == {}
    bench.disk.fail_when = None
    bench.look(rounds=8)
    assert log.compaction.state.cleaned_end_offset == log.end_offset


def test_active_segments_that_must_be_compacted_are_closed_although_few_files_may_be_open() -> None:
    """Two files of each are open until the next flush: the others wait for it, and none is given up."""
    partitions = 12
    bench = CleanerBench(
        partitions,
        4,
        **{"max.compaction.lag.ms": "600000", "min.cleanable.dirty.ratio": "1.0"},
    )
    started(bench)
    bench.look(rounds=50)
    for partition in bench.partitions:
        partition.append(build_batch([(bench.scheduler.wall_ms() - 600_001, b"b", b"1", ())]))
        partition.log.sync()
    bench.look(rounds=3)
    assert bench.log_cleaner.uncleanable == {}
    assert bench.log_cleaner.counts.failed == 0
    assert all(
        partition.log.compaction.state.cleaned_end_offset == partition.log.end_offset
        for partition in bench.partitions
    )


def test_a_partition_that_cannot_close_its_active_segment_is_compacted_later() -> None:
    bench = CleanerBench(2, 2, **{"max.compaction.lag.ms": "600000", "min.cleanable.dirty.ratio": "1.0"})
    started(bench)
    bench.look(rounds=50)
    for partition in reversed(bench.partitions):
        partition.append(build_batch([(bench.scheduler.wall_ms() - 600_001, b"b", b"1", ())]))
        partition.log.sync()
    busy, other = (partition.log for partition in bench.partitions)
    busy.compaction.is_busy = True  # its file cannot be closed
    bench.look(rounds=3)
    assert other.compaction.state.cleaned_end_offset < other.end_offset
    assert bench.log_cleaner.uncleanable == {}
    busy.compaction.is_busy = False
    bench.look(rounds=3)
    assert other.compaction.state.cleaned_end_offset == other.end_offset


def test_a_finished_compaction_keeps_no_file_of_the_segments_that_it_replaced() -> None:
    """`mansio serve` runs the cyclic garbage collector rarely: one descriptor for each log that was compacted."""
    gc.collect()
    gc.disable()
    try:
        bench = CleanerBench(2)
        first = [partition.log._segments.segments[0] for partition in bench.partitions]
        started(bench)
        assert all(segment.replaced for segment in first)
        assert [gc.get_referrers(segment) for segment in first] == [[first], [first]]
    finally:
        gc.enable()
