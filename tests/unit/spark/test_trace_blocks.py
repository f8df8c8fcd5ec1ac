"""Blocks of the trace in Arrow columns: what the decoder of rows yields, and damage is an error."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptMessage
from mansio.spark.trace.blocks import (
    KIND_COLUMN_NAMES,
    TRACE_SCHEMA,
    TraceSelection,
    decode_blocks,
    select_rows,
    to_columns,
)
from mansio.spark.trace.delivery_reader import _add_block
from mansio.wire.internal_records.trace_index_records import IndexRecord, encode_index_record
from mansio.wire.internal_records.trace_records import CONTROL_KINDS, LED, PUBLISHED, TraceBlock, TraceRow
from unit.wire.test_trace_records import encoded, partitions

if TYPE_CHECKING:
    from mansio.state.trace.coverage import Coverage

TOPICS = {b"a" * 16: "orders"}
Found = dict[tuple[bytes, int], list[TraceRow]]


def decoded(block: TraceBlock) -> list[dict[str, Any]]:
    """The rows of a block, one by one."""
    header = block.header
    return [
        {
            "topic": TOPICS.get(entry.topic_id),
            "topic_id": entry.topic_id,
            "partition": entry.partition,
            "first_offset": row.first,
            "last_offset": row.first + row.size - 1,
            "kind": KIND_COLUMN_NAMES[row.kind],
            "cause": row.cause,
            "time": row.time_ms,
            "group": row.group or None,
            "member": row.who or None,
            "attempt": row.attempt,
            "leader_epoch": entry.leader_epoch,
            "broker": header.broker_id,
            "incarnation": header.incarnation,
            "sequence": header.sequence,
            "extra": row.extra,
        }
        for entry in block.entries()
        for row in block.rows(entry)
    ]


def shown(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of the columns."""
    assert batch.schema == TRACE_SCHEMA
    times = batch.column("time").cast("int64").to_pylist()
    return [{**row, "time": time_ms} for row, time_ms in zip(batch.to_pylist(), times, strict=True)]


@given(st.lists(partitions, max_size=3))
def test_columns_have_the_rows_of_the_blocks(found: list[Found]) -> None:
    blocks = [TraceBlock(encoded(each)) for each in found]
    assert shown(decode_blocks(blocks, TOPICS)) == [row for block in blocks for row in decoded(block)]


@given(partitions, st.data())
def test_selected_rows_are_those_of_the_offsets_and_kinds(found: Found, data: st.DataObject) -> None:
    led = data.draw(st.sampled_from([*sorted(found), None]))
    if led is not None:
        control = TraceRow(LED, 0, 0, 0, 0, 5, 0, 0, -1)  # type: ignore[arg-type]  # numbers of names
        found = {**found, led: [*found[led], control]}
    chosen = {partition for _, partition in found} | {5}
    bounds = st.tuples(st.integers(0, 1 << 41), st.integers(1, 1 << 41)).map(
        lambda each: (each[0], sum(each))
    )
    ranges = {partition: data.draw(bounds) for partition in sorted(chosen)[::2]}
    wanted = data.draw(st.sets(st.integers(PUBLISHED, LED - 1)))
    topic_id = data.draw(st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16]))
    rows = select_rows(TraceBlock(encoded(found)), TraceSelection(topic_id, ranges, wanted))
    kinds = {KIND_COLUMN_NAMES[kind] for kind in wanted}
    controls = {KIND_COLUMN_NAMES[kind] for kind in CONTROL_KINDS}
    expected = []
    for row in decoded(TraceBlock(encoded(found))):
        first, end = ranges.get(row["partition"], (0, 0))
        touches = row["first_offset"] < end and row["last_offset"] >= first
        of_partition = row["topic_id"] == topic_id and row["partition"] in ranges
        if of_partition and (row["kind"] in controls or (row["kind"] in kinds and touches)):
            expected.append(row)
    batch = to_columns([] if rows is None else [rows], TOPICS)
    assert shown(batch) == expected


@given(partitions.filter(bool), st.data())
def test_a_shortened_block_is_an_error(found: Found, data: st.DataObject) -> None:
    whole = encoded(found)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(CorruptMessage):
        decode_blocks([TraceBlock(part)])


@given(partitions.filter(bool), st.data())
def test_a_damaged_block_is_an_error_or_has_other_rows(found: Found, data: st.DataObject) -> None:
    damaged = bytearray(encoded(found))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    ranges = {partition: (0, 1 << 41) for _, partition in found}
    with contextlib.suppress(CorruptMessage):
        decode_blocks([TraceBlock(bytes(damaged))])
    with contextlib.suppress(CorruptMessage):
        select_rows(TraceBlock(bytes(damaged)), TraceSelection(b"a" * 16, ranges, {PUBLISHED}))


def test_index_records_between_the_blocks_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    record = IndexRecord(0, 128, -1, (), b"", array("I", [0]), array("q"))
    coverage: dict[tuple[int, int], Coverage] = {}
    selection = TraceSelection(b"t" * 16, {0: (0, 10)}, {1})
    assert _add_block(pa.py_buffer(encode_index_record(record)), selection, coverage) is None
    assert not coverage
    assert not caplog.records
