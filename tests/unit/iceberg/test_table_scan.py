"""Scan of an archive table without Spark: each row once and in order, and only the needed files and row groups are
opened."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mansio.iceberg.archive import rewrite_data_files as rewriting
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table_format import TABLE_SCHEMA, LiveFile
from mansio.iceberg.archive.table_scan import Selection, read_file, scan, selected_files
from mansio.iceberg.archive.time_travel import SnapshotNotFound, TableVersion, find_version, version_at
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.orphan_cleanup import expire_snapshots
from support.archive_tables import FIRST_US, STEP_US, Archive, row, rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.iceberg.archive.table import ArchiveTable


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warehouse")


@pytest.fixture
def table(archive: Archive) -> ArchiveTable:
    """Two partitions, three files each, of ten records a file."""
    table = archive.open()
    for _ in range(3):
        archive.add(table, {0: 10, 1: 10})
    return table


def everything() -> list[dict[str, Any]]:
    return [row(partition, offset) for partition in (0, 1) for offset in range(30)]


def as_read(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return pa.Table.from_pylist(rows, TABLE_SCHEMA).to_pylist()


def test_all_records_come_back_as_they_were_and_in_the_order_of_offsets(table: ArchiveTable) -> None:
    assert rows_of(scan(table)) == as_read(everything())
    assert rows_of(scan(table, batch_rows=3)) == as_read(everything())


def test_any_selection_equals_the_same_filter_over_all_rows(table: ArchiveTable) -> None:
    chance = random.Random(7)
    for _ in range(60):
        low, high = sorted(chance.sample(range(-2, 34), 2))
        times = [None, *(FIRST_US + chance.randrange(-3, 33) * STEP_US for _ in range(2))]
        selection = Selection(
            partitions=chance.choice([None, frozenset({0}), frozenset({1, 5}), frozenset({9})]),
            starts={0: max(low, 0)} if chance.random() < 0.5 else {},
            ends={0: max(high, 0), 1: 17} if chance.random() < 0.5 else None,
            from_us=chance.choice(times),
            to_us=chance.choice(times),
        )

        def is_wanted(one: dict[str, Any], of: Selection = selection) -> bool:
            partition, offset, at = one["__partition"], one["__offset"], one["__timestamp"]
            return (
                (of.partitions is None or partition in of.partitions)
                and offset >= of.starts.get(partition, 0)
                and (of.ends is None or offset < of.ends.get(partition, 0))
                and (of.from_us is None or at >= of.from_us)
                and (of.to_us is None or at < of.to_us)
            )

        assert rows_of(scan(table, selection, batch_rows=4)) == as_read(list(filter(is_wanted, everything())))


def test_a_time_range_reads_only_the_files_that_hold_it(table: ArchiveTable) -> None:
    hour = Selection(from_us=FIRST_US + 12 * STEP_US, to_us=FIRST_US + 18 * STEP_US)
    assert [(file.partition, file.first_offset) for file in selected_files(table, hour)] == [(0, 10), (1, 10)]


def test_row_groups_outside_of_the_selection_are_not_read(table: ArchiveTable, tmp_path: Path) -> None:
    path = tmp_path / "grouped.parquet"
    rows = pa.Table.from_pylist([row(0, offset) for offset in range(100)], TABLE_SCHEMA)
    pq.write_table(rows, path, row_group_size=10)
    file = LiveFile(f"file://{path}", 100, 1, 0, 0, 99, FIRST_US, FIRST_US + 99 * STEP_US)

    def offsets_read(selection: Selection) -> list[int]:
        return [one["__offset"] for one in rows_of(read_file(table.iceberg.io, file, selection))]

    assert offsets_read(Selection(starts={0: 42}, ends={0: 51})) == list(range(40, 60))
    assert offsets_read(Selection(from_us=FIRST_US + 95 * STEP_US)) == list(range(90, 100))


def test_a_batch_is_bounded_by_bytes_also_of_a_file_that_maintenance_made(
    table: ArchiveTable, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may be of any size, so a number of rows bounds nothing."""
    monkeypatch.setattr(rewriting, "ROW_GROUP_BYTES", 100_000)
    for _ in range(4):
        first = archive.offsets[0]
        archive.add(table, {0: [row(0, first + index, value=b"v" * 9_000) for index in range(20)]})
    rewrite_data_files(table)
    batches = list(scan(table, Selection(partitions=frozenset({0}), starts={0: 30})))
    assert sum(batch.num_rows for batch in batches) == 80
    assert max(batch.nbytes for batch in batches) < 4 * 100_000


def test_a_record_that_is_there_twice_is_an_error_and_not_an_answer(
    table: ArchiveTable, archive: Archive
) -> None:
    doubled = archive.write(table, [row(0, offset) for offset in range(5, 12)])
    with table.iceberg.transaction() as change:
        change.add_files([doubled.file.path], check_duplicate_files=False)
    with pytest.raises(ArchiveError, match="partition 0 is not in order"):
        rows_of(scan(table))


def test_a_damaged_file_is_named(table: ArchiveTable) -> None:
    path = table.live_files()[0].path.removeprefix("file://")
    with open(path, "r+b") as file:
        file.seek(-6, 2)
        file.write(b"\xff\xff\xff\x7f")
    with pytest.raises(ArchiveError, match="is damaged"):
        rows_of(scan(table))


def test_a_read_keeps_to_the_state_it_began_with(table: ArchiveTable, archive: Archive) -> None:
    reading = scan(table, batch_rows=5)
    first = next(reading)
    archive.add(archive.open(), {0: 10, 1: 10})
    assert first.to_pylist() + rows_of(reading) == as_read(everything())


def test_a_moment_is_found_by_id_by_tag_and_by_time(table: ArchiveTable, archive: Archive) -> None:
    old = table.iceberg.current_snapshot()
    assert old is not None
    table.iceberg.manage_snapshots().create_tag(old.snapshot_id, "month-end").commit()
    table.refresh()
    archive.add(table, {0: 5})
    new = table.iceberg.current_snapshot()
    assert new is not None

    def count(version: TableVersion) -> int:
        return len(
            rows_of(scan(table, version.limit_selection(Selection()), snapshot_id=version.snapshot_id))
        )

    assert count(find_version(table, str(old.snapshot_id), int)) == 60
    assert count(find_version(table, "month-end", int)) == 60
    # A branch is no moment: after every batch it is another one.
    with pytest.raises(ValueError, match="main"):
        find_version(table, "main", int)
    assert count(find_version(table, str(new.timestamp_ms - 1), int)) == 60
    assert count(version_at(table, new.timestamp_ms)) == 65
    assert count(version_at(table, new.timestamp_ms + 10**9)) == 65
    # When the snapshots are gone, the marks still tell, at least of the first batch of the hour.
    expire_snapshots(table, 1)
    table.refresh()
    assert len(table.iceberg.metadata.snapshots) == 2
    assert count(version_at(table, table.offset_history()[0].at_ms)) == 20
    with pytest.raises(SnapshotNotFound, match="at that time are not recorded"):
        version_at(table, 1_000)
    with pytest.raises(SnapshotNotFound, match="keeps no snapshot 9999999999999999999"):
        find_version(table, "9" * 19, lambda text: 1 // 0 if len(text) < 15 else int("too late"))
