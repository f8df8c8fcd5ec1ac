"""Writer of a task's rows as Parquet files of a result table. A file holds rows of one partition.

The table refers to a file only after its batch is committed. A task never accesses the catalog. `FanoutWriter` has the
open files and their invariants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from mansio.iceberg.data_files import WrittenFile, report_files
from mansio.iceberg.fanout_writer import TARGET_FILE_BYTES, FanoutWriter
from mansio.iceberg.result_table.partition_spec import split_by_partition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.iceberg.data_files import PartitionValue
    from mansio.iceberg.result_table.partition_spec import PartitionField


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where and how the tasks write data files: the address of the directory, the columns with their field ids, and the
    partition fields.
    """

    location: str
    schema: pa.Schema
    partition_by: tuple[PartitionField, ...] = ()
    file_bytes: int = TARGET_FILE_BYTES


class DataFileWriter:
    """Writes the files of one task. Call `write` for each Arrow batch, then `close`, or `abort` if the task fails."""

    def __init__(self, layout: FileLayout, name: str) -> None:
        """`name`: prefix of all file names."""
        self._layout = layout
        self._name = name
        self._files: FanoutWriter[tuple[PartitionValue, ...]] = FanoutWriter(
            layout.location, layout.schema, self._add_done, file_bytes=layout.file_bytes
        )
        self._done: list[WrittenFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, which have columns of the table. Columns of the table that the rows lack become null."""
        rows = to_schema(batch, self._layout.schema)
        for partition, part in split_by_partition(self._layout.partition_by, rows):
            self._files.write(partition, part, self._name)

    def close(self) -> list[WrittenFile]:
        """Close all files; returns a description of each for the commit."""
        self._files.close()
        return self._done

    def abort(self) -> None:
        """Close and delete all files. No commit refers to them yet."""
        self._done.clear()
        self._files.abort()

    def _add_done(self, partition: tuple[PartitionValue, ...], path: str, rows: int, size: int) -> None:
        self._done.append(WrittenFile(path, rows, size, partition))


def to_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows with exactly the columns of `schema`, by name. A missing column becomes null."""
    columns = []
    for wanted in schema:
        index = batch.schema.get_field_index(wanted.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, wanted.type))
        else:
            column = batch.column(index)
            columns.append(column if column.type == wanted.type else column.cast(wanted.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def write_rows(layout: FileLayout, name: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task; yields one row per file with its description as `REPORT_SCHEMA`. For `mapInArrow`.

    A task that fails deletes its files.
    """
    writer = DataFileWriter(layout, name)
    try:
        for batch in batches:
            writer.write(batch)
        files = writer.close()
    except BaseException:
        writer.abort()
        raise
    yield report_files(files)
