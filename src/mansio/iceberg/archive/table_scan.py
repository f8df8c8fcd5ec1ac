"""Scan of an archive table without Spark, in offset order, as Arrow batches.

Data is pruned in three steps: files by their bounds in the manifests, row groups by their bounds in the files, then
rows.

Invariants:
* The rows of a partition are in offset order, each offset at most once; otherwise the scan raises `ArchiveError`.
* One Arrow batch is in memory at a time. It has rows of one row group, whose size the writers limit.
* A scan reads one state of the table, even if other programs commit at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mansio.iceberg.archive.decoded_schema import conform_batch
from mansio.iceberg.archive.table_format import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
    LiveFile,
)
from mansio.iceberg.errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyiceberg.io import FileIO

    from mansio.iceberg.archive.table import ArchiveTable

RecordPosition = tuple[int, int]
"""(partition, offset)"""

BATCH_ROWS: Final = 65_536
BEFORE_FIRST_RECORD: Final[RecordPosition] = (-1, -1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of records of a table by partition, offset and timestamp; by default all records.

    `from_us` (inclusive) and `to_us` (exclusive) are microseconds since the epoch (UTC). A record without a timestamp
    is not selected if one of the two is given.
    """

    partitions: frozenset[int] | None = None
    starts: Mapping[int, int] = field(default_factory=dict)
    """First selected offset by partition; a missing partition is selected from its first offset."""
    ends: Mapping[int, int] | None = None
    """End offset (exclusive) by partition; a missing partition is not selected. None: no partition has an end."""
    from_us: int | None = None
    to_us: int | None = None

    @property
    def has_time_bounds(self) -> bool:
        return self.from_us is not None or self.to_us is not None

    def offset_range(self, partition: int) -> tuple[int, int] | None:
        """Return the selected offsets [start, end) of a partition; None if no offset is selected."""
        if self.partitions is not None and partition not in self.partitions:
            return None
        end = _OFFSET_MAX if self.ends is None else self.ends.get(partition, 0)
        start = self.starts.get(partition, 0)
        return (start, end) if start < end else None

    def starting_at(self, starts: Mapping[int, int]) -> Selection:
        """Return the selection without offsets below `starts`, and without the partitions that `starts` lacks."""
        known = frozenset(starts)
        return replace(
            self,
            partitions=known if self.partitions is None else known & self.partitions,
            starts={one: max(start, self.starts.get(one, 0)) for one, start in starts.items()},
        )

    def may_match(self, file: LiveFile) -> bool:
        """Whether a file may hold a selected record, according to its bounds of offsets and timestamps."""
        offsets = self.offset_range(file.partition)
        if offsets is None or file.last_offset < offsets[0] or file.first_offset >= offsets[1]:
            return False
        return self._may_match_times(file.first_us, file.last_us)

    def _may_match_times(self, first_us: int | None, last_us: int | None) -> bool:
        if not self.has_time_bounds or first_us is None or last_us is None:
            return True
        return (self.from_us is None or last_us >= self.from_us) and (
            self.to_us is None or first_us < self.to_us
        )

    def filter_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the selected rows of a batch. All rows of the batch must be of one partition."""
        if not batch.num_rows:
            return batch
        offsets = self.offset_range(batch.column(PARTITION_COLUMN)[0].as_py())
        if offsets is None:
            return batch.slice(0, 0)
        column = batch.column(OFFSET_COLUMN).to_numpy()
        first, last = np.searchsorted(column, offsets)
        batch = batch.slice(int(first), int(last - first))
        for bound, is_wanted in ((self.from_us, pc.greater_equal), (self.to_us, pc.less)):
            if bound is not None:
                batch = batch.filter(
                    is_wanted(
                        batch.column(TIMESTAMP_COLUMN),
                        pa.scalar(bound, TABLE_SCHEMA.field(TIMESTAMP_COLUMN).type),
                    )
                )
        return batch


ALL_RECORDS: Final = Selection()
_OFFSET_MAX: Final = (1 << 63) - 1


def scan(
    table: ArchiveTable,
    selection: Selection = ALL_RECORDS,
    *,
    snapshot_id: int | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Yield the selected records as of the table's last refresh, or of one of its snapshots: by partition, in offset
    order, with the columns of `TABLE_SCHEMA`.

    Raises:
        ArchiveError: An offset exists twice, or a file is damaged.
        OSError: A file cannot be read.
    """
    last: RecordPosition = BEFORE_FIRST_RECORD
    for file in selected_files(table, selection, snapshot_id=snapshot_id):
        for batch in read_file(table.iceberg.io, file, selection, batch_rows=batch_rows):
            last = check_order(batch, last, file.path)
            wanted = selection.filter_batch(batch)
            if wanted.num_rows:
                yield wanted


def selected_files(
    table: ArchiveTable, selection: Selection = ALL_RECORDS, *, snapshot_id: int | None = None
) -> list[LiveFile]:
    """Return the files that may hold selected records, by partition and offset."""
    partitions = selection.partitions
    only_partition = next(iter(partitions)) if partitions is not None and len(partitions) == 1 else None
    return [
        file
        for file in table.live_files(partition=only_partition, snapshot_id=snapshot_id)
        if selection.may_match(file)
    ]


def read_file(
    io: FileIO,
    file: LiveFile,
    selection: Selection = ALL_RECORDS,
    *,
    batch_rows: int = BATCH_ROWS,
    schema: pa.Schema = TABLE_SCHEMA,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one file, without the row groups that cannot hold a selected record. `schema`: the columns, at
    least those of `TABLE_SCHEMA`.

    Raises:
        ArchiveError: The file is not a valid Parquet file.
        OSError: The file cannot be read.
    """
    try:
        with io.new_input(file.path).open() as stream:
            parquet = pq.ParquetFile(stream)
            names = [one for one in schema.names if one in parquet.schema_arrow.names]
            # One row group after the other: a batch over several groups would have `batch_rows` rows of any size.
            for group in _selected_row_groups(parquet.metadata, file, selection):
                for batch in parquet.iter_batches(
                    batch_rows, row_groups=[group], columns=names, use_threads=False
                ):
                    yield batch if batch.schema.equals(schema) else _cast_to_table_schema(batch, schema)
    except pa.ArrowInvalid as error:
        raise ArchiveError(f"{file.path} is damaged: {error}") from error


def _selected_row_groups(metadata: Any, file: LiveFile, selection: Selection) -> list[int]:
    """Indexes of the row groups that may hold a selected record, according to their bounds."""
    columns = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    wanted = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        offsets = _row_group_bounds(group, columns[OFFSET_COLUMN]) or (file.first_offset, file.last_offset)
        first_us, last_us = _row_group_bounds(group, columns[TIMESTAMP_COLUMN]) or (None, None)
        part = LiveFile(file.path, group.num_rows, 0, file.partition, *offsets, first_us, last_us)
        if selection.may_match(part):
            wanted.append(index)
    return wanted


def _row_group_bounds(group: Any, column: int) -> tuple[int, int] | None:
    statistics = group.column(column).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return statistics.min_raw, statistics.max_raw


def _cast_to_table_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast the columns to the types of the table: another program may have rewritten the file with equivalent types, or
    the file was written before a decoded column was added or widened.
    """
    columns = [batch.column(column.name).cast(column.type) for column in TABLE_SCHEMA]
    records = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
    if schema.equals(TABLE_SCHEMA):
        return records
    for name in schema.names[len(TABLE_SCHEMA) :]:
        if batch.schema.get_field_index(name) >= 0:
            records = records.append_column(name, batch.column(name))
    return conform_batch(records, schema)


def check_order(batch: pa.RecordBatch, last: RecordPosition, path: str) -> RecordPosition:
    """Check that the offsets increase, also from the position `last`; returns the position of the last row.

    Raises:
        ArchiveError: A record exists twice, or files overlap.
    """
    if not batch.num_rows:
        return last
    partition = batch.column(PARTITION_COLUMN)[0].as_py()
    offsets = batch.column(OFFSET_COLUMN).to_numpy()
    before = last[1] if last[0] == partition else -1
    if offsets[0] <= before or not (np.diff(offsets) > 0).all():
        raise ArchiveError(
            f"the archive of partition {partition} is not in order after offset {before}: "
            f"{path} begins at {int(offsets[0])}"
        )
    return partition, int(offsets[-1])


def record_count(files: Iterable[LiveFile]) -> int:
    """Total number of records in these files."""
    return sum(file.rows for file in files)
