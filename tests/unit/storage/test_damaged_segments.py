"""A damaged or missing closed segment affects only its own records."""

from __future__ import annotations

import pytest

from mansio.errors import CorruptLog, RequestError
from mansio.storage.compaction_state import CompactionState, write_state
from mansio.storage.file_cache import FileCache
from mansio.storage.inspection import Severity, inspect_log
from mansio.storage.log import Log, LogSettings
from mansio.storage.recovery.recovery import recover
from mansio.storage.scan import verify_segment
from mansio.storage.segment_list import SegmentList
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import check_batch, read_header
from support.logs import ManualClock, append, check_contents, make_batch

DIRECTORY = "/data/p"
SETTINGS = LogSettings(segment_bytes=700, index_interval_bytes=1)
BATCHES = 24


def built(settings: LogSettings = SETTINGS) -> tuple[SimulatedDisk, list[bytes], list[str]]:
    """A closed log of several segments; its batches; the paths of its segments."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    stored = [append(log, make_batch([1000 + n, 1001 + n], 80, n))[1] for n in range(BATCHES)]
    log.close()
    segments = sorted(path for path in disk.files() if path.endswith(".log"))
    assert len(segments) >= 5
    return disk, stored, segments


def read_one(log: Log, offset: int) -> bytes:
    piece = log.read(offset, 1, log.end_offset)
    assert piece is not None
    data = piece.read()
    check_batch(data)
    return data


def offsets_in(stored: list[bytes], data: bytes) -> range:
    inside = [read_header(batch).base_offset for batch in stored if batch in data]
    return range(inside[0], inside[-1] + 2)


@pytest.mark.parametrize("sparse", [False, True], ids=["plain", "compacted"])
@pytest.mark.parametrize("number", [1, 2, -2])
def test_missing_segment_is_an_error_only_for_its_readers(
    sparse: bool, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk, stored, segments = built()
    if sparse:  # offsets may be missing anywhere; where a segment ended stands in its index
        write_state(disk, DIRECTORY, CompactionState(cleaned_end_offset=40, sparse_end_offset=40))
    gone = offsets_in(stored, disk.files()[segments[number]])
    disk.remove(segments[number])
    (finding,) = [one for one in inspect_log(disk, DIRECTORY).findings if one.severity is Severity.DAMAGE]
    assert (finding.first_offset, finding.end_offset) == (gone.start, gone.stop)
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    for offset in range(2 * BATCHES):
        if offset in gone:
            with pytest.raises(CorruptLog):
                log.read(offset, 1, log.end_offset)
        else:
            assert read_one(log, offset) == stored[offset // 2]
    if sparse:
        assert [record.message for record in caplog.records] == ["segments_missing"]
    with pytest.raises(CorruptLog):
        list(log.batches(0))
    offset, batch = append(log, make_batch([5000], 80, 99))
    log.sync()
    assert read_one(log, offset) == batch


def harmed(data: bytes, kind: str) -> bytes:
    if kind == "empty":
        return b""
    if kind == "half":
        return data[: len(data) // 2]
    begin = 0 if kind == "zeros in front" else len(data) // 3
    return data[:begin] + bytes(100) + data[begin + 100 :]


@pytest.mark.parametrize("kind", ["empty", "half", "zeros in front", "zeros inside"])
@pytest.mark.parametrize("indexes", [True, False], ids=["with indexes", "without indexes"])
def test_damaged_closed_segment_affects_only_its_own_batches(kind: str, indexes: bool) -> None:
    """For readers, and for the iteration over all headers at a start (`skip_damaged`)."""
    for number in range(len(built()[2]) - 1):
        disk, stored, segments = built()
        path = segments[number]
        data = harmed(disk.files()[path], kind)
        disk.put_file(path, data)
        if not indexes:
            for name in [name for name in disk.files() if name.endswith(".index")]:
                disk.remove(name)
        whole = [batch for batch in stored if any(batch in kept for kept in disk.files().values())]
        assert len(whole) < BATCHES
        log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
        for batch in stored:
            base = read_header(batch).base_offset
            if batch in whole and (batch not in data or kind == "half"):
                assert read_one(log, base) == batch
            elif batch not in whole:
                with pytest.raises((CorruptLog, RequestError)):
                    read_one(log, base)
        append(log, make_batch([5000], 80, 99))
        recovered = recover(disk, DIRECTORY, SETTINGS)
        table = SegmentList(recovered.segments, FileCache(disk))
        headers = [header.base_offset for _, _, header in table.walk(0, skip_damaged=True)]
        expected = [read_header(batch).base_offset for batch in whole]
        assert [base for base in headers if base in expected] == expected
        assert headers == sorted(set(headers))
        with pytest.raises(CorruptLog):
            list(table.walk(0))


@pytest.mark.parametrize("kind", ["cut short", "missing"])
def test_search_by_timestamp_does_not_skip_missing_records(kind: str) -> None:
    disk, stored, segments = built()
    path = segments[1]
    data = disk.files()[path]
    if kind == "missing":
        disk.remove(path)
        left: list[int] = []
    else:
        disk.put_file(path, data[: len(data) // 2])
        left = [read_header(batch).base_offset for batch in stored if batch in data[: len(data) // 2]]
    gone = [offset for offset in offsets_in(stored, data) if not offset % 2 and offset not in left]
    behind = offsets_in(stored, data).stop
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    for batch in stored:
        header = read_header(batch)
        if header.base_offset in gone:
            with pytest.raises(CorruptLog):
                log.offset_for_time(header.max_timestamp_ms, log.end_offset)
        elif header.base_offset != behind:
            found = log.offset_for_time(header.max_timestamp_ms, log.end_offset)
            assert found is not None
            assert found[0] in range(header.base_offset, header.last_offset + 1)


@pytest.mark.parametrize("kind", ["flip", "last", "missing", "empty", "half", "cut"])
@pytest.mark.parametrize("interval_bytes", [1, 1 << 20], ids=["indexed", "not indexed"])
def test_a_reader_of_headers_learns_which_offsets_are_missing(kind: str, interval_bytes: int) -> None:
    disk, stored, segments = built(LogSettings(segment_bytes=1200, index_interval_bytes=1))
    path = segments[2]
    data = disk.files()[path]
    inside = [batch for batch in stored if batch in data]
    places = [data.index(batch) for batch in inside]
    if kind in ("flip", "last"):
        number = 1 if kind == "flip" else -1
        gone = inside[number : number + 1 or None]
        disk.flip_bit(path, 8 * (places[number] + 16))
    elif kind == "missing":
        gone = inside
        disk.remove(path)
    elif kind == "cut":
        gone = inside[1:2]
        disk.put_file(path, data[: places[1]] + data[places[2] :])
    else:
        gone = inside if kind == "empty" else inside[len(inside) // 2 :]
        disk.truncate_file(path, 0 if kind == "empty" else places[len(inside) // 2] + 10)
    missing = range(read_header(gone[0]).base_offset, read_header(gone[-1]).last_offset + 1)
    for name in disk.files():
        if name.endswith(".index") and interval_bytes > 1:
            disk.remove(name)
    log = Log.open(
        disk, ManualClock(), DIRECTORY, LogSettings(segment_bytes=1200, index_interval_bytes=interval_bytes)
    )
    for from_offset in range(log.end_offset):
        events: list[int] = []
        expected: list[int] = []
        for header, _ in log.headers_with_control_batches(from_offset, lambda offset: events.append(-offset)):  # noqa: B023
            events.append(header.base_offset)
        for offset in range(0, log.end_offset, 2):
            if offset + 1 < from_offset:
                continue
            if offset not in missing:
                expected.append(offset)
            elif offset == missing.start or offset <= from_offset:
                expected.append(-max(from_offset, offset))
        assert events == expected, from_offset


def test_damage_in_the_active_segment_is_never_skipped() -> None:
    disk, _, segments = built()
    data = disk.files()[segments[-1]]
    disk.put_file(segments[-1], data[:-240] + bytes(240))
    recovered = recover(disk, DIRECTORY, SETTINGS)
    table = SegmentList(recovered.segments, FileCache(disk))
    with pytest.raises(CorruptLog):
        list(table.walk(0, skip_damaged=True))


@pytest.mark.parametrize("later", [0, 1, 12])
def test_log_trimmed_into_a_truncated_batch_is_intact(later: int) -> None:
    """The offsets between the preceding batches and the start are deleted as intended."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    append(log, make_batch([1, 2]))
    log.sync()
    append(log, make_batch([3, 4, 5]))
    log.trim_to(3)
    log.truncate_to(4)
    stored = [append(log, make_batch([6 + n], 100, n))[1] for n in range(later)]
    log.close()
    report = inspect_log(disk, DIRECTORY)
    assert [one for one in report.findings if one.severity is not Severity.NOTE] == []
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    check_contents(log, stored)
    recovered = recover(disk, DIRECTORY, SETTINGS)
    for segment in recovered.segments:
        end = segment.end_offset if segment is not recovered.segments[-1] else recovered.end_offset
        arguments = (segment.base_offset, segment.size, end, recovered.epochs)
        verify_segment(disk.open(segment.path), *arguments, recovered.start_offset)
        if later and segment is recovered.segments[0]:
            with pytest.raises(CorruptLog):
                verify_segment(disk.open(segment.path), *arguments, 0)
