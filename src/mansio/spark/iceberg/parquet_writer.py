"""Writer of a task's rows as Parquet files. A file holds rows of one partition.

The table refers to a file only after its batch is committed. Every file name is used once, so a task that runs twice
writes other files the second time; unused files are removed later as orphans. A task never accesses the catalog.

Invariants:
* The rows of a file are in offset order, each offset once.
* A file returned by `close` is complete and, on a local file system, flushed to the disk.
* Memory is bounded by one Arrow batch, the rows that are buffered for a row group, and the open files.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from mansio.spark.iceberg.errors import InvalidDataFiles
from mansio.spark.iceberg.table_format import (
    DECODED_COLUMNS,
    HEADERS_COLUMN,
    LANE_COLUMN,
    LAST_OFFSET_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
    WrittenDataFile,
)

TARGET_FILE_BYTES = 256 << 20
"""Size at which a file is closed and another one is started."""
OPEN_FILES_MAX = 64
ROW_GROUP_BYTES = 16 << 20
"""Size of a row group in memory: rows are buffered up to this size per file, and `BUFFERED_BYTES_MAX` for all files.
Arrow batches have a few thousand rows; row groups of that size take 50 percent longer to write and to read.
"""
BUFFERED_BYTES_MAX = 32 << 20

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
    "compression": "zstd",
    "compression_level": 1,
    # Values of records are rarely equal: a dictionary would be built and discarded.
    "use_dictionary": ["key", PARTITION_COLUMN, TIMESTAMP_TYPE_COLUMN, LANE_COLUMN],
    "write_statistics": [PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN],
}


def _writer_options(schema: pa.Schema) -> dict[str, Any]:
    """The options for a file. Fields of decoded columns have dictionaries and statistics: their values are often equal,
    and readers skip row groups by them.
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
    """The paths of the fields of a column without those in lists and maps."""
    path = f"{prefix}{column.name}"
    if pa.types.is_struct(column.type):
        return [leaf for one in column.type for leaf in _leaves(one, f"{path}.")]
    return [] if pa.types.is_nested(column.type) else [path]


@dataclass(slots=True)
class _OpenFile:
    path: str
    writer: pq.ParquetWriter
    sink: pa.NativeFile
    first_offset: int
    last_offset: int
    rows: int = 0
    buffered: list[pa.RecordBatch] = field(default_factory=list)
    buffered_bytes: int = 0

    def write_buffered(self) -> int:
        """Write the buffered rows as one row group; returns their size in bytes."""
        size = self.buffered_bytes
        if self.buffered:
            rows = pa.Table.from_batches(self.buffered)
            self.writer.write_table(rows, row_group_size=rows.num_rows)
            self.buffered, self.buffered_bytes = [], 0
        return size


class PartitionFileWriter:
    """Writes the files of one task. Call `write` for each Arrow batch, then `close`, or `abort` if the task fails."""

    def __init__(
        self, location: str, name: str, file_bytes: int = TARGET_FILE_BYTES, schema: pa.Schema = TABLE_SCHEMA
    ) -> None:
        """`location`: the address of the table's data. `name`: prefix of all file names. `schema`: the table's columns,
        including partition and offset.
        """
        self._location = location.rstrip("/")
        self._name = re.sub(r"[^A-Za-z0-9-]", "_", name)
        self._file_bytes = file_bytes
        self._schema = schema
        self._system, self._directory = file_system(self._location)
        self._open: dict[int, _OpenFile] = {}
        self._buffered_bytes = 0
        self._done: list[WrittenDataFile] = []

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

    def close(self) -> list[WrittenDataFile]:
        """Close all files; returns a description of each for the commit."""
        for partition in list(self._open):
            self._close_file(partition)
        return self._done

    def abort(self) -> None:
        """Close and delete all files. No commit refers to them yet."""
        paths = [part.path for part in self._open.values()] + [part.path for part in self._done]
        for part in self._open.values():
            for close in (part.writer.close, part.sink.close):
                with suppress(OSError):  # a full disk fails on the footer of a file that is deleted anyway
                    close()
        self._open.clear()
        self._done.clear()
        self._buffered_bytes = 0
        for path in paths:
            self._system.delete_file(self._local_path(path))

    def _write(self, partition: int, rows: pa.RecordBatch) -> None:
        offsets = rows.column(OFFSET_COLUMN)
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        part = self._open.get(partition)
        follows = part is None or first > part.last_offset
        if not follows or not pc.all(pc.greater(offsets[1:], offsets[:-1]), min_count=0).as_py():
            raise InvalidDataFiles(
                f"rows of partition {partition} are not in the order of their offsets at {first}"
            )
        if part is None:
            part = self._open_file(partition, first)
        part.rows += rows.num_rows
        part.last_offset = last
        self._buffer_rows(part, rows)
        if part.sink.tell() + part.buffered_bytes >= self._file_bytes:
            self._close_file(partition)

    def _buffer_rows(self, part: _OpenFile, rows: pa.RecordBatch) -> None:
        """Buffer rows of a file. They are written when they make up a row group, or when the buffers of all files are
        full.
        """
        size = rows.nbytes
        part.buffered.append(rows)
        part.buffered_bytes += size
        self._buffered_bytes += size
        if part.buffered_bytes >= ROW_GROUP_BYTES:
            self._buffered_bytes -= part.write_buffered()
        elif self._buffered_bytes >= BUFFERED_BYTES_MAX:
            for one in self._open.values():
                self._buffered_bytes -= one.write_buffered()

    def _open_file(self, partition: int, first: int) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close_file(next(iter(self._open)))
        path = f"{self._location}/{self._name}-{partition}-{uuid.uuid4().hex}.parquet"
        sink = self._system.open_output_stream(self._local_path(path))
        try:
            writer = pq.ParquetWriter(sink, self._schema, **_writer_options(self._schema))
        except OSError:
            with suppress(OSError):
                sink.close()
            self._system.delete_file(self._local_path(path))
            raise
        part = self._open[partition] = _OpenFile(path, writer, sink, first, first)
        return part

    def _close_file(self, partition: int) -> None:
        part = self._open[partition]
        self._buffered_bytes -= part.write_buffered()
        part.writer.close()
        part.sink.close()
        place = self._local_path(part.path)
        if isinstance(self._system, fs.LocalFileSystem):
            fsync_file(place)  # the error ends the task: Spark repeats it with another file
        size = self._system.get_file_info(place).size
        self._done.append(
            WrittenDataFile(part.path, part.rows, size, partition, part.first_offset, part.last_offset)
        )
        del self._open[partition]  # last, so that `abort` deletes the file after a failure

    def _local_path(self, path: str) -> str:
        """A file's path on its file system."""
        return self._directory + path[len(self._location) :]


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
    """The same lists, with empty ones replaced by null."""
    is_none = pc.equal(pc.fill_null(pc.list_value_length(lists), 0), 0)
    offsets = pa.array(lists.offsets.to_numpy())  # copied, because a slice of offsets cannot have a mask
    return pa.ListArray.from_arrays(offsets, lists.values, type=lists.type, mask=is_none)


def file_system(location: str) -> tuple[fs.FileSystem, str]:
    """The file system and path of an address; a local directory is created."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        system, place = fs.FileSystem.from_uri(location)
        return system, str(place)
    os.makedirs(parts.path, exist_ok=True)
    return fs.LocalFileSystem(), parts.path


# -- fsync --------


def fsync_directory_entry(path: str) -> None:
    """Flush the directory entry of a file. Raises OSError.

    This function is not in `fsync_io`, because tasks that write files do not import pyiceberg.
    """
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: str) -> None:
    """Flush a closed file and its directory entry."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory_entry(path)
