"""Retention on virtual time: when it runs, which segments it deletes, and which it keeps."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from mansio.broker.maintenance.retention import FIRST_CHECK_MS, SLICE_PAUSE_MS, RetentionManager
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition import Partition
from mansio.config import topic_config
from mansio.logs import FIELDS
from mansio.state.replica import ReplicationProgress
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import TimestampType, build_batch
from support.logs import ManualBackground, ManualClock, ManualScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = AppendRules(10_000, TimestampType.CREATE, 1 << 62, 1 << 62)
INTERVAL_MS = 300_000
MINUTE_MS = 60_000
SEGMENT_BYTES = 1000


class Floor:
    """A feature that still needs records from an offset on."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.trims: list[int] = []

    def before_append(self, header: object) -> None: ...

    def on_append(self, header: object, base_offset: int) -> None: ...

    def on_committed(self, high_watermark: int) -> None: ...

    def on_trim(self, start_offset: int) -> None:
        self.trims.append(start_offset)

    def readable_end(self, isolation_level: int) -> None: ...

    def retention_floor(self) -> int:
        return self.offset

    def close(self) -> None: ...


class World:
    """Some partitions, their retention manager, and everything under them."""

    def __init__(self, *settings: dict[str, str], internal: bool = False) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.scheduler = ManualScheduler()
        self.background = ManualBackground()
        self.group_commit = GroupCommit(self.disk, self.background, "data", scheduler=self.scheduler)
        self.partitions = [self._partition(n, one, internal) for n, one in enumerate(settings or ({},))]
        self.manager = RetentionManager(
            self.partitions,
            clock=self.clock,
            scheduler=self.scheduler,  # type: ignore[arg-type]  # enough of one
            check_interval_ms=INTERVAL_MS,
        )

    def _partition(self, index: int, settings: dict[str, str], internal: bool) -> Partition:
        log = Log.open(
            self.disk, self.clock, f"data/t-{index}", LogSettings(segment_bytes=SEGMENT_BYTES), leader_epoch=3
        )
        self.group_commit.register(log)
        return Partition(
            topic="t",
            topic_id=UUID(int=1),
            index=index,
            broker_id=1,
            log=log,
            group_commit=self.group_commit,
            replica=ReplicationProgress(1, 3, frozenset({1}), log.durable_end_offset),
            rules=RULES,
            clock=self.clock,
            scheduler=self.scheduler,  # type: ignore[arg-type]  # enough of one
            settings=topic_config.resolve_topic_settings(settings, {}, 1),
            internal=internal,
        )

    @property
    def partition(self) -> Partition:
        return self.partitions[0]

    def fill(
        self, segments: int, *, index: int = 0, timestamp_ms: int | None = None, sync: bool = True
    ) -> None:
        """So many segments of one batch each; the last of them is the one written to."""
        for _ in range(segments):
            when = self.clock.wall_ms() if timestamp_ms is None else timestamp_ms
            self.partitions[index].append(build_batch([(when, None, bytes(SEGMENT_BYTES - 100), ())]))
        if sync:
            self.sync()

    def sync(self) -> None:
        self.background.run_all()
        self.scheduler.fire(1000)
        self.background.run_all()

    def pass_time(self, milliseconds: int) -> None:
        self.clock.seconds += milliseconds / 1000

    def starts(self) -> list[int]:
        return [partition.start_offset for partition in self.partitions]

    def segment_files(self, index: int = 0) -> list[str]:
        return [name for name in self.disk.list_directory(f"data/t-{index}") if name.endswith(".log")]

    def check(self) -> None:
        for partition in self.partitions:
            self.manager.check_partition(partition)
        self.sync()


def test_segments_older_than_retention_ms_go_and_their_files_with_them() -> None:
    world = World({"retention.ms": str(MINUTE_MS)})
    world.fill(3)
    world.pass_time(MINUTE_MS)
    world.fill(2)
    world.check()
    assert world.starts() == [0], "exactly retention.ms old is not older than that"
    world.pass_time(1)
    world.check()
    assert world.starts() == [3]
    assert len(world.segment_files()) == 2
    assert world.manager.counts.segments == 3
    assert world.manager.counts.records == 3
    assert world.manager.counts.size_bytes > 3 * (SEGMENT_BYTES - 100)


def test_a_log_larger_than_retention_bytes_loses_its_oldest_segments() -> None:
    world = World({"retention.bytes": "3000", "retention.ms": "-1"})
    world.fill(10)
    batch_bytes = world.partition.log.active_segment().size_bytes
    world.check()
    left = world.partition.log.size_bytes
    assert 3000 <= left < 3000 + batch_bytes, "without its oldest segment it would have less than it may keep"


def test_the_newest_segment_goes_when_all_of_it_is_old_and_offsets_go_on() -> None:
    world = World({"retention.ms": str(MINUTE_MS)})
    world.fill(2)
    world.pass_time(MINUTE_MS + 1)
    world.check()
    assert (world.starts(), world.partition.end_offset) == ([2], 2)
    assert world.segment_files() == [f"{2:020d}.log"]
    world.fill(1)
    assert world.partition.read(2, 1 << 20) is not None
    assert world.partition.high_watermark == 3


def test_the_newest_segment_stays_while_one_record_in_it_is_young() -> None:
    world = World({"retention.ms": str(MINUTE_MS), "retention.bytes": "0"})
    small = build_batch([(world.clock.wall_ms(), None, b"old", ())])
    world.partition.append(small)
    world.pass_time(MINUTE_MS + 1)
    world.partition.append(build_batch([(world.clock.wall_ms(), None, b"young", ())]))
    world.sync()
    world.check()
    assert world.starts() == [0]
    assert len(world.segment_files()) == 1, "and it was not rolled"


def test_a_timestamp_from_the_future_keeps_its_segment_and_all_after_it() -> None:
    world = World({"retention.ms": str(MINUTE_MS)})
    world.fill(1, timestamp_ms=world.clock.wall_ms() + 10 * MINUTE_MS)
    world.fill(2)
    world.pass_time(5 * MINUTE_MS)
    world.check()
    assert world.starts() == [0]
    world.pass_time(7 * MINUTE_MS)
    world.check()
    assert world.starts() == [3]


def test_a_segment_without_timestamps_is_as_old_as_its_file() -> None:
    world = World({"retention.ms": str(MINUTE_MS)})
    world.fill(3, timestamp_ms=-1)
    now_ms = world.clock.wall_ms()
    for name in world.segment_files():
        world.disk.modified_ms_by_path[f"data/t-0/{name}"] = now_ms
    world.check()
    assert world.starts() == [0]
    world.disk.modified_ms_by_path[f"data/t-0/{0:020d}.log"] = now_ms - MINUTE_MS - 1
    world.check()
    assert world.starts() == [1]


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_age_counts_only_where_the_policy_deletes(policy: str) -> None:
    world = World({"retention.ms": "1", "retention.bytes": "1", "cleanup.policy": policy})
    world.fill(4)
    world.pass_time(MINUTE_MS)
    world.check()
    assert world.starts() == [0 if policy == "compact" else 4]


def test_the_brokers_own_topics_lose_nothing_whatever_they_are_set_to() -> None:
    world = World({"retention.ms": "1", "cleanup.policy": "delete"}, internal=True)
    world.partition.internal = False
    world.fill(4)
    world.partition.internal = True
    world.pass_time(MINUTE_MS)
    world.check()
    assert world.starts() == [0]


def test_nothing_above_the_high_watermark_goes() -> None:
    world = World({"retention.ms": "1"})
    world.fill(3)
    world.fill(3, sync=False)
    world.pass_time(MINUTE_MS)
    world.manager.check_partition(world.partition)
    assert world.starts() == [3]
    world.sync()
    world.check()
    assert world.starts() == [6]


def test_nothing_a_feature_still_needs_goes() -> None:
    world = World({"retention.ms": "1"})
    hook = Floor(2)
    world.partition.add_hook(hook)  # type: ignore[arg-type]  # enough of one
    world.fill(4)
    world.pass_time(MINUTE_MS)
    world.check()
    assert (world.starts(), hook.trims) == ([2], [2])
    hook.offset = 4
    world.check()
    assert (world.starts(), hook.trims) == ([4], [2, 4])


def test_settings_changed_count_from_the_next_check_on() -> None:
    world = World({"retention.ms": "-1"})
    world.fill(3)
    world.pass_time(MINUTE_MS)
    world.check()
    assert world.starts() == [0]
    world.partition.settings = topic_config.resolve_topic_settings({"retention.ms": "1000"}, {}, 1)
    world.check()
    assert world.starts() == [3]


def test_what_was_deleted_to_the_end_gives_its_space_back() -> None:
    world = World({"retention.ms": "-1", "cleanup.policy": "compact,delete"})
    world.fill(1)
    world.partition.trim(1)
    assert world.partition.log.size_bytes > 0
    world.check()
    assert world.partition.log.size_bytes == 0
    assert world.segment_files() == [f"{1:020d}.log"]


def test_a_follower_gives_the_space_back_of_what_its_leader_deleted_to_the_end() -> None:
    world = World({"retention.ms": "1"})
    world.fill(1)
    world.partition.become_follower(2, 4)
    world.partition.update_from_leader(1, 1)
    world.manager.start()
    world.pass_time(FIRST_CHECK_MS)
    world.scheduler.fire(FIRST_CHECK_MS)
    world.sync()
    assert world.segment_files() == [f"{1:020d}.log"]


def test_a_follower_deletes_no_segment_by_itself() -> None:
    world = World({"retention.ms": "1"})
    world.fill(3)
    world.partition.become_follower(2, 4)
    world.pass_time(FIRST_CHECK_MS)
    world.check()
    assert (world.starts(), len(world.segment_files())) == ([0], 3)


def test_it_looks_soon_after_the_start_and_then_every_interval() -> None:
    world = World({"retention.ms": "1"})
    world.manager.start()
    assert [delay for delay, _ in world.scheduler.timers] == [FIRST_CHECK_MS]
    world.fill(2)
    world.pass_time(MINUTE_MS)
    world.scheduler.fire(FIRST_CHECK_MS)
    assert world.starts() == [2]
    assert INTERVAL_MS in [delay for delay, _ in world.scheduler.timers]
    world.fill(1)
    world.pass_time(MINUTE_MS)
    world.scheduler.fire(INTERVAL_MS)
    assert world.starts() == [3]
    world.manager.stop()
    world.fill(1)
    world.pass_time(MINUTE_MS)
    world.scheduler.fire()
    assert world.starts() == [3], "stopped"


class SlowClock(ManualClock):
    """A millisecond passes with every look."""

    def monotonic(self) -> float:
        self.seconds += 0.001
        return self.seconds


def test_many_partitions_are_looked_at_some_at_a_time() -> None:
    world = World(*({"retention.ms": "1"} for _ in range(20)))
    for index in range(20):
        world.fill(1, index=index)
    world.pass_time(MINUTE_MS)
    slow = SlowClock()
    slow.seconds = world.clock.seconds
    world.manager._clock = slow
    world.manager.start()
    world.scheduler.fire(FIRST_CHECK_MS)
    turns = 1
    while world.starts().count(1) < 20:
        done = world.starts().count(1)
        world.scheduler.fire(SLICE_PAUSE_MS)
        assert done < world.starts().count(1) <= done + 5
        turns += 1
    assert turns >= 5
    assert world.manager.counts.checks == 1, "rounds are counted, not turns"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="mansio.broker.maintenance.retention"):
        yield caplog


def test_a_partition_that_cannot_be_checked_does_not_stop_other_checks(
    lines: pytest.LogCaptureFixture,
) -> None:
    world = World({"retention.ms": "1"}, {"retention.ms": "1"})
    world.fill(1, index=0)
    world.fill(1, index=1)
    world.pass_time(MINUTE_MS)
    world.disk.fail_when = lambda operation, path: (
        errno.EIO if operation == "open" and "t-0" in path else None
    )
    world.manager.start()
    world.scheduler.fire(FIRST_CHECK_MS)
    assert world.starts() == [0, 1]
    assert world.manager.counts.failures == 1
    assert [record.getMessage() for record in lines.records] == [
        "log_failed",
        "retention_failed",
        "records_expired",
    ]


def test_an_unexpected_error_in_the_check_of_a_partition_does_not_stop_other_checks(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World({"retention.ms": "1"}, {"retention.ms": "1"})
    world.fill(1, index=0)
    world.fill(1, index=1)
    world.pass_time(MINUTE_MS)
    check, defective = world.manager.check_partition, world.partition

    def checked(partition: Partition) -> None:
        if partition is defective:
            raise IndexError
        check(partition)

    monkeypatch.setattr(world.manager, "check_partition", checked)
    world.manager.start()
    world.scheduler.fire(FIRST_CHECK_MS)
    assert world.starts() == [0, 1]
    assert world.manager.counts.failures == 1
    assert lines.records[0].exc_info is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_closed_segments_go_although_there_is_no_room_for_a_new_one(code: int) -> None:
    world = World({"retention.ms": "1"})
    world.fill(3)
    world.pass_time(MINUTE_MS)
    world.disk.fail_when = lambda operation, path: (
        code if operation == "open" and path.endswith("3.log") else None
    )
    world.manager.start()
    world.scheduler.fire(FIRST_CHECK_MS)
    assert world.starts() == [2]
    assert world.manager.counts.failures == 1
    assert world.manager.counts[2:4] == (2, 2)
    world.disk.fail_when = None
    world.manager.check_partition(world.partition)
    assert world.starts() == [3]
    assert world.manager.counts[2:4] == (3, 3)


def test_one_line_reports_what_went(lines: pytest.LogCaptureFixture) -> None:
    world = World({"retention.ms": "1", "retention.bytes": "1"})
    world.fill(3)
    size_bytes = world.partition.log.size_bytes
    world.pass_time(MINUTE_MS)
    world.check()
    (line,) = lines.records
    assert getattr(line, FIELDS) == {
        "topic": "t",
        "partition": 0,
        "start": 0,
        "to": 3,
        "segments": 3,
        "bytes": size_bytes,
        "reason": "time",
    }
