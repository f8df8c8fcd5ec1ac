"""Writer of a task's rows as Parquet files of a result table. A file holds rows of one partition.

The table refers to a file only after its batch is committed. Every file name is used once, so a task that runs twice
writes other files the second time; unused files are removed later as orphans. A task never accesses the catalog.

Invariants:
* The rows of a file are in the order in which they were written.
* A file returned by `close` is complete and, on a local file system, flushed to the disk.
* Memory is bounded by one Arrow batch, `BUFFERED_BYTES_MAX`, and the open files.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from mansio.spark.iceberg.parquet_writer import file_system, fsync_file
from mansio.spark.result_table.partition_spec import split_by_partition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.spark.result_table.partition_spec import PartitionField, PartitionValue

TARGET_FILE_BYTES: Final = 256 << 20
"""Size at which a file is closed and another one is started."""
OPEN_FILES_MAX: Final = 64
"""Maximum number of open files. With rows of more partitions the file that was opened first is closed."""
ROW_GROUP_BYTES: Final = 16 << 20
BUFFERED_BYTES_MAX: Final = 64 << 20
WRITER_OPTIONS: Final[dict[str, Any]] = {"compression": "zstd", "compression_level": 1}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A Parquet file that a task wrote, and the values of its partition fields."""

    path: str
    rows: int
    bytes: int
    partition: tuple[PartitionValue, ...] = ()

    def to_json(self) -> str:
        """The text with which a task reports the file; `parse_written_file` reads it."""
        return json.dumps([self.path, self.rows, self.bytes, self.partition])


def parse_written_file(text: str) -> WrittenFile:
    """Parse the result of `WrittenFile.to_json`."""
    path, rows, size, partition = json.loads(text)
    return WrittenFile(path, rows, size, tuple(partition))


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where and how the tasks write data files: the address of the directory, the columns with their field ids, and the
    partition fields.
    """

    location: str
    schema: pa.Schema
    partition_by: tuple[PartitionField, ...] = ()
    file_bytes: int = TARGET_FILE_BYTES


@dataclass(slots=True)
class _OpenFile:
    path: str
    writer: pq.ParquetWriter
    sink: pa.NativeFile
    rows: int = 0
    buffered: list[pa.RecordBatch] = field(default_factory=list)
    buffered_bytes: int = 0


class DataFileWriter:
    """Writes the files of one task. Call `write` for each Arrow batch, then `close`, or `abort` if the task fails."""

    def __init__(self, layout: FileLayout, name: str) -> None:
        """`name`: prefix of all file names."""
        self._layout = layout
        self._name = name
        self._location = layout.location.rstrip("/")
        self._system, self._directory = file_system(self._location)
        self._open: dict[tuple[PartitionValue, ...], _OpenFile] = {}
        self._buffered_bytes = 0
        self._done: list[WrittenFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, which have columns of the table. Columns of the table that the rows lack become null."""
        rows = to_schema(batch, self._layout.schema)
        for partition, part in split_by_partition(self._layout.partition_by, rows):
            self._write(partition, part)

    def close(self) -> list[WrittenFile]:
        """Close all files; returns a description of each for the commit."""
        for partition in list(self._open):
            self._close_file(partition)
        return self._done

    def abort(self) -> None:
        """Close and delete all files. No commit refers to them yet."""
        paths = [part.path for part in self._open.values()] + [file.path for file in self._done]
        for part in self._open.values():
            for close in (part.writer.close, part.sink.close):
                with suppress(OSError):  # a full disk fails on the footer of a file that is deleted anyway
                    close()
        self._open.clear()
        self._done.clear()
        self._buffered_bytes = 0
        for path in paths:
            self._system.delete_file(self._local_path(path))

    def _write(self, partition: tuple[PartitionValue, ...], rows: pa.RecordBatch) -> None:
        part = self._open.get(partition)
        if part is None:
            part = self._open_file(partition)
        part.rows += rows.num_rows
        part.buffered.append(rows)
        part.buffered_bytes += rows.nbytes
        self._buffered_bytes += rows.nbytes
        if part.buffered_bytes >= ROW_GROUP_BYTES:
            self._write_buffered(part)
        elif self._buffered_bytes >= BUFFERED_BYTES_MAX:
            for one in self._open.values():
                self._write_buffered(one)
        if part.sink.tell() >= self._layout.file_bytes:
            self._close_file(partition)

    def _write_buffered(self, part: _OpenFile) -> None:
        """Write the buffered rows of a file as one row group."""
        if part.buffered:
            rows = pa.Table.from_batches(part.buffered, self._layout.schema)
            part.writer.write_table(rows, row_group_size=rows.num_rows)
            self._buffered_bytes -= part.buffered_bytes
            part.buffered, part.buffered_bytes = [], 0

    def _open_file(self, partition: tuple[PartitionValue, ...]) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._close_file(next(iter(self._open)))
        path = f"{self._location}/{self._name}-{uuid.uuid4().hex}.parquet"
        sink = self._system.open_output_stream(self._local_path(path))
        try:
            writer = pq.ParquetWriter(sink, self._layout.schema, **WRITER_OPTIONS)
        except OSError:
            with suppress(OSError):
                sink.close()
            self._system.delete_file(self._local_path(path))
            raise
        part = self._open[partition] = _OpenFile(path, writer, sink)
        return part

    def _close_file(self, partition: tuple[PartitionValue, ...]) -> None:
        part = self._open[partition]
        self._write_buffered(part)
        part.writer.close()
        part.sink.close()
        place = self._local_path(part.path)
        if isinstance(self._system, fs.LocalFileSystem):
            fsync_file(place)  # the error ends the task: Spark repeats it with another file
        size = self._system.get_file_info(place).size
        self._done.append(WrittenFile(part.path, part.rows, size, partition))
        del self._open[partition]  # last, so that `abort` deletes the file after a failure

    def _local_path(self, path: str) -> str:
        """A file's path on its file system."""
        return self._directory + path[len(self._location) :]


def to_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with exactly the columns of `schema`, by name. A missing column becomes null."""
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


REPORT_SCHEMA: Final = "file string"
"""Spark schema of the descriptions of files that a task returns to the driver."""


def report_files(files: Sequence[WrittenFile]) -> pa.RecordBatch:
    """The descriptions of files as rows of `REPORT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"file": pa.array([one.to_json() for one in files], pa.string())})
