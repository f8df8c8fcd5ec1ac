"""The archive's sink without a JVM: what Spark noted for a batch is committed, and only if all tasks reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from mansio.errors import ConfigError
from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_format import LostRange
from mansio.iceberg.errors import ArchiveGap, InvalidDataFiles
from mansio.spark.options import ERROR_COLUMN
from mansio.spark.sink.iceberg_sink import (
    IcebergSink,
    IcebergStreamWriter,
    WrittenFiles,
    check_read_ranges,
    dead_letter_ranges,
    merge_lost_ranges,
    read_batch_plan,
    sink_options,
    split_dead_letters,
)
from mansio.spark.source.error_column import unreadable_offsets_text
from mansio.spark.source.read_plan import TaskRange
from support.iceberg import expected, held, plan, write_parts

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql.datasource import WriterCommitMessage

    from mansio.iceberg.archive.table_format import BatchPlan

QUERY = "0c5a"


@pytest.fixture
def table(tmp_path: Path) -> ArchiveTable:
    return open_table(None, str(tmp_path / "lake"), "t", create=True)


def note(checkpoint: Path, batch: int, offsets: dict[int, int], topic: str = "t") -> None:
    """What Spark writes into its checkpoint before a batch begins."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
    source = json.dumps({topic: {str(partition): offset for partition, offset in offsets.items()}})
    (checkpoint / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{source}')


def writer(table: ArchiveTable, tmp_path: Path, start: dict[int, int] | None = None) -> IcebergStreamWriter:
    source = {"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t"}
    options = sink_options(table, str(tmp_path / "lake"), None, start or {0: 0}, source)
    return IcebergStreamWriter({**options, "checkpointLocation": f"file://{tmp_path / 'checkpoint'}"})


def messages(table: ArchiveTable, wanted: BatchPlan) -> list[WriterCommitMessage | None]:
    """A task without rows, and one with all of them."""
    return [WrittenFiles((), ()), WrittenFiles(ranges(wanted), tuple(write_parts(table, wanted)))]


def ranges(wanted: BatchPlan) -> tuple[TaskRange, ...]:
    """One for each partition."""
    return tuple(
        TaskRange("t", partition, wanted.start[partition], end)
        for partition, end in wanted.end.items()
        if end > wanted.start[partition]
    )


def test_batch_that_spark_repeats_after_a_crash_is_in_the_table_once(
    table: ArchiveTable, tmp_path: Path
) -> None:
    note(tmp_path / "checkpoint", 0, {0: 5})
    first = plan(0, {0: 0}, {0: 5})
    for _ in range(2):
        writer(table, tmp_path).commit(messages(table, first), 0)
    note(tmp_path / "checkpoint", 1, {0: 8, 1: 2})
    second = plan(1, {0: 5, 1: 0}, {0: 8, 1: 2})
    for _ in range(2):
        writer(table, tmp_path).commit(messages(table, second), 1)
    table.refresh()
    committed = table.last_commit()
    assert committed is not None
    assert (committed.query, committed.batch, committed.offsets) == (QUERY, 1, {0: 8, 1: 2})
    assert held(table) == expected({0: 8, 1: 2})


def test_offsets_without_a_record_are_archived_too(table: ArchiveTable, tmp_path: Path) -> None:
    """The end is what Spark noted, not what the last row has: control records have offsets and no row."""
    note(tmp_path / "checkpoint", 0, {0: 9})
    parts = tuple(write_parts(table, plan(0, {0: 0}, {0: 5})))
    writer(table, tmp_path).commit([WrittenFiles(ranges(plan(0, {0: 0}, {0: 9})), parts)], 0)
    table.refresh()
    committed = table.last_commit()
    assert committed is not None
    assert committed.offsets == {0: 9}
    assert table.added_records(QUERY) == {0: 5}


@pytest.mark.parametrize(
    "read",
    [
        [],
        [(0, 0, 9)],
        [(0, 0, 4), (0, 5, 9), (1, 3, 7)],
        [(0, 0, 5), (0, 4, 9), (1, 3, 7)],
        [(0, 0, 9), (0, 0, 9), (1, 3, 7)],
        [(0, 0, 9), (1, 0, 7)],
        [(0, 0, 9), (1, 3, 8)],
        [(0, 0, 9), (1, 3, 7), (2, 0, 1)],
    ],
)
def test_batch_that_was_read_in_part_or_twice_is_refused(read: list[tuple[int, int, int]]) -> None:
    wanted = plan(0, {0: 0, 1: 3, 3: 2}, {0: 9, 1: 7, 3: 2})
    check_read_ranges(wanted, [TaskRange("t", 1, 3, 7), TaskRange("t", 0, 5, 9), TaskRange("t", 0, 0, 5)])
    with pytest.raises(InvalidDataFiles, match="each offset once"):
        check_read_ranges(wanted, [TaskRange("t", *one) for one in read])


def test_batch_of_which_a_task_has_not_reported_is_not_committed(table: ArchiveTable, tmp_path: Path) -> None:
    note(tmp_path / "checkpoint", 0, {0: 5})
    with pytest.raises(RuntimeError, match="has not reported"):
        writer(table, tmp_path).commit([*messages(table, plan(0, {0: 0}, {0: 5})), None], 0)
    table.refresh()
    assert table.last_commit() is None


def test_query_that_starts_above_the_table_commits_nothing(table: ArchiveTable, tmp_path: Path) -> None:
    note(tmp_path / "checkpoint", 0, {0: 5})
    writer(table, tmp_path).commit(messages(table, plan(0, {0: 0}, {0: 5})), 0)
    note(tmp_path / "checkpoint", 0, {0: 9})
    with pytest.raises(ArchiveGap):
        writer(table, tmp_path, {0: 6}).commit(messages(table, plan(0, {0: 6}, {0: 9})), 0)


def test_checkpoint_of_another_topic_or_format_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    note(checkpoint, 0, {0: 5}, topic="other")
    with pytest.raises(ConfigError, match="is of topic other, not of t"):
        read_batch_plan(str(checkpoint), 0, "t", {0: 0})
    (checkpoint / "offsets" / "0").write_text("v9\n{}\n{}")
    with pytest.raises(ConfigError, match="format v9"):
        read_batch_plan(str(checkpoint), 0, "t", {0: 0})
    with pytest.raises(ConfigError, match="has no offsets/7"):
        read_batch_plan(str(checkpoint), 7, "t", {0: 0})


def test_sink_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="append"):
        IcebergSink({}).streamWriter(None, overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="option table is missing"):
        IcebergSink({}).streamWriter(None, overwrite=False)  # type: ignore[arg-type]


def test_dead_letters_are_no_records_and_the_table_lists_what_they_stand_for(
    table: ArchiveTable, tmp_path: Path
) -> None:
    reasons = {3: unreadable_offsets_text(3, 5, "CRC"), 8: "any text"}
    rows = pa.RecordBatch.from_pylist(
        [
            {
                "partition": 1,
                "offset": offset,
                "value": b"offsets 0 to 9 cannot be read: ",
                ERROR_COLUMN: reasons.get(offset),
            }
            for offset in (1, 2, 3, 6, 7, 8)
        ],
        pa.schema(
            [
                ("partition", pa.int32()),
                ("offset", pa.int64()),
                ("value", pa.binary()),
                (ERROR_COLUMN, pa.string()),
            ]
        ),
    )
    readable, dead = split_dead_letters(rows)
    assert readable.column("offset").to_pylist() == [1, 2, 6, 7]
    assert dead is not None
    assert dead_letter_ranges(dead) == [LostRange(1, 3, 6), LostRange(1, 8, 9)]
    assert dead.column("reason").to_pylist() == ["CRC", "any text"]
    assert split_dead_letters(rows.slice(0, 2)) == (rows.slice(0, 2), None)

    note(tmp_path / "checkpoint", 0, {0: 9})
    parts = tuple(write_parts(table, plan(0, {0: 0}, {0: 3})))
    of_two_tasks: list[WriterCommitMessage | None] = [
        WrittenFiles((TaskRange("t", 0, 0, 5),), parts, (LostRange(0, 3, 5),)),
        WrittenFiles((TaskRange("t", 0, 5, 9),), (), (LostRange(0, 5, 9),)),
    ]
    for _ in range(2):
        writer(table, tmp_path).commit(of_two_tasks, 0)
    table.refresh()
    assert table.lost_ranges() == (LostRange(0, 3, 9),)
    committed = table.last_commit()
    assert committed is not None
    assert committed.offsets == {0: 9}


def test_ranges_that_touch_or_overlap_become_one() -> None:
    given = [
        LostRange(1, 0, 2),
        LostRange(0, 5, 7),
        LostRange(0, 6, 9),
        LostRange(0, 9, 10),
        LostRange(0, 12, 13),
    ]
    assert merge_lost_ranges(given) == [LostRange(0, 5, 10), LostRange(0, 12, 13), LostRange(1, 0, 2)]
