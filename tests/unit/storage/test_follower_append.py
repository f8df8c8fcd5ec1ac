"""Follower appends: unchanged batches, gaps, reset; also with disk failures in between."""

from __future__ import annotations

import errno
from random import Random

import pytest

from mansio.errors import ConcurrentChange, CorruptMessage, FencedLeaderEpoch, StorageError
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch, check_stored_batch, encode_batch
from support.logs import ManualClock, append, check_contents, make_batch

SETTINGS = LogSettings(segment_bytes=700)
DIRECTORY = "data/t-0"


class Crash(BaseException):
    """A power failure."""


def opened(disk: SimulatedDisk) -> Log:
    return Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)


def stored(base_offset: int, records: int = 2, leader_epoch: int = 0) -> bytes:
    values = [(base_offset + at, None, b"%d" % (base_offset + at), ()) for at in range(records)]
    return build_batch(values, base_offset=base_offset, leader_epoch=leader_epoch)


def take(log: Log, *batches: bytes, sparse_end_offset: int = 0) -> None:
    headers = [check_stored_batch(batch) for batch in batches]
    log.append_as_follower(memoryview(b"".join(batches)), headers, sparse_end_offset=sparse_end_offset)


@pytest.mark.parametrize("together", [1, 3, 20])
def test_follower_keeps_batches_byte_for_byte(together: int) -> None:
    disk = SimulatedDisk()
    log = opened(disk)
    batches = [stored(2 * at, 2, leader_epoch=at // 4) for at in range(20)]
    for first in range(0, 20, together):
        take(log, *batches[first : first + together])
    assert all(segment.size_bytes <= SETTINGS.segment_bytes for segment in log.segments())
    log.sync()
    check_contents(log, batches)
    assert log.leader_epochs.entries() == [(0, 0), (1, 8), (2, 16), (3, 24), (4, 32)]
    assert len(log.segments()) > 1
    check_contents(opened(disk.crash(Random(1))), batches)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (stored(1), CorruptMessage),
        (stored(4), CorruptMessage),
        (stored(2, leader_epoch=0), FencedLeaderEpoch),
    ],
)
def test_batch_out_of_order_is_refused_without_effect(batch: bytes, error: type[Exception]) -> None:
    log = opened(SimulatedDisk())
    take(log, stored(0, leader_epoch=1))
    with pytest.raises(error):
        take(log, batch)
    assert (log.end_offset, log.leader_epochs.entries()) == (2, [(1, 0)])


def test_gaps_of_a_compacted_leader_survive_a_restart() -> None:
    disk = SimulatedDisk()
    log = opened(disk)
    batches = [stored(10 * at, 2, leader_epoch=at // 3) for at in range(12)]
    for batch in batches:
        take(log, batch, sparse_end_offset=200)
    work = log.prepare_flush()
    assert work is not None
    work.run(disk)  # and no checkpoint: all is read again
    for one in (log, opened(disk.crash(Random(3)))):
        one.verify()
        assert list(one.batches(0)) == batches
        assert one.leader_epochs.entries() == [(0, 0), (1, 22), (2, 52), (3, 82)]
    log.finish_flush(work, None)
    log.sync()
    assert log.end_offset == 112
    assert log.end_offset_for_epoch(0) == (0, 22), "epoch 1 may have begun right behind the last of epoch 0"
    with pytest.raises(CorruptMessage):
        take(log, stored(300, leader_epoch=9), sparse_end_offset=200)
    for again in (opened(disk), opened(disk.crash(Random(2)))):
        assert list(again.batches(0)) == batches
        assert again.end_offset == 112
        again.verify()
        piece = again.read(15, 1, again.end_offset)
        assert piece is not None
        assert piece.read() == batches[2]


def thinned(batch: bytes, span: int) -> bytes:
    """A compacted batch that had `span` records."""
    header = check_stored_batch(batch)
    return encode_batch(header._replace(last_offset_delta=span - 1), batch[HEADER_BYTES:])


def test_batches_that_lack_records_survive_a_restart_although_nothing_is_missing_between_them() -> None:
    """Records that the leader counts as durable here must not look like a torn tail to the next recovery."""
    disk = SimulatedDisk()
    log = opened(disk)
    batches = [stored(0), thinned(stored(2), 5), stored(7), thinned(stored(9), 3), stored(12)]
    take(log, *batches[:3], sparse_end_offset=9)
    take(log, *batches[3:], sparse_end_offset=9)
    work = log.prepare_flush()
    assert work is not None
    work.run(disk)  # and no checkpoint: all is read again
    log.finish_flush(work, None)
    assert log.durable_end_offset == 14
    for one in (log, opened(disk.crash(Random(1)))):
        one.verify()
        assert one.recovery.truncated_tail is None
        assert list(one.batches(0)) == batches
        assert one.durable_end_offset == 14


def test_gap_that_cannot_be_recorded_on_a_full_disk_waits_for_space() -> None:
    disk = SimulatedDisk()
    log = opened(disk)
    take(log, stored(0))
    log.sync()
    disk.fail_when = lambda operation, path: errno.ENOSPC if "compaction" in path else None
    for batch in (stored(10), thinned(stored(2), 5)):
        with pytest.raises(StorageError):
            take(log, batch, sparse_end_offset=20)
        assert (log.failure, log.end_offset) == (None, 2)
    disk.fail_when = None
    take(log, stored(10), sparse_end_offset=20)
    log.sync()
    assert list(opened(disk.crash(Random(1))).batches(0)) == [stored(0), stored(10)]


def test_batches_lost_in_a_power_failure_are_not_taken_for_a_gap_of_the_leader() -> None:
    """The file of a later segment may have reached the disk before the end of the previous one."""
    batches = [stored(0), stored(10), *(stored(at) for at in range(12, 36, 2)), stored(50), stored(52)]
    cuts = 0
    for chance in range(60):
        disk = SimulatedDisk()
        log = opened(disk)
        take(log, *batches[:2], sparse_end_offset=1000)
        log.sync()
        for batch in batches[2:]:
            take(log, batch, sparse_end_offset=1000)
        assert len(log.segments()) == 2
        found = list(opened(disk.crash(Random(chance))).batches(0))
        assert found == batches[: len(found)]
        cuts += len(found) < len(batches)
    assert cuts


def test_a_gap_where_a_segment_is_closed_is_kept() -> None:
    disk = SimulatedDisk()
    log = opened(disk)
    batches = [stored(0)]
    while log._active.size + len(batches[-1]) <= SETTINGS.segment_bytes:
        take(log, batches[-1])
        batches.append(stored(log.end_offset))
    batches[-1] = stored(log.end_offset + 10)
    take(log, batches[-1], sparse_end_offset=1000)
    assert len(log.segments()) == 2
    work = log.prepare_flush()
    assert work is not None
    work.run(disk)  # and no checkpoint
    for one in (log, opened(disk.crash(Random(1)))):
        one.verify()
        assert list(one.batches(0)) == batches


def test_reset_continues_at_another_offset() -> None:
    disk = SimulatedDisk()
    log = opened(disk)
    for at in range(20):
        take(log, stored(2 * at))
    log.sync()
    for offset in (1000, 7, 7):
        log.reset_to(offset)
        assert (log.start_offset, log.end_offset, log.durable_end_offset) == (offset, offset, offset)
        assert log.leader_epochs.latest_epoch == -1
        assert list(log.batches(0)) == []
        empty = opened(disk.crash(Random(offset)))
        assert (empty.start_offset, empty.end_offset, empty.leader_epochs.latest_epoch) == (
            offset,
            offset,
            -1,
        )
        batch = stored(offset, 3, leader_epoch=5)
        take(log, batch)
        log.sync()
        check_contents(log, [batch])
        base = f"{offset:020d}"
        names = {name for name in disk.list_directory(DIRECTORY) if name[:1].isdigit()}
        assert names <= {f"{base}.log", f"{base}.index"}, "nothing of the old log is left, or comes back"
        check_contents(opened(disk.crash(Random(offset))), [batch])
    log.close()
    assert opened(disk).end_offset == 10


def test_log_that_is_being_synced_is_not_reset() -> None:
    log = opened(SimulatedDisk())
    take(log, stored(0))
    work = log.prepare_flush()
    assert work is not None
    with pytest.raises(ConcurrentChange):
        log.reset_to(100)
    work.run(log._disk)
    log.finish_flush(work, None)
    log.reset_to(100)
    assert log.end_offset == 100


def histories() -> tuple[SimulatedDisk, Log, list[bytes]]:
    """A log of several segments, trimmed a little, with a tail that is not synced."""
    disk = SimulatedDisk()
    log = opened(disk)
    written = [append(log, make_batch([at] * 3, tag=at), 1 + at // 5)[1] for at in range(12)]
    log.sync()
    log.trim_to(10)
    log.sync()
    written += [append(log, make_batch([at] * 3, tag=at), 4)[1] for at in range(12, 22)]
    return disk, log, written


def count_changes(offset: int) -> int:
    disk, log, _ = histories()
    seen = 0

    def count(operation: str, path: str) -> None:
        nonlocal seen
        del operation, path
        seen += 1

    disk.fail_when = count  # it fails nothing
    log.reset_to(offset)
    return seen


@pytest.mark.parametrize("offset", [1000, 66, 20])
def test_crash_during_a_reset_leaves_a_log_with_a_correct_earlier_state(
    offset: int,
) -> None:
    steps = count_changes(offset)
    assert steps > 10
    for step in range(steps):
        for chance in range(3):
            disk, log, written = histories()
            left = step

            def crash(operation: str, path: str) -> None:
                nonlocal left
                del operation, path
                if left == 0:
                    raise Crash
                left -= 1

            disk.fail_when = crash  # it never fails, it dies
            with pytest.raises(Crash):
                log.reset_to(offset)
            disk.fail_when = None
            again = opened(disk.crash(Random(chance)))
            again.verify()
            found = list(again.batches(again.start_offset))
            assert found == [] or again.start_offset < again.end_offset <= 66
            assert all(batch in written for batch in found)
            if found:
                assert again.start_offset in (10, 36)
            else:
                assert again.start_offset in (10, 36, offset)
            again.reset_to(offset)
            take(again, stored(offset, leader_epoch=9))
            again.sync()
            assert opened(again._disk.crash(Random(chance))).end_offset == offset + 2  # type: ignore[attr-defined]  # a simulated one


def test_disk_failure_during_a_reset_fails_the_log() -> None:
    for step in range(count_changes(1000)):
        disk, log, _ = histories()
        left = step

        def fail(operation: str, path: str) -> int | None:
            nonlocal left
            del operation, path
            left -= 1
            return 5 if left == -1 else None

        disk.fail_when = fail
        try:
            log.reset_to(1000)
        except StorageError:
            assert log.failure is not None
        else:
            pytest.fail(f"step {step} of the disk failed, and nobody was told")


@pytest.mark.parametrize("begun", [False, True], ids=["empty", "begun"])
def test_gap_wider_than_a_segment_starts_a_segment(begun: bool) -> None:
    """The remaining records of a topic with many updates may begin billions of offsets above its start."""
    disk = SimulatedDisk()
    log = opened(disk)
    batches = [stored(0)] if begun else []
    batches += [stored(5_000_000_000), stored(5_000_000_002), stored(1 << 40)]
    for batch in batches:
        take(log, batch, sparse_end_offset=1 << 41)
    log.sync()
    for one in (log, opened(disk.crash(Random(1)))):
        one.verify()
        assert list(one.batches(0)) == batches
        assert one.end_offset == (1 << 40) + 2
        piece = one.read(5_000_000_001, 1, one.end_offset)
        assert piece is not None
        assert piece.read() == stored(5_000_000_000)
