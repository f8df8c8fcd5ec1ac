"""Log cleaner on virtual time: it stops when requested, and a failing partition does not delay others."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.broker.maintenance.log_cleaner import LogCleaner
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition import Partition
from mansio.config import topic_config
from mansio.state.replica import ReplicationProgress
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import TimestampType, build_batch
from unit.broker.groups_fixtures import VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

RULES = AppendRules(10_000, TimestampType.CREATE, 1 << 62, 1 << 62)
INTERVAL_MS = 15_000
TOPIC = UUID(int=1)


class World:
    """Some compacted partitions with much to do, and their compactor."""

    def __init__(self, partitions: int = 1, **settings: str) -> None:
        self.disk = SimulatedDisk()
        self.scheduler = VirtualScheduler()
        loop: Any = self.scheduler  # clock and worker as well
        self.group_commit = GroupCommit(self.disk, loop, "data", scheduler=loop)
        self.settings = topic_config.resolve_topic_settings(
            {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", **settings}, {}, 1
        )
        self.partitions = [self._partition(n) for n in range(partitions)]
        self.log_cleaner = LogCleaner(
            self.partitions,
            disk=self.disk,
            clock=loop,
            scheduler=loop,
            background=loop,
            interval_ms=INTERVAL_MS,
            map_bytes_max=1 << 20,
            bytes_per_second=1 << 30,
        )

    def _partition(self, index: int) -> Partition:
        loop: Any = self.scheduler
        log = Log.open(self.disk, loop, f"data/t-{index}", LogSettings(segment_bytes=300), leader_epoch=3)
        self.group_commit.register(log)
        partition = Partition(
            topic="t",
            topic_id=TOPIC,
            index=index,
            broker_id=1,
            log=log,
            group_commit=self.group_commit,
            replica=ReplicationProgress(1, 3, frozenset({1}), log.durable_end_offset),
            rules=RULES,
            clock=loop,
            scheduler=loop,
            settings=self.settings,
        )
        for number in range(12):
            partition.append(build_batch([(loop.wall_ms(), b"a", b"%d" % number * 30, ())]))
            log.sync()
            loop.pass_time(1000)
        return partition

    def look(self, rounds: int = 1) -> None:
        self.scheduler.pass_time(rounds * INTERVAL_MS + 5000)

    def fail(self, code: int, operation: str, matches: Callable[[str], bool]) -> None:
        self.disk.fail_when = lambda what, path: code if what == operation and matches(path) else None

    def swap_finds_no_room(self, directory: str = "t-") -> None:
        self.fail(errno.ENOSPC, "rename", lambda path: directory in path and path.endswith(".compacted.tmp"))


def started(world: World) -> World:
    world.log_cleaner.start()
    world.look(rounds=3)
    return world


def test_the_world_is_compacted_when_nothing_fails() -> None:
    world = started(World(2))
    assert world.log_cleaner.counts.swaps >= 2
    assert not world.log_cleaner.uncleanable


def test_it_stops_although_a_swap_finds_no_room() -> None:
    world = World()
    world.swap_finds_no_room()
    started(world)
    assert world.partitions[0].log.compaction.is_busy
    world.scheduler.run(world.log_cleaner.stop(), limit_ms=1000)


def test_a_topic_can_be_left_although_a_swap_finds_no_room_and_is_not_taken_up_again() -> None:
    world = World()
    world.swap_finds_no_room()
    started(world)
    assert world.partitions[0].log.compaction.is_busy
    world.scheduler.run(world.log_cleaner.abort(TOPIC), limit_ms=1000)
    runs = world.log_cleaner.counts.runs
    world.disk.fail_when = None
    world.look(rounds=3)
    assert world.log_cleaner.counts.runs == runs


def test_a_swap_without_room_is_tried_now_and_then_only() -> None:
    world = World()
    tries = []
    world.fail(
        errno.ENOSPC, "rename", lambda path: path.endswith(".compacted.tmp") and not tries.append(path)
    )  # it counts
    started(world)
    tries.clear()
    world.scheduler.pass_time(10_000)
    assert 1 <= len(tries) <= 40


def test_a_partition_that_finds_no_room_holds_up_no_other() -> None:
    world = World(2)  # the last one goes first
    world.fail(errno.ENOSPC, "open", lambda path: "t-1" in path and path.endswith(".compacted.tmp"))
    started(world)
    assert world.partitions[1].log.compaction.state.cleaned_end_offset == 0
    assert world.partitions[0].log.compaction.state.cleaned_end_offset > 0
    world.disk.fail_when = None
    world.look(rounds=2)
    assert world.partitions[1].log.compaction.state.cleaned_end_offset > 0


def test_no_descriptor_to_close_a_segment_with_is_no_reason_to_give_a_partition_up() -> None:
    world = World(1, **{"max.compaction.lag.ms": "60000", "min.cleanable.dirty.ratio": "1.0"})
    log = world.partitions[0].log
    started(world)
    world.partitions[0].append(build_batch([(world.scheduler.wall_ms() - 1, b"b", b"1", ())]))
    log.sync()
    world.look(rounds=8)
    world.partitions[0].append(build_batch([(world.scheduler.wall_ms(), b"b", b"2", ())]))
    log.sync()
    world.fail(errno.EMFILE, "open", lambda path: path.endswith(".log"))
    world.look(rounds=8)
    assert world.log_cleaner.uncleanable == {}
    world.disk.fail_when = None
    world.look(rounds=8)
    assert log.compaction.state.cleaned_end_offset == log.end_offset
