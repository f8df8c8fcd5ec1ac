"""Blocks of the trace: what is written is read again, a reader skips what is not wanted, and damage is an error."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptMessage
from mansio.state.trace.trace_buffer import OFFSET_MAX
from mansio.wire.internal_records.trace_index_records import (
    CoveredTime,
    IndexRecord,
    decode_index_record,
    encode_index_record,
    is_index_record,
)
from mansio.wire.internal_records.trace_records import (
    CONTROL_KINDS,
    HEADER,
    LED,
    PUBLISHED,
    ROW,
    BlockHeader,
    PartitionRows,
    TraceBlock,
    TraceRow,
    encode_block,
)

NAMES = ["g", "m" * 300, "ü"]
BEGIN_MS = 1_790_000_000_000

rows = st.builds(
    TraceRow,
    kind=st.integers(PUBLISHED, LED - 1),
    cause=st.integers(0, 255),
    attempt=st.integers(0, 65_535),
    group=st.integers(0, len(NAMES)),
    who=st.integers(0, len(NAMES)),
    time_ms=st.integers(0, (1 << 32) - 1),
    first=st.integers(0, 1 << 40),
    size=st.integers(1, 1_000),
    extra=st.integers(-1, 1 << 62),
)
partitions = st.dictionaries(
    st.tuples(st.sampled_from([b"a" * 16, b"b" * 16, b"\xff" * 16]), st.integers(0, (1 << 31) - 1)),
    st.lists(rows, min_size=1, max_size=5),
    max_size=8,
)


def header(**more: Any) -> BlockHeader:
    values = dict.fromkeys(BlockHeader._fields, 0) | {"begin_ms": BEGIN_MS, "end_ms": BEGIN_MS + 1000}
    return BlockHeader(**(values | more))


def encoded(found: dict[tuple[bytes, int], list[TraceRow]]) -> bytes:
    parts = [
        PartitionRows(
            topic_id,
            partition,
            7,
            b"".join(ROW.pack(*each) for each in each_rows),
            *bounds(each_rows),
        )
        for (topic_id, partition), each_rows in found.items()
    ]
    return encode_block(header(sequence=3, broker_id=2), parts, NAMES)


def bounds(found: list[TraceRow]) -> tuple[int, int]:
    """Bounds of the offsets; a row about the partition concerns all."""
    if any(each.kind in CONTROL_KINDS for each in found):
        return 0, OFFSET_MAX
    return min(each.first for each in found), max(each.first + each.size for each in found)


def named(row: TraceRow) -> TraceRow:
    names = ["", *(name[:249] for name in NAMES)]
    return row._replace(group=names[row.group], who=names[row.who], time_ms=BEGIN_MS + row.time_ms)  # type: ignore[call-overload]


@given(partitions)
def test_the_rows_of_each_partition_are_read_again(found: dict[tuple[bytes, int], list[TraceRow]]) -> None:
    block = TraceBlock(encoded(found))
    assert (block.header.sequence, block.header.broker_id, block.header.rows) == (
        3,
        2,
        sum(map(len, found.values())),
    )
    assert [(each.topic_id, each.partition) for each in block.entries()] == sorted(found)
    for (topic_id, partition), wanted in found.items():
        (entry,) = block.entries_of(topic_id, partition)
        assert entry.leader_epoch == 7
        assert list(block.rows(entry)) == [named(each) for each in wanted]
        first = wanted[0].first
        assert list(block.rows(entry, [first])) == [
            named(each) for each in wanted if each.first <= first < each.first + each.size
        ]
    assert not list(block.entries_of(b"c" * 16, 0))


@given(partitions, st.data())
def test_a_shortened_block_is_an_error_or_has_fewer_names(
    found: dict[tuple[bytes, int], list[TraceRow]], data: st.DataObject
) -> None:
    whole = encoded(found)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]

    def read() -> None:
        for entry in TraceBlock(part).entries():
            list(TraceBlock(part).rows(entry))
        list(TraceBlock(part).rows_of_group("g", {PUBLISHED}))

    with pytest.raises(CorruptMessage):
        read()


def test_a_block_of_a_later_version_is_an_error() -> None:
    with pytest.raises(CorruptMessage, match="version 9"):
        TraceBlock(bytes([9]) + bytes(HEADER.size))


numbers = st.integers(-(1 << 63), (1 << 63) - 1)
gaps = st.lists(st.tuples(numbers, numbers, numbers), max_size=3)
covered_times = st.builds(
    CoveredTime, st.integers(-(1 << 31), (1 << 31) - 1), numbers, numbers, numbers, numbers, numbers, gaps
)


@st.composite
def index_records(draw: st.DrawFn) -> IndexRecord:
    found = draw(
        st.dictionaries(st.binary(min_size=20, max_size=20), st.lists(numbers, max_size=3), max_size=5)
    )
    starts, bounds = array("I", [0]), array("q")
    for key in sorted(found):
        bounds.extend(each for number in found[key] for each in (number, number))
        starts.append(len(bounds))
    covered = draw(st.lists(covered_times, max_size=3))
    return IndexRecord(
        draw(numbers), draw(numbers), draw(numbers), covered, b"".join(sorted(found)), starts, bounds
    )


@given(index_records(), st.data())
def test_an_index_record_is_read_again_and_a_part_of_one_is_an_error(
    record: IndexRecord, data: st.DataObject
) -> None:
    value = encode_index_record(record)
    assert is_index_record(value)
    assert decode_index_record(value) == record
    with pytest.raises(CorruptMessage):
        decode_index_record(value[: data.draw(st.integers(0, len(value) - 1))])
    with pytest.raises(CorruptMessage):
        TraceBlock(value)
