"""Writer of a task's rows as Parquet files of an archive. A file holds rows of one partition.

The table refers to a file only after its batch is committed. A task never accesses the catalog.

Invariants:
* The rows of a file are in offset order, each offset once.
* Those of `FanoutWriter`, which has the open files.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mansio.iceberg.archive.table_format import (
    DECODED_COLUMNS,
    HEADERS_COLUMN,
    LANE_COLUMN,
    LAST_OFFSET_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
    WrittenRange,
)
from mansio.iceberg.data_files import WrittenFile
from mansio.iceberg.errors import InvalidDataFiles
from mansio.iceberg.fanout_writer import TARGET_FILE_BYTES, WRITER_OPTIONS, FanoutWriter

SOURCE_COLUMN_NAMES = {
    PARTITION_COLUMN: "partition",
    OFFSET_COLUMN: "offset",
    TIMESTAMP_COLUMN: "timestamp",
    TIMESTAMP_TYPE_COLUMN: "timestampType",
    LANE_COLUMN: "lane",
    LAST_OFFSET_COLUMN: "last_offset",
}
"""Names in the source of the table columns that have another name in the table."""

PARQUET_WRITER_OPTIONS: dict[str, Any] = {
    **WRITER_OPTIONS,
    # Values of records are rarely equal: a dictionary would be built and discarded.
    "use_dictionary": ["key", PARTITION_COLUMN, TIMESTAMP_TYPE_COLUMN, LANE_COLUMN],
    "write_statistics": [PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN],
}


def _writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the options for a file. Fields of decoded columns have dictionaries and statistics: their values are often
    equal, and readers skip row groups by them.
    """
    fields = [
        path for name in DECODED_COLUMNS if name in schema.names for path in _leaves(schema.field(name))
    ]
    return {
        **PARQUET_WRITER_OPTIONS,
        "use_dictionary": [*PARQUET_WRITER_OPTIONS["use_dictionary"], *fields],
        "write_statistics": [*PARQUET_WRITER_OPTIONS["write_statistics"], *fields],
    }


def _leaves(column: pa.Field, prefix: str = "") -> list[str]:
    """Return the paths of the fields of a column without those in lists and maps."""
    path = f"{prefix}{column.name}"
    if pa.types.is_struct(column.type):
        return [leaf for one in column.type for leaf in _leaves(one, f"{path}.")]
    return [] if pa.types.is_nested(column.type) else [path]


class PartitionFileWriter:
    """Writes the files of one task. Call `write` for each Arrow batch, then `close`, or `abort` if the task fails."""

    def __init__(
        self, location: str, name: str, file_bytes: int = TARGET_FILE_BYTES, schema: pa.Schema = TABLE_SCHEMA
    ) -> None:
        """`location`: the address of the table's data. `name`: prefix of all file names. `schema`: the table's columns,
        including partition and offset.
        """
        self._name = re.sub(r"[^A-Za-z0-9-]", "_", name)
        self._schema = schema
        self._files: FanoutWriter[int] = FanoutWriter(
            location, schema, self._add_done, options=_writer_options(schema), file_bytes=file_bytes
        )
        self._offsets: dict[int, tuple[int, int]] = {}
        """First and last offset of the rows in the open file of each partition."""
        self._done: list[WrittenRange] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows with the columns of the source.

        Raises:
            InvalidDataFiles: The rows of a partition are not in offset order, or lack a partition or offset.
        """
        rows = to_table_rows(batch, self._schema)
        if not rows.num_rows:
            return
        partitions = rows.column(PARTITION_COLUMN)
        bounds = pc.min_max(partitions)
        if partitions.null_count or rows.column(OFFSET_COLUMN).null_count:
            raise InvalidDataFiles("rows for the archive must have a partition and an offset")
        if bounds["min"] == bounds["max"]:
            self._write(bounds["min"].as_py(), rows)
            return
        for partition in pc.unique(partitions).to_pylist():
            self._write(partition, rows.filter(pc.equal(partitions, partition)))

    def close(self) -> list[WrittenRange]:
        """Close all files; returns a description of each for the commit."""
        self._files.close()
        return self._done

    def abort(self) -> None:
        """Close and delete all files. No commit refers to them yet."""
        self._offsets.clear()
        self._done.clear()
        self._files.abort()

    def _write(self, partition: int, rows: pa.RecordBatch) -> None:
        offsets = rows.column(OFFSET_COLUMN)
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        written = self._offsets.get(partition)
        follows = written is None or first > written[1]
        if not follows or not pc.all(pc.greater(offsets[1:], offsets[:-1]), min_count=0).as_py():
            raise InvalidDataFiles(
                f"rows of partition {partition} are not in the order of their offsets at {first}"
            )
        self._offsets[partition] = (first if written is None else written[0], last)
        self._files.write(partition, rows, f"{self._name}-{partition}")

    def _add_done(self, partition: int, path: str, rows: int, size: int) -> None:
        file = WrittenFile(path, rows, size, (partition,))
        self._done.append(WrittenRange(file, partition, *self._offsets.pop(partition)))


def to_table_rows(batch: pa.RecordBatch, schema: pa.Schema = TABLE_SCHEMA) -> pa.RecordBatch:
    """Convert rows with the columns of the source to rows of the table. A missing column becomes null."""
    columns = []
    for wanted in schema:
        name = SOURCE_COLUMN_NAMES.get(wanted.name, wanted.name)
        index = batch.schema.get_field_index(name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, wanted.type))
            continue
        column = batch.column(index)
        if wanted.name == HEADERS_COLUMN:
            column = _empty_to_null(column)
        columns.append(column if column.type == wanted.type else column.cast(wanted.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _empty_to_null(lists: pa.ListArray) -> pa.ListArray:
    """Return the same lists, with empty ones replaced by null."""
    is_none = pc.equal(pc.fill_null(pc.list_value_length(lists), 0), 0)
    offsets = pa.array(lists.offsets.to_numpy())  # copied, because a slice of offsets cannot have a mask
    return pa.ListArray.from_arrays(offsets, lists.values, type=lists.type, mask=is_none)
