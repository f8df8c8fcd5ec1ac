"""Search of a log by key or id: the same matches as a scan of all records, whatever the codec, the layout and the
steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.storage import record_search
from mansio.storage.log import Log, LogSettings
from mansio.storage.record_search import (
    DAMAGED,
    SearchTask,
    SkippedOffsets,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
    search_files,
)
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, read_header, with_log_append_time
from mansio.wire.batch.record_id_header import RECORD_ID_HEADER, RECORD_ID_NAME
from mansio.wire.batch.record_reader import read_records
from support.logs import ManualClock, append

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import DiskFile
    from mansio.storage.index import SparseIndex
    from mansio.storage.segment import Segment
    from mansio.wire.batch.record_batch import NewRecord
    from mansio.wire.batch.record_reader import Record

KEY = b"ann"
ID = b"01a22edd-9f76-7629-a681-8020797c351b"
ENCODED_KEY = b"\x06ann"
ENCODED_ID = b"\x12mansio-id\x48" + ID
"""As they are in a record; in a value they are no match."""
FAR = 1 << 60
PIECES = (b"", KEY, b"bob", ENCODED_KEY, ENCODED_KEY * 2, ENCODED_ID, b"an", b"\x06an", bytes(200))


class Asked(NamedTuple):
    """A search."""

    by_key: bool = True
    start: int = 0
    end: int = FAR
    since: int = -1
    until: int = FAR

    def task(self, offset: int, matches_max: int = 1_000, budget_ms: int = 1_000) -> SearchTask:
        return SearchTask(
            KEY if self.by_key else None,
            RECORD_ID_NAME,
            ID,
            offset,
            self.end,
            self.since,
            self.until,
            matches_max,
            budget_ms,
        )

    def matches(self, record: Record) -> bool:
        found = record.key == KEY if self.by_key else (RECORD_ID_HEADER, ID) in record.headers
        return (
            found
            and self.start <= record.offset < self.end
            and self.since <= record.timestamp_ms <= self.until
        )


def read_file(opened: Sequence[DiskFile], number: int, size: int) -> bytes:
    return opened[number].read_at(size, 0)


def find(
    log: Log, asked: Asked, *, matches_max: int = 1_000, files_max: int = 100, is_slow: bool = False
) -> tuple[list[tuple[int, int]], list[SkippedOffsets]]:
    """Search in steps, as a broker does; `is_slow`: each step ends after the least that it does."""
    clock = ManualClock()

    def now() -> float:
        clock.seconds += 10.0 if is_slow else 0.0
        return clock.seconds

    end = min(asked.end, log.end_offset)
    matches: list[tuple[int, int]] = []
    skipped: list[SkippedOffsets] = []
    offset, steps = max(asked.start, log.start_offset), 0
    while offset < end:
        plan = log.plan_search(offset, end, files_max)
        job = encode_job(asked.task(offset, matches_max)._replace(end_offset=end), plan.files)
        task, files = decode_job(job)
        result = search_files(task, files, partial(read_file, plan.opened), now)
        assert decode_result(encode_result(result)) == result
        assert result.next_offset > offset, "a step that does not advance"
        assert len(result.matches) <= matches_max
        matches += result.matches
        skipped += result.skipped
        offset, steps = result.next_offset, steps + 1
        assert steps < 10_000
    assert offset == max(end, asked.start)
    return matches, skipped


def expected(log: Log, asked: Asked) -> list[tuple[int, int]]:
    return [
        (each.offset, each.timestamp_ms)
        for batch in log.batches(log.start_offset)
        if not batch[22] & 0x20
        for each in read_records(batch)
        if asked.matches(each)
    ]


pieces = st.one_of(st.none(), st.sampled_from(PIECES), st.binary(max_size=20))
headers = st.lists(
    st.tuples(
        st.sampled_from([RECORD_ID_HEADER, "mansio-i", "mansio-id2", "a"]),
        st.one_of(st.none(), st.sampled_from([ID, ID[:-1], ENCODED_ID, ENCODED_KEY])),
    ),
    max_size=3,
).map(tuple)
records = st.tuples(st.integers(1000, 1100), pieces, pieces, headers)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    found: list[NewRecord] = draw(st.lists(records, min_size=1, max_size=8))
    batch = build_batch(found, codec=draw(st.sampled_from(list(Codec))), control=draw(st.integers(0, 9)) == 0)
    if draw(st.booleans()):
        header = with_log_append_time(batch, read_header(batch), draw(st.integers(1000, 1100)))
        return header + batch[len(header) :]
    return batch


asked_for = st.builds(
    Asked,
    st.booleans(),
    st.integers(0, 40),
    st.one_of(st.just(FAR), st.integers(0, 60)),
    st.one_of(st.just(-1), st.integers(1000, 1100)),
    st.one_of(st.just(FAR), st.integers(1000, 1100)),
)


@given(
    st.lists(batches(), min_size=1, max_size=12),
    asked_for,
    st.integers(200, 4000),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([1, 100]),
    st.booleans(),
    st.sampled_from([1, 300, 1 << 17]),
)
def test_a_search_finds_what_a_scan_of_all_records_finds(
    stored: list[bytes],
    asked: Asked,
    segment_bytes: int,
    matches_max: int,
    files_max: int,
    is_slow: bool,
    chunk_bytes: int,
) -> None:
    log = Log.open(SimulatedDisk(), ManualClock(), "/data/p", LogSettings(segment_bytes=segment_bytes))
    for each in stored:
        append(log, each)
    with patch.object(record_search, "CHUNK_BYTES", chunk_bytes):
        found, skipped = find(log, asked, matches_max=matches_max, files_max=files_max, is_slow=is_slow)
    assert found == expected(log, asked)
    assert not skipped


def opened(*batches: bytes) -> tuple[SimulatedDisk, Log]:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), "/data/p", LogSettings(segment_bytes=1 << 20))
    for each in batches:
        append(log, each)
    return disk, log


def test_a_key_in_a_value_or_in_a_header_is_no_match() -> None:
    _, log = opened(
        build_batch([(1000, b"bob", ENCODED_KEY, ())]),
        build_batch([(1000, None, ENCODED_ID, (("a", ENCODED_KEY), (RECORD_ID_HEADER + "x", ID)))]),
    )
    assert find(log, Asked()) == ([], [])
    assert find(log, Asked(by_key=False)) == ([], [])


@pytest.mark.parametrize("codec", list(Codec))
def test_a_damaged_batch_is_skipped_and_named(codec: Codec) -> None:
    batch = build_batch([(1000, KEY, b"v" * 100, ())] * 2, codec=codec)
    _, log = opened(batch, batch, batch)
    log.sync()
    file = log.segment_file(log._segments.segments[0])
    file.write_at([bytes([batch[66] ^ 1])], len(batch) + 66)
    matches, skipped = find(log, Asked())
    assert [offset for offset, _ in matches] == [0, 1, 4, 5]
    assert [(each.first_offset, each.end_offset) for each in skipped] == [(2, 4)]
    file.write_at([b"\x09"], len(batch) + 16)  # the magic number: where does the next batch begin?
    matches, skipped = find(log, Asked())
    assert [offset for offset, _ in matches] == [0, 1]
    assert skipped == [SkippedOffsets(2, 6, DAMAGED)]


def test_batches_before_the_time_range_are_not_read() -> None:
    _, log = opened(*[build_batch([(1000 + number, KEY, b"v" * 500, ())]) for number in range(100)])
    plan = log.plan_search(0, log.end_offset, 10)
    task = Asked(since=1090).task(0)._replace(end_offset=log.end_offset)
    result = search_files(task, plan.files, partial(read_file, plan.opened), lambda: 0.0)
    assert [offset for offset, _ in result.matches] == list(range(90, 100))
    assert result.searched_bytes == log.size_bytes // 10
    assert log.bytes_between(0, log.end_offset) == log.size_bytes


def test_a_segment_that_retention_deletes_during_a_step_is_still_read() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), "/data/p", LogSettings(segment_bytes=200))
    for _ in range(6):
        append(log, build_batch([(1000, KEY, b"v" * 100, ())]))
    plan = log.plan_search(0, 6, 10)
    log.sync()
    log.trim_to(4)
    log.sync()
    result = search_files(
        Asked().task(0)._replace(end_offset=6), plan.files, partial(read_file, plan.opened), lambda: 0.0
    )
    assert [offset for offset, _ in result.matches] == list(range(6))


def test_a_segment_that_cannot_be_opened_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log.open(SimulatedDisk(), ManualClock(), "/data/p", LogSettings(segment_bytes=200))
    for _ in range(6):
        append(log, build_batch([(1000, KEY, b"v" * 100, ())]))
    damaged = log._segments.segments[2]
    files = log._files
    open_file, load_index = files.file, files.index

    def file(segment: Segment) -> DiskFile:
        if segment is damaged:
            raise CorruptLog("it is missing")
        return open_file(segment)

    def index(segment: Segment) -> SparseIndex:
        file(segment)
        return load_index(segment)

    monkeypatch.setattr(files, "file", file)
    monkeypatch.setattr(files, "index", index)
    plan = log.plan_search(0, 6, 10)
    assert plan.skipped == [SkippedOffsets(2, 3, "it is missing")]
    task = Asked().task(0)._replace(end_offset=6)
    result = search_files(task, plan.files, partial(read_file, plan.opened), lambda: 0.0)
    assert [offset for offset, _ in result.matches] == [0, 1, 3, 4, 5]
    assert result.next_offset == 6
    assert log.bytes_between(0, 3) == 3 * damaged.size
