"""Compaction: the records and files that it keeps, and the errors that end it."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mansio.errors import ConcurrentChange, CorruptLog
from mansio.storage.cleaner import batch_filter
from mansio.storage.cleaner.batch_filter import RECORDS_PER_SLICE
from mansio.storage.cleaner.compaction import (
    NOTHING_TO_COMPACT,
    CompactionPlan,
    CompactionSettings,
    group_segments,
    plan_compaction,
)
from mansio.storage.compaction_run import CompactionOutcome, CompactionRun, plan_log_compaction
from mansio.storage.compaction_state import CompactionState, write_state
from mansio.storage.index import NO_TIMESTAMP
from mansio.storage.inspection import inspect_log
from mansio.storage.leader_epochs import EPOCHS_NAME
from mansio.storage.log import Log, LogSettings, SegmentInfo
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch import record_reader
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    DELETE_HORIZON_FLAG,
    TimestampType,
    build_batch,
    check_batch,
    encode_batch,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import RecordLocation, read_records, with_timestamp_delta
from support.compaction import EAGER, compact, finish, one_piece, records_of, run_to_end, start_compaction
from support.logs import LogBench
from support.present import present

GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "v1-compacted"
DIRECTORY = "/data/p"
NOW = 1_700_000_000_000
Row = tuple[bytes | None, bytes | None]


class CompactedLog(LogBench):
    """A log on a simulated disk whose segments the test closes."""

    def __init__(self, segment_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.settings = LogSettings(segment_bytes=segment_bytes, index_interval_bytes=1)
        self.open_log(DIRECTORY, self.settings, registered=False)

    def write(self, *rows: Row, timestamp_ms: int = NOW, **more: Any) -> int:
        batch = build_batch([(timestamp_ms + n, *row, ()) for n, row in enumerate(rows)], **more)
        return self.append(batch)

    def append(self, batch: bytes) -> int:
        return self.log.append(batch, check_batch(batch), 0)

    def compact(self, now_ms: int = NOW, **more: Any) -> CompactionOutcome:
        """Close the active segment and compact the log."""
        self.log.roll()
        self.log.sync()
        run = compact(self.log, self.disk, now_ms=now_ms, **more)
        assert run is not None
        assert run.outcome is not None
        self.run = run
        return run.outcome

    def reopen(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or self.disk
        self.logs = [Log.open(self.disk, self.clock, DIRECTORY, self.settings)]

    def batches(self) -> list[bytes]:
        return list(self.log.batches(self.log.start_offset))

    def values(self) -> list[tuple[int, bytes | None, bytes | None]]:
        return [(r.offset, r.key, r.value) for r in records_of(self.log)]


def test_roll_closes_only_a_non_empty_segment() -> None:
    compacted = CompactedLog()
    assert not compacted.log.roll()
    compacted.write((b"a", b"1"))
    assert compacted.log.roll()
    assert not compacted.log.roll()
    compacted.write((b"b", b"1"))
    assert [info.base_offset for info in compacted.log.segments()] == [0, 1]
    compacted.log.sync()
    compacted.reopen(compacted.disk.crash(random.Random(1)))
    assert [info.base_offset for info in compacted.log.segments()] == [0, 1]
    compacted.log.close()


@pytest.mark.parametrize("codec", list(Codec))
def test_unchanged_batches_are_kept_byte_for_byte_and_others_keep_their_offsets(codec: Codec) -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"old"), (b"b", b"stays" * 20), (None, b"no key"), codec=codec)
    compacted.write((b"c", b"1"), (b"d", b"2"), codec=codec)
    compacted.write((b"a", b"new"), codec=codec)
    before = compacted.batches()
    assert compacted.compact() is CompactionOutcome.DONE
    after = compacted.batches()
    assert after[1:] == before[1:]
    old, new = read_header(before[0]), read_header(after[0])
    assert new._replace(crc=0, batch_length=0) == old._replace(
        crc=0, batch_length=0, record_count=1, max_timestamp_ms=NOW + 1
    )
    assert records_of(compacted.log)[0][:4] == (1, NOW + 1, b"b", b"stays" * 20)


def test_log_append_timestamps_are_kept() -> None:
    compacted = CompactedLog()
    for value in (b"1", b"2"):
        batch = build_batch([(5, b"a", value, ()), (6, b"b" + value, None, ())])
        header = check_batch(batch)
        front = with_log_append_time(batch, header, NOW)
        compacted.log.append(batch, header, 0, rewritten_header=front)
    assert compacted.compact() is CompactionOutcome.DONE
    assert [(r.key, r.timestamp_ms) for r in records_of(compacted.log)] == [
        (b"b1", NOW), (b"a", NOW), (b"b2", NOW)
    ]  # fmt: skip
    assert all(read_header(b).timestamp_type is TimestampType.LOG_APPEND for b in compacted.batches())


def test_tombstone_is_kept_for_the_retention_time_from_the_first_compaction_on() -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"1"), (b"b", b"1"))
    compacted.write((b"a", None), (b"c", b"3"))
    assert compacted.compact(now_ms=NOW) is CompactionOutcome.DONE
    assert compacted.values() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"3")]
    header = read_header(compacted.batches()[1])
    assert header.attributes & DELETE_HORIZON_FLAG
    assert header.base_timestamp_ms == NOW + EAGER.delete_retention_ms
    assert [r.timestamp_ms for r in records_of(compacted.log)[1:]] == [NOW, NOW + 1]
    compacted.write((b"d", b"4"))
    assert compacted.compact(now_ms=NOW + 1000) is CompactionOutcome.DONE
    assert (2, b"a", None) in compacted.values()
    assert compacted.log.compaction.state.last_delete_horizon_ms == NOW + 1000
    assert start_compaction(compacted.log, compacted.disk, now_ms=NOW + 1000) is None
    assert compacted.compact(now_ms=NOW + 1001) is CompactionOutcome.DONE  # although nothing is dirty
    assert compacted.values() == [(1, b"b", b"1"), (3, b"c", b"3"), (4, b"d", b"4")]
    assert compacted.log.compaction.state.last_delete_horizon_ms == -1
    assert start_compaction(compacted.log, compacted.disk, now_ms=NOW + 5000) is None


def test_delete_horizon_sent_by_a_client_is_ignored() -> None:
    compacted = CompactedLog()
    header = check_batch(batch := build_batch([(1, b"a", None, ())]))
    compacted.append(encode_batch(header._replace(attributes=DELETE_HORIZON_FLAG), batch[61:]))
    compacted.write((b"b", b"1"))
    assert compacted.compact() is CompactionOutcome.DONE
    assert compacted.values() == [(0, b"a", None), (1, b"b", b"1")]
    assert read_header(compacted.batches()[0]).base_timestamp_ms == NOW + EAGER.delete_retention_ms
    assert records_of(compacted.log)[0].timestamp_ms == 1


def test_tombstones_above_the_floor_of_a_view_are_kept() -> None:
    compacted = CompactedLog()
    compacted.write((b"a", None))
    compacted.write((b"b", None))
    compacted.compact(now_ms=NOW)
    assert compacted.compact(now_ms=NOW + 2000, tombstone_floor=1) is CompactionOutcome.DONE
    assert compacted.values() == [(1, b"b", None)]
    assert start_compaction(compacted.log, compacted.disk, now_ms=NOW + 2500) is None  # not again and again
    assert compacted.compact(now_ms=NOW + 4000) is CompactionOutcome.DONE
    assert compacted.values() == []


def test_last_batches_of_a_producer_are_kept_as_headers() -> None:
    compacted = CompactedLog()
    numbers = {"producer_id": 7, "producer_epoch": 2}
    for sequence in range(3):
        compacted.write((b"a", b"%d" % sequence), base_sequence=sequence, **numbers)
    compacted.write((b"a", b"else"))
    assert (
        compacted.compact(is_last_of_producer=lambda header: header.base_sequence == 2)
        is CompactionOutcome.DONE
    )
    empty, last = (read_header(batch) for batch in compacted.batches())
    assert (empty.base_offset, empty.last_offset, empty.record_count) == (2, 2, 0)
    assert (empty.producer_id, empty.producer_epoch, empty.base_sequence) == (7, 2, 2)
    assert empty.max_timestamp_ms == NO_TIMESTAMP
    assert last.base_offset == 3
    compacted.write((b"b", b"1"))
    assert compacted.compact() is CompactionOutcome.DONE  # the producer is forgotten by now
    assert [read_header(batch).base_offset for batch in compacted.batches()] == [3, 4]


def test_reader_reaches_the_end_of_a_part_emptied_by_compaction() -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"1"))
    compacted.write((None, b"no key"))
    assert compacted.compact() is CompactionOutcome.DONE
    piece = compacted.log.read(1, 100, compacted.log.end_offset)
    assert piece is not None
    assert piece.next_offset == compacted.log.end_offset == 2
    assert read_header(piece.read()).record_count == 0
    assert compacted.log.max_timestamp(2) == (0, NOW, 0)
    compacted.write((b"b", b"1"))
    assert compacted.compact() is CompactionOutcome.DONE
    assert [read_header(batch).base_offset for batch in compacted.batches()] == [0, 2]


def test_undecodable_batch_is_kept_unchanged() -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"old"))
    header = check_batch(good := build_batch([(1, b"a", b"x", ()), (1, b"a", b"y", ())]))
    nonsense = encode_batch(header, good[61:-9] + bytes(9))
    packed = encode_batch(header._replace(attributes=Codec.ZSTD), b"not zstd" * 3)
    compacted.append(nonsense)
    compacted.append(packed)
    compacted.write((b"b", b"1"))
    assert compacted.compact() is CompactionOutcome.DONE
    found = compacted.batches()
    assert [batch[16:] for batch in found[1:3]] == [nonsense[16:], packed[16:]]
    assert read_header(found[0]).record_count == 1  # keys in half a batch prove nothing


def test_aborted_data_is_removed_and_markers_expire_like_tombstones() -> None:
    compacted = CompactedLog()
    transaction = {"producer_id": 9, "producer_epoch": 0}
    compacted.write((b"a", b"kept"))
    compacted.write((b"a", b"aborted"), base_sequence=0, transactional=True, **transaction)
    compacted.write((b"\0\0\0\0", b"\0" * 6), transactional=True, control=True, **transaction)
    compacted.write((b"b", b"1"))
    functions: dict[str, Any] = {
        "is_aborted": lambda header: header.is_transactional and not header.is_control,
        "is_obsolete_marker": lambda header: header.is_control,
    }
    assert compacted.compact(**functions) is CompactionOutcome.DONE
    kept, marker, last = (read_header(batch) for batch in compacted.batches())
    assert [kept.base_offset, marker.base_offset, last.base_offset] == [0, 2, 3]
    assert marker.is_control
    assert marker.attributes & DELETE_HORIZON_FLAG
    assert compacted.values()[0] == (0, b"a", b"kept")
    compacted.write((b"c", b"1"))
    assert compacted.compact(now_ms=NOW + 2000, **functions) is CompactionOutcome.DONE
    assert [read_header(batch).base_offset for batch in compacted.batches()] == [0, 3, 4]


def test_markers_are_kept_without_knowledge_of_transactions() -> None:
    compacted = CompactedLog()
    compacted.write(
        (b"\0\0\0\1", b"\0" * 6), transactional=True, control=True, producer_id=1, producer_epoch=0
    )
    compacted.write((b"a", b"1"))
    before = compacted.batches()
    assert compacted.compact() is CompactionOutcome.DONE
    assert compacted.batches() == before


def test_map_too_small_for_all_keys_needs_several_runs() -> None:
    compacted = CompactedLog()
    for turn in range(3):
        for n in range(0, 300, 10):
            compacted.write(*((b"%d" % (n + k), b"%d" % turn) for k in range(10)))
    compacted.write((None, b"no key"), (b"0", None))
    runs = 0
    compacted.log.roll()
    before = compacted.batches()
    first = compact(compacted.log, compacted.disk, now_ms=NOW, map_bytes_max=64 * 24)
    assert first is not None
    cleaned = compacted.log.compaction.state.cleaned_end_offset
    assert 0 < cleaned < 900
    untouched = [batch for batch in before if read_header(batch).base_offset >= cleaned]
    assert compacted.batches()[-len(untouched) :] == untouched
    while (run := compact(compacted.log, compacted.disk, now_ms=NOW, map_bytes_max=64 * 24)) is not None:
        assert run.outcome is CompactionOutcome.DONE
        runs += 1
    assert runs > 5
    latest = {b"%d" % n: b"2" for n in range(300)} | {b"0": None}
    assert {key: value for _, key, value in compacted.values()} == latest
    assert len(compacted.values()) < 600
    assert compacted.log.compaction.state.cleaned_end_offset == 902


def test_batch_with_more_keys_than_the_map_is_reported_and_nothing_changes() -> None:
    compacted = CompactedLog()
    compacted.write(*((b"%d" % n, b"") for n in range(100)))
    before = compacted.batches()
    assert compacted.compact(map_bytes_max=64 * 24) is CompactionOutcome.FAILED
    assert "log_cleaner_dedupe_buffer_size" in str(compacted.run.error)
    assert compacted.batches() == before
    assert compacted.log.failure is None
    assert compacted.compact(map_bytes_max=256 * 24) is CompactionOutcome.DONE


def test_damaged_batch_ends_the_run_and_is_kept() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(20):
        compacted.write((b"a", b"%d" % n * 20))
    compacted.log.sync()
    path = f"{DIRECTORY}/{compacted.log.segments()[2].base_offset:020d}.log"
    compacted.disk.flip_bit(path, 8 * 80)
    before = compacted.disk.files()[path]
    assert compacted.compact() is CompactionOutcome.FAILED
    assert isinstance(compacted.run.error, CorruptLog)
    assert "CRC" in str(compacted.run.error)
    assert compacted.disk.files()[path] == before
    assert not [name for name in compacted.disk.files() if name.endswith(".tmp")]
    compacted.write((b"b", b"still served"))
    with pytest.raises(CorruptLog):
        compacted.log.verify()


def with_four_segments(*, sparse: bool) -> CompactedLog:
    compacted = CompactedLog()
    for number in range(4):
        compacted.write((b"a", b"%d" % number), (b"k%d" % number, b"kept"))
        compacted.log.roll()
    compacted.log.close()
    if sparse:  # where a segment ended stands in its index alone
        write_state(compacted.disk, DIRECTORY, CompactionState(cleaned_end_offset=0, sparse_end_offset=8))
    return compacted


@pytest.mark.parametrize(
    ("harm", "sparse"),
    [
        ("missing", False),
        ("missing", True),
        ("cut short", False),
    ],  # where it is sparse the latter has no witness
)
def test_segment_followed_by_missing_records_is_not_compacted(harm: str, sparse: bool) -> None:
    """Otherwise lost records could not be distinguished from compacted ones."""
    compacted = with_four_segments(sparse=sparse)
    path = f"{DIRECTORY}/{2:020d}.log"
    if harm == "missing":
        compacted.disk.remove(path)
    else:
        compacted.disk.put_file(path, b"")
    compacted.reopen()
    before = {name: data for name, data in compacted.disk.files().items() if name.endswith(".log")}
    assert compacted.compact() is CompactionOutcome.FAILED
    assert isinstance(compacted.run.error, CorruptLog)
    after = {name: data for name, data in compacted.disk.files().items() if name.endswith(".log")}
    assert {name: after[name] for name in before} == before
    for reopened in (False, True):
        if reopened:
            compacted.log.close()
            compacted.reopen()
        with pytest.raises(CorruptLog):
            compacted.log.read(2, 1, compacted.log.end_offset)


@pytest.mark.parametrize("length", [1, 40, 60])
def test_segment_too_short_for_a_batch_does_not_prevent_planning(length: int) -> None:
    compacted = with_four_segments(sparse=False)
    path = f"{DIRECTORY}/{0:020d}.log"
    compacted.disk.put_file(path, compacted.disk.files()[path][:length])
    compacted.reopen()
    assert compacted.log.compaction.first_dirty_timestamp() is None
    assert compacted.compact() is CompactionOutcome.FAILED
    assert isinstance(compacted.run.error, CorruptLog)


def test_adjacent_segments_are_joined_and_their_files_removed() -> None:
    compacted = CompactedLog(segment_bytes=400)
    for n in range(30):
        compacted.write((b"%d" % (n % 3), b"v" * 50))
    assert len(compacted.log.segments()) > 8
    assert compacted.compact() is CompactionOutcome.DONE
    compacted.write((b"x", b"1"))
    assert compacted.compact() is CompactionOutcome.DONE
    assert len(compacted.log.segments()) < 8
    compacted.log.sync()
    names = {path.rpartition("/")[2] for path in compacted.disk.files()}
    expected = {f"{info.base_offset:020d}.log" for info in compacted.log.segments()}
    assert {name for name in names if name.endswith(".log")} == expected
    assert not [name for name in names if name.endswith(".tmp")]
    compacted.log.close()
    compacted.reopen()
    assert compacted.log.recovery.checked_bytes == 0
    assert [key for _, key, _ in compacted.values()] == [b"0", b"1", b"2", b"x"]


def test_reader_during_a_swap_continues_with_the_old_segments() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    piece = compacted.log.read(0, 1 << 20, 12)
    assert piece is not None
    before = compacted.batches()
    headers = compacted.log.batches(0)
    first = next(headers)
    size = len(before[0])
    assert compacted.log.read(0, size, 12) is not None  # the log remembers where the next batch is
    assert compacted.compact() is CompactionOutcome.DONE
    assert compacted.run.swaps
    assert [first, *headers] == before
    assert piece.read() == b"".join(before[: len(piece.read()) // len(before[0])])
    after = compacted.log.read(1, 1, 12)
    assert after is not None
    assert [after.read()] == compacted.batches() == before[-1:]


def test_readers_see_the_new_segment_before_its_file_has_its_name() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    while not compacted.log.compaction.is_busy:
        work = run.next_job()
        assert work is not None
        if not compacted.log.compaction.is_busy:
            run.finish_job(work(), None)
    swap = finish(run, present(work))
    assert swap is not None
    assert len(compacted.values()) < 12
    assert [path for path in compacted.disk.files() if path.endswith(".compacted.tmp")]
    first = compacted.batches()
    with pytest.raises(ConcurrentChange):
        compacted.log.truncate_to(11)
    with pytest.raises(ConcurrentChange):
        compacted.log.delete()
    compacted.log.trim_to(11)
    assert not compacted.log.needs_maintenance or compacted.log.prepare_maintenance() is None
    while swap is not None:
        swap = finish(run, swap)
    run_to_end(run)
    assert compacted.batches() == first[-1:]
    compacted.log.sync()
    compacted.log.verify()


def test_only_segments_below_both_slots_of_the_checkpoint_are_touched() -> None:
    """If the newest slot is damaged, the other one is used, and the size of the segment that it names."""
    compacted = CompactedLog()
    compacted.write((b"a", b"1"))
    compacted.log.sync()
    compacted.log.roll()
    compacted.write((b"a", b"2"))
    compacted.log.sync()
    log = compacted.log
    assert plan_log_compaction(log, EAGER, limit_offset=2, now_ms=NOW).segment_count == 0
    needs_maintenance = log.needs_maintenance
    assert needs_maintenance, "it asks for another checkpoint"
    log.sync()
    assert plan_log_compaction(log, EAGER, limit_offset=2, now_ms=NOW).segment_count == 1
    assert not log.needs_maintenance
    assert plan_log_compaction(log, EAGER, limit_offset=0, now_ms=NOW).segment_count == 0, "not committed"


def test_no_swap_starts_during_maintenance() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.log.trim_to(1)
    compacted.log.sync()
    compacted.log.trim_to(2)
    job = compacted.log.prepare_maintenance()
    assert job is not None
    while one_piece(run):
        assert not compacted.log.compaction.is_busy
    assert run.outcome is None
    job.run(compacted.disk)
    compacted.log.finish_maintenance(job, None)
    run_to_end(run)
    assert run.swaps or run.outcome is CompactionOutcome.ABANDONED


def test_log_truncated_into_its_clean_part_is_dirty_from_there_on() -> None:
    compacted = CompactedLog(segment_bytes=200)
    for n in range(8):
        compacted.write((b"%d" % n, b"x" * 50), (None, b"gap"))
    assert compacted.compact() is CompactionOutcome.DONE
    compacted.log.sync()
    compacted.log.truncate_to(7)  # an offset that is gone
    assert compacted.log.end_offset == 6
    compacted.log.truncate_to(5)
    assert compacted.log.end_offset == 4
    compacted.write((b"0", b"later"), (b"1", None))
    assert [offset for offset, _, _ in compacted.values()] == [0, 2, 4, 5]
    compacted.log.sync()
    compacted.log.verify()
    for seed in range(5):
        compacted.reopen(compacted.disk.crash(random.Random(seed)))
        assert compacted.log.compaction.state.cleaned_end_offset == 4
    assert compacted.compact() is CompactionOutcome.DONE
    assert compacted.values() == [(4, b"0", b"later"), (5, b"1", None)]


@pytest.mark.parametrize(
    ("operation", "suffix", "code", "ends"),
    [
        ("write", ".compacted.tmp", errno.ENOSPC, CompactionOutcome.DISK_FULL),
        ("write", ".compacted.tmp", errno.EIO, CompactionOutcome.FAILED),
        ("sync", ".compacted.tmp", errno.EIO, CompactionOutcome.FAILED),
        ("write", "compaction.tmp", errno.ENOSPC, CompactionOutcome.DISK_FULL),
        ("sync", "compaction.tmp", errno.EIO, CompactionOutcome.FAILED),
        ("read", ".log", errno.EIO, CompactionOutcome.FAILED),
    ],
)
def test_failure_before_the_swap_leaves_the_log_unchanged_and_in_service(
    operation: str, suffix: str, code: int, ends: CompactionOutcome
) -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.update_settings(LogSettings())  # all of it becomes one segment
    compacted.log.roll()
    before = compacted.batches()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.disk.fail_when = lambda what, path: (
        code if what == operation and path.endswith(suffix) else None
    )
    assert run_to_end(run) is ends
    compacted.disk.fail_when = None
    assert compacted.batches() == before
    assert not [name for name in compacted.disk.files() if name.endswith(".compacted.tmp")]
    compacted.write((b"b", b"1"))
    compacted.log.sync()
    assert compacted.compact() is CompactionOutcome.DONE
    assert [key for _, key, _ in compacted.values()] == [b"a", b"b"]


def test_directory_that_cannot_be_synced_fails_the_log() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.disk.fail_when = lambda what, path: errno.EIO if what == "sync_directory" else None
    assert run_to_end(run) is CompactionOutcome.FAILED
    assert compacted.log.failure is not None


def test_swap_on_a_full_disk_waits_and_is_completed() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.disk.fail_when = lambda what, path: errno.ENOSPC if what in ("rename", "remove") and path.endswith(
        (".compacted.tmp", ".log")
    ) else None  # fmt: skip
    for _ in range(40):
        one_piece(run)
    assert run.outcome is None
    compacted.log.trim_to(3)
    assert len(compacted.values()) <= 9
    compacted.disk.fail_when = None
    assert run_to_end(run) is CompactionOutcome.ABANDONED or run.outcome is CompactionOutcome.DONE
    compacted.log.sync()
    compacted.reopen(compacted.disk.crash(random.Random(3)))
    compacted.log.verify()
    assert compacted.values()[-1] == (11, b"a", b"11" * 30)


def waiting_for_room(compacted: CompactedLog) -> CompactionRun:
    """A run whose swap started and found the disk full."""
    for n in range(12):
        compacted.write((b"a", b"%d" % n * 30))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.disk.fail_when = lambda what, path: (
        errno.ENOSPC if what == "rename" and path.endswith(".compacted.tmp") else None
    )
    while not run.waits_for_disk_space:
        assert one_piece(run)
    return run


def test_swap_on_a_full_disk_ends_on_stop_and_recovery_completes_it() -> None:
    compacted = CompactedLog(segment_bytes=300)
    run = waiting_for_room(compacted)
    seen = compacted.values()
    run.stop()
    assert not one_piece(run)
    assert run.outcome is CompactionOutcome.ABANDONED
    assert compacted.values() == seen  # readers go on with the new segment
    with pytest.raises(ConcurrentChange):
        compacted.log.truncate_to(5)
    compacted.log.sync()
    compacted.log.close()
    compacted.disk.fail_when = None
    compacted.reopen()
    compacted.log.verify()
    assert compacted.values() == seen
    assert not [name for name in compacted.disk.files() if name.endswith(".compacted.tmp")]


def test_started_swap_is_completed_on_pause() -> None:
    compacted = CompactedLog(segment_bytes=300)
    run = waiting_for_room(compacted)
    run.pause()
    for _ in range(5):
        assert one_piece(run)
    assert run.outcome is None
    compacted.disk.fail_when = None
    assert run_to_end(run) is CompactionOutcome.ABANDONED
    assert not compacted.log.compaction.is_busy
    assert run.swaps == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_lack_of_descriptors_is_handled_like_a_full_disk(code: int) -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"1"))
    compacted.write((b"a", b"2"))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    compacted.disk.fail_when = lambda what, path: code if what == "open" else None
    assert run_to_end(run) is CompactionOutcome.DISK_FULL
    assert compacted.log.failure is None


LONGEST = (1 << 63) - 1


def test_tombstones_can_be_kept_without_limit() -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"1"))
    compacted.write((b"a", None))
    settings = CompactionSettings(0.0, delete_retention_ms=LONGEST)
    assert compacted.compact(settings=settings) is CompactionOutcome.DONE
    compacted.write((b"b", b"1"))
    assert compacted.compact(now_ms=NOW * 1000, settings=settings) is CompactionOutcome.DONE
    assert compacted.values() == [(1, b"a", None), (2, b"b", b"1")]


def raw(*rows: tuple[bytes, bytes | None, int], base_ms: int = NOW) -> bytes:
    """A batch as a client can send it: key, value and timestamp delta of each record."""

    def varint(
        value: int,
    ) -> bytes:  # a record of nothing but its delta: one byte each of length and attributes
        return with_timestamp_delta(b"", RecordLocation(0, 0, 0, 0, 0, None, is_tombstone=False), value)[2:]

    body = b""
    for n, (key, value, delta) in enumerate(rows):
        end = varint(-1) if value is None else varint(len(value)) + value
        record = b"\0" + varint(delta) + varint(n) + varint(len(key)) + key + end + b"\0"
        body += varint(len(record)) + record
    header = read_header(build_batch([(NOW, b"k", b"v", ())] * len(rows)))
    return encode_batch(header._replace(base_timestamp_ms=base_ms), body)


@pytest.mark.parametrize(
    ("base_ms", "delta"), [(NOW, LONGEST), (NOW, -LONGEST - 1), (-LONGEST - 1, 0), (LONGEST, 1)]
)
def test_no_timestamp_that_a_client_sends_ends_compaction_or_brings_a_value_back(
    base_ms: int, delta: int
) -> None:
    compacted = CompactedLog()
    compacted.append(raw((b"a", b"1", delta), (b"b", b"old", delta), (b"c", None, delta), base_ms=base_ms))
    compacted.write((b"b", b"new"))
    compacted.write((b"b", None))
    for round_number in range(4):
        assert compacted.compact(now_ms=NOW + round_number * 10_000) is CompactionOutcome.DONE
        compacted.write((b"z", b"%d" % round_number))
    latest = {key: value for _, key, value in compacted.values()}
    assert latest[b"a"] == b"1"
    assert latest.get(b"b") is None
    assert latest.get(b"c") is None


def test_batch_of_too_many_records_is_kept_and_its_old_values_stay_superseded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"before"))
    compacted.write((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    compacted.write((b"a", b"2"))
    compacted.write((b"a", b"3"))
    compacted.write((b"b", None))
    monkeypatch.setattr(batch_filter, "DECODED_RECORDS_MAX", 2)
    for round_number in range(4):
        assert compacted.compact(now_ms=NOW + round_number * 10_000) is CompactionOutcome.DONE
        compacted.write((b"z", b"%d" % round_number))
    assert compacted.values()[:5] == [
        (1, b"a", b"1"),
        (2, b"b", b"1"),
        (3, b"c", b"1"),
        (5, b"a", b"3"),
        (6, b"b", None),
    ]


def test_batch_too_large_to_decode_supersedes_nothing_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compacted = CompactedLog()
    compacted.write((b"a", b"before"))
    compacted.write((b"a", bytes(5000)), codec=Codec.GZIP)
    compacted.write((b"b", b"1"))
    compacted.write((b"b", b"2"))
    monkeypatch.setattr(record_reader, "DECOMPRESSED_BYTES_MAX", 1000)
    assert compacted.compact() is CompactionOutcome.DONE
    assert [offset for offset, _, _ in compacted.values()] == [0, 1, 3]


def test_damaged_compaction_state_costs_time_but_no_records() -> None:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(12):
        compacted.write((b"%d" % (n % 2), b"%d" % n * 20))
    assert compacted.compact() is CompactionOutcome.DONE
    expected = compacted.values()
    compacted.log.close()
    compacted.disk.flip_bit(f"{DIRECTORY}/compaction", 150)
    compacted.reopen()
    assert compacted.log.compaction.state.cleaned_end_offset == 0
    compacted.log.verify()
    assert compacted.values() == expected
    assert compacted.compact() is CompactionOutcome.DONE


def test_inspection_accepts_records_compacted_between_two_leader_epochs() -> None:
    compacted = CompactedLog()
    for key, leader_epoch in ((b"a", 1), (b"b", 1), (b"b", 2), (b"b", 3), (b"c", 3)):
        batch = build_batch([(NOW, key, b"value", ())])
        compacted.log.append(batch, check_batch(batch), leader_epoch)
    compacted.compact()
    assert [offset for offset, _, _ in compacted.values()] == [0, 3, 4]
    compacted.log.close()
    assert inspect_log(compacted.disk, DIRECTORY).findings == []
    compacted.disk.remove(f"{DIRECTORY}/{EPOCHS_NAME}")
    inspect_log(compacted.disk, DIRECTORY, repair=True)
    assert inspect_log(compacted.disk, DIRECTORY).findings == []


def test_slices_are_short_whatever_is_in_a_batch() -> None:
    compacted = CompactedLog(segment_bytes=1 << 22)
    for codec in Codec:
        compacted.write(*((b"%d" % n, b"v") for n in range(5000)), codec=codec)
    for n in range(3000):
        compacted.write((b"s%d" % n, b"v"))
    compacted.log.roll()
    run = start_compaction(compacted.log, compacted.disk, now_ms=NOW)
    assert run is not None
    slices = 0
    while run.outcome is None:
        slices += 1
        one_piece(run)
    looked_at = 2 * (5 * 5000 + 3000 * 12)
    assert slices >= looked_at / (2 * RECORDS_PER_SLICE)


def info(base: int, end: int, size: int, timestamp: int = 0) -> SegmentInfo:
    return SegmentInfo(base, end, size, timestamp)


def judged(
    state: CompactionState, settings: CompactionSettings, limit: int = 1000, oldest: int | None = None
) -> CompactionPlan:
    segments = [info(0, 10, 600, 5), info(10, 20, 300, 50), info(20, 30, 100, 500), info(30, 30, 0)]
    return plan_compaction(segments, state, settings, limit_offset=limit, oldest_dirty_ms=oldest, now_ms=1000)


def test_compaction_plan() -> None:
    settings = CompactionSettings()
    clean = CompactionState(10, 10)
    assert judged(clean, settings) == CompactionPlan(3, 1, 400, 0.4, is_forced=False, is_due=False)
    assert judged(clean, CompactionSettings(min_cleanable_dirty_ratio=0.4)).is_due
    assert judged(CompactionState(), settings) == CompactionPlan(
        3, 0, 1000, 1.0, is_forced=False, is_due=True
    )
    assert judged(clean, CompactionSettings(min_compaction_lag_ms=600))[:3] == (2, 1, 300)
    assert judged(CompactionState(30, 30), settings) == CompactionPlan(
        3, 3, 0, 0.0, is_forced=False, is_due=False
    )
    assert judged(CompactionState(), settings, limit=25)[:3] == (2, 0, 900)
    assert judged(CompactionState(), settings, limit=5) == NOTHING_TO_COMPACT
    old = judged(clean, CompactionSettings(max_compaction_lag_ms=500), oldest=400)
    assert old.is_forced
    assert old.is_due
    assert not judged(clean, CompactionSettings(max_compaction_lag_ms=500), oldest=600).is_due
    assert judged(CompactionState(30, 30, 999), settings).is_forced
    assert not judged(CompactionState(30, 30, 1000), settings).is_due


def test_groups_are_adjacent_and_fit_into_a_segment() -> None:
    sizes = [info(n, n + 1, size) for n, size in enumerate([60, 30, 20, 90, 200, 10, 0, 0])]
    assert group_segments(sizes, 100) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 8)]
    far = [info(0, 10, 1), info(10, 1 << 31, 1), info(1 << 31, (1 << 31) + 5, 1)]
    assert group_segments(far, 100) == [(0, 1), (1, 3)]
    assert group_segments([], 100) == []
    many = [info(n, n + 1, 0) for n in range(200)]
    assert [last - first for first, last in group_segments(many, 100)] == [64, 64, 64, 8]


def build_golden() -> dict[str, bytes]:
    compacted = CompactedLog(segment_bytes=300)
    for n in range(6):
        compacted.write((b"a", b"%d" % n), (b"b%d" % n, None if n % 2 else b"v"), producer_id=5, producer_epoch=0,
                    base_sequence=2 * n)  # fmt: skip
    compacted.write((b"a", b"last"))
    compacted.compact(is_last_of_producer=lambda header: header.base_sequence == 10)
    compacted.write((b"c", b"dirty"))
    compacted.log.close()
    return {path.rpartition("/")[2]: data for path, data in compacted.disk.files().items()}


def test_a_compacted_log_is_written_as_the_golden_files_are_and_opened() -> None:
    files = build_golden()
    if os.environ.get("MANSIO_WRITE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (GOLDEN / name).write_bytes(data)
    golden = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
    assert files == golden
    compacted = CompactedLog(segment_bytes=300)
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    for name, data in golden.items():
        disk.put_file(f"{DIRECTORY}/{name}", data)
    compacted.reopen(disk)
    compacted.log.verify()
    assert compacted.log.compaction.state.cleaned_end_offset == 13
    assert [(o, k) for o, k, _ in compacted.values()] == [
        (1, b"b0"), (3, b"b1"), (5, b"b2"), (7, b"b3"), (9, b"b4"), (11, b"b5"), (12, b"a"), (13, b"c")
    ]  # fmt: skip
    assert all(read_records(batch, output_bytes_max=1 << 20) for batch in compacted.batches())
