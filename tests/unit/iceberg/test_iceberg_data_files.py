"""What the tasks write comes back as it was, and the manifests' bounds leave out only what holds no wanted row."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mansio.iceberg import fanout_writer
from mansio.iceberg.archive.parquet_writer import PartitionFileWriter, to_table_rows
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import TABLE_SCHEMA
from mansio.iceberg.errors import InvalidDataFiles
from support.iceberg import HOUR_US, add, plan, source_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_live_files_are_pruned_by_partition_offset_and_time(tmp_path: Path) -> None:
    table = open_table(None, str(tmp_path), "t", create=True)
    for batch in range(3):
        low, high = batch * 10, batch * 10 + 10
        add(table, plan(batch, {0: low, 1: low}, {0: high, 1: high}))
    assert [(f.partition, f.first_offset, f.last_offset, f.rows) for f in table.live_files()] == [
        (partition, low, low + 9, 10) for partition in (0, 1) for low in (0, 10, 20)
    ]
    only = table.live_files(partition=1, offsets=(9, 11))
    assert [(file.partition, file.first_offset) for file in only] == [(1, 0), (1, 10)]
    timed = table.live_files(times=(10 * HOUR_US, 20 * HOUR_US))
    assert {(file.partition, file.first_us, file.last_us) for file in timed} == {
        (0, 10 * HOUR_US, 19 * HOUR_US),
        (1, 10 * HOUR_US, 19 * HOUR_US),
    }
    assert table.live_files(offsets=(30, 40)) == []


def test_files_roll_over_at_their_size_and_name_what_they_hold(tmp_path: Path) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0", file_bytes=1)
    for low in (0, 5):
        writer.write(source_rows(0, range(low, low + 5)))
    parquet_writer = writer.close()
    assert [(part.first_offset, part.last_offset, part.file.rows) for part in parquet_writer] == [
        (0, 4, 5),
        (5, 9, 5),
    ]
    for part in parquet_writer:
        rows = pq.read_table(part.file.path.removeprefix("file://"))
        assert rows.schema.equals(TABLE_SCHEMA)
        assert rows.num_rows == part.file.rows
    assert len({part.file.path for part in parquet_writer}) == 2


def test_small_batches_become_one_row_group_and_what_waits_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0")
    for low in range(0, 400, 10):
        writer.write(source_rows(0, range(low, low + 10)))
    (part,) = writer.close()
    file = pq.ParquetFile(part.file.path.removeprefix("file://"))
    assert (file.num_row_groups, file.read().num_rows) == (1, 400)
    monkeypatch.setattr(fanout_writer, "BUFFERED_BYTES_MAX", 1_000)
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-1")
    for low in range(0, 400, 10):
        for partition in range(3):
            writer.write(source_rows(partition, range(low, low + 10)))
            assert writer._files.buffered_bytes < 1_000
    for part in writer.close():
        rows = pq.read_table(part.file.path.removeprefix("file://"))
        assert rows.column("__offset").to_pylist() == list(range(400))
        assert part.file.rows == 400


def test_rows_of_several_partitions_go_to_files_of_their_own(tmp_path: Path) -> None:
    mixed = (
        pa.Table.from_batches([source_rows(0, [1, 4]), source_rows(2, [7])]).combine_chunks().to_batches()[0]
    )
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0")
    writer.write(mixed)
    assert sorted((part.partition, part.first_offset, part.last_offset) for part in writer.close()) == [
        (0, 1, 4),
        (2, 7, 7),
    ]


@pytest.mark.parametrize("offsets", [[3, 2], [2, 2]], ids=["backwards", "twice"])
def test_rows_out_of_order_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0")
    with pytest.raises(InvalidDataFiles, match="order of their offsets"):
        writer.write(source_rows(0, offsets))


def test_batch_that_starts_below_the_one_before_is_refused(tmp_path: Path) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0")
    writer.write(source_rows(0, [1, 2]))
    with pytest.raises(InvalidDataFiles):
        writer.write(source_rows(0, [2, 3]))
    writer.abort()


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0", file_bytes=1)
    writer.write(source_rows(0, range(5)))
    writer.write(source_rows(1, range(5)))
    writer.abort()
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("room_bytes", [0, 100], ids=["at its begin", "at its end"])
def test_a_task_whose_file_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path, room_bytes: int) -> None:
    writer = PartitionFileWriter(f"file://{tmp_path}/data", "q-0")

    def write_all() -> None:
        for partition in range(3):
            writer.write(source_rows(partition, range(5)))
        writer.close()

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_all()
        writer.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list((tmp_path / "data").iterdir()) == []


def test_headers_lanes_and_nulls_are_kept() -> None:
    headers = pa.array([[("h", b"1"), ("h", None)], None], TABLE_SCHEMA.field("headers").type)
    batch = source_rows(0, [0, 1]).append_column("headers", headers)
    batch = batch.append_column("lane", pa.array(["urgent", None]))
    rows = to_table_rows(batch)
    assert rows.schema.equals(TABLE_SCHEMA)
    assert rows.column("headers").to_pylist() == [
        [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
        None,
    ]
    assert rows.column("__lane").to_pylist() == ["urgent", None]
