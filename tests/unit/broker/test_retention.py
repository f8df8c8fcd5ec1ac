"""Retention on virtual time: when it runs, which segments it deletes, and which it keeps."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import pytest

from mansio.broker.maintenance.retention import FIRST_CHECK_MS, SLICE_PAUSE_MS, RetentionManager
from mansio.config import topic_config
from mansio.logs import FIELDS
from mansio.ports import SliceTimes
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import build_batch
from support.logs import ManualClock
from support.partition_bench import PartitionBench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.broker.partition.partition import Partition

INTERVAL_MS = 300_000
MINUTE_MS = 60_000
SEGMENT_BYTES = 1000


class Floor:
    """A feature that still needs records from an offset on."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.trims: list[int] = []

    def before_append(self, header: object) -> None: ...

    def on_append(self, header: object, base_offset: int, contents: object = None) -> None: ...

    def on_committed(self, high_watermark: int) -> None: ...

    def on_trim(self, start_offset: int) -> None:
        self.trims.append(start_offset)

    def readable_end(self, isolation_level: int) -> None: ...

    def retention_floor(self) -> int:
        return self.offset

    def close(self) -> None: ...


class RetentionBench(PartitionBench):
    """Some partitions, their retention manager, and everything under them."""

    def __init__(
        self, *settings: dict[str, str], internal: bool = False, active_files_max: int | None = None
    ) -> None:
        super().__init__(
            directory="data/t",
            settings=settings or ({},),
            leader_epoch=3,
            log_settings=LogSettings(segment_bytes=SEGMENT_BYTES),
            internal=internal,
            active_files_max=active_files_max,
        )
        self.manager = RetentionManager(
            self.partitions, clock=self.clock, scheduler=self.scheduler, check_interval_ms=INTERVAL_MS
        )

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
    bench = RetentionBench({"retention.ms": str(MINUTE_MS)})
    bench.fill(3)
    bench.pass_time(MINUTE_MS)
    bench.fill(2)
    bench.check()
    assert bench.starts() == [0], "exactly retention.ms old is not older than that"
    bench.pass_time(1)
    bench.check()
    assert bench.starts() == [3]
    assert len(bench.segment_files()) == 2
    assert bench.manager.counts.segments == 3
    assert bench.manager.counts.records == 3
    assert bench.manager.counts.size_bytes > 3 * (SEGMENT_BYTES - 100)


def test_a_log_larger_than_retention_bytes_loses_its_oldest_segments() -> None:
    bench = RetentionBench({"retention.bytes": "3000", "retention.ms": "-1"})
    bench.fill(10)
    batch_bytes = bench.partition.log.active_segment().size_bytes
    bench.check()
    left = bench.partition.log.size_bytes
    assert 3000 <= left < 3000 + batch_bytes, "without its oldest segment it would have less than it may keep"


def test_the_newest_segment_goes_when_all_of_it_is_old_and_offsets_go_on() -> None:
    bench = RetentionBench({"retention.ms": str(MINUTE_MS)})
    bench.fill(2)
    bench.pass_time(MINUTE_MS + 1)
    bench.check()
    assert (bench.starts(), bench.partition.end_offset) == ([2], 2)
    assert bench.segment_files() == [f"{2:020d}.log"]
    bench.fill(1)
    assert bench.partition.read(2, 1 << 20) is not None
    assert bench.partition.high_watermark == 3


def test_the_newest_segment_stays_while_one_record_in_it_is_young() -> None:
    bench = RetentionBench({"retention.ms": str(MINUTE_MS), "retention.bytes": "0"})
    small = build_batch([(bench.clock.wall_ms(), None, b"old", ())])
    bench.partition.append(small)
    bench.pass_time(MINUTE_MS + 1)
    bench.partition.append(build_batch([(bench.clock.wall_ms(), None, b"young", ())]))
    bench.sync()
    bench.check()
    assert bench.starts() == [0]
    assert len(bench.segment_files()) == 1, "and it was not rolled"


def test_a_timestamp_from_the_future_keeps_its_segment_and_all_after_it() -> None:
    bench = RetentionBench({"retention.ms": str(MINUTE_MS)})
    bench.fill(1, timestamp_ms=bench.clock.wall_ms() + 10 * MINUTE_MS)
    bench.fill(2)
    bench.pass_time(5 * MINUTE_MS)
    bench.check()
    assert bench.starts() == [0]
    bench.pass_time(7 * MINUTE_MS)
    bench.check()
    assert bench.starts() == [3]


def test_a_segment_without_timestamps_is_as_old_as_its_file() -> None:
    bench = RetentionBench({"retention.ms": str(MINUTE_MS)})
    bench.fill(3, timestamp_ms=-1)
    now_ms = bench.clock.wall_ms()
    for name in bench.segment_files():
        bench.disk.modified_ms_by_path[f"data/t-0/{name}"] = now_ms
    bench.check()
    assert bench.starts() == [0]
    bench.disk.modified_ms_by_path[f"data/t-0/{0:020d}.log"] = now_ms - MINUTE_MS - 1
    bench.check()
    assert bench.starts() == [1]


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_age_counts_only_where_the_policy_deletes(policy: str) -> None:
    bench = RetentionBench({"retention.ms": "1", "retention.bytes": "1", "cleanup.policy": policy})
    bench.fill(4)
    bench.pass_time(MINUTE_MS)
    bench.check()
    assert bench.starts() == [0 if policy == "compact" else 4]


def test_the_brokers_own_topics_lose_nothing_whatever_they_are_set_to() -> None:
    bench = RetentionBench({"retention.ms": "1", "cleanup.policy": "delete"}, internal=True)
    bench.partition.internal = False
    bench.fill(4)
    bench.partition.internal = True
    bench.pass_time(MINUTE_MS)
    bench.check()
    assert bench.starts() == [0]


def test_nothing_above_the_high_watermark_goes() -> None:
    bench = RetentionBench({"retention.ms": "1"})
    bench.fill(3)
    bench.fill(3, sync=False)
    bench.pass_time(MINUTE_MS)
    bench.manager.check_partition(bench.partition)
    assert bench.starts() == [3]
    bench.sync()
    bench.check()
    assert bench.starts() == [6]


def test_nothing_a_feature_still_needs_goes() -> None:
    bench = RetentionBench({"retention.ms": "1"})
    hook = Floor(2)
    bench.partition.add_hook(hook)  # type: ignore[arg-type]  # enough of one
    bench.fill(4)
    bench.pass_time(MINUTE_MS)
    bench.check()
    assert (bench.starts(), hook.trims) == ([2], [2])
    hook.offset = 4
    bench.check()
    assert (bench.starts(), hook.trims) == ([4], [2, 4])


def test_settings_changed_count_from_the_next_check_on() -> None:
    bench = RetentionBench({"retention.ms": "-1"})
    bench.fill(3)
    bench.pass_time(MINUTE_MS)
    bench.check()
    assert bench.starts() == [0]
    bench.partition.settings = topic_config.resolve_topic_settings({"retention.ms": "1000"}, {}, 1)
    bench.check()
    assert bench.starts() == [3]


def test_what_was_deleted_to_the_end_gives_its_space_back() -> None:
    bench = RetentionBench({"retention.ms": "-1", "cleanup.policy": "compact,delete"})
    bench.fill(1)
    bench.partition.trim(1)
    assert bench.partition.log.size_bytes > 0
    bench.check()
    assert bench.partition.log.size_bytes == 0
    assert bench.segment_files() == [f"{1:020d}.log"]


def test_a_follower_gives_the_space_back_of_what_its_leader_deleted_to_the_end() -> None:
    bench = RetentionBench({"retention.ms": "1"})
    bench.fill(1)
    bench.partition.become_follower(2, 4)
    bench.partition.update_from_leader(1, 1)
    bench.manager.start()
    bench.pass_time(FIRST_CHECK_MS)
    bench.scheduler.fire(FIRST_CHECK_MS)
    bench.sync()
    assert bench.segment_files() == [f"{1:020d}.log"]


def test_a_follower_deletes_no_segment_by_itself() -> None:
    bench = RetentionBench({"retention.ms": "1"})
    bench.fill(3)
    bench.partition.become_follower(2, 4)
    bench.pass_time(FIRST_CHECK_MS)
    bench.check()
    assert (bench.starts(), len(bench.segment_files())) == ([0], 3)


def test_it_looks_soon_after_the_start_and_then_every_interval() -> None:
    bench = RetentionBench({"retention.ms": "1"})
    bench.manager.start()
    assert [delay for delay, _ in bench.scheduler.timers] == [FIRST_CHECK_MS]
    bench.fill(2)
    bench.pass_time(MINUTE_MS)
    bench.scheduler.fire(FIRST_CHECK_MS)
    assert bench.starts() == [2]
    assert INTERVAL_MS in [delay for delay, _ in bench.scheduler.timers]
    bench.fill(1)
    bench.pass_time(MINUTE_MS)
    bench.scheduler.fire(INTERVAL_MS)
    assert bench.starts() == [3]
    bench.manager.stop()
    bench.fill(1)
    bench.pass_time(MINUTE_MS)
    bench.scheduler.fire()
    assert bench.starts() == [3], "stopped"


class SlowClock(ManualClock):
    """A millisecond passes with every look."""

    def monotonic(self) -> float:
        self.seconds += 0.001
        return self.seconds


def test_many_partitions_are_looked_at_some_at_a_time() -> None:
    bench = RetentionBench(*({"retention.ms": "1"} for _ in range(20)))
    for index in range(20):
        bench.fill(1, index=index)
    bench.pass_time(MINUTE_MS)
    slow = SlowClock()
    slow.seconds = bench.clock.seconds
    bench.scheduler.slices = SliceTimes(slow.monotonic)
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    turns = 1
    while bench.starts().count(1) < 20:
        done = bench.starts().count(1)
        bench.scheduler.fire(SLICE_PAUSE_MS)
        assert done < bench.starts().count(1) <= done + 5
        turns += 1
    assert turns >= 5
    assert bench.manager.counts.checks == 1, "rounds are counted, not turns"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="mansio.broker.maintenance.retention"):
        yield caplog


def test_a_partition_that_cannot_be_checked_does_not_stop_other_checks(
    lines: pytest.LogCaptureFixture,
) -> None:
    bench = RetentionBench({"retention.ms": "1"}, {"retention.ms": "1"})
    bench.fill(1, index=0)
    bench.fill(1, index=1)
    bench.pass_time(MINUTE_MS)
    bench.disk.fail_when = lambda operation, path: (
        errno.EIO if operation == "open" and "t-0" in path else None
    )
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    assert bench.starts() == [0, 1]
    assert bench.manager.counts.failures == 1
    assert [record.getMessage() for record in lines.records] == [
        "log_failed",
        "retention_failed",
        "records_expired",
    ]


def test_an_unexpected_error_in_the_check_of_a_partition_does_not_stop_other_checks(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = RetentionBench({"retention.ms": "1"}, {"retention.ms": "1"})
    bench.fill(1, index=0)
    bench.fill(1, index=1)
    bench.pass_time(MINUTE_MS)
    check, defective = bench.manager.check_partition, bench.partition

    def checked(partition: Partition) -> None:
        if partition is defective:
            raise IndexError
        check(partition)

    monkeypatch.setattr(bench.manager, "check_partition", checked)
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    assert bench.starts() == [0, 1]
    assert bench.manager.counts.failures == 1
    assert lines.records[0].exc_info is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_closed_segments_go_although_there_is_no_room_for_a_new_one(code: int) -> None:
    bench = RetentionBench({"retention.ms": "1"})
    bench.fill(3)
    bench.pass_time(MINUTE_MS)
    bench.disk.fail_when = lambda operation, path: (
        code if operation == "open" and path.endswith("3.log") else None
    )
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    assert bench.starts() == [2]
    assert bench.manager.counts.failures == 1
    assert bench.manager.counts[2:4] == (2, 2)
    bench.disk.fail_when = None
    bench.manager.check_partition(bench.partition)
    assert bench.starts() == [3]
    assert bench.manager.counts[2:4] == (3, 3)


@pytest.mark.parametrize(("partitions", "active_files_max"), [(30, 4), (150, 140)])
def test_one_check_deletes_the_active_segments_of_more_partitions_than_files_may_be_open(
    lines: pytest.LogCaptureFixture, partitions: int, active_files_max: int
) -> None:
    """Two files of each are open until the next flush: the others wait for it, and report no error."""
    bench = RetentionBench(*[{"retention.ms": "1"}] * partitions, active_files_max=active_files_max)
    for index in range(partitions):
        bench.fill(1, index=index)
    bench.pass_time(MINUTE_MS)
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    for _ in range(3 * partitions):
        bench.background.run_all()
        bench.scheduler.fire(100)
        bench.group_commit.request_flush_of_all(bench.logs)  # as clients do
    assert bench.starts() == [1] * partitions
    assert bench.manager.counts[:3] == (1, 0, partitions)
    assert not [line.getMessage() for line in lines.records if line.levelno > logging.INFO]
    assert not bench.manager._awaiting_file


def test_a_partition_that_cannot_roll_although_nothing_is_to_be_flushed_is_checked_in_the_next_round(
    lines: pytest.LogCaptureFixture,
) -> None:
    bench = RetentionBench({"retention.ms": "-1"}, {"retention.ms": "1"}, active_files_max=2)
    bench.fill(1, index=1)
    bench.fill(1, index=0)
    bench.pass_time(MINUTE_MS)
    bench.partition.log.compaction.is_busy = True  # its file cannot be closed
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    assert bench.starts() == [0, 0]
    assert [line.getMessage() for line in lines.records] == ["retention_postponed"]
    assert bench.manager.counts.failures == 0
    bench.partition.log.compaction.is_busy = False
    bench.scheduler.fire(INTERVAL_MS)
    assert bench.starts() == [0, 1]


def test_no_partition_is_checked_after_the_flush_if_retention_has_stopped() -> None:
    bench = RetentionBench(*[{"retention.ms": "1"}] * 10, active_files_max=4)
    for index in range(10):
        bench.fill(1, index=index)
    bench.pass_time(MINUTE_MS)
    bench.manager.start()
    bench.scheduler.fire(FIRST_CHECK_MS)
    rolled = bench.starts()
    bench.manager.stop()
    bench.sync()
    bench.sync()
    assert bench.starts() == rolled
    assert 0 in rolled


def test_one_line_reports_what_went(lines: pytest.LogCaptureFixture) -> None:
    bench = RetentionBench({"retention.ms": "1", "retention.bytes": "1"})
    bench.fill(3)
    size_bytes = bench.partition.log.size_bytes
    bench.pass_time(MINUTE_MS)
    bench.check()
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
